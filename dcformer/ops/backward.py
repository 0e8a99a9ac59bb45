"""Gradients of composed attention on GPUs, over a bounded workspace and without atomic additions.

Only the inputs and the logarithms of the softmax's sums are kept from the forward pass. A chunk of queries at a time:

1. scores, and gradients of composed weights, by matrix products;
2. weights; maps over the heads of scores, weights and gradients; and by block of keys the softmax's delta, the sum over
   the keys of a weight times its gradient, for which all heads are needed (it is not the sum of output times gradient);
3. composed weights, gradients of composed scores, and what each block adds to the gradients of factors after the
   softmax;
4. gradients of scores, and likewise of the factors before the softmax;
5. gradients of queries, keys and values by matrix products.

What blocks add is summed by programs that each own a part of a gradient, so two runs give the same bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import LOG2_E, Composition, Mask
from .backward_kernels import launch_score_gradients, launch_softmax_gradients
from .backward_maps import launch_weights_and_maps
from .backward_sums import launch_join_keys, launch_join_queries, launch_static_gradients
from .config import BACKWARD, TileConfig, for_type, tuned
from .examples import random_operands
from .forward import composed_forward
from .plan import Chunk, Problem, Stage, plan_chunks, round_up, workspace_dtype
from .products import launch_key_products, launch_output, launch_products
from .workspace import workspace_bytes as default_workspace_bytes


# What `dcformer bench tune` tries, the default first.
KERNELS = {
    "backward": [
        TileConfig(*sizes)._asdict()
        for sizes in (
            BACKWARD,
            (64, 64, 16, 4, 2, 4),
            (64, 64, 16, 4, 3, 8),
            (64, 32, 32, 4, 3, 4),
            (128, 64, 32, 8, 3, 8),
        )
    ]
}


def composed_backward(
    output_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None,
    post: Composition | None,
    log_sums: Tensor,
    *,
    scaling: float,
    mask: Mask,
    workspace_bytes: int,
    config: TileConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Composition | None, Composition | None]:
    """
    Gradients of [`composed_forward`]'s inputs.

    Args:
        output_gradient (`Tensor`): (batch, heads, query, value channels), in the output's type.
        query, key, value, pre, post, scaling, mask: As they were given to the forward pass.
        log_sums (`Tensor`): What the forward pass returned beside its output.
        workspace_bytes (`int`): Bound of what is needed beside inputs and gradients; those of keys, values and keys'
            factors are summed in float32, whatever their type.
        config (`TileConfig`, *optional*): Tile sizes.

    Returns:
        Gradients of query, key, value, pre and post, in the types and shapes of these; None for what is None. Queries
        that see no key and keys that no query sees have gradients of zero.

    Raises:
        ValueError: for other types, or if pre and post have different groups.
    """
    config = config or tuned(for_type(BACKWARD, query.dtype), "backward", query)
    batch, heads, queries, _ = query.shape
    if output_gradient.stride(3) != 1:
        output_gradient = output_gradient.contiguous()
    problem = Problem.of(query, key, pre, post, mask, log_sums)
    score_type = workspace_dtype(query.dtype)
    query_gradient = query.new_empty(query.shape)
    key_gradient = key.new_zeros(key.shape, dtype=torch.float32)
    value_gradient = value.new_zeros(value.shape, dtype=torch.float32)
    pre_gradients, post_gradients = _Gradients.of(pre), _Gradients.of(post)
    sums = log_sums.new_empty(2, *log_sums.shape)  # of weights times gradients, which become the deltas, and of weights
    chunks = plan_chunks(
        batch,
        queries,
        key.shape[2],
        mask,
        heads=heads,
        bytes_per_column=_bytes_per_column(problem, config, score_type, query.dtype),
        maps=max(problem.pre.maps, problem.post.maps),
        workspace_bytes=workspace_bytes,
        block_rows=config.block_rows,
        block_keys=config.block_keys,
    )
    for chunk in chunks:
        workspace = _Workspace.of(problem, chunk, config, query, score_type)
        launch_products(problem, chunk, config, query, key, workspace.scores, scaling * LOG2_E)
        launch_products(problem, chunk, config, output_gradient, value, workspace.gradients, 1.0)
        _softmax_gradients(problem, chunk, config, workspace, log_sums, sums, post_gradients, scaling)
        launch_key_products(problem, chunk, config, workspace.composed, output_gradient, value_gradient)
        _score_gradients(problem, chunk, config, workspace, pre_gradients, scaling)
        launch_output(problem, chunk, config, workspace.score_gradients, key, query_gradient)
        launch_key_products(problem, chunk, config, workspace.score_gradients, query, key_gradient)
        del workspace
    return (
        query_gradient,
        key_gradient.to(key.dtype),
        value_gradient.to(value.dtype),
        None if pre is None else pre_gradients.finished(pre),
        None if post is None else post_gradients.finished(post),
    )


class _Gradients(NamedTuple):
    """
    Gradients of the factors of one composition while they are summed.

    Args:
        query (`Tensor`, *optional*): In its final type, since every query belongs to one chunk.
        key, static (`Tensor`, *optional*): Sums in float32 over the chunks.
    """

    query: Tensor | None
    key: Tensor | None
    static: Tensor | None

    @classmethod
    def of(cls, composition: Composition | None) -> "_Gradients":
        if composition is None:
            return cls(None, None, None)
        query, key, static = composition.query, composition.key, composition.static
        return cls(
            None if query is None else query.new_empty(query.shape),
            None if key is None else key.new_zeros(key.shape, dtype=torch.float32),
            None if static is None else static.new_zeros(static.shape, dtype=torch.float32),
        )

    def finished(self, composition: Composition) -> Composition:
        """In the types of the composition's tensors."""
        key = None if self.key is None or composition.key is None else self.key.to(composition.key.dtype)
        static = None if self.static is None or composition.static is None else self.static.to(composition.static.dtype)
        return Composition(self.query, key, static, composition.groups)


