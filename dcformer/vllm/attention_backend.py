"""Composed attention over vLLM's paged cache: an attention backend.

A cached row holds, per key/value head, the key states and the factors of the composition before the softmax, then the
value states and the factors of that after it. Window layers are a group whose blocks vLLM frees behind the window.

The sequences of a step are sorted into few padded batches. Each batch is gathered from its blocks and passed to
`composed_attention`; on a GPU, where the operator would choose its Triton kernels, decoding reads the blocks directly.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.attention import Attention, unified_attention_with_output
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from ..compose_dcformer import ComposeProjection, unpack
from ..dcmha import BACKENDS, composed_attention
from ..kernels.call import Call
from ..kernels.triton.triton_backend import MOST_DECODE_QUERIES, decode_op
from ..types_dcformer import AttentionInputs, ComposeSide, ComposeWeights
from ..visibility_dcformer import Visibility


# The cost of the operator calls of one more batch, in scores.
_COST_OF_A_BATCH = 2**15
# Gathering more bytes at once costs a CPU more in new memory than it saves in calls.
_BYTES_AT_ONCE_ON_CPU = 16 * 2**20


class ComposedAttentionBackend(AttentionBackend):
    """The backend `DCMHA`, which layers that compose heads ask for by name."""

    @staticmethod
    def get_name() -> str:
        return "DCMHA"

    @staticmethod
    def get_impl_cls() -> type["ComposedAttentionImpl"]:
        return ComposedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["ComposedAttentionMetadataBuilder"]:
        return ComposedAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # A head's rows of a block lie one after the other, so that the whole cache is a table of rows.
        return (KVCacheLayout.LBHNC,)


@dataclass
class PaddedBatch:
    """Sequences of one step that are computed together."""

    queries: int
    tokens: Tensor  # (sequences x queries,) indices of their tokens in the step; padding repeats one
    real: Tensor  # indices of those in `tokens` that are not padding
    mask: Visibility
    rows: Tensor  # (sequences, key/value heads, keys) of the cache as a table of rows
    block_table: Tensor  # (sequences, blocks)
    lengths: Tensor  # (sequences,) keys in these blocks


@dataclass
class ComposedAttentionMetadata(AttentionMetadata):
    """One step, for the layers of one group of the cache."""

    query_lengths: list[int]
    sequence_lengths: list[int]  # with the tokens of this step
    block_table: Tensor  # (sequences, blocks)
    slot_mapping: Tensor  # (tokens,) where each token of this step goes
    _batches: dict[int | None, list[PaddedBatch]] = field(default_factory=dict)

    def batches(self, window: int | None, cache: Tensor) -> list[PaddedBatch]:
        """The padded batches of this step, made once for all layers of a window."""
        if window not in self._batches:
            self._batches[window] = list(self._padded_batches(window, cache))
        return self._batches[window]

    def _padded_batches(self, window: int | None, cache: Tensor) -> Iterator[PaddedBatch]:
        # The keys that any query of a sequence sees; blocks before them may belong to another sequence by now.
        spans = [
            length if window is None else min(length, queries + window - 1)
            for queries, length in zip(self.query_lengths, self.sequence_lengths)
        ]
        for batch in batches_of_similar_length(self.query_lengths, spans):
            size = len(batch)
            if cache.device.type == "cpu":
                size = max(1, _BYTES_AT_ONCE_ON_CPU // (cache[0, :, 0].nbytes * max(spans[i] for i in batch)))
            for first in range(0, len(batch), size):
                yield self._padded(batch[first : first + size], spans, window, cache)

    def _padded(self, sequences: list[int], spans: list[int], window: int | None, cache: Tensor) -> PaddedBatch:
        """Queries and keys aligned at their last, as in a left-padded batch of `generate`."""
        lengths, key_lengths = [self.query_lengths[i] for i in sequences], [spans[i] for i in sequences]
        queries, keys = max(lengths), max(key_lengths)
        stops = list(itertools.accumulate(self.query_lengths))
        tokens, are_real = _aligned(torch.tensor([stops[i] for i in sequences]), torch.tensor(lengths), queries)
        ends, spanned = self._moved([self.sequence_lengths[i] for i in sequences]), self._moved(key_lengths)
        # Padding repeats a key of the sequence: what is hidden must still be a number.
        positions, are_keys = _aligned(ends, spanned, keys)
        mask = Visibility(queries, keys, sliding_window=window, padding=None if min(key_lengths) == keys else are_keys)
        heads, block_size = cache.shape[1:3]
        table = self.block_table[self._moved(sequences)]
        blocks = table.long().gather(1, positions // block_size)
        rows = blocks[:, None] * heads + torch.arange(heads, device=ends.device)[:, None]
        rows = rows * block_size + (positions % block_size)[:, None]
        tokens, real = self._moved(tokens.flatten()), self._moved(are_real.flatten().nonzero().flatten())
        return PaddedBatch(queries, tokens, real, mask, rows, table, ends)

    def _moved(self, values: list[int] | Tensor) -> Tensor:
        return torch.as_tensor(values).to(self.block_table.device, non_blocking=True)


def _aligned(ends: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The last indices (sequences, width) before these ends, where padding repeats the first, and which are none."""
    back = torch.arange(width, 0, -1, device=ends.device)
    return ends[:, None] - torch.minimum(back, lengths[:, None]), back <= lengths[:, None]


