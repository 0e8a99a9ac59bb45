"""How much memory the scores of a chunk of queries may take while attention is computed."""

import os


_VARIABLE = "DCFORMER_WORKSPACE_MB"
_DEFAULT = 256 * 2**20

_chosen: int | None = None


def workspace_bytes() -> int:
    """
    Bytes that a fused form may use beside its inputs and outputs for scores, maps and partial sums: 256 MB, unless the
    environment variable `DCFORMER_WORKSPACE_MB` or [`set_workspace_bytes`] says otherwise. One row of query blocks is
    computed at least, whatever it takes.

    Raises:
        ValueError: if the environment variable is not a positive whole number.
    """
    if _chosen is not None:
        return _chosen
    megabytes = os.environ.get(_VARIABLE)
    if megabytes is None:
        return _DEFAULT
    if not megabytes.isdecimal() or int(megabytes) == 0:
        raise ValueError(f"{_VARIABLE} must be a positive whole number of megabytes, got {megabytes!r}.")
    return int(megabytes) * 2**20


def set_workspace_bytes(number: int | None) -> None:
    """
    Set how much memory the fused forms may use beside their inputs and outputs; see `docs/gpu.md`.

    Args:
        number (`int`, *optional*): Bytes, at least 1. None: back to the environment variable or the default.

    Raises:
        ValueError: if `number` is below 1.
    """
    global _chosen
    if number is not None and number < 1:
        raise ValueError(f"The workspace must have at least 1 byte, got {number}; use None for the default.")
    _chosen = number
