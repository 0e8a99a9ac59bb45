"""Compose weights from their wide projections in one Triton kernel, as an operator of torch with gradients.

The products with the hidden states are torch's, except those of a few tokens without gradients. What follows them
(activation, low-rank product, normalisation over heads, tanh, layout) is a small kernel of torch for each step, which
takes longer to launch than to run.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import GELUActivation, GELUTanh
from transformers.utils.import_utils import is_tracing

from ..compose_dcformer import plain_factors, product
from ..dcmha import is_number
from ..modeling_dcformer import is_hooked
from . import triton_form
from .call import DTYPES, why_transformed
from .ops import register_op


_APPROXIMATIONS = {GELUActivation: "none", GELUTanh: "tanh"}  # as `functional.gelu` names them
MOST_COLUMNS = 512  # 2 rank x heads of a group, as the powers of two that a program has sums for
MOST_FEW_TOKENS = 16  # which one matrix product takes


def triton_factors(act_fn: nn.Module, eps: float, states: Tensor, *weights: Tensor | None) -> Tensor | None:
    """As [`compose_dcformer.fused_factors`], where the kernels of attention are selected automatically too."""
    given = [tensor for tensor in (states, *weights) if tensor is not None]
    hidden_weight, weight, gate_weight = weights
    device, approximate = states.device, _APPROXIMATIONS.get(type(act_fn))
    if device.type != triton_form._AUTOMATIC_ON or triton_form._why_not_here(device.type, device.index):
        return None
    if approximate is None or is_hooked(act_fn) or _has_any_global_hook() or why_transformed():
        return None
    if any(type(each) not in (Tensor, nn.Parameter) or each.dtype not in DTYPES for each in given):
        return None
    if weight is not None and math.prod([1 << (size - 1).bit_length() for size in weight.shape[3:]]) > MOST_COLUMNS:
        return None
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    if not needs_gradient and _are_few(states) and all(x is weight or x.dtype == states.dtype for x in given):
        compute = factors_of_few_op if is_tracing(states) else _factors_of_few
        return compute(approximate, eps, states, *weights)
    compute = factors_op if torch.is_grad_enabled() or is_tracing(states) else _factors
    return compute(approximate, eps, product(states, hidden_weight), weight, product(states, gate_weight))


def _are_few(states: Tensor) -> bool:
    """Whether there are few tokens, as in a decoding step, and their products need not be of a type of autocast."""
    lengths = states.shape[:2]
    are_numbers = all(map(is_number, lengths)) and not torch.is_autocast_enabled(states.device.type)
    return are_numbers and 0 < lengths.numel() <= MOST_FEW_TOKENS


def _factors_of_few(approximate: str, eps: float, states: Tensor, *weights: Tensor | None) -> Tensor:
    from .projection_kernel import launch_factors, launch_products

    factors = _new_factors_of_few(approximate, eps, states, *weights)
    with torch.cuda.device_of(states):
        hidden, gates = launch_products(states, weights[0], weights[2])
        launch_factors(approximate, eps, hidden, weights[1], gates, factors)
    return factors


def _new_factors_of_few(approximate: str, eps: float, states: Tensor, hidden: Any, weight: Any, gates: Any) -> Tensor:
    """The same as of their products, of which the shapes are those of so many rows of the wide weights."""
    shape = states.shape[:2].numel(), -1, -1, -1
    products = [None if each is None else each[:1].expand(shape) for each in (hidden, gates)]
    return _new_factors(approximate, eps, products[0], weight, products[1])


def _factors(*call: Any) -> Tensor:
    from .projection_kernel import launch_factors

    factors = _new_factors(*call)
    with torch.cuda.device_of(factors):
        launch_factors(*call, factors)
    return factors


def _new_factors(approximate: str, eps: float, hidden: Any, weight: Any, gates: Any) -> Tensor:
    products = gates if hidden is None else hidden
    tokens, groups, slots = products.shape[:3]
    channels, heads = (0, products.shape[3]) if weight is None else weight.shape[3:]
    return products.new_empty(slots, tokens, channels + int(gates is not None), groups * heads)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    (ctx.approximate, ctx.eps), tensors = inputs[:2], inputs[2:]
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Those of torch's operators, which have derivatives of any order."""
    creates_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
        # Hooks of the caller's tensors would see a gradient twice.
        tensors = [None if tensor is None else tensor.view_as(tensor) for tensor in ctx.saved_tensors]
        factors = plain_factors(functools.partial(functional.gelu, approximate=ctx.approximate), ctx.eps, *tensors)
        needed = [tensor for tensor, is_needed in zip(tensors, ctx.needs_input_grad[2:5]) if is_needed]
        results = iter(torch.autograd.grad(factors, needed, gradient, create_graph=creates_graph))
    return None, None, *(next(results) if is_needed else None for is_needed in ctx.needs_input_grad[2:5])


_SCHEMA = "(str approximate, float eps, Tensor? hidden, Tensor? weight, Tensor? gates) -> Tensor"
factors_op = register_op("compose_factors", _SCHEMA, _factors, _new_factors)
_SCHEMA = _SCHEMA.replace("Tensor? hidden", "Tensor states, Tensor? hidden")
factors_of_few_op = register_op("compose_factors_of_few", _SCHEMA, _factors_of_few, _new_factors_of_few)
factors_op.register_autograd(_gradients, setup_context=_save_for_backward)
