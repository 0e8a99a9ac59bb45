"""The workspace of the forward and the backward pass, and the tuples of tensors and numbers that their kernels take.

Members of type `tl.constexpr` are known when a kernel is compiled, and so is where a member is None.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..call import LOG2_E, Call, cdiv, readable_mask
from .tuning import PART, Sizes, constant, constants


# Programs along the third axis of a grid, and elements that an index of 32 bits reaches.
_GRID_LIMIT = 2**16 - 1
_INDEX_LIMIT = 2**31 - 1


def unspecialized(number: int) -> int:
    """2 n + 1, of which kernels take half (`>> 1`), for a number n that grows with a cache."""
    # Triton compiles a kernel again for multiples of 16, and 3.9 ignores `do_not_specialize` inside of tuples.
    return 2 * number + 1


class States(NamedTuple):
    """Queries, keys, values or outputs: (batch, heads, length, channels) with channels side by side."""

    pointer: Tensor
    stride_b: int  # strides in units of UNIT elements, by which the compiler knows how far loads are aligned
    stride_h: int  # this one and the first are `unspecialized`
    stride_t: int
    UNIT: tl.constexpr
    KV_GROUPS: tl.constexpr  # query heads of a head: Transformers' num_key_value_groups
    CHANNELS: tl.constexpr

    @classmethod
    def of(cls, tensor: Tensor, heads: int | None = None) -> "States":
        """Describe a tensor; `heads` are those of the queries, by default as many as it has."""
        strides = tensor.stride()[:3]
        unit = math.gcd(8, *strides)  # rows of a cache start at 16 bytes
        sizes = map(constant, (unit, (heads or tensor.shape[1]) // tensor.shape[1], tensor.shape[3]))
        batch, head, position = (stride // unit for stride in strides)
        return cls(tensor, unspecialized(batch), unspecialized(head), position, *sizes)


class Factors(NamedTuple):
    """The factors of one side of a composition: (batch, heads, length, factors), any strides."""

    pointer: Tensor | None
    stride_b: int  # this one, the next and stride_t are in units; in a cache the first two are `unspecialized`
    stride_h: int
    stride_member: int  # between query heads of a key/value head
    stride_t: int
    stride_factor: int
    KV_GROUPS: tl.constexpr
    RANK: tl.constexpr
    GATE: tl.constexpr
    NUMBER: tl.constexpr
    UNIT: tl.constexpr  # 8 where eight factors may be read as one vector, else 1
    IS_CACHED: tl.constexpr  # 1 or 0

    @classmethod
    def of(cls, tensor: Tensor | None, heads: int, is_cached: bool) -> "Factors":
        """Describe (batch, heads, length, factors), or (.., key/value heads, length, their query heads x factors)."""
        if tensor is None:
            return cls(None, 0, 0, 0, 0, 0, *map(constant, (1, 0, 0, 0, 1, 0)))
        kv_groups = heads // tensor.shape[1]
        factors = tensor.shape[3] // kv_groups
        batch, head, position, factor = tensor.stride()
        unit = 8 if kv_groups == 1 and _reads_eight(tensor) else 1
        outer = batch // unit, head // unit
        strides = (*(map(unspecialized, outer) if is_cached else outer), factors * factor, position // unit, factor)
        sizes = kv_groups, factors // 2, factors % 2, factors, unit, int(is_cached)
        return cls(tensor, *strides, *map(constant, sizes))


class Stage(NamedTuple):
    """One composition, before or after the softmax."""

    query: Factors
    key: Factors
    static: Tensor | None  # (groups, heads per group, heads per group) [in, out]
    # Last: in loops Triton 3.6 loses the constants of nested tuples unless a constant follows them.
    HAS_STATIC: tl.constexpr

    @classmethod
    def both(cls, call: Call, is_cached: bool = False) -> tuple["Stage", "Stage"]:
        """Describe the compositions before and after the softmax; the keys are those of a cache or not."""
        stages = []
        for *sides, static in (call[3:6], call[6:9]):
            query, key = (Factors.of(side, call.query.shape[1], is_cached) for side in sides)
            static = None if static is None else static.contiguous()
            stages.append(cls(query, key, static, constant(static is not None)))
        return stages[0], stages[1]


class Mask(NamedTuple):
    """The mask of a call. Tensors have a row for every row of the batch, or one for all with a stride of 0."""

    queries: int
    keys: int
    query_offset: int
    window: int | None
    CAUSAL: tl.constexpr
    first_keys: Tensor | None  # (batch or 1, length): where each token's document begins, which is its number too
    last_keys: Tensor | None  # and where it ends
    document_stride_b: int
    padding: Tensor | None  # (batch or 1, key)
    padding_stride_b: int  # `unspecialized`, as those of the dense mask
    dense: Tensor | None  # (batch or 1, 1, query, key)
    dense_stride_b: int
    dense_stride_m: int

    @classmethod
    def of(cls, call: Call) -> "Mask":
        """Describe a call's mask; packed documents have the range of keys of every token, found on the device."""
        ranges = (None, None) if call.sequence_ids is None else _document_ranges(call.sequence_ids)
        padding = None if call.padding is None else call.padding.to(torch.int8).contiguous()
        dense = None if call.dense is None else _dense_mask(call.dense).contiguous()
        band = (call.query.shape[2], call.key.shape[2], call.query_offset, call.sliding_window)
        dense_strides = _row_stride(dense), 0 if dense is None else dense.stride(2)
        masks = padding, unspecialized(_row_stride(padding)), dense, *map(unspecialized, dense_strides)
        return cls(*band, constant(call.is_causal), *ranges, _row_stride(ranges[0]), *masks)


