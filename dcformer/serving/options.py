"""Options of an engine, which are handed to it as they are, looked up where they decide what is said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def has_option(arguments: Sequence[str], name: str) -> bool:
    """Whether an option is among them, such as `"api-key"`."""
    return any(option == name for option, _ in _options(arguments))


def option_value(arguments: Sequence[str], name: str) -> str | None:
    """The (first) value of an option's last occurrence, or `None` if it is not there."""
    values = [value for option, value in _options(arguments) if option == name]
    return values[-1] if values else None


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    for index, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        name, equals, value = argument.removeprefix("--").partition("=")
        following = arguments[index + 1] if index + 1 < len(arguments) else None
        # vLLM takes underscores too.
        yield name.replace("_", "-"), value if equals else following
