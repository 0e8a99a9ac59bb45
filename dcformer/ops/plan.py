"""What the forward and the backward pass prepare alike: factors as kernels read them, masks, and chunks of queries."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import Composition, Mask, channels_of, dense_mask
from .config import TileConfig


# Scores of float32 inputs stay in float32; those of 16-bit inputs have their range of exponents from the composition's
# small numbers, so what counts is the mantissa: float16 errs an eighth as much as bfloat16.
_WORKSPACE_DTYPES = {torch.float32: torch.float32, torch.float16: torch.float16, torch.bfloat16: torch.float16}


# Programs along the third axis of a grid, and elements that an index of 32 bits reaches.
_GRID_LIMIT = 2**16 - 1
_INDEX_LIMIT = 2**31 - 1

# Keys of a tile that begins at the last key.
_LARGEST_TILE = 128


class Stage(NamedTuple):
    """
    One composition as the kernels read it.

    Args:
        query, key (`Tensor`): (batch, channels, heads, length), float32, the length padded to a multiple of 16 and by a
            tile of 128 at least; the identity is added to the query's gate, or to the key's if there is no other.
            Without a side, any tensor.
        static (`Tensor`, *optional*): (groups, heads per group, heads per group), float32.
        query_rank, query_gate, key_rank, key_gate: What each side has.
    """

    query: Tensor
    key: Tensor
    static: Tensor | None
    query_rank: int
    query_gate: bool
    key_rank: int
    key_gate: bool

    @property
    def maps(self) -> int:
        """Rank maps of a group of heads."""
        return self.query_rank + self.key_rank

    @property
    def is_empty(self) -> bool:
        return self.static is None and self.maps == 0 and not self.query_gate and not self.key_gate

    def arguments(self, batch: slice, name: str) -> dict[str, Any]:
        """The arguments of a kernel about the factors of these rows of the batch, whose names begin with `name`."""
        return {
            f"{name}_QUERY": self.query[batch],
            f"{name}_KEY": self.key[batch],
            f"{name.lower()}_query_batch_stride": self.query.stride(0),
            f"{name.lower()}_query_stride": self.query.stride(1),
            f"{name.lower()}_key_batch_stride": self.key.stride(0),
            f"{name.lower()}_key_stride": self.key.stride(1),
            f"{name}_QUERY_RANK": self.query_rank,
            f"{name}_QUERY_GATE": self.query_gate,
            f"{name}_KEY_RANK": self.key_rank,
            f"{name}_KEY_GATE": self.key_gate,
        }


class Chunk(NamedTuple):
    """Rows `batch` of the batch and queries start..stop, over so many columns of the workspace."""

    batch: slice
    start: int
    stop: int
    columns: int


class MaskTensors(NamedTuple):
    """A mask as the kernels read it: numbers, and tensors with a row for every row of the batch or one for all."""

    is_causal: bool
    window: int | None
    query_offset: int
    padding: Tensor | None
    sequences: Tensor | None
    first_keys: Tensor | None
    last_keys: Tensor | None
    visible: Tensor | None


class Problem(NamedTuple):
    """One call, as all kernels see it."""

    heads: int
    key_value_heads: int
    groups: int
    queries: int
    keys: int
    pre: Stage
    post: Stage
    mask: MaskTensors

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        pre: Composition | None,
        post: Composition | None,
        mask: Mask,
        like: Tensor,
    ) -> "Problem":
        """Gather what the kernels need; `like` is any float32 tensor with a row for every row of the batch."""
        if pre is not None and post is not None and pre.groups != post.groups:
            raise ValueError(f"pre and post must have the same groups here, got {pre.groups} and {post.groups}.")
        given = pre or post
        return cls(
            query.shape[1],
            key.shape[1],
            1 if given is None else given.groups,
            query.shape[2],
            key.shape[2],
            prepare_stage(pre, like),
            prepare_stage(post, like),
            prepare_mask(mask),
        )

    def range_arguments(self, chunk: Chunk) -> dict[str, Any]:
        """What tells a kernel where the chunk is and which blocks of keys it sees."""
        mask = self.mask
        return {
            "query_start": chunk.start,
            "queries": self.queries,
            "keys": self.keys,
            "columns": chunk.columns,
            "query_offset": mask.query_offset,
            "window": mask.window,
            "FIRST_KEYS": _rows(mask.first_keys, chunk),
            "LAST_KEYS": _rows(mask.last_keys, chunk),
            "sequence_stride": _row_stride(mask.sequences),
            "IS_CAUSAL": mask.is_causal,
        }

    def mask_arguments(self, chunk: Chunk) -> dict[str, Any]:
        """What tells a kernel which single keys are hidden besides."""
        mask = self.mask
        return {
            "PADDING": _rows(mask.padding, chunk),
            "SEQUENCES": _rows(mask.sequences, chunk),
            "VISIBLE": _rows(mask.visible, chunk),
            "padding_stride": _row_stride(mask.padding),
            "visible_batch_stride": _row_stride(mask.visible),
            "visible_stride": 0 if mask.visible is None else mask.visible.stride(2),
        }

    def head_constants(self) -> dict[str, int]:
        return {"GROUPS": self.groups, "HEADS": self.heads // self.groups}

    def tile_grid(self, config: TileConfig, scores: Tensor) -> tuple[int, int, int]:
        """Programs of a composition: blocks of columns, blocks of rows, groups of heads in each row of the batch."""
        number, _, rows, columns = scores.shape
        return columns // config.block_keys, rows // config.compose_rows, number * self.groups

    def tile_constants(self, config: TileConfig, scores: Tensor) -> dict[str, Any]:
        """What every kernel that composes tiles of `scores` is compiled for and launched with."""
        return {
            **self.head_constants(),
            "ROWS": scores.shape[2],
            "BLOCK_ROWS": config.block_rows,
            "BLOCK_QUERIES": config.compose_rows,
            "BLOCK_KEYS": config.block_keys,
            "num_warps": config.compose_warps,
            "num_stages": 2,
            "enable_fp_fusion": True,
        }


def _rows(tensor: Tensor | None, chunk: Chunk) -> Tensor | None:
    return tensor if tensor is None or tensor.shape[0] == 1 else tensor[chunk.batch]


def _row_stride(tensor: Tensor | None) -> int:
    """From row to row of the batch; 0 where one row stands for all."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def prepare_stage(composition: Composition | None, like: Tensor) -> Stage:
    """The factors of a composition as kernels read them; `like` stands where there is none."""
    if composition is None:
        return Stage(like, like, None, 0, False, 0, False)
    query_rank, query_gate = channels_of(composition.query)
    key_rank, key_gate = channels_of(composition.key)
    query, key = (
        like if side is None else _packed(side, add_identity=has_gate)
        for side, has_gate in ((composition.query, query_gate), (composition.key, key_gate and not query_gate))
    )
    static = None if composition.static is None else composition.static.float().contiguous()
    return Stage(query, key, static, query_rank, query_gate, key_rank, key_gate)


