"""Faults of files, and conversions that are interrupted."""

import contextlib

import pytest

from dcformer.conversion import writer


def flip_bit(path, position=-1):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def cut(path, share=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def partial_of(destination):
    """The folder of an unfinished conversion."""
    return destination.with_name(f".{destination.name}.partial")


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def interrupted(after, error=KeyboardInterrupt, module=writer, function="save_file"):
    """The block ends with an error: a function, that which saves shards, raises it after so many calls."""
    original, calls = getattr(module, function), []

    def failing(*arguments, **options):
        if len(calls) == after:
            raise error
        calls.append(arguments)
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(error if isinstance(error, type) else type(error)):
        patch.setattr(module, function, failing)
        yield calls
