"""Compose weights from their wide projections in one Triton kernel, as an operator of torch with gradients.

The products with the hidden states are torch's. What follows them (activation, low-rank product, normalisation over
heads, tanh, layout) is a small kernel of torch for each step, which takes longer to launch than to run.
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
from ..modeling_dcformer import is_hooked
from . import triton_form
from .call import DTYPES, why_transformed
from .ops import register_op


_APPROXIMATIONS = {GELUActivation: "none", GELUTanh: "tanh"}  # as `functional.gelu` names them
MOST_COLUMNS = 512  # 2 rank x heads of a group, as the powers of two that a program has sums for


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
    compute = factors_op if torch.is_grad_enabled() or is_tracing(states) else _factors
    return compute(approximate, eps, product(states, hidden_weight), weight, product(states, gate_weight))


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
factors_op.register_autograd(_gradients, setup_context=_save_for_backward)
