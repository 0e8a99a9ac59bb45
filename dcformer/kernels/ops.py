"""Kernels as operators of torch, under `torch.ops.dcformer`: opaque to `torch.compile`, with gradients.

An operator of torch takes tensors and numbers side by side, which is how a [`Call`] lays them out. Those of Triton
stand here, and import it when the first of them runs; those of C++ are in `native`.
"""

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..dcmha import Visibility, plain_blocks
from .call import DIFFERENTIABLE, TENSORS, Call, channels_last, new_output


# What holds 2,048 queries and keys of 32 heads at once.
FORWARD_BYTES, BACKWARD_BYTES = 2**29, 3 * 2**29
_workspace_bytes: int | None = None


def set_workspace_bytes(number: int | None) -> None:
    """
    Set how much memory the Triton kernels may use beside inputs and outputs; see `docs/gpu.md`.

    Args:
        number (`int`, *optional*): Bytes, at least 1; one block of queries is computed at once whatever it takes. None:
            512 MB in a forward pass and 1.5 GB in a backward pass.
    """
    global _workspace_bytes
    if number is not None and not (isinstance(number, int) and number >= 1):
        raise ValueError(f"The workspace must have whole bytes, at least 1, got {number}; None is the default.")
    _workspace_bytes = number


_KINDS = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int: "SymInt", int | None: "SymInt?"}
_KINDS[float] = "float"
ARGUMENTS = ", ".join(f"{_KINDS[kind]} {name}" for name, kind in get_type_hints(Call).items())


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    from .forward import composed_forward

    call = Call(*arguments).with_channels_last()
    with torch.cuda.device_of(call.query):  # where Triton launches kernels
        return composed_forward(call, _workspace_bytes or FORWARD_BYTES)


def _backward(output_gradient: Tensor, *arguments: Any) -> list[Tensor]:
    from .backward import composed_backward

    call, log_sums = Call(*arguments[:-1]).with_channels_last(), arguments[-1]
    workspace_bytes = _workspace_bytes or BACKWARD_BYTES
    with torch.cuda.device_of(call.query):
        gradients = composed_backward(channels_last(output_gradient), call, log_sums, workspace_bytes)
    return [gradient for gradient in gradients if gradient is not None]


def _decode(*arguments: Any) -> Tensor:
    from .decode import composed_decode

    call, of_cache = Call(*arguments[:-3]).with_channels_last(), arguments[-3:]
    with torch.cuda.device_of(call.query):
        return composed_decode(call, *of_cache)


def register_op(
    name: str,
    schema: str,
    function: Callable[..., Any],
    flops: Callable[..., int],
    fake: Callable[..., Any] = new_output,
) -> Any:
    """
    Register `torch.ops.dcformer.NAME`; `fake` returns new tensors of the sizes, types and strides of its results, and
    `flops` what `FlopCounterMode` counts: products of matrices, as many as plain PyTorch would make.
    """
    made = torch.library.custom_op(f"dcformer::{name}", function, mutates_args=(), schema=schema)
    made.register_fake(fake)
    packet = getattr(torch.ops.dcformer, name)
    register_flop_formula(packet, get_raw=True)(lambda *arguments, out_val: flops(*arguments))
    return made


def attention_flops(*arguments: Any, is_backward: bool = False) -> int:
    """Of blocks of queries with the keys that causality and window leave; masks of tensors spare nothing here."""
    call, (_, table, _) = Call(*arguments[: len(Call._fields)]), (*arguments[len(Call._fields) :], *[None] * 3)[:3]
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
    forward_op = register_op(f"{name}_forward", schema, forward, attention_flops, forward_fake)
    schema = f"(Tensor output_gradient, {ARGUMENTS}, Tensor log_sums) -> Tensor[]"
    backward_op = register_op(f"{name}_backward", schema, backward, backward_flops, backward_fake)
    forward_op.register_autograd(gradients, setup_context=save_for_backward)
    backward_op.register_autograd(refuse_second_derivatives)
    return forward_op


forward_op = differentiable_op("composed", _forward, _backward, "Triton")
_OF_CACHE = "Tensor? key_lengths, Tensor? block_table, SymInt? ring_size"
decode_op = register_op("composed_decode", f"({ARGUMENTS}, {_OF_CACHE}) -> Tensor", _decode, attention_flops)
