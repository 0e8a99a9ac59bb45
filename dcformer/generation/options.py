"""Options of generate() as people give them, checked before a model is loaded."""

from __future__ import annotations

import math
from typing import Any

import torch

from .models import LoadedModel


DEFAULT_NEW_TOKENS = 256  # what the pipeline of Transformers takes too
CACHES = ("dynamic", "static", "offloaded", "offloaded_static", "quantized")
# Options that say how to draw tokens; one of them alone asks for drawing.
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# Option -> smallest, largest value, whether the smallest is itself allowed.
_RANGES = {
    "max_new_tokens": (1, math.inf, True),
    "num_beams": (1, math.inf, True),
    "temperature": (0.0, math.inf, False),
    "top_k": (0, math.inf, True),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, math.inf, False),
}


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """
    The options that were given, as keyword arguments of generate().

    Args:
        options: `max_new_tokens`, `num_beams`, `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`,
            `do_sample` and `cache_implementation`; `None` leaves one to the model's generation_config.json. A
            temperature, `top_k`, `top_p` or `min_p` asks for sampling unless `do_sample` is False.

    Raises:
        ValueError: if a value is out of its range, or two of them contradict each other.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, (low, high, may_be_low) in _RANGES.items():
        value = given.get(name)
        if value is None or (low <= value <= high and math.isfinite(value) and (may_be_low or value > low)):
            continue
        limits = f"at least {low:g}" if may_be_low else f"above {low:g}"
        limits += "" if high == math.inf else f" and at most {high:g}"
        advice = "; use --greedy to always take the likeliest token" if name == "temperature" and value == 0 else ""
        raise ValueError(f"{name} must be {limits}, got {value}{advice}.")
    of_sampling = [name for name in _OF_SAMPLING if name in given]
    if of_sampling and given.get("do_sample") is False:
        raise ValueError(f"{of_sampling[0]} has no meaning for greedy decoding, which draws no tokens; leave it out.")
    if of_sampling:
        given["do_sample"] = True
    cache = given.get("cache_implementation")
    if cache is not None and cache not in CACHES:
        raise ValueError(f"cache must be one of {', '.join(CACHES)}, got {cache!r}.")
    if cache is not None and cache.startswith("offloaded") and not torch.cuda.is_available():
        raise ValueError(
            f"The cache {cache!r} moves keys from a GPU to memory, and PyTorch finds no GPU; leave it out."
        )
    return given


def new_tokens(options: dict[str, Any], loaded: LoadedModel, prompt_length: int) -> int | None:
    """
    The number of tokens to write at most, `None` if the model's own generation_config.json limits it.

    Where nobody says, it is 256, or what is left of the context that the model was made for.
    """
    if "max_new_tokens" in options:
        return options["max_new_tokens"]
    own = loaded.model.generation_config
    if own.max_new_tokens is not None:
        return own.max_new_tokens
    if own.max_length is not None:
        return None
    context = loaded.context_length
    left = DEFAULT_NEW_TOKENS if context is None else context - prompt_length
    return min(DEFAULT_NEW_TOKENS, left) if left > 0 else DEFAULT_NEW_TOKENS
