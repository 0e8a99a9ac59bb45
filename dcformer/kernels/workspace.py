"""How much memory the scores of a chunk of queries may take while attention is computed."""

_INFERENCE, _TRAINING = 2**28, 2**30
_chosen: int | None = None


def workspace_bytes(training: bool = False) -> int:
    """Bytes beside inputs and outputs: 256 MB, or 1 GB in a backward pass, unless [`set_workspace_bytes`] chose."""
    return _chosen or (_TRAINING if training else _INFERENCE)


def set_workspace_bytes(number: int | None) -> None:
    """
    Set how much memory the Triton kernels may use beside inputs and outputs; see `docs/gpu.md`.

    Args:
        number (`int`, *optional*): Bytes, at least 1; one block of queries is computed at once whatever it takes. None:
            the default, 256 MB in a forward pass and 1 GB in a backward pass.

    Raises:
        ValueError: if `number` is below 1.
    """
    global _chosen
    if number is not None and number < 1:
        raise ValueError(f"The workspace must have at least 1 byte, got {number}; use None for the default.")
    _chosen = number
