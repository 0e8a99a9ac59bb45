"""Composed attention for CPUs: chunks of queries, heads mixed in place, gradients in closed form.

A composition touches every score of every head a dozen times with almost no arithmetic, so it is bound by memory
traffic. Here one chunk of queries is scored for all heads into one buffer, and a few heads at a time are mixed in place
while their scores are in the cache. Nothing of the size of the score matrix outlives a chunk: the backward pass scores
the chunk again. Peak extra memory is about (heads + 2 rank) x batch x chunk x keys elements forwards and four times
that backwards.

Axis order inside this file: (heads, batch, query, key), heads first so that the scores of some heads are contiguous.

The gradients: let C be the linear map of equation 7 and A its input. With d the gradient of C(A), the gradient of A is
the same map with w1 and w2 swapped (and the static matrix transposed) applied to d, and those of the weights are sums
over queries or keys of A or d times a rank map: dw1 = sum A (sum_h d w2), dw2 = sum d (sum_h A w1), dgate = sum A d.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .dcmha_mask import Visibility


# One operation on so many elements keeps both the call overhead and the working set small (measured on 2 cores).
_ELEMENTS_PER_OPERATION = 2**20
_ELEMENTS_PER_CHUNK = 2**22


class _Side(NamedTuple):
    w1: Tensor | None  # (heads, rank, batch, length), compute dtype
    w2: Tensor | None  # (heads, rank, batch, length)
    gate: Tensor | None  # (heads, batch, length); one side's gate also holds the identity, the plain 1 of equation 7


class _Stage(NamedTuple):
    """One composition, pre or post."""

    query: _Side
    key: _Side
    static: Tensor | None  # (groups, heads per group, heads per group) [in, out]
    groups: int

    def adjoint(self) -> "_Stage":
        query, key = (_Side(side.w2, side.w1, side.gate) for side in (self.query, self.key))
        static = None if self.static is None else self.static.transpose(1, 2)
        return _Stage(query, key, static, self.groups)

    def chunk(self, start: int, stop: int, first: int, last: int) -> "_Stage":
        """The weights of one block, with a singleton axis where they do not vary: (..., query, 1) or (..., 1, key)."""
        query = _Side(*(None if w is None else w[..., start:stop, None] for w in self.query))
        key = _Side(*(None if w is None else w[..., None, first:last] for w in self.key))
        return self._replace(query=query, key=key)

    def group(self, group: int, heads: int) -> "_Stage":
        """The weights of one group's heads."""
        members = slice(group * heads, (group + 1) * heads)
        query, key = (_Side(*(None if w is None else w[members] for w in side)) for side in (self.query, self.key))
        static = None if self.static is None else self.static[group]
        return _Stage(query, key, static, 1)


def head_loop_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre,
    post,
    *,
    scaling: float,
    mask: Visibility,
    dropout: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """As every implementation in the table, without dropout; pre and post are `ComposeWeights` or None."""
    weights = [tensor for stage in (pre, post) for tensor in _flatten(stage)]
    groups = tuple(None if stage is None else stage.groups for stage in (pre, post))
    return _HeadLoop.apply(query, key, value, scaling, mask, chunk_size, groups, *weights)


def compute_dtype(query: Tensor, key: Tensor) -> torch.dtype:
    """float64 if either is, else float32: what scores, softmax and compositions are computed in."""
    return torch.float64 if torch.float64 in (query.dtype, key.dtype) else torch.float32


def _flatten(stage) -> list[Tensor | None]:
    """The tensors of a `ComposeWeights`: the query's factors, the key's, the static map."""
    if stage is None:
        return [None] * 3
    return [*(None if side is None else side.factors for side in (stage.query, stage.key)), stage.static]


def _stage(tensors: tuple, groups: int | None, dtype: torch.dtype) -> _Stage | None:
    """The three tensors of `_flatten` in this file's layout."""
    if groups is None:
        return None
    query, key = (_heads_first(factors, dtype) for factors in tensors[:2])
    if query.gate is not None:
        query = query._replace(gate=query.gate + 1)
    elif key.gate is not None:
        key = key._replace(gate=key.gate + 1)
    return _Stage(query, key, None if tensors[2] is None else tensors[2].to(dtype), groups)


def _heads_first(factors: Tensor | None, dtype: torch.dtype) -> _Side:
    """(batch, heads, length, channels) -> w1, w2 (heads, rank, batch, length) and the gate (heads, batch, length)."""
    if factors is None:
        return _Side(None, None, None)
    channels = factors.permute(1, 3, 0, 2).to(dtype).contiguous()  # (heads, channels, batch, length)
    rank = channels.shape[1] // 2
    w1, w2 = (channels[:, :rank], channels[:, rank : 2 * rank]) if rank > 0 else (None, None)
    return _Side(w1, w2, channels[:, -1] if channels.shape[1] % 2 == 1 else None)