class Chunk(NamedTuple):
    """
    Rows of the batch and queries that are computed together in a workspace (batch, head, row, column): a row is a
    query, columns are keys from 0 on or, with a window, from the first on that the row's BLOCK_M queries can see.
    """

    batch: int  # the first row of the batch
    number: int  # of rows of the batch
    start: int  # the first query
    rows: int
    columns: int


class Work(NamedTuple):
    """A chunk of a call, with what every kernel of a pass takes first."""

    mask: Mask
    chunk: Chunk
    sizes: Sizes

    def arguments(self) -> tuple[Mask, Chunk, Sizes]:
        """The first arguments of every kernel."""
        return self.mask, self.chunk, constants(self.sizes)

    def compose_grid(self) -> tuple[int, int, int]:
        """The grid of kernels that compose: blocks of columns, blocks of rows, groups of heads of each batch row."""
        chunk, sizes = self.chunk, self.sizes
        return chunk.columns // sizes.COMPOSE_N, chunk.rows // sizes.COMPOSE_M, chunk.number * sizes.GROUPS

    def compose_options(self) -> dict[str, int]:
        """Warps and stages of kernels that compose."""
        return {"num_warps": self.sizes.WARPS, "num_stages": self.sizes.STAGES, "enable_fp_fusion": True}

    def new_scores(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory (batch, head, row, column)."""
        return like.new_empty(self.chunk.number, self.sizes.ALL_HEADS, *self.chunk[3:], dtype=dtype)

    def new_parts(self, like: Tensor) -> Tensor:
        """Memory for one number by part of the keys: (batch, part, row, head) in float32."""
        parts = self.chunk.columns // PART.value
        return like.new_empty(self.chunk.number, parts, self.chunk.rows, self.sizes.ALL_HEADS, dtype=torch.float32)


def plan_chunks(call: Call, sizes: Sizes, bytes_per_column: int, workspace_bytes: int) -> Iterator[Chunk]:
    """
    Chunks of whole rows of the batch whose workspace stays within a bound, or where one is too large for it of its
    queries, at least one block of them. A query takes `bytes_per_column` for each of its columns, and its matrices.
    """
    batch, heads, queries, _ = call.query.shape
    columns = _columns(call, queries, sizes)
    matrices = 2 * sizes.GROUPS * sizes.HEADS_PADDED**2 * call.query.element_size()
    block_bytes = sizes.BLOCK_M * (columns * bytes_per_column + matrices)
    all_blocks = cdiv(queries, sizes.BLOCK_M)
    blocks = min(workspace_bytes // block_bytes, _INDEX_LIMIT // (sizes.BLOCK_M * columns))
    batch_step = _even_steps(batch, min(blocks // all_blocks, _GRID_LIMIT // heads))
    rows = _even_steps(all_blocks, blocks) * sizes.BLOCK_M
    for first in range(0, batch, batch_step):
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            padded = cdiv(stop - start, sizes.BLOCK_M) * sizes.BLOCK_M
            yield Chunk(first, min(batch_step, batch - first), start, padded, _columns(call, stop, sizes))


def _even_steps(number: int, most: int) -> int:
    """The size of as few steps as a number takes, of about the same size and at most so large."""
    return cdiv(number, cdiv(number, max(1, most)))


def _columns(call: Call, stop: int, sizes: Sizes) -> int:
    """Columns that queries up to `stop` need: the band of a block of queries, or all keys up to the last one's."""
    keys = seen = call.key.shape[2]
    if call.sliding_window is not None:
        # The first column's key is rounded down to a multiple of BLOCK_N.
        sides = 1 if call.is_causal else 2
        seen = min(sides * call.sliding_window + sizes.BLOCK_M + sizes.BLOCK_N, keys)
    elif call.is_causal:
        seen = min(stop + call.query_offset, keys)
    return cdiv(max(1, seen), sizes.BLOCK_N) * sizes.BLOCK_N


def _row_stride(tensor: Tensor | None) -> int:
    """The stride from row to row of the batch; 0 where one row stands for all."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def _dense_mask(dense: Tensor) -> Tensor:
    """A dense mask in bytes, or in float32 to be added to scores to base 2, -inf where it hides."""
    dense = readable_mask(dense)
    if dense.dtype == torch.bool:
        return dense.view(torch.int8)
    # Beside -1e9 in all of a row float32 keeps no score; without what all share the softmax is the same.
    return (dense - dense.amax(-1, keepdim=True).clamp(-1e30, 0)) * LOG2_E


def _document_ranges(ids: Tensor) -> tuple[Tensor, Tensor]:
    """First and last token with the number of each token, (batch, length) each."""
    ids = ids.contiguous() + 0  # of booleans numbers too, which the search takes
    # A stable sort keeps the tokens of one number in their order, so its first is where the number begins.
    values, order = ids.sort(dim=1, stable=True)
    first, last = torch.searchsorted(values, ids), torch.searchsorted(values, ids, right=True) - 1
    return order.gather(1, first).int(), order.gather(1, last).int()


def _reads_eight(factors: Tensor) -> bool:
    """Tell whether eight factors from the first on are one aligned vector, as in cached rows, padded to eights."""
    *strides, step = factors.stride()
    if not 4 < factors.shape[3] <= 8 or step != 1 or factors.element_size() != 2:
        return False
    last = factors.storage_offset() + sum((size - 1) * stride for size, stride in zip(factors.shape, strides))
    is_aligned = factors.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in strides)
    return bool(is_aligned and (last + 8) * 2 <= factors.untyped_storage().nbytes())
