"""The rule which key a query sees, and the mask of composed attention, evaluated for one block at a time.

The query of row t is at the position p = t + offset of the keys, and sees the key s if all of these hold:

- s <= p, if attention is causal;
- p - s < window, and s - p < window, if there is a window;
- the key is no padding, and a dense mask, if there is one, does not hide it;
- the tokens p and s have the same number, if the sequence packs documents.

The kernels have the rule too, and name this file: `kernels/triton/blocks.py`, `attention_decode.py` and
`kernels/cpu/csrc/call.h`. Tests hold all of them to one table of cases.
"""

import functools
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value
from transformers.utils.import_utils import is_tracing


def in_graph(tensor: Tensor) -> bool:
    """True if a tensor has no values for Python, as it stands for others in a graph that is being made."""
    if type(tensor) is Tensor and tensor.device.type == "cpu":  # `is_tracing` asks CUDA, for 40 us without a GPU
        return torch.compiler.is_compiling() or torch.jit.is_tracing()
    return tensor.is_meta or is_tracing(tensor)


def values_are_known(values: Any) -> bool:
    """True if Python can read the values and branch on them: not while a graph is traced, nor under `vmap`."""
    if not isinstance(values, Tensor):
        return True
    functorch = torch._C._functorch
    if in_graph(values) or functorch.is_batchedtensor(values):
        return False
    # Other transforms of torch.func wrap what they are given, inside of `vmap` too.
    return not functorch.is_functorch_wrapped_tensor(values) or values_are_known(functorch.get_unwrapped(values))


def is_number(length: int) -> bool:
    """True if a length is a number, not a symbol, or a tensor of TorchScript, of a graph for all lengths."""
    return not isinstance(length, Tensor) and (not torch.compiler.is_compiling() or has_static_value(length))


