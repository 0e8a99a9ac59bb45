"""The bundled models: small language models of C code, a folder each."""

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


def find_model_folder(name: str) -> str:
    """The folder of a bundled model; the name itself if it is none, or if there is a folder of that name."""
    return pretrained_path(name) if name in pretrained_names() and not Path(name).is_dir() else name
