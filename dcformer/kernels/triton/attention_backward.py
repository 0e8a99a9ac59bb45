"""
Gradients of composed attention on GPUs, over a bounded workspace and without atomic additions.

Only the inputs and the logarithms of the softmax's sums are kept from the forward pass. A chunk of queries at a time:

1. `scores_fwd_kernel`: scores, and gradients of composed weights, by matrix products;
2. `weights_bwd_kernel`: weights, composed weights, and by part of the keys the softmax's delta, the sum over the keys
   of a weight times its gradient, for which all heads are needed (it is not the sum of output times gradient); where
   these need too many registers, `Sizes.IS_SPLIT`, three kernels do it;
3. `query_factors_bwd_kernel`: gradients of the queries' factors and of the static map follow from that of a query's
   matrix: one product of the inputs of its composition with the gradients of the outputs, over the keys;
4. `compose_bwd_kernel`: gradients of a composition's inputs, and what each query adds to the gradients of the keys'
   factors, which `key_factors_bwd_kernel` sums up; 3 and 4 run for the composition after the softmax, then before it;
5. `output_fwd_kernel` and `attention_bwd_kernel_dkv`: gradients of queries, keys and values by matrix products.

Each part of a gradient has one program, which adds up what blocks contribute, so two runs give the same bits.

The letters are those of `blocks`. The gradient of a is the transposed composition of d. The gradient of a key's w1 is a
times the sums of d, of w2 it is d times the sums of a, and of the gate it is a d, each summed over the queries. For
16-bit inputs d is in float16, times a power of 2 that keeps it in that type's range.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import DIFFERENTIABLE, LOG2_E, Call, cdiv
from . import attention_forward as forward
from . import blocks
from .tuning import PART, QUERY_FACTORS, REDUCING, Sizes, product_tile
from .workspace import Mask, Stage, States, Work, plan_chunks


def composed_backward(
    output_gradient: Tensor, call: Call, log_sums: Tensor, workspace_bytes: int
) -> tuple[Tensor | None, ...]:
    """
    Gradients of the first nine tensors of a call, within so many bytes beside, with the `log_sums` of
    [`composed_forward`]; zeros for what is not seen or sees nothing.
    """
    query, key, value = call.query, call.key, call.value
    sizes, mask, (pre, post) = Sizes.of(call, is_forward=False), Mask.of(call), Stage.both(call)
    chunks = list(plan_chunks(call, sizes, _bytes_per_column(sizes, query, pre, post), workspace_bytes))
    # What one chunk does not complete is summed in float32: keys, values and keys' factors, unless each chunk has all
    # queries of its rows of the batch.
    results = call.new_gradients("static" if chunks[-1].start == 0 else ("static", "key", "value"))
    norms = _largest_norms(output_gradient, value)
    deltas, totals = torch.empty_like(log_sums), torch.empty_like(log_sums)
    for chunk in chunks:
        work = Work(mask, chunk, sizes)
        scores = work.new_scores(query, forward.SCORE_TYPES[query.dtype])
        gradients, weights = torch.empty_like(scores), torch.empty_like(scores)
        composed, score_gradients = work.new_scores(query, query.dtype), gradients.view(query.dtype)
        forward.launch_scores(work, query, key, scores, call.scaling * LOG2_E)
        forward.launch_scores(work, output_gradient, value, gradients, 1.0, norms)
        matrices, part_deltas = forward.launch_matrices(work, pre, post, scores), work.new_parts(scores)
        part_totals = work.new_parts(scores) if scores.dtype == torch.float32 else None
        arguments = {"post": post, "matrices": matrices, "gradients": gradients, "weights": weights}
        arguments |= {"part_deltas": part_deltas, "part_totals": part_totals, **work.compose_options()}
        if sizes.IS_SPLIT:
            forward.launch_weights(work, pre, post, scores, matrices, log_sums, weights)
            deltas_bwd_kernel[work.compose_grid()](*work.arguments(), **arguments)
            forward.launch_compose(work, post, weights, matrices, composed)
        else:
            arguments |= {"pre": pre, "scores": scores, "log_sums": log_sums}
            weights_bwd_kernel[work.compose_grid()](*work.arguments(), **arguments, composed=composed)
        forward.launch_reduce_parts(work, None, part_deltas, deltas)
        if part_totals is not None:
            # Logarithms of large scores are rounded so far that weights do not add up to 1. Divided by what they add up
            # to, the gradients of a query's scores add up to 0; a query that sees no key has 0 here.
            forward.launch_reduce_parts(work, None, part_totals, totals)
            deltas /= totals.clamp(min=0.5)
        of_post = {"inputs": weights, "gradients": gradients, "norms": norms}
        _launch_compose_bwd(work, post, matrices, deltas, gradients, 1.0, results[6:], **of_post)
        of_pre = {"inputs": scores, "gradients": gradients, "norms": norms}
        _launch_compose_bwd(work, pre, matrices, None, score_gradients, call.scaling, results[3:6], **of_pre)
        _launch_dkv(work, composed, output_gradient, results[2])
        forward.launch_output(work, score_gradients, key, results[0])
        _launch_dkv(work, score_gradients, query, results[1])
        # Their memory is that of the next chunk.
        del scores, gradients, weights, composed, score_gradients, matrices, part_deltas, part_totals, arguments
        del of_post, of_pre
    tensors: Any = call[:DIFFERENTIABLE]
    return tuple(None if result is None else result.to(tensor.dtype) for result, tensor in zip(results, tensors))


def _bytes_per_column(sizes: Sizes, query: Tensor, *stages: Stage) -> int:
    """Bytes of workspace for one column of one query."""
    heads, number = query.shape[1], max(stage.key.NUMBER.value for stage in stages)
    # Deltas, in float32 with totals, and sums for the keys' factors; and four of what the scores are.
    sums = cdiv(2 * query.element_size() * heads, PART.value) + cdiv(4 * heads * number, sizes.COMPOSE_M)
    return 4 * heads * query.element_size() + sums


def _largest_norms(*tensors: Tensor) -> Tensor | None:
    """The largest norms of the vectors of two 16-bit tensors (batch, heads, length, channels), (2,) in float32."""
    if tensors[0].dtype == torch.float32:
        return None
    largest = tensors[0].new_empty(2, dtype=torch.float32)
    for tensor, result in zip(tensors, largest.unbind()):
        torch.amax(torch.linalg.vector_norm(tensor, dim=3, dtype=torch.float32), (0, 1, 2), out=result)
    return largest


def _launch_compose_bwd(
    work: Work, stage: Stage, matrices: Tensor, deltas: Any, into: Any, scale: float, results: Any, **arguments: Any
) -> None:
    """
    Compute gradients of a composition's inputs times `scale`, or with `deltas`, after the softmax, of the softmax's
    inputs; and `results`: those of the factors of queries, of keys and of the static map, where there are any.
    """
    (mask, chunk, sizes), (dq_factors, dk_factors, dstatic) = work, results
    rows, numbers = min(chunk.rows, mask.queries - chunk.start), stage.key.NUMBER.value * sizes.ALL_HEADS
    arguments |= {"stage": stage}
    factor_scale = 1 / LOG2_E if deltas is None else 1.0  # scores hold a factor log2(e), and so do products with them
    if dq_factors is not None or dstatic is not None:
        shape = matrices[:, :, :, 0].shape
        dmatrices: Any = None if dstatic is None else matrices.new_empty(shape, dtype=torch.float32)
        # Grid: a query, 1, a group of heads in a row of the batch.
        grid = chunk.rows, 1, chunk.number * sizes.GROUPS
        outputs = {"dq_factors": dq_factors, "dmatrices": dmatrices, "scale": factor_scale}
        # Before `compose_bwd_kernel`, which after the softmax overwrites the gradients that it has read.
        query_factors_bwd_kernel[grid](*work.arguments(), **arguments, **outputs, **QUERY_FACTORS)
        if dstatic is not None:
            dstatic += dmatrices[:, :rows, :, : sizes.HEADS, : sizes.HEADS].sum((0, 1))
    sums = None
    if dk_factors is not None:
        shape = chunk.number, chunk.rows // sizes.COMPOSE_M, chunk.columns, numbers
        sums = matrices.new_empty(shape, dtype=torch.float32)
    launches = [(into, 0 if dk_factors is None else 3)]
    if sizes.IS_SPLIT and dk_factors is not None:
        launches = [(None, 1), (None, 2), (into, 0)]  # `into` last, for the same reason
    # Without maxnreg ptxas limits some forms of this kernel to 32 registers, and they spill.
    arguments |= {"matrices": matrices, "scale": scale, "deltas": deltas, "sums": sums, "maxnreg": 255}
    for each, of_keys in launches:
        options = {"into": each, "SUMS": of_keys, **work.compose_options()}
        compose_bwd_kernel[work.compose_grid()](*work.arguments(), **arguments, **options)
    if dk_factors is not None:
        block_n, block = 16, 64
        # Grid: a block of keys, a block of factors x heads, a row of the batch.
        grid = cdiv(mask.keys, block_n), cdiv(numbers, block), chunk.number
        tensors = {"stage": stage, "sums": sums, "dfactors": dk_factors, "scale": factor_scale}
        options = {"BLOCK": block, "BLOCK_N": block_n, "IS_FIRST": chunk.start == 0, **REDUCING}
        key_factors_bwd_kernel[grid](*work.arguments(), **tensors, **options)


def _launch_dkv(work: Work, weights: Tensor, q: Tensor, gradients: Any) -> None:
    """Add weights^T . q over a chunk's queries and a key/value head's heads; a batch row's first chunk sets them."""
    mask, chunk, sizes = work
    block, step = product_tile(q)
    # Grid: a block of channels, a block of keys, a key/value head of a row of the batch.
    grid = cdiv(q.shape[3], block), cdiv(mask.keys, sizes.BLOCK_N), chunk.number * gradients.shape[1]
    options = {"BLOCK_D": block, "BLOCK_K": step, "IS_FIRST": chunk.start == 0, **sizes.product_options(q)}
    q, gradients = States.of(q), States.of(gradients, q.shape[1])
    attention_bwd_kernel_dkv[grid](*work.arguments(), weights=weights, q=q, gradients=gradients, **options)


