"""Kernels as operators of torch, under `torch.ops.dcformer`: opaque to `torch.compile`, with gradients.

An operator of torch takes tensors and numbers side by side, which is how a [`Call`] lays them out. Those of Triton
stand here, and import it when the first of them runs; those of C++ are in `native`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .call import DIFFERENTIABLE, Call, channels_last


_workspace_bytes: int | None = None


def set_workspace_bytes(number: int | None) -> None:
    """
    Set how much memory the Triton kernels may use beside inputs and outputs; see `docs/gpu.md`.

    Args:
        number (`int`, *optional*): Bytes, at least 1; one block of queries is computed at once whatever it takes. None:
            256 MB in a forward pass and 1 GB in a backward pass.
    """
    global _workspace_bytes
    if number is not None and number < 1:
        raise ValueError(f"The workspace must have at least 1 byte, got {number}; use None for the default.")
    _workspace_bytes = number


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? pre_query, Tensor? pre_key, Tensor? pre_static, "
    "Tensor? post_query, Tensor? post_key, Tensor? post_static, Tensor? padding, Tensor? sequence_ids, "
    "Tensor? dense, SymInt groups, bool is_causal, SymInt? sliding_window, SymInt query_offset, float scaling"
)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    from .forward import composed_forward

    call = Call(*arguments).with_channels_last()
    with _on_device_of(call.query):
        output, log_sums = composed_forward(call, _workspace_bytes or 2**28)
    return _heads_inside(output), log_sums


def _backward(output_gradient: Tensor, *arguments: Any) -> list[Tensor]:
    from .backward import composed_backward

    call, log_sums = Call(*arguments[:-1]).with_channels_last(), arguments[-1]
    with _on_device_of(call.query):
        gradients = composed_backward(channels_last(output_gradient), call, log_sums, _workspace_bytes or 2**30)
    return [gradient for gradient in gradients if gradient is not None]


def _decode(*arguments: Any) -> Tensor:
    from .decode import composed_decode

    *flat, key_lengths, block_table, ring_size = arguments
    call = Call(*flat)
    call = call._replace(query=channels_last(call.query))
    if block_table is None:
        call = call.with_channels_last()
    with _on_device_of(call.query):
        return _heads_inside(composed_decode(call, key_lengths, block_table, ring_size))


def _output_fake(*arguments: Any) -> Tensor:
    """(batch, heads, query, value channels), in memory (batch, query, heads, channels), as models go on with it."""
    query, _, value = arguments[:3]
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)


def inference_op(name: str, function: Callable[..., Tensor], more_arguments: str = "") -> Callable[..., Tensor]:
    """Register `torch.ops.dcformer.NAME`, a function of a [`Call`]'s fields, and of more, to the output."""
    made = torch.library.custom_op(
        f"dcformer::{name}", function, mutates_args=(), schema=f"({_ARGUMENTS}{more_arguments}) -> Tensor"
    )
    made.register_fake(_output_fake)
    return made


def differentiable_op(
    name: str, forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., list[Tensor]], form: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    """
    Register `torch.ops.dcformer.NAME_forward`, which returns output and `log_sums`, (batch, heads, query) in float32,
    and `NAME_backward`, which returns the gradients of the differentiable tensors that are not None, in their types.
    """
    forward_op = torch.library.custom_op(
        f"dcformer::{name}_forward", forward, mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
    )
    backward_op = torch.library.custom_op(
        f"dcformer::{name}_backward",
        backward,
        mutates_args=(),
        schema=f"(Tensor output_gradient, {_ARGUMENTS}, Tensor log_sums) -> Tensor[]",
    )

    def forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
        query = arguments[0]
        return _output_fake(*arguments), query.new_empty(query.shape[:3], dtype=torch.float32)

    def backward_fake(output_gradient: Tensor, *arguments: Any) -> list[Tensor]:
        return [tensor.new_empty(tensor.shape) for tensor in arguments[: len(DIFFERENTIABLE)] if tensor is not None]

    def gradients(ctx: Any, output_gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, log_sums = ctx.saved_tensors
        found = iter(backward_op(output_gradient, *tensors, *ctx.numbers, log_sums))
        made = [None if tensor is None else next(found) for tensor in tensors[: len(DIFFERENTIABLE)]]
        return *made, *[None] * (len(Call._fields) - len(made))

    def refuse_second_derivatives(ctx: Any, *_: Any) -> None:
        raise ValueError(
            f"Second derivatives (create_graph=True) are not in the {form} form of composed attention; use "
            "attn_implementation='dcmha_plain' in a model, or implementation='plain'."
        )

    forward_op.register_fake(forward_fake)
    backward_op.register_fake(backward_fake)
    forward_op.register_autograd(gradients, setup_context=_save_for_backward)
    backward_op.register_autograd(refuse_second_derivatives)
    return forward_op


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    number_of_tensors = Call._fields.index("groups")
    ctx.save_for_backward(*inputs[:number_of_tensors], output[1])
    ctx.numbers = inputs[number_of_tensors:]
    ctx.mark_non_differentiable(output[1])


def _on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches kernels on the current device, which need not be that of the tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _heads_inside(output: Tensor) -> Tensor:
    """The same as (batch, query, heads, channels) in memory, as models go on with it and the fake kernels say."""
    return output.transpose(1, 2).contiguous().transpose(1, 2)


forward_op = differentiable_op("composed", _forward, _backward, "Triton")
decode_op = inference_op("composed_decode", _decode, ", Tensor? key_lengths, Tensor? block_table, SymInt? ring_size")
