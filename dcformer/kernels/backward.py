"""
Gradients of composed attention on GPUs, over a bounded workspace and without atomic additions.

Only the inputs and the logarithms of the softmax's sums are kept from the forward pass. A chunk of queries at a time:

1. scores, and gradients of composed weights, by matrix products;
2. by block of keys the softmax's delta, the sum over the keys of a weight times its gradient, for which all heads are
   needed (it is not the sum of output times gradient);
3. composed weights, gradients of scores, and what each block adds to the gradients of factors;
4. gradients of queries, keys and values by matrix products.

Weights are computed from the scores whenever they are needed, which is cheaper than storing them. Programs that each
own a part of a gradient add up what blocks contribute, so two runs give the same bits.

Letters: a input of a composition, d gradient of its output. The gradient of a is the transposed composition of d. The
gradient of w1 is a times the map of d, of w2 it is d times the map of a, and of a gate it is a d, each summed over the
keys for a query's factors and over the queries for a key's; of a static map it is the sum over both of a[in] d[out].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import LOG2_E, Call
from .forward import SCORE_TYPES
from .plan import COMPOSING, JOINING, Chunk, Mask, Sizes, Stage, plan_chunks
from .products import launch_key_products, launch_output, launch_products
from .tiles import (
    blocks_in_sight,
    columns_in_sight,
    compose,
    heads_of_program,
    is_seen_by_product,
    key_factors,
    load_sums,
    maps_over_heads,
    mask_bias,
    query_factors,
    rows_in_sight,
    static_map,
    store_zeros,
    tile_of_program,
    tile_places,
)


def composed_backward(
    output_gradient: Tensor, call: Call, log_sums: Tensor, workspace_bytes: int
) -> tuple[Tensor | None, ...]:
    """
    Gradients of the first nine tensors of a call, in their types and shapes, within so many bytes beside inputs and
    gradients; `log_sums` are those of [`composed_forward`]. What is not seen or sees nothing has gradients of zero.
    """
    query, key, value = call.query, call.key, call.value
    batch, heads, queries, _ = query.shape
    sizes, mask = Sizes.of(call), Mask.of(call)
    pre, post = Stage.both(call)
    query_gradient = query.new_empty(query.shape)
    # Summed in float32, whatever the type of the tensors.
    key_gradient = key.new_zeros(key.shape, dtype=torch.float32)
    value_gradient = value.new_zeros(value.shape, dtype=torch.float32)
    # Of the factors before and after the softmax, one after the other.
    query_sums = query.new_zeros(batch, queries, pre.query.number + post.query.number, heads, dtype=torch.float32)
    key_sums = query.new_zeros(batch, pre.key.number + post.key.number, heads, mask.keys, dtype=torch.float32)
    static_sums = query.new_zeros(2, sizes.GROUPS, sizes.HEADS, sizes.HEADS, dtype=torch.float32)
    bytes_per_column = _bytes_per_column(sizes, query, query_sums.shape[2], key_sums.shape[1])
    for chunk in plan_chunks(call, sizes, bytes_per_column, workspace_bytes):
        scores = query.new_empty(chunk.shape(heads), dtype=SCORE_TYPES[query.dtype])
        gradients = query.new_empty(chunk.shape(heads))
        weights = scores.view(query.dtype)
        launch_products(mask, chunk, sizes, query, key, scores, call.scaling * LOG2_E)
        launch_products(mask, chunk, sizes, output_gradient, value, gradients, 1.0)
        deltas = _deltas(mask, chunk, sizes, pre, post, scores, gradients, log_sums)
        columns, rows = chunk.columns // sizes.KEYS, chunk.rows // sizes.ROWS
        own_query_sums = query_sums.new_empty(chunk.number, columns, chunk.rows, *query_sums.shape[2:])
        own_key_sums = key_sums.new_empty(chunk.number, rows, *key_sums.shape[1:3], chunk.columns)
        has_static = pre.static is not None or post.static is not None
        static_shape = (chunk.number, rows, columns, sizes.GROUPS, 2, sizes.HEADS, sizes.HEADS)
        own_static_sums = static_sums.new_zeros(static_shape) if has_static else None
        own_sums = (own_query_sums, own_key_sums, own_static_sums)
        arguments = (mask, chunk, pre, post, scores, weights, gradients, log_sums, deltas, *own_sums, call.scaling)
        _gradients_kernel[chunk.grid(sizes)](*arguments, sizes.constants, **COMPOSING)
        launch_key_products(mask, chunk, sizes, weights, output_gradient, value_gradient)
        launch_output(mask, chunk, sizes, gradients, key, query_gradient)
        launch_key_products(mask, chunk, sizes, gradients, query, key_gradient)
        _join_over_keys(mask, chunk, sizes, own_query_sums, query_sums)
        _join_over_queries(mask, chunk, sizes, own_key_sums, key_sums)
        if own_static_sums is not None:
            static_sums += own_static_sums.sum((0, 1, 2)).transpose(0, 1)
    # The scores hold a factor of log2(e).
    query_sums[:, :, : pre.query.number] /= LOG2_E
    key_sums[:, : pre.key.number] /= LOG2_E
    static_sums[0] /= LOG2_E
    of_query = query_sums.permute(0, 3, 1, 2).split([pre.query.number, post.query.number], dim=3)
    of_key = key_sums.permute(0, 2, 3, 1).split([pre.key.number, post.key.number], dim=3)
    of_factors = (of_query[0], of_key[0], static_sums[0], of_query[1], of_key[1], static_sums[1])
    # Copies, since they share memory, which gradients may not.
    options = {"copy": True, "memory_format": torch.contiguous_format}
    found = [None if old is None else new.to(old.dtype, **options) for old, new in zip(call[3:9], of_factors)]
    return query_gradient, key_gradient.to(key.dtype), value_gradient.to(value.dtype), *found


def _bytes_per_column(sizes: Sizes, query: Tensor, query_factors: int, key_factors: int) -> int:
    """Of the workspace, for each query of a row of the batch."""
    heads = sizes.GROUPS * sizes.HEADS
    sums = -(-4 * heads * max(2, query_factors) // sizes.KEYS) + -(-4 * heads * key_factors // sizes.ROWS)
    static = -(-8 * heads * sizes.HEADS // (sizes.KEYS * sizes.ROWS))
    return 2 * heads * query.element_size() + sums + static


def _deltas(
    mask: Mask, chunk: Chunk, sizes: Sizes, pre: Stage, post: Stage, scores: Tensor, gradients: Tensor, log_sums: Tensor
) -> Tensor:
    """(batch, heads, row) sums over the keys of a weight times its gradient."""
    heads = scores.shape[1]
    partial = log_sums.new_empty(chunk.number, chunk.columns // sizes.KEYS, chunk.rows, 2, heads)
    _deltas_kernel[chunk.grid(sizes)](
        mask, chunk, pre, post, scores, gradients, log_sums, partial, sizes.constants, **COMPOSING
    )
    sums = log_sums.new_zeros(chunk.batch + chunk.number, chunk.start + chunk.rows, 2, heads)
    _join_over_keys(mask, chunk, sizes, partial, sums)
    deltas, totals = sums[chunk.batch :, chunk.start :].permute(2, 0, 3, 1)
    # Rounded logarithms leave sums of weights a little beside 1. Divided by them, the gradients of a query's scores add
    # up to 0; a query that sees no key has 0 here.
    return (deltas / totals.clamp(min=0.5)).contiguous()


def _join_over_keys(mask: Mask, chunk: Chunk, sizes: Sizes, partial: Tensor, sums: Tensor) -> None:
    """The sum of (batch, block of keys, row, ...) over those that were computed, for (batch, query, ...) of a chunk."""
    values = partial.shape[3:].numel()
    if values > 0:
        block = 512
        grid = (-(-sizes.ROWS * values // block), chunk.rows // sizes.ROWS, chunk.number)
        _join_over_keys_kernel[grid](
            mask, chunk, partial, sums, sums.stride(0), values, sizes.constants, block, **JOINING
        )


def _join_over_queries(mask: Mask, chunk: Chunk, sizes: Sizes, partial: Tensor, sums: Tensor) -> None:
    """(batch, ..., key) sums += (batch, block of queries, ..., column) over those that were computed."""
    values = partial.shape[2:4].numel()
    if values > 0:
        block = 64
        grid = (-(-mask.keys // block), -(-values // 32), chunk.number)
        _join_over_queries_kernel[grid](mask, chunk, partial, sums, values, sizes.constants, 32, block, **JOINING)


@triton.jit
def _deltas_kernel(mask, chunk, pre, post, scores, gradients, log_sums, partial, sizes):
    """By block of keys, the sums of a weight times its gradient and of the weights: (batch, block, row, 2, heads)."""
    HEADS: tl.constexpr = sizes.GROUPS * sizes.HEADS
    batch_row, b, group, h, is_head = heads_of_program(chunk, sizes)
    first_row, column, base, is_seen = tile_of_program(mask, b, chunk, sizes)
    if is_seen:
        s = base + column
        pre_key = key_factors(pre.key, b, h, is_head, s, s < mask.keys)
        post_key = key_factors(post.key, b, h, is_head, s, s < mask.keys)
        pre_static = static_map(pre, group, sizes.HEADS, sizes.HEADS_PADDED)
        post_static = static_map(post, group, sizes.HEADS, sizes.HEADS_PADDED)
        partial += (batch_row * tl.num_programs(0) + tl.program_id(0)) * chunk.rows * (2 * HEADS)
        for start in tl.range(0, sizes.ROWS, sizes.QUERIES, num_stages=2):
            row = first_row + start + tl.arange(0, sizes.QUERIES)
            t = chunk.start + row
            is_query = t < mask.queries
            places = tile_places(chunk, batch_row, h, row, column, sizes)
            a = tl.load(scores + places, mask=is_head[None, :, None], other=0).to(tl.float32)  # [QUERIES, HEADS, KEYS]
            d = tl.load(gradients + places, mask=is_head[None, :, None], other=0).to(tl.float32)
            pre_query = query_factors(pre.query, b, h, is_head, t, is_query)
            post_query = query_factors(post.query, b, h, is_head, t, is_query)
            maps = maps_over_heads(a, pre_query, pre_key, pre, False)
            x = compose(a, maps, pre_query, pre_key, pre_static, pre, False) + mask_bias(mask, b, t, s)
            e = tl.exp2(x - load_sums(log_sums, mask, b, h, is_head, t, sizes))
            maps = maps_over_heads(d, post_query, post_key, post, True)
            p = compose(d, maps, post_query, post_key, post_static, post, True)
            at = row[:, None] * (2 * HEADS) + h[None, :]
            tl.store(partial + at, tl.sum(e * p, 2), mask=is_head[None, :])
            tl.store(partial + at + HEADS, tl.sum(e, 2), mask=is_head[None, :])


@triton.jit
def _gradients_kernel(
    mask, chunk, pre, post, scores, weights, gradients, log_sums, delta, query_sums, key_sums, static_sums, scale, sizes
):
    """
    Composed weights in the place of scores, gradients of scores in that of those of composed weights, and what a tile
    adds to the gradients of factors: (batch, block of keys, row, factors, heads), (batch, block of queries, factors,
    heads, column) and (batch, block of queries, block of keys, group, before or after, in, out).
    """
    HEADS: tl.constexpr = sizes.GROUPS * sizes.HEADS
    PRE_QUERY: tl.constexpr = 2 * pre.query.RANK + pre.query.GATE
    POST_QUERY: tl.constexpr = 2 * post.query.RANK + post.query.GATE
    PRE_KEY: tl.constexpr = 2 * pre.key.RANK + pre.key.GATE
    POST_KEY: tl.constexpr = 2 * post.key.RANK + post.key.GATE
    batch_row, b, group, h, is_head = heads_of_program(chunk, sizes)
    first_row, column, base, is_seen = tile_of_program(mask, b, chunk, sizes)
    if is_seen:
        s = base + column
        pre_key = key_factors(pre.key, b, h, is_head, s, s < mask.keys)
        post_key = key_factors(post.key, b, h, is_head, s, s < mask.keys)
        pre_static = static_map(pre, group, sizes.HEADS, sizes.HEADS_PADDED)
        post_static = static_map(post, group, sizes.HEADS, sizes.HEADS_PADDED)
        pre_key_sums = zero_sums(PRE_KEY, sizes)
        post_key_sums = zero_sums(POST_KEY, sizes)
        pre_static_sums = tl.zeros([sizes.HEADS_PADDED, sizes.HEADS_PADDED], tl.float32)
        post_static_sums = tl.zeros([sizes.HEADS_PADDED, sizes.HEADS_PADDED], tl.float32)
        query_sums += (
            (batch_row * tl.num_programs(0) + tl.program_id(0)) * chunk.rows * (PRE_QUERY + POST_QUERY) * HEADS
        )
        for start in range(0, sizes.ROWS, sizes.QUERIES):
            row = first_row + start + tl.arange(0, sizes.QUERIES)
            t = chunk.start + row
            is_query = t < mask.queries
            places = tile_places(chunk, batch_row, h, row, column, sizes)
            a = tl.load(scores + places, mask=is_head[None, :, None], other=0).to(tl.float32)  # [QUERIES, HEADS, KEYS]
            d = tl.load(gradients + places, mask=is_head[None, :, None], other=0).to(tl.float32)
            pre_query = query_factors(pre.query, b, h, is_head, t, is_query)
            post_query = query_factors(post.query, b, h, is_head, t, is_query)
            a_maps = maps_over_heads(a, pre_query, pre_key, pre, False)
            x = compose(a, a_maps, pre_query, pre_key, pre_static, pre, False) + mask_bias(mask, b, t, s)
            e = tl.exp2(x - load_sums(log_sums, mask, b, h, is_head, t, sizes))
            e_maps = maps_over_heads(e, post_query, post_key, post, False)
            y = compose(e, e_maps, post_query, post_key, post_static, post, False)
            tl.store(weights + places, y.to(weights.dtype.element_ty), mask=is_head[None, :, None])
            d_maps = maps_over_heads(d, post_query, post_key, post, True)
            p = compose(d, d_maps, post_query, post_key, post_static, post, True)
            at = query_sums + row[:, None] * ((PRE_QUERY + POST_QUERY) * HEADS) + h[None, :]
            store_query_sums(at + PRE_QUERY * HEADS, e, d, e_maps, d_maps, is_head, post, HEADS)
            post_key_sums = add_key_sums(post_key_sums, e, d, e_maps, d_maps, post)
            delta_places = (batch_row * HEADS + h)[None, :] * chunk.rows + row[:, None]
            p = e * (p - tl.load(delta + delta_places, mask=is_head[None, :], other=0.0)[:, :, None])
            p_maps = maps_over_heads(p, pre_query, pre_key, pre, True)
            z = compose(p, p_maps, pre_query, pre_key, pre_static, pre, True) * scale
            tl.store(gradients + places, z.to(gradients.dtype.element_ty), mask=is_head[None, :, None])
            store_query_sums(at, a, p, a_maps, p_maps, is_head, pre, HEADS)
            pre_key_sums = add_key_sums(pre_key_sums, a, p, a_maps, p_maps, pre)
            if static_sums is not None:
                pre_static_sums += tl.sum(tl.dot(a, tl.permute(p, [0, 2, 1]), input_precision="ieee"), 0)
                post_static_sums += tl.sum(tl.dot(e, tl.permute(d, [0, 2, 1]), input_precision="ieee"), 0)
        key_sums += (batch_row * tl.num_programs(1) + tl.program_id(1)) * (PRE_KEY + POST_KEY) * HEADS * chunk.columns
        at = key_sums + h.to(tl.int64)[:, None] * chunk.columns + column[None, :]
        for i in tl.static_range(PRE_KEY):
            tl.store(at + i * HEADS * chunk.columns, pre_key_sums[i], mask=is_head[:, None])
        for i in tl.static_range(POST_KEY):
            tl.store(at + (PRE_KEY + i) * HEADS * chunk.columns, post_key_sums[i], mask=is_head[:, None])
        if static_sums is not None:
            block = (batch_row * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
            member = tl.arange(0, sizes.HEADS_PADDED)
            places = (block * sizes.GROUPS + group) * (2 * sizes.HEADS * sizes.HEADS)
            places += member[:, None] * sizes.HEADS + member[None, :]
            inside = (member < sizes.HEADS)[:, None] & (member < sizes.HEADS)[None, :]
            tl.store(static_sums + places, pre_static_sums, mask=inside)
            tl.store(static_sums + places + sizes.HEADS * sizes.HEADS, post_static_sums, mask=inside)
    elif is_seen_by_product(mask, b, chunk, first_row, tl.program_id(0) * sizes.KEYS, sizes):
        store_zeros(weights, chunk, batch_row, h, is_head, first_row, column, sizes)
        store_zeros(gradients, chunk, batch_row, h, is_head, first_row, column, sizes)


@triton.jit
def zero_sums(FACTORS: tl.constexpr, sizes):
    sums = ()
    for _ in tl.static_range(FACTORS):
        sums = sums + (tl.zeros([sizes.HEADS_PADDED, sizes.KEYS], tl.float32),)
    return sums


@triton.jit
def store_query_sums(at, a, d, a_maps, d_maps, is_head, stage, HEADS: tl.constexpr):
    """What a tile adds to the gradients of the queries' factors, in their order; `at` is [QUERIES, HEADS]."""
    RANK: tl.constexpr = stage.query.RANK
    for r in tl.static_range(RANK):
        tl.store(at + r * HEADS, tl.sum(a * d_maps[r], 2), mask=is_head[None, :])
        tl.store(at + (RANK + r) * HEADS, tl.sum(d * a_maps[r], 2), mask=is_head[None, :])
    if stage.query.GATE:
        tl.store(at + 2 * RANK * HEADS, tl.sum(a * d, 2), mask=is_head[None, :])


