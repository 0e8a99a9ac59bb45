"""The bundled models: small language models of C code, with a folder for each."""

from pathlib import Path


_FOLDER = Path(__file__).parent


def pretrained_names() -> tuple[str, ...]:
    """Names of the bundled models."""
    return tuple(sorted(file.parent.name for file in _FOLDER.glob("*/config.json")))


def pretrained_path(name: str) -> str:
    """
    The folder of a bundled model, for `from_pretrained`.

    Args:
        name: `"dcformer-tiny"`, or its baseline without composition, `"transformer-tiny"`.

    Raises:
        ValueError: if there is no such model.
    """
    if name not in pretrained_names():
        raise ValueError(f"name must be one of {', '.join(pretrained_names())}, got {name!r}.")
    return str(_FOLDER / name)