@triton.jit
def _store_deltas(e, d, matrix, chunk, sizes, tile, row, post, factors, part_deltas, part_totals):
    """Store by part of the keys the sums of weights e times their gradients, from those d of composed weights."""
    de, _sums = blocks.compose_heads(d, blocks.to_accumulator(d, tile.eye), matrix, factors, tile.eye, post, True)
    blocks.store_parts(part_deltas, tl.sum(blocks.in_parts(e * de, sizes), 1), chunk, tile, row, sizes)
    if part_totals is not None:
        blocks.store_parts(part_totals, tl.sum(blocks.in_parts(e, sizes), 1), chunk, tile, row, sizes)


@triton.jit
def weights_bwd_kernel(
    mask, chunk, sizes, pre, post, scores, log_sums, matrices, gradients, weights, composed, part_deltas, part_totals
):
    """Weights from scores, composed weights, and deltas by part of the keys, with totals of the weights if wanted."""
    DTYPE: tl.constexpr = scores.dtype.element_ty
    tile = blocks.program_tile(mask, chunk, sizes, DTYPE)
    if tile.is_seen:
        pre_factors = blocks.load_key_factors(pre, tile, DTYPE)
        factors = blocks.load_key_factors(post, tile, DTYPE)
        for row in range(tile.first_row, tile.end_row):
            a = blocks.load_tile(scores, chunk, tile, row)
            d = blocks.load_tile(gradients, chunk, tile, row)
            e = blocks.softmax_weights(a, mask, chunk, sizes, tile, row, matrices, log_sums, pre, pre_factors)
            blocks.store_tile(weights, e, chunk, tile, row)
            matrix = tl.load(blocks.matrix_pointers(matrices, chunk, tile.group, row, 1, sizes))
            _store_deltas(e, d, matrix, chunk, sizes, tile, row, post, factors, part_deltas, part_totals)
            y, _sums = blocks.compose_heads(e.to(DTYPE), e, matrix, factors, tile.eye, post, False)
            blocks.store_tile(composed, y, chunk, tile, row)
    else:
        blocks.store_zeros(composed, mask, chunk, sizes, tile)


