"""How the forward and the backward pass lay out a call for the kernels: tuples of tensors and numbers, and chunks.

The tuples are arguments of the kernels. Members of type `tl.constexpr` are known when a kernel is compiled, and so is
where a member is None.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..call import LOG2_E, Call, cdiv, next_power_of_2, readable_mask


# Programs along the third axis of a grid, and elements that an index of 32 bits reaches.
_GRID_LIMIT = 2**16 - 1
_INDEX_LIMIT = 2**31 - 1

# Queries that a program composes one after another.
COMPOSE_M = 64
# Keys whose scores it adds up: those of a warp, so that no sum waits for another warp.
PART = tl.constexpr(16)
# What kernels are compiled for, as the same objects in all calls, which Triton then finds sooner to be equal.
constant = functools.lru_cache(maxsize=None, typed=True)(tl.constexpr)
# What a program composes at once, of one query: scores of all heads of a group, and keys, at least. Then the warps, and
# for how many queries at once scores are on their way. Hopper multiplies by four warps together, which leaves each of
# them more registers. Elsewhere four warps would exchange much through shared memory. Factors in float32 take twice the
# registers.
TILES = {"hopper": (2048, 64, 4, 4), "others": (1024, 32, 2, 3), "float32": (1024, 16, 4, 3)}
# Of a thread for the factors of its keys; if they need more, kernels compute one result at a time.
FACTOR_REGISTERS = 128
# What kernels are launched with that add up what blocks contribute.
JOINING = {"num_warps": 4}


def odd(number: int) -> int:
    """
    For a number that grows from step to step of decoding, of which the kernel takes half, rounded down. Triton compiles
    a kernel once more for numbers that 16 divides.
    """
    return 2 * number + 1


class States(NamedTuple):
    """Queries, keys, values or outputs: (batch, heads, length, channels) with channels side by side."""

    pointer: Tensor
    batch: int  # strides, in units of so many elements that the compiler knows how far loads are aligned; two are `odd`
    head: int
    position: int
    UNIT: tl.constexpr
    KV_GROUPS: tl.constexpr  # query heads of a head: Transformers' num_key_value_groups
    CHANNELS: tl.constexpr

    @classmethod
    def of(cls, tensor: Tensor, heads: int | None = None) -> "States":
        """`heads` are those of the queries, by default as many as it has."""
        strides = tensor.stride()[:3]
        unit = math.gcd(8, *strides)  # rows of a cache start at 16 bytes
        sizes = map(constant, (unit, (heads or tensor.shape[1]) // tensor.shape[1], tensor.shape[3]))
        batch, head, position = (stride // unit for stride in strides)
        return cls(tensor, odd(batch), odd(head), position, *sizes)


class Factors(NamedTuple):
    """What one side contributes to a composition: (batch, heads, length, factors), any strides."""

    pointer: Tensor | None
    batch: int  # strides, of which the first, second and fourth are in units, and of a cache the first two `odd`
    head: int
    in_group: int  # between query heads of a key/value head
    position: int
    factor: int
    KV_GROUPS: tl.constexpr
    RANK: tl.constexpr
    GATE: tl.constexpr
    NUMBER: tl.constexpr
    UNIT: tl.constexpr  # 8 where eight factors may be read as one vector, else 1
    IS_CACHED: tl.constexpr  # 1 or 0

    @classmethod
    def of(cls, tensor: Tensor | None, heads: int, is_cached: bool) -> "Factors":
        """Of (batch, heads, length, factors), or (.., key/value heads, length, their query heads x factors)."""
        if tensor is None:
            return cls(None, 0, 0, 0, 0, 0, *map(constant, (1, 0, 0, 0, 1, 0)))
        kv_groups = heads // tensor.shape[1]
        factors = tensor.shape[3] // kv_groups
        batch, head, position, factor = tensor.stride()
        unit = 8 if kv_groups == 1 and _reads_eight(tensor) else 1
        outer = (odd(batch // unit), odd(head // unit)) if is_cached else (batch // unit, head // unit)
        strides = (*outer, factors * factor, position // unit, factor)
        return cls(
            tensor, *strides, *map(constant, (kv_groups, factors // 2, factors % 2, factors, unit, int(is_cached)))
        )


class Stage(NamedTuple):
    """One composition; the static map is (groups, heads per group, heads per group)."""

    query: Factors
    key: Factors
    static: Tensor | None
    # Triton 3.6 forgets in loops the constants of tuples in this one, unless a constant comes after them.
    HAS_STATIC: tl.constexpr

    @classmethod
    def both(cls, call: Call, is_cached: bool = False) -> tuple["Stage", "Stage"]:
        """The compositions before and after the softmax; of the keys of a cache or not."""
        stages = []
        for *sides, static in (call[3:6], call[6:9]):
            query, key = (Factors.of(side, call.query.shape[1], is_cached) for side in sides)
            static = None if static is None else static.contiguous()
            stages.append(cls(query, key, static, constant(static is not None)))
        return stages[0], stages[1]


class Mask(NamedTuple):
    """Which key a query sees. Tensors have a row for every row of the batch, or one for all with a stride of 0."""

    queries: int
    keys: int
    query_offset: int
    window: int | None
    CAUSAL: tl.constexpr
    first_keys: Tensor | None  # (batch or 1, length): where each token's document begins, which is its number too
    last_keys: Tensor | None
    sequence_stride: int
    padding: Tensor | None  # (batch or 1, key)
    padding_stride: int  # `odd`, as those of the dense mask
    dense: Tensor | None  # (batch or 1, 1, query, key)
    dense_batch_stride: int
    dense_stride: int

    @classmethod
    def of(cls, call: Call) -> "Mask":
        """Of packed documents also the range of keys of every token, computed on the device."""
        ranges = (None, None) if call.sequence_ids is None else _document_ranges(call.sequence_ids)
        documents = (*ranges, row_stride(ranges[0]))
        padding = None if call.padding is None else call.padding.to(torch.int8).contiguous()
        dense = None if call.dense is None else _dense_mask(call.dense).contiguous()
        band = (call.query.shape[2], call.key.shape[2], call.query_offset, call.sliding_window)
        strides = row_stride(padding), row_stride(dense), 0 if dense is None else dense.stride(2)
        masks = (padding, odd(strides[0]), dense, *map(odd, strides[1:]))
        return cls(*band, constant(call.is_causal), *documents, *masks)


class Sizes(NamedTuple):
    """Sizes of tiles, as constants of the kernels."""

    HEADS: int  # of a group
    ALL_HEADS: int
    HEADS_PADDED: int  # a power of 2, of at least the 16 that a matrix product takes
    GROUPS: int
    BLOCK_M: int  # queries and keys of a tile of the matrix products
    BLOCK_N: int
    COMPOSE_M: int  # queries and keys of a program that composes, which divide the former
    COMPOSE_N: int
    WARPS: int  # of a program that composes
    STAGES: int
    IS_SPLIT: bool  # into a launch for each result, which together would need too many registers

    @classmethod
    def of(cls, call: Call, is_forward: bool) -> "Sizes":
        """Of the forward or the backward pass."""
        heads = call.query.shape[1] // call.groups
        padded = max(next_power_of_2(heads), 16)
        # Large tiles read queries and keys less often. They need the registers of 16-bit products and the memory of few
        # channels, and waste much at the edges of a narrow band.
        window = call.sliding_window or call.key.shape[2]
        channels = max(call.query.shape[3], call.value.shape[3])
        is_large = min(window, call.query.shape[2]) > 256 and channels <= 128
        rows = 128 if is_large and call.query.dtype != torch.float32 else 64
        kind = "float32" if call.query.dtype == torch.float32 else "hopper" if is_hopper(call.query) else "others"
        scores, keys, warps, stages = TILES[kind]
        keys = min(rows, max(keys, scores // padded))
        seen = min(window + COMPOSE_M, call.key.shape[2])
        programs = cdiv(call.query.shape[2], COMPOSE_M) * cdiv(seen, keys) * call.query.shape[0] * call.groups
        # Fewer programs are made more by half as many queries each, the sooner where nothing is summed up over queries.
        composed = COMPOSE_M if programs >= (2048 if is_forward else 512) else COMPOSE_M // 2
        assert rows % composed == 0 and rows % keys == 0
        # More heads take the shared memory of fewer stages.
        stages = stages if padded < 64 else 2
        # Forward those of both compositions, backward those of one and their gradients in float32.
        size = call.query.element_size()
        factors = keys * padded // (32 * warps) * (2 * call.rank() + 1)
        is_split = factors * (2 * size if is_forward else size + 4) // 4 > FACTOR_REGISTERS
        return cls(heads, call.query.shape[1], padded, call.groups, rows, rows, composed, keys, warps, stages, is_split)


class Chunk(NamedTuple):
    """
    Rows of the batch and queries that are computed together, and their workspace: (batch, head, row, column). A row
    is a query; columns are keys from 0 on or, where there is a window, from the first key on that the row's block of
    BLOCK_M queries can see, so that nothing outside the band exists.
    """

    batch: int  # the first of them
    number: int
    start: int  # the first query
    rows: int
    columns: int

    def shape(self, heads: int) -> tuple[int, int, int, int]:
        return self.number, heads, self.rows, self.columns


class Work(NamedTuple):
    """A chunk of a call, as the first arguments of every kernel."""

    mask: Mask
    chunk: Chunk
    sizes: Sizes

    def launch(self, kernel: Any, grid: tuple[int, ...], options: dict[str, Any], *arguments: Any) -> None:
        kernel[grid](self.mask, self.chunk, _constants(self.sizes), *arguments, **options, enable_fp_fusion=True)

    def launch_composing(self, kernel: Any, *arguments: Any, **options: Any) -> None:
        """A program for each block of columns, block of rows, and group of heads in each row of the batch."""
        chunk, sizes = self.chunk, self.sizes
        grid = (chunk.columns // sizes.COMPOSE_N, chunk.rows // sizes.COMPOSE_M, chunk.number * sizes.GROUPS)
        self.launch(kernel, grid, {"num_warps": sizes.WARPS, "num_stages": sizes.STAGES, **options}, *arguments)


@functools.cache
def _constants(sizes: Sizes) -> Sizes:
    """The same as kernels take it."""
    return Sizes(*map(constant, sizes))  # type: ignore[arg-type]


def is_hopper(tensor: Tensor) -> bool:
    """Whether it is on a GPU of compute capability 9, or on none."""
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device)[0] == 9


def row_stride(tensor: Tensor | None) -> int:
    """From row to row of the batch; 0 where one row stands for all."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


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
    # As many chunks as that takes, of about as many rows, or queries, each.
    batch_step = _even_steps(batch, min(blocks // all_blocks, _GRID_LIMIT // heads))
    rows = _even_steps(all_blocks, blocks) * sizes.BLOCK_M
    for first in range(0, batch, batch_step):
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            padded = round_up(stop - start, sizes.BLOCK_M)
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
    return round_up(max(1, seen), sizes.BLOCK_N)


def round_up(number: int, multiple: int) -> int:
    return cdiv(number, multiple) * multiple


def _dense_mask(dense: Tensor) -> Tensor:
    """As kernels read it: bytes, or float32 to be added to scores to base 2, -inf where it hides."""
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
    """Whether eight factors from the first on are one aligned vector, as in a cached row, which is padded to eights."""
    *strides, step = factors.stride()
    if not 4 < factors.shape[3] <= 8 or step != 1 or factors.element_size() != 2:
        return False
    last = factors.storage_offset() + sum((size - 1) * stride for size, stride in zip(factors.shape, strides))
    is_aligned = factors.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in strides)
    return is_aligned and (last + 8) * 2 <= factors.untyped_storage().nbytes()