class _Workspace(NamedTuple):
    """
    What a chunk of queries needs.

    Scores and weights are in float16 for 16-bit inputs, whose mantissa is what counts for them. Gradients are in the
    type of the inputs: bfloat16 for its range, since their scale is the loss's, and float16 where the caller scales the
    loss for its range anyway.

    Args:
        scores, weights, gradients (`Tensor`): (batch, heads, row, column): scores times log2(e), softmax's weights,
            and gradients of composed weights.
        composed, exponent_gradients, score_gradients (`Tensor`): Composed weights, gradients of composed scores and of
            scores. Each lies in the place of what it is computed from, unless a static map is between the two, which
            reads all heads of a group where the others read one.
        score_maps, gradient_maps, weight_maps, exponent_maps (`Tensor`): (batch, groups, map, row, column), float32.
        query_sums (`Tensor`): Flat, for what each block of keys adds to the sums over keys.
        key_sums (`Tensor`): Flat, for what each block of queries adds to the sums over queries.
    """

    scores: Tensor
    weights: Tensor
    gradients: Tensor
    composed: Tensor
    exponent_gradients: Tensor
    score_gradients: Tensor
    score_maps: Tensor
    gradient_maps: Tensor
    weight_maps: Tensor
    exponent_maps: Tensor
    query_sums: Tensor
    key_sums: Tensor

    @classmethod
    def of(
        cls, problem: Problem, chunk: Chunk, config: TileConfig, query: Tensor, score_type: torch.dtype
    ) -> "_Workspace":
        number = chunk.batch.stop - chunk.batch.start
        rows = round_up(chunk.stop - chunk.start, config.block_rows)
        shape = (number, problem.heads, rows, chunk.columns)
        scores, weights = query.new_empty(shape, dtype=score_type), query.new_empty(shape, dtype=score_type)
        gradients = query.new_empty(shape)
        composed, exponent_gradients = weights, gradients
        if problem.post.static is not None:
            composed, exponent_gradients = torch.empty_like(weights), torch.empty_like(gradients)
        score_gradients = exponent_gradients
        if problem.pre.static is not None:
            # Behind a static map after the softmax, the gradients that it has read are needed no more.
            score_gradients = torch.empty_like(gradients) if problem.post.static is None else gradients

        def maps(stage: Stage) -> Tensor:
            size = (number, problem.groups, stage.maps, rows, chunk.columns)
            return query.new_empty(size, dtype=torch.float32)

        query_channels, key_channels = _channels(problem)
        elements = number * problem.heads * rows * chunk.columns
        return cls(
            scores,
            weights,
            gradients,
            composed,
            exponent_gradients,
            score_gradients,
            maps(problem.pre),
            maps(problem.post),
            maps(problem.post),
            maps(problem.pre),
            query.new_empty(elements // config.block_keys * query_channels, dtype=torch.float32),
            query.new_empty(elements // config.compose_rows * key_channels, dtype=torch.float32),
        )

    def partial(self, stage: Stage, config: TileConfig) -> tuple[Tensor, Tensor]:
        """
        Where blocks put what they add to the gradients of a composition's factors: (batch, block of keys, channels,
        heads, row) and (batch, block of queries, channels, heads, column).
        """
        number, heads, rows, columns = self.scores.shape
        query_channels, key_channels = _channels_of(stage)
        query_shape = (number, columns // config.block_keys, query_channels, heads, rows)
        key_shape = (number, rows // config.compose_rows, key_channels, heads, columns)
        return _first(self.query_sums, query_shape), _first(self.key_sums, key_shape)


def _first(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    return memory[: torch.Size(shape).numel()].view(shape)


def _channels_of(stage: Stage) -> tuple[int, int]:
    """Channels of the query's and of the key's factors."""
    return 2 * stage.query_rank + stage.query_gate, 2 * stage.key_rank + stage.key_gate


def _channels(problem: Problem) -> tuple[int, int]:
    """The most channels of either composition, on the query's side (at least the softmax's two sums) and the key's."""
    before, after = _channels_of(problem.pre), _channels_of(problem.post)
    return max(2, before[0], after[0]), max(before[1], after[1])


def _bytes_per_column(problem: Problem, config: TileConfig, score_type: torch.dtype, gradient_type: torch.dtype) -> int:
    """Of the workspace, for each query of a row of the batch."""
    static_after, static_before = problem.post.static is not None, problem.pre.static is not None
    score_arrays = 2 + static_after
    gradient_arrays = 1 + (static_after or static_before)
    maps = 2 * (problem.pre.maps + problem.post.maps)
    query_channels, key_channels = _channels(problem)
    sums = -(-4 * problem.heads * query_channels // config.block_keys)
    sums += -(-4 * problem.heads * key_channels // config.compose_rows)
    # One number for each pair of heads and 16 queries, over at least `block_keys` columns.
    if static_after or static_before:
        sums += -(-4 * problem.heads**2 // (16 * config.block_keys))
    arrays = score_arrays * score_type.itemsize + gradient_arrays * gradient_type.itemsize
    return problem.heads * arrays + 4 * problem.groups * maps + sums


def _softmax_gradients(
    problem: Problem,
    chunk: Chunk,
    config: TileConfig,
    workspace: _Workspace,
    log_sums: Tensor,
    sums: Tensor,
    gradients: _Gradients,
    scaling: float,
) -> None:
    """Composed weights, gradients of composed scores, and those of the factors after the softmax."""
    number, heads, rows, columns = workspace.scores.shape
    partial_sums = _first(workspace.query_sums, (number, columns // config.block_keys, 2, heads, rows))
    launch_weights_and_maps(
        problem,
        chunk,
        config,
        workspace.scores,
        workspace.gradients,
        workspace.weights,
        workspace.score_maps,
        workspace.gradient_maps,
        workspace.weight_maps,
        log_sums,
        partial_sums,
    )
    launch_join_queries(problem, chunk, config, partial_sums, sums.permute(1, 2, 3, 0), 1.0)
    # Rounded logarithms leave sums of weights a little beside 1. Divided by them, the gradients of a query's scores add
    # up to 0; a query that sees no key has 0 here.
    deltas, totals = sums[:, chunk.batch, :, chunk.start : chunk.stop]
    deltas /= totals.clamp(min=0.5)
    query_sums, key_sums = workspace.partial(problem.post, config)
    if gradients.static is not None:
        added = launch_static_gradients(problem, chunk, config, workspace.weights, workspace.gradients)
        gradients.static.add_(added)
    launch_softmax_gradients(
        problem,
        chunk,
        config,
        workspace.gradients,
        workspace.weights,
        workspace.composed,
        workspace.exponent_gradients,
        workspace.gradient_maps,
        workspace.weight_maps,
        workspace.exponent_maps,
        sums[0],
        query_sums,
        key_sums,
        # Without a composition before the softmax, these are the gradients of the scores already.
        scaling if problem.pre.is_empty else 1.0,
    )
    _join(problem, chunk, config, query_sums, key_sums, gradients, 1.0)


def _score_gradients(
    problem: Problem,
    chunk: Chunk,
    config: TileConfig,
    workspace: _Workspace,
    gradients: _Gradients,
    scaling: float,
) -> None:
    """Gradients of scores, and those of the factors before the softmax."""
    if problem.pre.is_empty:
        return
    # The scores hold a factor of log2(e).
    unit = 1.0 / LOG2_E
    query_sums, key_sums = workspace.partial(problem.pre, config)
    if gradients.static is not None:
        added = launch_static_gradients(problem, chunk, config, workspace.scores, workspace.exponent_gradients)
        gradients.static.add_(added, alpha=unit)
    launch_score_gradients(
        problem,
        chunk,
        config,
        workspace.scores,
        workspace.exponent_gradients,
        workspace.score_gradients,
        workspace.score_maps,
        workspace.exponent_maps,
        query_sums,
        key_sums,
        scaling,
    )
    _join(problem, chunk, config, query_sums, key_sums, gradients, unit)


def _join(
    problem: Problem,
    chunk: Chunk,
    config: TileConfig,
    query_sums: Tensor,
    key_sums: Tensor,
    gradients: _Gradients,
    factor: float,
) -> None:
    if gradients.query is not None:
        launch_join_queries(problem, chunk, config, query_sums, gradients.query, factor)
    if gradients.key is not None:
        launch_join_keys(problem, chunk, config, key_sums, gradients.key, factor)


def tuning_example(
    heads: int, channels: int, dtype: torch.dtype, device: torch.device
) -> Callable[[dict[str, dict[str, int]]], list[Tensor]]:
    """The gradients of 2048 tokens, as [`tuning`] asks for them."""
    operands = random_operands(heads, channels, 2048, 2048, dtype, device)
    options: dict[str, Any] = {"scaling": channels**-0.5, "mask": Mask(), "workspace_bytes": default_workspace_bytes()}
    output, log_sums = composed_forward(*operands, **options)

    def call(configs: dict[str, dict[str, int]]) -> list[Tensor]:
        config = TileConfig(**configs.get("backward", BACKWARD._asdict()))
        *states, pre, post = composed_backward(output, *operands, log_sums, **options, config=config)
        return [*states, pre.query, pre.key, post.query, post.key]

    return call
