"""Which key a query may see, evaluated block by block.

Transformers' masks for eager attention hold one number per query and key, which is quadratic in the sequence. Causality
and the window follow from two indices, padding is one bit per key and packed sequences one number per token, so a block
of the mask is built where it is needed, and key ranges that no query of a block can see are never computed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value
from transformers.utils.import_utils import is_tracing


class Visibility:
    """
    The mask of one attention layer.

    Args:
        query_length (`int`): Number of queries.
        key_length (`int`): Number of keys.
        is_causal (`bool`): Hide keys after the query.
        sliding_window (`int`, *optional*): t - w < s <= t if causal, else |t - s| < w.
        query_offset (`int`, *optional*): Position of the first query, counted in keys. None: the last query stands at
            the last key.
        padding (`Tensor`, *optional*): (batch, key), nonzero for real tokens.
        dense (`Tensor`, *optional*): (batch or 1, heads or 1, query, key), boolean with True for visible, or floating
            point, added to the scores; at or below half the smallest number it hides.
        sequence_ids (`Tensor`, *optional*): (batch, query) numbers of packed sequences; a token sees its own
            sequence only. Queries and keys are the same tokens then.

    Raises:
        ValueError: if a shape does not fit, or the window is below 1.
    """

    def __init__(
        self,
        query_length: int,
        key_length: int,
        *,
        is_causal: bool = True,
        sliding_window: int | None = None,
        query_offset: int | None = None,
        padding: Tensor | None = None,
        dense: Tensor | None = None,
        sequence_ids: Tensor | None = None,
    ):
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, got {sliding_window}; use None for full attention.")
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
        self.query_length = query_length
        self.key_length = key_length
        self.is_causal = is_causal
        self.sliding_window = sliding_window
        self.query_offset = key_length - query_length if query_offset is None else query_offset
        self.padding = None if padding is None else padding.to(torch.bool)
        self.dense = dense
        self.sequence_ids = sequence_ids

    @classmethod
    def from_mask(
        cls, mask: Tensor | None, *, query_length: int, key_length: int, is_causal: bool, sliding_window: int | None
    ) -> "Visibility":
        """A (batch, key) padding mask, a (batch or 1, heads or 1, query, key) mask, or none, as a Visibility."""
        if mask is not None and mask.dim() not in (2, 4):
            raise ValueError(
                "attention_mask must be (batch, key) or (batch or 1, heads or 1, query, key), "
                f"got shape {tuple(mask.shape)}."
            )
        return cls(
            query_length,
            key_length,
            is_causal=is_causal,
            sliding_window=sliding_window,
            padding=mask if mask is not None and mask.dim() == 2 else None,
            dense=mask if mask is not None and mask.dim() == 4 else None,
        )

    def to(self, *args: Any, **kwargs: Any) -> "Visibility":
        """A copy with its tensors moved, as `Tensor.to`; models spread over devices move their inputs this way."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(*args, **kwargs)

        return Visibility(
            self.query_length,
            self.key_length,
            is_causal=self.is_causal,
            sliding_window=self.sliding_window,
            query_offset=self.query_offset,
            padding=moved(self.padding),
            dense=moved(self.dense),
            sequence_ids=moved(self.sequence_ids),
        )

    def check_fits(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raise ValueError if this is the mask of another attention than of these sizes."""
        if (self.query_length, self.key_length) != (queries, keys):
            raise ValueError(
                f"The mask is for {self.query_length} queries and {self.key_length} keys, "
                f"but there are {queries} and {keys}."
            )
        for tensor in (self.padding, self.dense, self.sequence_ids):
            if tensor is not None and tensor.shape[0] not in (1, batch):
                raise ValueError(f"The mask is for a batch of {tensor.shape[0]}, but there are {batch} rows.")
        if self.dense is not None and self.dense.shape[1] not in (1, heads):
            raise ValueError(f"The mask is for {self.dense.shape[1]} heads, but there are {heads}.")

    @property
    def lengths_are_known(self) -> bool:
        """Whether the lengths are numbers, not symbols of a graph that is traced for any length."""
        if not torch.compiler.is_compiling():
            return True
        return all(has_static_value(n) for n in (self.query_length, self.key_length, self.query_offset))

    @property
    def requires_grad(self) -> bool:
        """Whether the mask is a bias that is learned."""
        return self.dense is not None and self.dense.requires_grad

    @property
    def same_for_all_heads(self) -> bool:
        return self.dense is None or self.dense.shape[1] == 1

    def key_range(self, start: int, stop: int) -> tuple[int, int]:
        """The smallest range of keys that holds all which queries start..stop may see; never empty."""
        first, last = 0, self.key_length
        if self.is_causal:
            last = min(last, stop + self.query_offset)
        if self.sliding_window is not None:
            first = max(first, start + self.query_offset - self.sliding_window + 1)
            last = min(last, stop - 1 + self.query_offset + self.sliding_window)
        # Finding the range of what is in a tensor reads its values: not while tracing, nor where it spares nothing.
        for tensor, seen_by in ((self.dense, _seen_by_dense), (self.sequence_ids, _seen_by_sequence)):
            if tensor is not None and self.query_length > 1 and not (tensor.is_meta or is_tracing(tensor)):
                seen = seen_by(tensor, start, stop).nonzero()  # (seen keys, 1)
                if len(seen) > 0:
                    first, last = max(first, int(seen[0])), min(last, int(seen[-1]) + 1)
        first = min(max(first, 0), self.key_length - 1)
        return first, max(last, first + 1)

    def hidden(self, start: int, stop: int, first: int, last: int, device: torch.device | None = None) -> Tensor | None:
        """
        What queries start..stop may not see of keys first..last, on `device`.

        Returns:
            `Tensor`: boolean, broadcasts to (batch, heads, query, key). None if everything is visible.
        """
        parts = []
        if self.dense is not None:
            parts.append(_hidden_by_dense(self.dense[:, :, start:stop, first:last]))
        if self.padding is not None:
            parts.append(~self.padding[:, None, None, first:last])
        if self.sequence_ids is not None:
            ids = self.sequence_ids
            parts.append((ids[:, start:stop, None] != ids[:, None, first:last])[:, None])
        parts.extend(self._band_hidden(start, stop, first, last, device))
        if not parts:
            return None
        hidden = parts[0]
        for part in parts[1:]:
            hidden = hidden | part
        return hidden

    def _band_hidden(self, start: int, stop: int, first: int, last: int, device: torch.device | None) -> list[Tensor]:
        """The parts of `hidden` that causality and window decide: (query, key) each, only those that hide something."""
        parts = []
        window = self.sliding_window
        start_position, stop_position = start + self.query_offset, stop + self.query_offset
        # Comparing symbols would tie the graph to the lengths for which the answer is the same.
        anywhere = not self.lengths_are_known
        too_late = self.is_causal and (anywhere or last - 1 > start_position)
        too_old = window is not None and (anywhere or first < stop_position - window)
        too_new = window is not None and not self.is_causal and (anywhere or last - 1 >= start_position + window)
        if too_late or too_old or too_new:
            position = torch.arange(start_position, stop_position, device=device)
            age = position[:, None] - torch.arange(first, last, device=device)  # (query, key)
            if too_late:
                parts.append(age < 0)
            if window is not None:
                if too_old:
                    parts.append(age >= window)
                if too_new:
                    parts.append(age <= -window)
        return parts

    def bias(self, start: int, stop: int, first: int, last: int) -> Tensor | None:
        """What a floating point mask adds to this block's scores, (batch or 1, heads or 1, query, key), or None."""
        if self.dense is None or not self.dense.dtype.is_floating_point:
            return None
        block = self.dense[:, :, start:stop, first:last]
        return block.masked_fill(_hidden_by_dense(block), 0.0)


def _hidden_by_dense(block: Tensor) -> Tensor:
    """Which pairs a block of a dense mask hides."""
    if block.dtype.is_floating_point:
        return block <= torch.finfo(block.dtype).min / 2
    return ~block.to(torch.bool)


def _seen_by_dense(dense: Tensor, start: int, stop: int) -> Tensor:
    """(key,) boolean: whether the dense mask shows a key to any of these queries."""
    return (~_hidden_by_dense(dense[:, :, start:stop])).flatten(0, 2).any(0)


def _seen_by_sequence(sequence_ids: Tensor, start: int, stop: int) -> Tensor:
    """(key,) boolean: whether a key is in a packed sequence of any of these queries."""
    return (sequence_ids[:, start:stop, None] == sequence_ids[:, None, :]).flatten(0, 1).any(0)
