"""Composed attention for CPUs: blocks of queries, tiles that stay in the cache, gradients in closed form.

A composition touches every score of every head a dozen times with little arithmetic, so it is bound by memory traffic
and by the number of operations. The scores of a block of queries are one product of matrices for all heads; of them a
tile of a few queries at a time is composed, passed through the softmax and composed again while it is in the cache
(equation 7 on a tile, its adjoint and the gradients of its weights are in `dcmha_cpu_compose`); and one product with
the values ends the block. Blocks are shared out to threads, each with buffers of its own. Nothing of the size of the
score matrix outlives a block: the backward pass scores and composes it again.

The scores lie (query, batch, head, key) in memory, so that a tile is contiguous, each query's scores are a matrix
heads x keys for the products of a composition, and each head's are a matrix queries x keys with long rows for the
products with keys and values.

In bfloat16, where the CPU has products of it, those with keys and values are in bfloat16 with scores rounded once, and
all between them is in float32. The backward pass is in float32 throughout.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .dcmha_cpu_compose import Stage, Tile, Workspace, accumulate_weight_gradients, compose
from .dcmha_cpu_threads import available_threads, deal, run_shares
from .dcmha_factors import ComposeWeights
from .dcmha_mask import Visibility


# (start, stop) of some queries and (first, last) of the keys that they can see.
Block: TypeAlias = tuple[int, int, int, int]

# Long operations against what fits into the cache beside a second tile and the keys' weights.
_ELEMENTS_PER_TILE = 2**19
# Tall blocks make the products of matrices efficient; short ones waste less beside the diagonal or the window.
_QUERIES_PER_BLOCK = 128
_ELEMENTS_PER_BLOCK = 2**23
# Handing less than this to another thread costs more than it saves.
_ELEMENTS_PER_THREAD = 2**18
# Products read keys faster with the channels first in memory; as many uses of a key make up for laying it out so.
_QUERIES_THAT_PAY_FOR_COLUMNS = 512


def cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    scaling: float,
    mask: Visibility,
    dropout: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """As every implementation in the table, without dropout; with gradients in closed form."""
    weights = [tensor for stage in (pre, post) for tensor in _flatten(stage)]
    groups = tuple(None if stage is None else stage.groups for stage in (pre, post))
    return _ComposedAttention.apply(query, key, value, scaling, mask, chunk_size, groups, *weights)


def compute_dtype(query: Tensor, key: Tensor) -> torch.dtype:
    """float64 if either is, else float32: what scores, softmax and compositions are computed in."""
    return torch.float64 if torch.float64 in (query.dtype, key.dtype) else torch.float32


def _flatten(stage: ComposeWeights | None) -> list[Tensor | None]:
    """The tensors of a `ComposeWeights`: the queries' factors, the keys', the static map."""
    if stage is None:
        return [None] * 3
    return [*(None if side is None else side.factors for side in (stage.query, stage.key)), stage.static]


class _ComposedAttention(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        visibility: Visibility,
        chunk_size: int | None,
        groups: tuple[int | None, int | None],
        *weights: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, *weights)
        ctx.scaling, ctx.visibility, ctx.chunk_size, ctx.groups = scaling, visibility, chunk_size, groups
        dtype = compute_dtype(query, key)
        if query.dtype == key.dtype == value.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            dtype = torch.bfloat16
        problem = _Problem(query, key, value, weights, scaling, visibility, chunk_size, groups, dtype)
        # As models go on with it: (batch, query, heads, value channels) in memory.
        output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)

        def work(blocks: list[Block]) -> None:
            workspace = Workspace()
            for block in blocks:
                problem.forward_block(block, output, workspace)

        run_shares(work, problem.shares())
        return output

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ValueError(
                "Second derivatives (create_graph=True) are not in the closed form of composed attention on CPUs; use "
                "attn_implementation='dcmha_chunked' in a model, or implementation='chunked'."
            )
        query, key, value, *weights = ctx.saved_tensors
        dtype = compute_dtype(query, key)
        problem = _Problem(query, key, value, weights, ctx.scaling, ctx.visibility, ctx.chunk_size, ctx.groups, dtype)
        output_gradient = problem.split_heads(output_gradient.to(dtype))
        value_columns = problem.columns(problem.value)
        query_gradient = query.new_empty(query.shape, dtype=dtype)
        query_sides = [None if stage is None else stage.zeros().query for stage in problem.stages]

        def work(blocks: list[Block]) -> tuple[Tensor, Tensor, list[Stage | None]]:
            workspace = Workspace()
            key_gradient, value_gradient = (torch.zeros_like(x) for x in (problem.key, problem.value))
            stages = [None if s is None else s.zeros(side) for s, side in zip(problem.stages, query_sides)]
            gradients = (problem.split_heads(query_gradient), key_gradient, value_gradient, stages)
            for block in blocks:
                problem.backward_block(block, output_gradient, value_columns, gradients, workspace)
            return key_gradient, value_gradient, stages

        (key_gradient, value_gradient, stages), *others = run_shares(work, problem.shares())
        for more_key, more_value, more_stages in others:
            key_gradient += more_key
            value_gradient += more_value
            stages = [None if own is None else own.add_(more) for own, more in zip(stages, more_stages)]
        gradients = [query_gradient, key_gradient.view(key.shape), value_gradient.view(value.shape)]
        options = [None] * 4  # scaling, visibility, chunk size, groups
        for stage in stages:
            gradients.extend([None] * 3 if stage is None else stage.tensors())
        gradients = [
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, (query, key, value, *weights))
        ]
        return *gradients[:3], *options, *gradients[3:]


class _Problem:
    """
    The inputs of one call in this file's layout, and the steps of one block of it.

    Args:
        matmul_dtype (`torch.dtype`): Of the products with keys and values.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weights: Sequence[Tensor | None],
        scaling: float,
        visibility: Visibility,
        chunk_size: int | None,
        groups: tuple[int | None, int | None],
        matmul_dtype: torch.dtype,
    ):
        self.dtype = compute_dtype(query, key)
        self.matmul_dtype = matmul_dtype
        self.batch, self.heads, self.queries = query.shape[:3]
        self.key_value_heads = key.shape[1]
        self.scaling = scaling
        self.visibility = visibility
        # In 16 bits a power of two scales exactly; the rest follows in the compositions' type.
        self.late_scaling = 1.0
        if matmul_dtype != self.dtype:
            scaling = 2.0 ** (math.frexp(scaling)[1] - 1)
            self.late_scaling = self.scaling / scaling
        self.query = self.split_heads(query.to(matmul_dtype) * scaling)
        self.key, self.value = (x.to(matmul_dtype).flatten(0, 1) for x in (key, value))  # (rows, key, channels)
        self.stages = [
            None if number is None else Stage.lay_out(weights[3 * i : 3 * i + 3], number, self.dtype)
            for i, number in enumerate(groups)
        ]
        self.matrices = [None if stage is None else stage.matrices(self.queries, self.batch) for stage in self.stages]
        self.band_regions: dict[tuple[int, int, int], list[tuple[slice, Tensor]]] = {}
        window = visibility.sliding_window or key.shape[2]
        self.keys_in_sight = min(key.shape[2], window)
        self.key_columns = self.columns(self.key)
        per_query = self.heads * self.batch * self.keys_in_sight
        self.threads = max(1, min(available_threads(), self.queries * per_query // _ELEMENTS_PER_THREAD))
        longest = max(32, min(_QUERIES_PER_BLOCK, window // 4))
        if self.threads > 1:  # two blocks for each, a cheap and an expensive one
            longest = min(longest, math.ceil(self.queries / (2 * self.threads)))
        self.queries_per_block = chunk_size or max(16, min(longest, _ELEMENTS_PER_BLOCK // per_query))

    def split_heads(self, states: Tensor) -> Tensor:
        """(batch, heads, query, channels) -> (batch, key/value heads, heads that share one, query, channels)."""
        return states.unflatten(1, (self.key_value_heads, -1))

    def columns(self, states: Tensor) -> Tensor:
        """(rows, key, channels) as (rows, channels, key), also in memory where enough queries use it."""
        if min(self.queries, self.keys_in_sight) < _QUERIES_THAT_PAY_FOR_COLUMNS:
            return states.mT
        # A product with the identity is several times faster than a copy.
        return torch.matmul(torch.eye(states.shape[2], dtype=states.dtype), states.mT)

    def blocks(self) -> list[Block]:
        """(start, stop) of the queries and (first, last) of the keys they can see, block by block."""
        starts = range(0, self.queries, self.queries_per_block)
        ranges = [(start, min(start + self.queries_per_block, self.queries)) for start in starts]
        return [(start, stop, *self.visibility.key_range(start, stop)) for start, stop in ranges]

    def shares(self) -> list[list[Block]]:
        """The blocks, shared out to the threads that pay."""
        blocks = self.blocks()
        costs = [self.batch * self.heads * (stop - start) * (last - first) for start, stop, first, last in blocks]
        return deal(blocks, costs, self.threads)

    def tiles(self, block: Block) -> Iterator[Block]:
        """(start, stop, first, last) of the tiles of a block, each with only the keys that it can see."""
        start, stop, first, last = block
        step = max(1, _ELEMENTS_PER_TILE // (self.batch * self.heads * (last - first)))
        for low in range(start, stop, step):
            high = min(low + step, stop)
            yield low, high, *self.visibility.key_range(low, high)

    def products_with_columns(
        self, states: Tensor, columns: Tensor, block: Block, workspace: Workspace, name: str
    ) -> Tensor:
        """The products of some queries' states with the keys' or values': (query, batch, heads, key)."""
        start, stop, first, last = block
        shape = (stop - start, self.batch * self.key_value_heads, self.heads // self.key_value_heads, last - first)
        products = workspace.take(name, *shape, dtype=columns.dtype)
        for rows, out in zip(states[..., start:stop, :].unbind(2), products.unbind(2)):
            torch.bmm(rows.flatten(0, 1), columns[..., first:last], out=out.transpose(0, 1))
        return products.view(stop - start, self.batch, self.heads, last - first)

    def rows(self, attention: Tensor) -> list[Tensor]:
        """(query, batch, heads, key) as (rows, query, key) for each of the heads that share a key/value head."""
        heads = attention.unflatten(2, (self.key_value_heads, -1)).unbind(3)
        return [head.flatten(1, 2).transpose(0, 1) for head in heads]

    def forward_block(self, block: Block, output: Tensor, workspace: Workspace) -> None:
        start, stop, first, last = block
        scores = self.products_with_columns(self.query, self.key_columns, block, workspace, "scores")
        composed = scores
        if self.matmul_dtype != self.dtype:
            # Products in 16 bits read rows that follow each other faster.
            shape = (self.batch, self.heads, stop - start, last - first)
            composed = workspace.take("composed", *shape, dtype=self.matmul_dtype).permute(2, 0, 1, 3)
        for tile in self.tiles(block):
            queries, keys = slice(tile[0] - start, tile[1] - start), slice(tile[2] - first, tile[3] - first)
            a = scores[queries, ..., keys]
            if self.matmul_dtype != self.dtype:
                a = workspace.take("tile", *a.shape, dtype=self.dtype).copy_(a)
                if self.late_scaling != 1.0:
                    a *= self.late_scaling
            other = workspace.take("other tile", *a.shape, dtype=self.dtype)
            for index, stage in enumerate(self.stages):
                if stage is not None:
                    weights = Tile.cut(stage, self.matrices[index], slice(tile[0], tile[1]), slice(tile[2], tile[3]))
                    compose(stage.heads_in_groups(a), stage.heads_in_groups(other), weights, workspace, "maps")
                    a, other = other, a
                if index == 0:
                    self.softmax_(a, tile)
            _fill(composed[queries], a, keys)
        for mixed, head in zip(self.split_heads(output).unbind(2), self.rows(composed)):
            mixed[..., start:stop, :] = torch.bmm(head, self.value[:, first:last]).unflatten(0, (self.batch, -1))

    def softmax_(self, scores: Tensor, tile: Block) -> None:
        """The masked softmax of a tile's scores, (query, batch, heads, key), in place."""
        bias = self.visibility.bias(*tile)
        if bias is not None:
            scores += bias.permute(2, 0, 1, 3).to(self.dtype)
        regions = self.hidden_regions(tile)
        for columns, hidden in regions:
            scores[..., columns].masked_fill_(hidden, torch.finfo(self.dtype).min)
        torch.softmax(scores, dim=-1, out=scores)
        if not self.visibility.band_only:
            for _, hidden in regions:
                if hidden.shape[-1] == scores.shape[-1]:  # some query may see no key at all
                    scores.masked_fill_(hidden.all(-1, keepdim=True), 0.0)

    def hidden_regions(self, tile: Block) -> list[tuple[slice, Tensor]]:
        """(columns, what is hidden there: (query, batch or 1, 1, these columns)), for all columns that hide any."""
        start, stop, first, last = tile
        band_only = self.visibility.band_only
        shape = (stop - start, first - start, last - start)  # a band hides the same from all tiles of this
        if band_only and shape in self.band_regions:
            return self.band_regions[shape]
        regions = []
        for columns, hidden in self.visibility.hidden_regions(*tile, device=self.query.device):
            hidden = hidden[:, None, None] if hidden.dim() == 2 else hidden.permute(2, 0, 1, 3)
            if not band_only:
                # Only in some columns, as a rule: packed sequences hide little of the keys that a tile spans.
                somewhere = hidden.flatten(0, -2).any(0).nonzero()
                low, high = (int(somewhere[0]), int(somewhere[-1]) + 1) if len(somewhere) > 0 else (0, 0)
                columns, hidden = slice(columns.start + low, columns.start + high), hidden[..., low:high]
            regions.append((columns, hidden))
        if band_only:
            self.band_regions[shape] = regions
        return regions

    def backward_block(
        self,
        block: Block,
        output_gradient: Tensor,
        value_columns: Tensor,
        gradients: tuple[Tensor, Tensor, Tensor, list[Stage | None]],
        workspace: Workspace,
    ) -> None:
        start, stop, first, last = block
        query_gradient, key_gradient, value_gradient, stage_gradients = gradients
        scores = self.products_with_columns(self.query, self.key_columns, block, workspace, "scores")
        gradient = self.products_with_columns(output_gradient, value_columns, block, workspace, "gradient")
        composed = workspace.take("composed", *scores.shape, dtype=self.dtype)
        for tile in self.tiles(block):
            part = (slice(tile[0] - start, tile[1] - start), ..., slice(tile[2] - first, tile[3] - first))
            self.backward_tile(tile, scores[part], gradient[part], composed[part], stage_gradients, workspace)
            for whole in (gradient, composed):
                _fill(whole[part[0]], whole[part], part[2])
        keys = slice(first, last)
        composed_rows, gradient_rows = self.rows(composed), self.rows(gradient)
        for shared in range(self.heads // self.key_value_heads):
            of_output, of_query = (x[:, :, shared, start:stop] for x in (output_gradient, query_gradient))
            queries = self.query[:, :, shared, start:stop].flatten(0, 1)
            value_gradient[:, keys].baddbmm_(composed_rows[shared].mT, of_output.flatten(0, 1))
            key_gradient[:, keys].baddbmm_(gradient_rows[shared].mT, queries)
            product = torch.bmm(gradient_rows[shared], self.key[:, keys])
            torch.mul(product.unflatten(0, (self.batch, -1)), self.scaling, out=of_query)

    def backward_tile(
        self,
        tile: Block,
        scores: Tensor,
        gradient: Tensor,
        composed: Tensor,
        stage_gradients: list[Stage | None],
        workspace: Workspace,
    ) -> None:
        """From scores and the gradient of the composed weights to the composed weights and the scores' gradient."""
        queries, keys = slice(tile[0], tile[1]), slice(tile[2], tile[3])
        cuts = [
            None if stage is None else Tile.cut(stage, matrices, queries, keys)
            for stage, matrices in zip(self.stages, self.matrices)
        ]

        def apply(index: int, a: Tensor, out: Tensor, adjoint: bool, name: str) -> Tensor | None:
            """`out` = C(a) of one stage or its adjoint, and the maps of it."""
            stage, cut = self.stages[index], cuts[index]
            if stage is None or cut is None:
                out.copy_(a)
                return None
            cut = cut.adjoint() if adjoint else cut
            return compose(stage.heads_in_groups(a), stage.heads_in_groups(out), cut, workspace, name)

        def accumulate(index: int, a: Tensor, d: Tensor, maps: tuple[Tensor | None, Tensor | None]) -> None:
            stage, gradients = self.stages[index], stage_gradients[index]
            if stage is not None and gradients is not None:
                a, d = stage.heads_in_groups(a), stage.heads_in_groups(d)
                accumulate_weight_gradients(gradients, stage, a, d, maps, queries, keys, workspace)

        weights = workspace.take("weights", *scores.shape, dtype=self.dtype)
        pre_input_maps = apply(0, scores, weights, False, "pre input maps")
        self.softmax_(weights, tile)
        input_maps = apply(1, weights, composed, False, "input maps")
        other = workspace.take("other tile", *scores.shape, dtype=self.dtype)
        gradient_maps = apply(1, gradient, other, True, "gradient maps")
        accumulate(1, weights, gradient, (input_maps, gradient_maps))
        # Softmax: dX = P (dP - sum P dP); hidden keys have P = 0 and get none.
        other -= torch.mul(weights, other, out=gradient).sum(-1, keepdim=True)
        other *= weights
        gradient_maps = apply(0, other, gradient, True, "gradient maps")
        accumulate(0, scores, other, (pre_input_maps, gradient_maps))


def _fill(whole: Tensor, part: Tensor, keys: slice) -> None:
    """Put a tile's part of the keys, unless it is there already, among zeros for all others."""
    target = whole[..., keys]
    if part.data_ptr() != target.data_ptr():
        target.copy_(part)
    whole[..., : keys.start].zero_()
    whole[..., keys.stop :].zero_()