def _packed(factors: Tensor, add_identity: bool) -> Tensor:
    batch, heads, length, channels = factors.shape
    packed = factors.new_zeros(batch, channels, heads, round_up(length + _LARGEST_TILE, 16), dtype=torch.float32)
    packed[..., :length] = factors.permute(0, 3, 1, 2)
    if add_identity:
        packed[:, -1] += 1.0
    return packed


def prepare_mask(mask: Mask) -> MaskTensors:
    """Masks as kernels read them; of packed sequences also the range of keys of every query, found on the device."""
    first_keys = last_keys = sequences = None
    if mask.sequence_ids is not None:
        sequences = mask.sequence_ids.to(torch.int32).contiguous()
        first_keys, last_keys = _sequence_ranges(sequences)
    return MaskTensors(
        mask.is_causal,
        mask.sliding_window,
        mask.query_offset,
        None if mask.padding is None else mask.padding.to(torch.int8).contiguous(),
        sequences,
        first_keys,
        last_keys,
        None if mask.visible is None else dense_mask(mask.visible).contiguous(),
    )


def _sequence_ranges(ids: Tensor) -> tuple[Tensor, Tensor]:
    """First and last token with the number of each token, (batch, length) each."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    values, order = ids.sort(dim=1, stable=True)
    edges = values[:, 1:] != values[:, :-1]
    begins = torch.nn.functional.pad(edges, (1, 0), value=True)
    ends = torch.nn.functional.pad(edges, (0, 1), value=True)
    # A stable sort keeps the tokens of one number in their order, so its first is where the number begins.
    first_places = torch.where(begins, positions, 0).cummax(dim=1).values
    last_places = torch.where(ends, positions, ids.shape[1]).flip(1).cummin(dim=1).values.flip(1)
    ranges = []
    for places in (first_places, last_places):
        ranges.append(torch.empty_like(order).scatter_(1, order, order.gather(1, places)).to(torch.int32))
    return ranges[0], ranges[1]


def workspace_dtype(dtype: torch.dtype) -> torch.dtype:
    """
    In which type scores and weights of these inputs are kept.

    Raises:
        ValueError: for types that the kernels do not take.
    """
    if dtype not in _WORKSPACE_DTYPES:
        raise ValueError(f"The Triton forms take float32, float16 and bfloat16, got {dtype}.")
    return _WORKSPACE_DTYPES[dtype]


def plan_chunks(
    batch: int,
    queries: int,
    keys: int,
    mask: Mask,
    *,
    heads: int,
    bytes_per_column: int,
    maps: int,
    workspace_bytes: int,
    block_rows: int,
    block_keys: int,
) -> Iterator[Chunk]:
    """
    Chunks of queries, and of the batch if it is large, whose workspace stays within a bound: at least one block of
    queries of one row of the batch.

    Args:
        bytes_per_column (`int`): What a query of one row of the batch takes for each of its columns.
        maps (`int`): Rank maps of a group, which one index of 32 bits has to reach.
        block_rows, block_keys (`int`): Rows come in multiples of the one, columns of the other.
    """
    columns = _columns(keys, mask, queries, block_rows, block_keys)
    block_bytes = block_rows * columns * bytes_per_column
    batch_step = max(1, min(batch, workspace_bytes // block_bytes, _GRID_LIMIT // heads))
    blocks = min(workspace_bytes // (block_bytes * batch_step), _INDEX_LIMIT // (block_rows * columns * max(1, maps)))
    blocks = max(1, blocks)
    rows = min(blocks * block_rows, round_up(queries, block_rows))
    for first in range(0, batch, batch_step):
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            columns = _columns(keys, mask, stop, block_rows, block_keys)
            yield Chunk(slice(first, min(first + batch_step, batch)), start, stop, columns)


def _columns(keys: int, mask: Mask, stop: int, block_rows: int, block_keys: int) -> int:
    """Columns that queries up to `stop` need: the band of a block of queries, or all keys up to the last one's own."""
    seen = keys
    if mask.sliding_window is not None:
        # The first column's key is rounded down by up to 15.
        seen = mask.sliding_window + block_rows - 1 + 15 + (0 if mask.is_causal else mask.sliding_window - 1)
    elif mask.is_causal:
        seen = stop + mask.query_offset
    return round_up(max(1, min(seen, keys if mask.sliding_window is None else keys + 15)), block_keys)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