@triton.jit
def deltas_bwd_kernel(mask, chunk, sizes, post, matrices, gradients, weights, part_deltas, part_totals):
    """Deltas by part of the keys and, if wanted, totals of the weights."""
    tile = blocks.program_tile(mask, chunk, sizes, weights.dtype.element_ty)
    if tile.is_seen:
        factors = blocks.load_key_factors(post, tile, weights.dtype.element_ty)
        for row in range(tile.first_row, tile.end_row):
            e = blocks.to_accumulator(blocks.load_tile(weights, chunk, tile, row), tile.eye)
            d = blocks.load_tile(gradients, chunk, tile, row)
            matrix = tl.load(blocks.matrix_pointers(matrices, chunk, tile.group, row, 1, sizes))
            _store_deltas(e, d, matrix, chunk, sizes, tile, row, post, factors, part_deltas, part_totals)


@triton.jit
def compose_bwd_kernel(
    mask, chunk, sizes, stage, matrices, inputs, gradients, norms, scale, deltas, into, sums, SUMS: tl.constexpr
):
    """
    Gradients of a composition's inputs (after the softmax, of the softmax's inputs), if they go `into` a tensor; and
    sums over queries for those of the keys' factors, (batch, block of queries, column, factors, heads): of w1 and the
    gate (SUMS 1), of w2 (2), or of all (3).
    """
    SUM_W1: tl.constexpr = SUMS % 2
    SUM_W2: tl.constexpr = SUMS // 2
    RANK: tl.constexpr = stage.key.RANK
    DTYPE: tl.constexpr = inputs.dtype.element_ty
    tile = blocks.program_tile(mask, chunk, sizes, DTYPE)
    if tile.is_seen:
        factors = blocks.load_key_factors(stage, tile, DTYPE)
        inverse = 1.0
        if norms is not None:
            inverse = 1.0 / blocks.load_gradient_scale(norms)
            scale *= inverse
        dw1, dw2, dgate = _zero_sums(RANK, sizes), _zero_sums(RANK, sizes), _zero_sums(stage.key.GATE, sizes)
        for row in range(tile.first_row, tile.end_row):
            a = blocks.load_tile(inputs, chunk, tile, row)
            d = blocks.load_tile(gradients, chunk, tile, row)
            matrix = tl.load(blocks.matrix_pointers(matrices, chunk, tile.group, row, deltas is not None, sizes))
            if deltas is not None:
                delta = blocks.load_row(deltas, mask, tile.group, chunk.start + row, sizes)
            d32 = blocks.to_accumulator(d, tile.eye)
            da, d_sums = blocks.compose_heads(d, d32, matrix, factors, tile.eye, stage, True)
            a32 = blocks.to_accumulator(a, tile.eye)
            if into is not None:
                da = a32 * (da - delta[None, :]) if deltas is not None else da * scale
                blocks.store_tile(into, da, chunk, tile, row)
            if SUM_W1:
                dw1 = _add_products(dw1, d_sums, a32)
            if SUM_W2:
                _y, a_sums = blocks.compose_heads(a, a32, matrix, factors, tile.eye, stage, False)
                dw2 = _add_products(dw2, a_sums, d32)
            if SUM_W1:  # last: three registers fewer on compute capability 10.0
                dgate = _add_products(dgate, (a32,), d32)
        block = tile.group.batch_row * tl.num_programs(1) + tl.program_id(1)
        offsets = (block * chunk.columns + tile.column)[:, None] * (stage.key.NUMBER * sizes.ALL_HEADS)
        offsets += tile.group.offs_h[None, :]
        if SUM_W1:
            _store_sums(sums + offsets, dw1, 0, inverse, tile, sizes)
            _store_sums(sums + offsets, dgate, 2 * RANK, inverse, tile, sizes)
        if SUM_W2:
            _store_sums(sums + offsets, dw2, RANK, inverse, tile, sizes)
    elif (deltas is None) & (into is not None):  # only gradients of scores are read by products of matrices
        blocks.store_zeros(into, mask, chunk, sizes, tile)


