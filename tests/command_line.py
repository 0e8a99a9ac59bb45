"""The `dcformer` command within the process of the tests; typer puts it together once, not for every call."""

import functools

import typer.testing

from dcformer.cli import app


typer.testing._get_command = functools.cache(typer.testing._get_command)


def call(*words, **options) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(app, [*map(str, words)], **options)