@triton.jit
def add_key_sums(sums, a, d, a_maps, d_maps, stage):
    """The gradients of the keys' factors with what one tile adds, [HEADS, KEYS] each."""
    QUERY_RANK: tl.constexpr = stage.query.RANK
    RANK: tl.constexpr = stage.key.RANK
    added = ()
    for r in tl.static_range(RANK):
        added = added + (sums[r] + tl.sum(a * d_maps[QUERY_RANK + r], 0),)
    for r in tl.static_range(RANK):
        added = added + (sums[RANK + r] + tl.sum(d * a_maps[QUERY_RANK + r], 0),)
    if stage.key.GATE:
        added = added + (sums[2 * RANK] + tl.sum(a * d, 0),)
    return added


@triton.jit
def _join_over_keys_kernel(mask, chunk, partial, sums, batch_stride, VALUES: tl.constexpr, sizes, BLOCK: tl.constexpr):
    """Program (part of a block of rows, block of rows, row of the batch)."""
    batch_row = tl.program_id(2).to(tl.int64)
    b = batch_row + chunk.batch
    first_row = tl.program_id(1) * sizes.ROWS
    first, last, _base = columns_in_sight(mask, b, chunk.start, first_row, sizes.ROWS, sizes.PRODUCT_ROWS)
    begin, end = blocks_in_sight(first, last, sizes.KEYS)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = first_row + element // VALUES
    inside = (element < sizes.ROWS * VALUES) & (chunk.start + row < mask.queries)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(begin, end):
        at = ((batch_row * (chunk.columns // sizes.KEYS) + block) * chunk.rows + first_row) * VALUES + element
        total += tl.load(partial + at, mask=inside, other=0.0)
    places = b * batch_stride + (chunk.start + first_row).to(tl.int64) * VALUES + element
    tl.store(sums + places, total, mask=inside)


@triton.jit
def _join_over_queries_kernel(
    mask, chunk, partial, sums, VALUES: tl.constexpr, sizes, BLOCK: tl.constexpr, KEYS: tl.constexpr
):
    """Program (block of keys, block of values, row of the batch)."""
    batch_row = tl.program_id(2).to(tl.int64)
    b = batch_row + chunk.batch
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    begin, end = rows_in_sight(mask, b, chunk, s, sizes.ROWS)
    is_value = (value < VALUES)[:, None]
    total = tl.zeros([BLOCK, KEYS], tl.float32)
    for start in range(begin, end, sizes.ROWS):
        first, last, base = columns_in_sight(mask, b, chunk.start, start, sizes.ROWS, sizes.PRODUCT_ROWS)
        # A block of keys may lie across tiles of columns, each of which was computed if any query sees it.
        column = s - base
        tile = column // sizes.KEYS
        first_tile, last_tile = blocks_in_sight(first, last, sizes.KEYS)
        is_there = (
            (column >= 0) & (column < chunk.columns) & (tile >= first_tile) & (tile < last_tile) & (s < mask.keys)
        )
        at = (batch_row * (chunk.rows // sizes.ROWS) + start // sizes.ROWS) * VALUES
        at = (at + value)[:, None] * chunk.columns + column[None, :]
        total += tl.load(partial + at, mask=is_value & is_there[None, :], other=0.0)
    if begin < end:
        places = (b * VALUES + value)[:, None] * mask.keys + s[None, :]
        inside = is_value & (s < mask.keys)[None, :]
        tl.store(sums + places, tl.load(sums + places, mask=inside, other=0.0) + total, mask=inside)