def batches_of_similar_length(query_lengths: Sequence[int], key_lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the sequences to pad to one length, batch by batch; sequences without queries are left out."""
    longest_first = sorted(range(len(key_lengths)), key=lambda i: (query_lengths[i], key_lengths[i]), reverse=True)
    batches: list[list[int]] = []
    queries = keys = 0
    for i in longest_first:
        if query_lengths[i] == 0:
            break
        if batches:
            size, longest = len(batches[-1]), max(keys, key_lengths[i])
            apart = size * queries * keys + query_lengths[i] * key_lengths[i] + _COST_OF_A_BATCH
            if (size + 1) * queries * longest <= apart:
                batches[-1].append(i)
                keys = longest
                continue
        batches.append([i])
        queries, keys = query_lengths[i], key_lengths[i]
    return [sorted(batch) for batch in batches]


class ComposedAttentionMetadataBuilder(AttentionMetadataBuilder[ComposedAttentionMetadata]):
    """Makes the metadata of a step from those that vLLM has for every backend."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.speculates = vllm_config.speculative_config is not None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ComposedAttentionMetadata:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        # Without speculative decoding the bound is the length, without waiting for the device.
        lengths = None if self.speculates else common.seq_lens_cpu_upper_bound
        lengths = common.seq_lens.cpu() if lengths is None else lengths
        slots = common.slot_mapping[: starts[-1]]
        if self.speculates:  # rejected tokens have none, -1: they go to the first, which belongs to no sequence
            slots = slots.clamp(min=0)
        return ComposedAttentionMetadata(
            query_lengths=[stop - start for start, stop in itertools.pairwise(starts)],
            sequence_lengths=lengths[: common.num_reqs].tolist(),
            block_table=common.block_table_tensor,
            slot_mapping=slots,
        )


class ComposedAttentionImpl(AttentionImpl[ComposedAttentionMetadata]):
    """The attention of one layer; `compose` says what its queries and its cached rows hold."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: int | None,
        kv_cache_dtype: str,
        *unused: Any,  # which vLLM passes to every backend
        head_dim: int,
        compose: ComposeProjection,
    ):
        self.num_heads, self.num_kv_heads, self.head_size, self.head_dim = num_heads, num_kv_heads, head_size, head_dim
        self.scale, self.sliding_window, self.kv_cache_dtype = scale, sliding_window, kv_cache_dtype
        self.compose = compose
        # The factors of a query or a key in one stage: w1 and w2 of every rank, and the gate.
        self.channels = (compose.hidden_weight is not None) * 2 * compose.rank + (compose.gate_weight is not None)
        self.slots = compose.slots if self.channels > 0 else []
        self.like = {
            heads: ComposeSide(factors=torch.empty(1, 1, 0, num_heads // heads * self.channels))
            for heads in (num_heads, num_kv_heads)
        }  # heads that factors are of -> what `unpack` takes their number from
        self._chosen: dict[int, bool] = {}  # number of queries -> whether the operator would choose its Triton kernels

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: ComposedAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """
        Store keys and values (tokens, key/value heads, head_dim + factors) in the cache (blocks, key/value heads, block
        size, those of both), attend by queries (tokens, heads, head_dim + factors), and write the output.
        """
        if attn_metadata is None:  # vLLM measures how much memory a step takes
            return output.zero_()
        slots, block_size, key_width = attn_metadata.slot_mapping.long(), kv_cache.shape[2], key.shape[2]
        tokens, blocks, offsets = len(slots), slots // block_size, slots % block_size
        kv_cache[blocks, :, offsets, :key_width] = key[:tokens].to(kv_cache.dtype)
        kv_cache[blocks, :, offsets, key_width:] = value[:tokens].to(kv_cache.dtype)
        table = kv_cache.view(-1, kv_cache.shape[3])
        for batch in attn_metadata.batches(self.sliding_window, kv_cache):
            # (sequences x queries, heads, width) -> (sequences, heads, queries, width)
            queries = query[batch.tokens].unflatten(0, (-1, batch.queries)).transpose(1, 2)
            if self._reads_blocks(queries, kv_cache, key_width, batch):
                attended = self._attend_in_blocks(queries, kv_cache, key_width, batch)
            else:
                cached = table.index_select(0, batch.rows.flatten()).view(*batch.rows.shape, -1)
                operands = self._operands(queries, cached, key_width)
                attended = composed_attention(*operands, scaling=self.scale, attention_mask=batch.mask)
            attended = attended.transpose(1, 2).flatten(0, 1)  # (sequences x queries, heads, head_dim)
            output[batch.tokens[batch.real]] = attended[batch.real].to(output.dtype)
        output[tokens:].zero_()
        return output

    def _operands(
        self, query: Tensor, cached: Tensor, key_width: int, in_blocks: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, ComposeWeights | None, ComposeWeights | None]:
        """
        Query, key and value (sequences, heads, length, head_dim), and the compose weights stored beside them; with
        `in_blocks` key-wise factors stay as they are cached, those of all query heads of a key/value head in one row.
        """
        query_slots = [slot for slot in self.slots if slot % 2 == 0]
        query, *query_factors = query.split([self.head_dim, *[self.channels] * len(query_slots)], dim=-1)
        factors, states = dict(zip(query_slots, query_factors)), []
        heads = self.num_kv_heads if in_blocks else self.num_heads
        for slot, rows in (1, cached[..., :key_width]), (3, cached[..., key_width:]):
            values, side = unpack(rows, self.head_dim, self.like[heads] if slot in self.slots else None, heads)
            states.append(values)
            if side is not None:
                factors[slot] = side.factors
        pre, post = self.compose.weights_of(factors)
        return query, states[0], states[1], pre, post

    def _reads_blocks(self, query: Tensor, cache: Tensor, key_width: int, batch: PaddedBatch) -> bool:
        """True if the Triton kernels of decoding take these queries."""
        queries, is_padded = batch.queries, len(batch.real) < len(batch.tokens)
        if query.device.type != "cuda" or is_padded or queries > MOST_DECODE_QUERIES or query.dtype != cache.dtype:
            return False
        if queries not in self._chosen:
            operands = self._operands(query[:1], cache[:1], key_width)
            mask = Visibility(queries, cache.shape[2], sliding_window=self.sliding_window)
            inputs = AttentionInputs(*operands, self.scale, mask)
            self._chosen[queries] = BACKENDS["triton"].why_not_automatic(inputs) is None
        return self._chosen[queries]

    def _attend_in_blocks(self, query: Tensor, cache: Tensor, key_width: int, batch: PaddedBatch) -> Tensor:
        """The output (sequences, heads, queries, head_dim) by kernels that read keys and values in the cache."""
        mask = Visibility(batch.queries, cache.shape[2], sliding_window=self.sliding_window, query_offset=0)
        operands = self._operands(query, cache, key_width, in_blocks=True)
        call = Call.of(AttentionInputs(*operands, self.scale, mask))
        return decode_op(*call, key_lengths=batch.lengths, block_table=batch.block_table)


class ComposedAttention(Attention):
    """The attention layer of vLLM, for queries that carry factors and are wider than the keys."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        key_channels: int,
        value_channels: int,
        compose: ComposeProjection,
        **options: Any,
    ):
        options |= {"attn_backend": ComposedAttentionBackend, "head_dim": head_dim, "compose": compose}
        options["head_size_v"] = head_dim + value_channels
        super().__init__(num_heads, head_dim + key_channels, head_dim**-0.5, **options)
        self.head_dim = head_dim

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(tokens, heads or key/value heads, head_dim + factors) -> (tokens, heads x head_dim)."""
        output = query.new_empty(query.shape[0], self.num_heads, self.head_dim)
        if self.use_direct_call:
            unified_attention_with_output(query, key, value, output, self.layer_name)
        else:
            torch.ops.vllm.unified_attention_with_output(query, key, value, output, _encode_layer_name(self.layer_name))
        return output.flatten(1)