def _positions_first(side: _Side) -> Tensor:
    """Undo `_heads_first`."""
    channels = [] if side.w1 is None else [side.w1, side.w2]
    if side.gate is not None:
        channels.append(side.gate.unsqueeze(1))
    return torch.cat(channels, dim=1).permute(2, 0, 3, 1)


class _Workspace:
    """Buffers that the chunks of one call take turns in: fresh memory costs as much as a pass over it."""

    def __init__(self, like: Tensor):
        self.like = like
        self.buffers = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """An uninitialised tensor of this shape, valid until the same name is taken again."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = self.like.new_empty(size)
        return self.buffers[name][:size].view(shape)


class _HeadLoop(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, query, key, value, scaling, visibility, chunk_size, groups, *weights):
        ctx.save_for_backward(query, key, value, *weights)
        ctx.scaling, ctx.visibility, ctx.chunk_size, ctx.groups = scaling, visibility, chunk_size, groups
        problem = _Problem(query, key, value, weights, scaling, visibility, chunk_size, groups)
        output = query.new_empty(*query.shape[:3], value.shape[3])
        for block in problem.blocks():
            scores = problem.scores(block)
            problem.composed_weights_(scores, block)
            first, last = block[2:]
            mixed = torch.matmul(scores, problem.value[:, :, first:last])  # (heads, batch, query, value channels)
            output[:, :, block[0] : block[1]] = mixed.transpose(0, 1)
        return output

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, output_gradient):
        if torch.is_grad_enabled():
            raise ValueError(
                "Second derivatives (create_graph=True) are not in the closed form of composed attention on CPUs; use "
                "attn_implementation='dcmha_chunked' in a model, or implementation='chunked'."
            )
        query, key, value, *weights = ctx.saved_tensors
        problem = _Problem(query, key, value, weights, ctx.scaling, ctx.visibility, ctx.chunk_size, ctx.groups)
        output_gradient = output_gradient.to(problem.dtype).transpose(0, 1)  # (heads, batch, query, value channels)
        query_gradient = torch.zeros_like(problem.query)
        key_gradient, value_gradient = torch.zeros_like(problem.key), torch.zeros_like(problem.value)
        stage_gradients = [_zero_gradients(stage) for stage in problem.stages]
        for block in problem.blocks():
            problem.backward_block(
                block, output_gradient, query_gradient, key_gradient, value_gradient, stage_gradients
            )
        query_gradient = query_gradient.transpose(0, 1).to(query.dtype)
        key_gradient = problem.merge_heads(key_gradient).to(key.dtype)
        value_gradient = problem.merge_heads(value_gradient).to(value.dtype)
        weight_gradients = []
        for index, gradients in enumerate(stage_gradients):
            tensors = weights[3 * index : 3 * index + 3]
            for factors, side in zip(tensors, (None, None) if gradients is None else (gradients.query, gradients.key)):
                weight_gradients.append(None if factors is None else _positions_first(side).to(factors.dtype))
            weight_gradients.append(None if tensors[2] is None else gradients.static.to(tensors[2].dtype))
        return query_gradient, key_gradient, value_gradient, None, None, None, None, *weight_gradients


class _Problem:
    """The inputs of one call in this file's layout, and the steps of one block of it."""

    def __init__(self, query, key, value, weights, scaling, visibility, chunk_size, groups):
        self.dtype = compute_dtype(query, key)
        self.shared_heads = query.shape[1] // key.shape[1]
        self.query = query.transpose(0, 1).to(self.dtype) * scaling  # (heads, batch, query, channels)
        self.key = self.split_heads(key)
        self.value = self.split_heads(value)
        self.scaling = scaling
        self.visibility = visibility
        self.workspace = _Workspace(self.query)
        self.stages = [_stage(weights[3 * i : 3 * i + 3], groups[i], self.dtype) for i in range(2)]
        heads, batch = self.query.shape[:2]
        keys = min(key.shape[2], visibility.sliding_window or key.shape[2])
        # A block spans its own queries beside the window: with a short window, shorter blocks waste less.
        longest = 96 if visibility.sliding_window is None else max(32, min(96, visibility.sliding_window // 2))
        self.chunk_size = chunk_size or max(16, min(longest, _ELEMENTS_PER_CHUNK // (heads * batch * keys)))

    def split_heads(self, states: Tensor) -> Tensor:
        """(batch, key/value heads, key, channels) -> (heads, batch, key, channels)."""
        states = states.transpose(0, 1).to(self.dtype)
        return states.repeat_interleave(self.shared_heads, dim=0) if self.shared_heads > 1 else states

    def merge_heads(self, gradient: Tensor) -> Tensor:
        """The gradient of `split_heads`."""
        return gradient.unflatten(0, (-1, self.shared_heads)).sum(1).transpose(0, 1)

    def blocks(self):
        """(start, stop) of the queries and (first, last) of the keys they can see, block by block."""
        queries = self.query.shape[2]
        for start in range(0, queries, self.chunk_size):
            stop = min(start + self.chunk_size, queries)
            yield start, stop, *self.visibility.key_range(start, stop)

    def scores(self, block) -> Tensor:
        """(heads, batch, query, key), scaled."""
        start, stop, first, last = block
        scores = self.workspace.take("scores", *self.query.shape[:2], stop - start, last - first)
        return torch.matmul(self.query[:, :, start:stop], self.key[:, :, first:last].transpose(-1, -2), out=scores)

    def composed_weights_(self, scores: Tensor, block) -> None:
        """Scores to composed weights, in place."""
        pre, post = self.stages
        _compose_(scores, pre, block, self.workspace, self.softmax_(block))
        _compose_(scores, post, block, self.workspace)

    def softmax_(self, block):
        """An in-place masked softmax for the scores of some heads of this block."""
        regions = self.visibility.hidden_regions(*block, device=self.query.device)
        regions = [(columns, hidden.transpose(0, 1) if hidden.dim() == 4 else hidden) for columns, hidden in regions]
        bias = self.visibility.bias(*block)
        bias = None if bias is None else bias.transpose(0, 1).to(self.dtype)
        every_query_sees_a_key = self.visibility.band_only
        lowest = torch.finfo(self.dtype).min

        def softmax_(scores: Tensor) -> None:
            if bias is not None:
                scores.add_(bias)
            for columns, hidden in regions:
                scores[..., columns].masked_fill_(hidden, lowest)
            torch.softmax(scores, dim=-1, out=scores)
            if not every_query_sees_a_key:
                for columns, hidden in regions:
                    scores[..., columns].masked_fill_(hidden, 0.0)

        return softmax_

    def backward_block(self, block, output_gradient, query_gradient, key_gradient, value_gradient, stage_gradients):
        start, stop, first, last = block
        pre, post = self.stages
        pre_gradients, post_gradients = stage_gradients
        rows, columns = (slice(None), slice(None), slice(start, stop)), (slice(None), slice(None), slice(first, last))

        take = self.workspace.take
        scores = self.scores(block)
        weights = take("weights", *scores.shape).copy_(scores)
        _compose_(weights, pre, block, self.workspace, self.softmax_(block))
        composed = take("composed", *scores.shape).copy_(weights)
        _compose_(composed, post, block, self.workspace)
        value_gradient[columns] += torch.matmul(composed.transpose(-1, -2), output_gradient[rows])

        gradient = take("composed", *scores.shape)
        torch.matmul(output_gradient[rows], self.value[columns].transpose(-1, -2), out=gradient)
        _accumulate_weight_gradients(weights, gradient, post, post_gradients, block, self.workspace)
        _compose_(gradient, None if post is None else post.adjoint(), block, self.workspace)
        # Softmax: dX = P (dP - sum P dP); hidden keys have P = 0 and get none.
        gradient -= (weights * gradient).sum(-1, keepdim=True)
        gradient *= weights

        _accumulate_weight_gradients(scores, gradient, pre, pre_gradients, block, self.workspace)
        _compose_(gradient, None if pre is None else pre.adjoint(), block, self.workspace)
        query_gradient[rows] = torch.matmul(gradient, self.key[columns]) * self.scaling
        key_gradient[columns] += torch.matmul(gradient.transpose(-1, -2), self.query[rows])


def _head_blocks(attention: Tensor) -> int:
    """How many heads to treat in one operation."""
    return max(1, min(attention.shape[0], _ELEMENTS_PER_OPERATION // attention[0].numel()))


def _rank_maps(attention: Tensor, stage: _Stage, workspace: _Workspace, name: str) -> list[Tensor | None]:
    """
    sum_h attention_h w1_h for the queries' w1 and for the keys', in one sweep over the heads: a head's scores come into
    the cache once for both.

    Returns:
        For either side (rank, batch, query, key), or None if it has no w1.
    """
    maps, sums = [], []
    for side_name, side in (("query", stage.query), ("key", stage.key)):
        side_maps = None
        if side.w1 is not None:
            side_maps = workspace.take(f"{name} {side_name}", side.w1.shape[1], *attention.shape[1:])
            sums.append((side_maps, side.w1.unbind(0)))
        maps.append(side_maps)
    for index, scores in enumerate(attention.unbind(0)):
        for side_maps, w1 in sums:
            if index == 0:
                torch.mul(scores, w1[0], out=side_maps)
            else:
                side_maps.addcmul_(scores, w1[index])
    return maps


def _compose_(attention: Tensor, stage: _Stage | None, block, workspace: _Workspace, finish=None) -> None:
    """
    Equation 7 in place on (heads, batch, query, key).

    Args:
        stage (`_Stage`, *optional*): None leaves the heads as they are.
        block: (start, stop, first, last) that the attention covers.
        finish (callable, *optional*): Applied to a few heads at a time as soon as they are composed.
    """
    if stage is None:
        if finish is not None:
            for heads in attention.split(_head_blocks(attention)):
                finish(heads)
        return
    per_group = attention.shape[0] // stage.groups
    stage = stage.chunk(*block)
    for group in range(stage.groups):
        members = attention[group * per_group : (group + 1) * per_group]
        step = _head_blocks(members)
        own = stage.group(group, per_group)
        mixed = None
        if own.static is not None:
            mixed = torch.matmul(own.static.t(), members.flatten(1)).view_as(members)
        spreads = []  # (rank map, what spreads it over these heads, those, ...)
        for side, maps in zip((own.query, own.key), _rank_maps(members, own, workspace, "input")):
            if maps is not None:
                spreads.extend((rank_map, w2.split(step)) for rank_map, w2 in zip(maps.unbind(0), side.w2.unbind(1)))
        gates = [side.gate.split(step) for side in (own.query, own.key) if side.gate is not None]
        for index, heads in enumerate(members.split(step)):
            if len(gates) == 2:
                gate = workspace.take("gate", *heads.shape)
                heads.mul_(torch.add(gates[0][index], gates[1][index], out=gate))
            elif gates:
                heads.mul_(gates[0][index])
            for rank_map, w2 in spreads:
                heads.addcmul_(rank_map, w2[index])
            if mixed is not None:
                heads.add_(mixed[index * step : (index + 1) * step])
            if finish is not None:
                finish(heads)


def _zero_gradients(stage: _Stage | None) -> _Stage | None:
    if stage is None:
        return None
    query, key = (
        _Side(*(None if w is None else torch.zeros_like(w) for w in side)) for side in (stage.query, stage.key)
    )
    return _Stage(query, key, None if stage.static is None else torch.zeros_like(stage.static), stage.groups)


def _accumulate_weight_gradients(
    attention: Tensor, gradient: Tensor, stage: _Stage | None, gradients: _Stage | None, block, workspace: _Workspace
) -> None:
    """Add to `gradients` what this block says of the weights of `stage`, whose input and output gradient are given."""
    if stage is None:
        return
    start, stop, first, last = block
    per_group = attention.shape[0] // stage.groups
    chunk, adjoint = stage.chunk(*block), stage.adjoint().chunk(*block)
    for group in range(stage.groups):
        members = slice(group * per_group, (group + 1) * per_group)
        a, d = attention[members], gradient[members]
        own, own_adjoint, own_gradients = (s.group(group, per_group) for s in (chunk, adjoint, gradients))
        if own.static is not None:
            own_gradients.static.add_(torch.matmul(a.flatten(1), d.flatten(1).t()))
        input_maps = _rank_maps(a, own, workspace, "input")
        gradient_maps = _rank_maps(d, own_adjoint, workspace, "gradient")
        # The queries' weights vary with the query alone, so the keys are summed out, and the other way round.
        sides = (
            (own_gradients.query, input_maps[0], gradient_maps[0], slice(start, stop), -1),
            (own_gradients.key, input_maps[1], gradient_maps[1], slice(first, last), -2),
        )
        step = _head_blocks(a)
        for low in range(0, per_group, step):
            part = slice(low, low + step)
            product = workspace.take("gate", *a[part].shape)
            for side, side_input, side_gradient, positions, summed_axis in sides:
                for rank in range(0 if side_input is None else side_input.shape[0]):
                    torch.mul(a[part], side_gradient[rank], out=product)
                    side.w1[part, rank, :, positions] += product.sum(summed_axis)
                    torch.mul(d[part], side_input[rank], out=product)
                    side.w2[part, rank, :, positions] += product.sum(summed_axis)
            if own.query.gate is not None or own.key.gate is not None:
                torch.mul(a[part], d[part], out=product)
            for side, _, _, positions, summed_axis in sides:
                if side.gate is not None:
                    side.gate[part, :, positions] += product.sum(summed_axis)
