"""Kernels as operators of torch, under `torch.ops.dcformer`: opaque to `torch.compile`, with gradients.

An operator of torch takes tensors and numbers side by side, which is how a [`Call`] lays them out. The backends
register theirs with what stands here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..plain_dcformer import plain_blocks
from ..visibility_dcformer import Visibility
from .call import DIFFERENTIABLE, TENSORS, Call, new_output


# The fields of a `Call`.
ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? pre_query, Tensor? pre_key, Tensor? pre_static, "
    "Tensor? post_query, Tensor? post_key, Tensor? post_static, Tensor? padding, Tensor? sequence_ids, Tensor? dense, "
    "SymInt groups, bool is_causal, SymInt? sliding_window, SymInt query_offset, float scaling"
)


def register_op(
    name: str,
    function: Callable[..., Any],
    flops: Callable[..., int],
    fake: Callable[..., Any] = new_output,
    schema: str | None = None,
) -> Any:
    """
    Register `torch.ops.dcformer.NAME`, with the schema of the function's annotations if there is none; `fake` returns
    results without values, and `flops` what `FlopCounterMode` counts: the products of matrices of plain PyTorch.
    """
    made = torch.library.custom_op(f"dcformer::{name}", function, mutates_args=(), schema=schema)
    made.register_fake(fake)
    packet = getattr(torch.ops.dcformer, name)
    register_flop_formula(packet, get_raw=True)(lambda *arguments, out_val: flops(*arguments))
    return made


def attention_flops(*arguments: Any, is_backward: bool = False) -> int:
    """Operations on the keys that causality and window leave to blocks of queries; masks of tensors spare nothing."""
    call, (_, table) = Call(*arguments[: len(Call._fields)]), (*arguments[len(Call._fields) :], None, None)[:2]
    batch, heads, queries, channels = call.query.shape
    keys = call.key.shape[2] * (1 if table is None else table.shape[1])
    band: dict[str, Any] = {name: getattr(call, name) for name in ("is_causal", "sliding_window", "query_offset")}
    blocks = plain_blocks(Visibility(queries, keys, **band), batch * heads)
    pairs = batch * heads * sum((stop - start) * (last - first) for start, stop, first, last in blocks)
    values, number = call.value.shape[3], channels
    group = heads // call.groups
    for side in (call.pre_query, call.pre_key, call.post_query, call.post_key):
        rank = 0 if side is None else side.shape[1] * side.shape[3] // heads // 2
        number += rank * (group > 1) + rank * (rank > 1)  # sums of one term are no products of matrices
    number += sum(group * (group > 1) for each in (call.pre_static, call.post_static) if each is not None)
    if is_backward:  # of several blocks, weights are computed again
        number *= 3 if len(blocks) > 1 else 2
        values *= 2
    return 2 * pairs * (number + values)


def differentiable_op(
    name: str, forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., list[Tensor]], form: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    """
    Register `torch.ops.dcformer.NAME_forward`, which returns output and `log_sums`, (batch, heads, query) in float32,
    and `NAME_backward`, which returns the gradients of the differentiable tensors that are not None, in their types.
    """

    def forward_fake(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return new_output(query, *others), query.new_empty(query.shape[:3], dtype=torch.float32)

    def backward_fake(output_gradient: Tensor, *arguments: Any) -> list[Tensor]:
        return [gradient for gradient in Call(*arguments[:-1]).new_gradients() if gradient is not None]

    def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:TENSORS], output[1])
        ctx.numbers = inputs[TENSORS:]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, output_gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if output_gradient is None:
            return (None,) * len(Call._fields)
        *tensors, log_sums = ctx.saved_tensors
        results = iter(backward_op(output_gradient, *tensors, *ctx.numbers, log_sums))
        of_tensors = [None if tensor is None else next(results) for tensor in tensors[:DIFFERENTIABLE]]
        return *of_tensors, *[None] * (len(Call._fields) - DIFFERENTIABLE)

    def refuse_second_derivatives(ctx: Any, *_: Any) -> None:
        raise ValueError(
            f"Second derivatives (create_graph=True) are not in the {form} form of composed attention; use "
            "attn_implementation='dcmha_plain' in a model, or implementation='plain'."
        )

    def backward_flops(output_gradient: Tensor, *arguments: Any) -> int:
        return attention_flops(*arguments[:-1], is_backward=True)

    schema = f"({ARGUMENTS}) -> (Tensor, Tensor)"
    forward_op = register_op(f"{name}_forward", forward, attention_flops, forward_fake, schema)
    schema = f"(Tensor output_gradient, {ARGUMENTS}, Tensor log_sums) -> Tensor[]"
    backward_op = register_op(f"{name}_backward", backward, backward_flops, backward_fake, schema)
    forward_op.register_autograd(gradients, setup_context=save_for_backward)
    backward_op.register_autograd(refuse_second_derivatives)
    return forward_op