@triton.jit
def _zero_sums(NUMBER: tl.constexpr, sizes):
    """A tuple of NUMBER tiles of zeros."""
    sums = ()
    for _ in tl.static_range(NUMBER):
        sums = sums + (tl.zeros([sizes.COMPOSE_N, sizes.HEADS_PADDED], tl.float32),)
    return sums


@triton.jit
def _add_products(sums, factors, tile):
    """Sums, each with its factor times a tile added."""
    added = ()
    for i in tl.static_range(len(sums)):
        added = added + (sums[i] + factors[i] * tile,)
    return added


@triton.jit
def _store_sums(pointers, sums, FIRST: tl.constexpr, scale, tile, sizes):
    """Store sums for the gradients of the keys' factors from the number FIRST on."""
    for i in tl.static_range(len(sums)):
        tl.store(pointers + (FIRST + i) * sizes.ALL_HEADS, sums[i] * scale, mask=tile.group.is_head[None, :])


@triton.jit
def query_factors_bwd_kernel(mask, chunk, sizes, stage, inputs, gradients, norms, dq_factors, dmatrices, scale):
    """The gradient of one query's matrix [heads in, heads out], and from it those of its factors."""
    RANK: tl.constexpr = stage.query.RANK
    group, row = blocks.program_group(chunk, sizes), tl.program_id(0)
    t = chunk.start + row
    if t < mask.queries:
        begin, end, _ = blocks.visible_blocks(mask, group.b, chunk.start, row, 1, sizes.COMPOSE_N, sizes)
        offsets = blocks.head_offsets(chunk, group, sizes)[:, None] + tl.arange(0, sizes.COMPOSE_N)[None, :]
        offsets += row * chunk.columns
        total = tl.zeros([sizes.HEADS_PADDED, sizes.HEADS_PADDED], tl.float32)
        for block in range(begin, end):
            tile = offsets + block * sizes.COMPOSE_N
            a = tl.load(inputs + tile, mask=group.is_head[:, None], other=0.0)  # [HEADS, COMPOSE_N]
            d = tl.load(gradients + tile, mask=group.is_head[:, None], other=0.0)
            total = tl.dot(a, tl.trans(d), total, input_precision="ieee")
        if norms is not None:
            scale /= blocks.load_gradient_scale(norms)
        total *= scale
        if dq_factors is not None:
            pointers = dq_factors + ((group.b * sizes.ALL_HEADS + group.offs_h) * mask.queries + t) * stage.query.NUMBER
            DTYPE: tl.constexpr = dq_factors.dtype.element_ty
            factors = blocks.load_factors(stage.query, group.b, group.offs_h, t, group.is_head, tl.float32)
            for r in tl.static_range(RANK):
                dw1, dw2 = tl.sum(total * factors[RANK + r][None, :], 1), tl.sum(total * factors[r][:, None], 0)
                tl.store(pointers + r, dw1.to(DTYPE), mask=group.is_head)
                tl.store(pointers + (RANK + r), dw2.to(DTYPE), mask=group.is_head)
            if stage.query.GATE:
                dgate = tl.sum(total * blocks.identity(sizes.HEADS_PADDED, tl.float32), 0)
                tl.store(pointers + 2 * RANK, dgate.to(DTYPE), mask=group.is_head)
        if dmatrices is not None:
            tl.store(blocks.matrix_pointers(dmatrices, chunk, group, row, 0, sizes, 1), total)


