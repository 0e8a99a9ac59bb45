"""The Triton operators as operators of torch, under `torch.ops.dcformer`: opaque to `torch.compile`, with gradients.

An operator of torch takes tensors and numbers side by side, so compositions and masks are laid out flat here, and
gathered again where the kernels are called. Triton is imported when the first of them runs.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.arguments import Composition, Mask
from ..ops.workspace import workspace_bytes


class FlatCall(NamedTuple):
    """One call of composed attention: all tensors, those that may have gradients first, then all numbers."""

    query: Tensor
    key: Tensor
    value: Tensor
    pre_query: Tensor | None
    pre_key: Tensor | None
    pre_static: Tensor | None
    post_query: Tensor | None
    post_key: Tensor | None
    post_static: Tensor | None
    padding: Tensor | None
    sequence_ids: Tensor | None
    visible: Tensor | None
    groups: int
    is_causal: bool
    sliding_window: int | None
    query_offset: int
    scaling: float

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pre: Composition | None,
        post: Composition | None,
        mask: Mask,
        scaling: float,
    ) -> "FlatCall":
        pre_tensors, post_tensors = ((None,) * 3 if stage is None else stage[:3] for stage in (pre, post))
        stage = pre or post
        return cls(
            query,
            key,
            value,
            *pre_tensors,
            *post_tensors,
            mask.padding,
            mask.sequence_ids,
            mask.visible,
            1 if stage is None else stage.groups,
            mask.is_causal,
            mask.sliding_window,
            mask.query_offset,
            scaling,
        )

    @property
    def compositions(self) -> tuple[Composition | None, Composition | None]:
        """Before and after the softmax."""
        stages = (self[3:6], self[6:9])
        pre, post = (None if stage == (None,) * 3 else Composition(*stage, self.groups) for stage in stages)
        return pre, post

    @property
    def mask(self) -> Mask:
        numbers = (self.is_causal, self.sliding_window, self.query_offset)
        return Mask(*numbers, self.padding, self.sequence_ids, self.visible)

    @property
    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, with their channels side by side in memory, as the kernels read them."""
        query, key, value = (_with_channels_last(states) for states in self[:3])
        return query, key, value


# Of its arguments, those that have gradients.
_DIFFERENTIABLE = FlatCall._fields[:9]
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? pre_query, Tensor? pre_key, Tensor? pre_static, "
    "Tensor? post_query, Tensor? post_key, Tensor? post_static, Tensor? padding, Tensor? sequence_ids, "
    "Tensor? visible, SymInt groups, bool is_causal, SymInt? sliding_window, SymInt query_offset, float scaling"
)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    from ..ops.forward import composed_forward

    call = FlatCall(*arguments)
    with _on_device_of(call.query):
        output, log_sum_exp = composed_forward(
            *call.states,
            *call.compositions,
            scaling=call.scaling,
            mask=call.mask,
            workspace_bytes=workspace_bytes(),
        )
    return _heads_inside(output), log_sum_exp.contiguous()


def _backward(output_gradient: Tensor, *arguments: Any) -> list[Tensor]:
    from ..ops.backward import composed_backward

    call, log_sum_exp = FlatCall(*arguments[:-1]), arguments[-1]
    with _on_device_of(call.query):
        *states, pre, post = composed_backward(
            _with_channels_last(output_gradient),
            *call.states,
            *call.compositions,
            log_sum_exp,
            scaling=call.scaling,
            mask=call.mask,
            workspace_bytes=workspace_bytes(),
        )
    found = [*states, *((None,) * 3 if pre is None else pre[:3]), *((None,) * 3 if post is None else post[:3])]
    return [
        gradient.to(tensor.dtype).contiguous()
        for gradient, tensor in zip(found, call)
        if tensor is not None and gradient is not None
    ]


def _decode(*arguments: Any) -> Tensor:
    from ..ops.decode import composed_decode

    *flat, key_lengths, block_table, block_size, ring_size = arguments
    call = FlatCall(*flat)
    with _on_device_of(call.query):
        output = composed_decode(
            *call.states,
            *call.compositions,
            scaling=call.scaling,
            mask=call.mask,
            key_lengths=key_lengths,
            block_table=block_table,
            block_size=block_size,
            ring_size=ring_size,
        )
    return _heads_inside(output)


forward_op = torch.library.custom_op(
    "dcformer::composed_forward", _forward, mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
backward_op = torch.library.custom_op(
    "dcformer::composed_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor output_gradient, {_ARGUMENTS}, Tensor log_sum_exp) -> Tensor[]",
)
decode_op = torch.library.custom_op(
    "dcformer::composed_decode",
    _decode,
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor? key_lengths, Tensor? block_table, SymInt? block_size, SymInt? ring_size) -> Tensor",
)


@forward_op.register_fake
def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    query = arguments[0]
    return _decode_fake(*arguments), query.new_empty(query.shape[:3], dtype=torch.float32)


@decode_op.register_fake
def _decode_fake(*arguments: Any) -> Tensor:
    query, _, value = arguments[:3]
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)


@backward_op.register_fake
def _backward_fake(output_gradient: Tensor, *arguments: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in arguments[: len(_DIFFERENTIABLE)] if tensor is not None]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    number_of_tensors = FlatCall._fields.index("groups")
    ctx.save_for_backward(*inputs[:number_of_tensors], output[1])
    ctx.numbers = inputs[number_of_tensors:]
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, output_gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, log_sum_exp = ctx.saved_tensors
    found = iter(backward_op(output_gradient, *tensors, *ctx.numbers, log_sum_exp))
    gradients = [None if tensor is None else next(found) for tensor in tensors[: len(_DIFFERENTIABLE)]]
    return *gradients, *[None] * (len(FlatCall._fields) - len(gradients))


def _refuse_second_derivatives(ctx: Any, *_: Any) -> None:
    raise ValueError(
        "Second derivatives (create_graph=True) are not in the Triton form of composed attention; use "
        "attn_implementation='dcmha_chunked' in a model, or implementation='chunked'."
    )


forward_op.register_autograd(_gradients, setup_context=_save_for_backward)
backward_op.register_autograd(_refuse_second_derivatives)


def decode(
    call: FlatCall,
    key_lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    block_size: int | None = None,
    ring_size: int | None = None,
) -> Tensor:
    """The operator of decoding, whose arguments about the cache are those of `composed_decode`."""
    return decode_op(*call, key_lengths, block_table, block_size, ring_size)


def _on_device_of(tensor: Tensor) -> AbstractContextManager:
    """Triton launches kernels on the current device, which need not be that of the tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _with_channels_last(states: Tensor) -> Tensor:
    return states if states.shape[-1] == 1 or states.stride(-1) == 1 else states.contiguous()


def _heads_inside(output: Tensor) -> Tensor:
    """The same as (batch, query, heads, channels) in memory, as models go on with it and the fake kernels say."""
    return output.transpose(1, 2).contiguous().transpose(1, 2)


__all__ = ["FlatCall", "backward_op", "decode", "decode_op", "forward_op"]