@dataclass(eq=False, repr=False)
class Visibility:
    """
    The mask of an attention layer, evaluated for one block of queries and keys at a time.

    Except for `dense` it grows linearly with the sequence. Keys that no query of a block can see are not computed.

    Args:
        query_length (`int`): Number of queries.
        key_length (`int`): Number of keys.
        is_causal (`bool`, defaults to `True`): Hide keys after the query.
        sliding_window (`int`, *optional*): t - w < s <= t if causal, else |t - s| < w.
        query_offset (`int`, *optional*): Index of the key at the position of the first query. None: the last query is
            at the position of the last key.
        padding (`Tensor`, *optional*): (batch, key), nonzero for real tokens.
        dense (`Tensor`, *optional*): (batch or 1, heads or 1, query, key), boolean with True for visible, or floating
            point, added to the scores; values at or below half the dtype's smallest number hide.
        sequence_ids (`Tensor`, *optional*): (batch, query) numbers of packed sequences: a token sees only tokens of
            the same number. Queries and keys must be the same tokens.

    Raises:
        ValueError: if a shape does not fit, or the window is below 1.
    """

    query_length: int
    key_length: int
    _: KW_ONLY
    is_causal: bool = True
    sliding_window: int | None = None
    query_offset: int | Any = None  # always a number once it is made
    padding: Tensor | None = None
    dense: Tensor | None = None
    sequence_ids: Tensor | None = None

    def __post_init__(self) -> None:
        query_length, key_length = self.query_length, self.key_length
        padding, dense, sequence_ids = self.padding, self.dense, self.sequence_ids
        if self.sliding_window is not None and self.sliding_window < 1:
            window = self.sliding_window
            raise ValueError(f"sliding_window must be at least 1, got {window}; use None for full attention.")
        if padding is not None and padding.shape[-1] != key_length:
            raise ValueError(f"The padding mask covers {padding.shape[-1]} keys, but there are {key_length}.")
        if dense is not None and dense.shape[-2:] != (query_length, key_length):
            raise ValueError(
                f"The attention mask must end in (query, key) = {(query_length, key_length)}, got {tuple(dense.shape)}."
            )
        if sequence_ids is not None and (query_length != key_length or sequence_ids.shape[-1] != key_length):
            raise ValueError(
                "Packed sequences need as many queries as keys and one number for each, got "
                f"{query_length} queries, {key_length} keys and {sequence_ids.shape[-1]} numbers."
            )
        if self.query_offset is None:
            self.query_offset = key_length - query_length
        if padding is not None:
            self.padding = padding.to(torch.bool)

    def to(self, *args: Any, **kwargs: Any) -> "Visibility":
        """A copy with its tensors moved, as `Tensor.to`, for models spread over devices."""
        tensors = {name: getattr(self, name) for name in ("padding", "dense", "sequence_ids")}
        return replace(self, **{name: x.to(*args, **kwargs) for name, x in tensors.items() if x is not None})

    @property
    def lengths_are_known(self) -> bool:
        """True if lengths and offset are numbers, not symbols of a graph for all lengths."""
        return all(is_number(length) for length in (self.query_length, self.key_length, self.query_offset))

    def key_range(self, start: int, stop: int) -> tuple[int, int]:
        """Range of keys, at least one, that covers those which queries start to stop - 1 see."""
        first, last = 0, self.key_length
        if self.is_causal:
            last = min(last, stop + self.query_offset)
        if self.sliding_window is not None:
            first = max(first, start + self.query_offset - self.sliding_window + 1)
            last = min(last, stop - 1 + self.query_offset + self.sliding_window)
        for tensor in (self.dense, self.sequence_ids):
            # Reading its values saves no work for a single query.
            if tensor is None or self.query_length == 1 or not values_are_known(tensor):
                continue
            if tensor is self.dense:
                seen = (~_hidden_by_dense(tensor[:, :, start:stop])).flatten(0, 2).any(0)
            else:
                seen = (tensor[:, start:stop, None] == tensor[:, None, :]).flatten(0, 1).any(0)
            indices = seen.nonzero()  # (seen keys, 1)
            if len(indices) > 0:
                first, last = max(first, int(indices[0])), min(last, int(indices[-1]) + 1)
        first = min(max(first, 0), self.key_length - 1)
        return first, max(last, first + 1)

    def hidden(self, start: int, stop: int, first: int, last: int, device: torch.device | None = None) -> Tensor | None:
        """Mask of keys first to last - 1 that those queries cannot see, broadcasts to (batch, heads, query, key)."""
        parts = self._hidden_by_band(start, stop, first, last, device)
        if self.dense is not None:
            parts.append(_hidden_by_dense(self.dense[:, :, start:stop, first:last]))
        if self.padding is not None:
            parts.append(~self.padding[:, None, None, first:last])
        if self.sequence_ids is not None:
            ids = self.sequence_ids
            parts.append((ids[:, start:stop, None] != ids[:, None, first:last])[:, None])
        return functools.reduce(torch.logical_or, parts) if parts else None

    def _hidden_by_band(
        self, start: int, stop: int, first: int, last: int, device: torch.device | None
    ) -> list[Tensor]:
        """Masks (query, key) of what causality and window hide, without those that hide nothing."""
        window, known = self.sliding_window, self.lengths_are_known
        first_position, last_position = start + self.query_offset, stop - 1 + self.query_offset
        # Comparing symbols would restrict the graph to lengths with the same result.
        too_late = self.is_causal and not (known and last - 1 <= first_position)
        too_old = window is not None and not (known and last_position - first < window)
        too_new = window is not None and not self.is_causal and not (known and last - 1 - first_position < window)
        if not (too_late or too_old or too_new):
            return []
        position = torch.arange(first_position, last_position + 1, device=device)
        age = position[:, None] - torch.arange(first, last, device=device)  # (query, key)
        parts = [age < 0] if too_late else []
        if window is not None:
            parts += [age >= window] if too_old else []
            parts += [age <= -window] if too_new else []
        return parts

    def bias(self, start: int, stop: int, first: int, last: int) -> Tensor | None:
        """The floating point mask of a block of scores, (batch or 1, heads or 1, query, key), or None without one."""
        if self.dense is None or not self.dense.dtype.is_floating_point:
            return None
        block = self.dense[:, :, start:stop, first:last]
        return block.masked_fill(_hidden_by_dense(block), 0.0)


def _hidden_by_dense(block: Tensor) -> Tensor:
    if block.dtype.is_floating_point:
        return block <= torch.finfo(block.dtype).min / 2
    return ~block.to(torch.bool)