@triton.jit
def key_factors_bwd_kernel(
    mask, chunk, sizes, stage, sums, dfactors, scale, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, IS_FIRST: tl.constexpr
):
    """Add `scale` times the sums of computed blocks of queries; the first chunk of a batch row sets the gradients."""
    NUMBER: tl.constexpr = stage.key.NUMBER
    batch_row = tl.program_id(2).to(tl.int64)
    b = batch_row + chunk.batch
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # factors x heads
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = blocks.visible_rows(mask, b, chunk, offs_n, sizes.COMPOSE_M)
    is_number = (number < NUMBER * sizes.ALL_HEADS)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK], tl.float32)
    for start in range(begin, end, sizes.COMPOSE_M):
        first, last, base = blocks.visible_blocks(mask, b, chunk.start, start, sizes.COMPOSE_M, sizes.COMPOSE_N, sizes)
        column = offs_n - base
        is_computed = (column // sizes.COMPOSE_N >= first) & (column // sizes.COMPOSE_N < last)
        block = batch_row * (chunk.rows // sizes.COMPOSE_M) + start // sizes.COMPOSE_M
        offsets = (block * chunk.columns + column)[:, None] * (NUMBER * sizes.ALL_HEADS) + number[None, :]
        total += tl.load(sums + offsets, mask=is_number & is_computed[:, None], other=0.0)
    offsets = (b * sizes.ALL_HEADS + number % sizes.ALL_HEADS)[None, :] * mask.keys + offs_n[:, None]
    offsets = offsets * NUMBER + (number // sizes.ALL_HEADS)[None, :]
    is_inside = is_number & (offs_n < mask.keys)[:, None]
    total *= scale
    if not IS_FIRST:
        total += tl.load(dfactors + offsets, mask=is_inside, other=0.0)
    tl.store(dfactors + offsets, total.to(dfactors.dtype.element_ty), mask=is_inside)


@triton.jit
def attention_bwd_kernel_dkv(
    mask, chunk, sizes, weights, q, gradients, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, IS_FIRST: tl.constexpr
):
    """Gradients of values, or in another launch of keys: weights^T . q, summed over the heads that share them."""
    KV_GROUPS: tl.constexpr = gradients.KV_GROUPS
    pid_n, pid_bh = tl.program_id(1), tl.program_id(2)
    batch_row = (pid_bh // (sizes.ALL_HEADS // KV_GROUPS)).to(tl.int64)
    b = batch_row + chunk.batch
    first_head = (pid_bh % (sizes.ALL_HEADS // KV_GROUPS)).to(tl.int64) * KV_GROUPS
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_n = pid_n * sizes.BLOCK_N + tl.arange(0, sizes.BLOCK_N)
    begin, end = blocks.visible_rows(mask, b, chunk, offs_n, BLOCK_K)
    total = tl.zeros([sizes.BLOCK_N, BLOCK_D], tl.float32)
    for h in range(first_head, first_head + KV_GROUPS):
        head_weights = weights + (batch_row * sizes.ALL_HEADS + h) * chunk.rows * chunk.columns
        for start in range(begin, end, BLOCK_K):
            row = start + tl.arange(0, BLOCK_K)
            offs_m = chunk.start + row
            stop = mask.queries
            if mask.first_keys is not None:
                # A document that comes back has others in between, which may see none of the block of keys.
                block_row = start // sizes.BLOCK_M * sizes.BLOCK_M
                first, last, base = blocks.visible_blocks(
                    mask, b, chunk.start, block_row, sizes.BLOCK_M, sizes.BLOCK_N, sizes
                )
                block_n = pid_n - base // sizes.BLOCK_N
                stop = tl.where((block_n >= first) & (block_n < last), stop, 0)
            column = offs_n - blocks.first_key(mask, chunk.start, start, sizes)
            pointers = head_weights + (row[:, None] * chunk.columns + column[None, :])
            w = tl.load(pointers, mask=(offs_m < stop)[:, None], other=0.0)
            pointers, is_inside = blocks.state_tile(q, b, h, offs_m, offs_d, stop)
            block = tl.load(pointers, mask=is_inside, other=0.0)
            total = tl.dot(tl.trans(w), block, total, input_precision="ieee")
    pointers, is_inside = blocks.state_tile(gradients, b, first_head, offs_n, offs_d, mask.keys)
    if not IS_FIRST:
        total += tl.load(pointers, mask=is_inside, other=0.0)
    tl.store(pointers, total.to(gradients.pointer.dtype.element_ty), mask=is_inside)
