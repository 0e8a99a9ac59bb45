"""Composed attention of many queries on GPUs: sections 3 and D of the paper as five kernels over a bounded workspace.

Every head's score has to be complete before any is composed, and every weight normalised before it is composed, so no
pass over the keys can do all. Instead a chunk of queries at a time has its scores in a workspace of 16 bits:

1. scores: a matrix product of queries and keys, only where a query sees a key;
2. pre-composition and the softmax's sums: rank maps over the heads, kept in float32, and each head's sums by block;
3. the sums of all blocks, as one logarithm a query and head;
4. weights: pre-composition again from the maps, the exponential, post-composition, in place of the scores;
5. output: a matrix product of weights and values.

Letters as in `tiles`: t query, s key, h head.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .arguments import LOG2_E, Composition, Mask
from .config import FORWARD, TileConfig, for_type, tuned
from .examples import random_operands
from .forward_kernels import launch_log_sums, launch_weights
from .plan import Problem, plan_chunks, round_up, workspace_dtype
from .products import launch_output, launch_products
from .workspace import workspace_bytes as default_workspace_bytes


# What `dcformer bench tune` tries, the default first.
KERNELS = {
    "forward": [
        TileConfig(*sizes)._asdict()
        for sizes in (
            (),
            (64, 64, 16, 4, 2, 4),
            (64, 64, 32, 4, 3, 8),
            (64, 128, 16, 4, 3, 8),
            (128, 64, 32, 8, 3, 4),
            (128, 64, 16, 8, 3, 4),
            (128, 128, 16, 8, 3, 8),
        )
    ]
}


def composed_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None,
    post: Composition | None,
    *,
    scaling: float,
    mask: Mask,
    workspace_bytes: int,
    config: TileConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Composed attention of float32, float16 or bfloat16 inputs.

    Args:
        query (`Tensor`): (batch, heads, query, channels), as key and value with any strides but a last one of 1.
        key (`Tensor`): (batch, key/value heads, key, channels).
        value (`Tensor`): (batch, key/value heads, key, value channels).
        pre, post (`Composition`, *optional*): Before and after the softmax, of the same groups.
        scaling (`float`): Factor of the scores.
        mask (`Mask`): Which key a query sees.
        workspace_bytes (`int`): Bound of what is needed beside inputs and outputs.
        config (`TileConfig`, *optional*): Tile sizes.

    Returns:
        output (batch, heads, query, value channels) in the query's type, zeros for a query that sees no key; and the
        logarithm to base 2 of the softmax's sum (batch, heads, query) in float32, infinite for such a query.

    Raises:
        ValueError: for other types, or if pre and post have different groups.
    """
    config = config or tuned(for_type(FORWARD, query.dtype), "forward", query)
    batch, heads, queries, _ = query.shape
    output = query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
    log_sums = query.new_empty(batch, heads, queries, dtype=torch.float32)
    problem = Problem.of(query, key, pre, post, mask, log_sums)
    dtype = workspace_dtype(query.dtype)
    has_static = problem.pre.static is not None or problem.post.static is not None
    chunks = plan_chunks(
        batch,
        queries,
        key.shape[2],
        mask,
        heads=heads,
        # Scores, maps, and the largest score and the sum of each block of keys.
        bytes_per_column=heads * dtype.itemsize * (1 + has_static)
        + 4 * problem.groups * problem.pre.maps
        + -(-8 * heads // config.block_keys),
        maps=problem.pre.maps,
        workspace_bytes=workspace_bytes,
        block_rows=config.block_rows,
        block_keys=config.block_keys,
    )
    for chunk in chunks:
        rows = round_up(chunk.stop - chunk.start, config.block_rows)
        number = chunk.batch.stop - chunk.batch.start
        scores = query.new_empty(number, heads, rows, chunk.columns, dtype=dtype)
        maps = query.new_empty(number, problem.groups, problem.pre.maps, rows, chunk.columns, dtype=torch.float32)
        # A static map reads all heads of a group after some of them would have been overwritten.
        weights = torch.empty_like(scores) if has_static else None
        launch_products(problem, chunk, config, query, key, scores, scaling * LOG2_E)
        launch_log_sums(problem, chunk, config, scores, maps, log_sums)
        launch_weights(problem, chunk, config, scores, weights, maps, log_sums)
        composed = weights if weights is not None and problem.post.is_empty else scores
        launch_output(problem, chunk, config, composed, value, output)
    return output, log_sums


def tuning_example(
    heads: int, channels: int, dtype: torch.dtype, device: torch.device
) -> Callable[[dict[str, dict[str, int]]], tuple[Tensor, ...]]:
    """A prefill of 2048 tokens, as [`tuning`] asks for it."""
    operands = random_operands(heads, channels, 2048, 2048, dtype, device)
    options = {"scaling": channels**-0.5, "mask": Mask(), "workspace_bytes": default_workspace_bytes()}

    def call(configs: dict[str, dict[str, int]]) -> tuple[Tensor, ...]:
        return composed_forward(*operands, **options, config=TileConfig(**configs.get("forward", FORWARD._asdict())))

    return call
