"""The factors of compose weights (w1, w2, gates) from wide products of hidden states, and gradients, as operators.

The product with the hidden states is torch's. What follows it (activation, low-rank product, normalisation over
heads, tanh, layout) is a small kernel of torch for each step, which takes longer to launch than to run.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import GELUActivation, GELUTanh

from ...compose_dcformer import plain_factors, product
from ...visibility_dcformer import is_number
from ..call import DTYPES, are_replaced, is_traced, next_power_of_2
from ..operators import register_op


_APPROXIMATIONS = {GELUActivation: "none", GELUTanh: "tanh"}  # as `functional.gelu` names them
MOST_COLUMNS = 512  # 2 rank x heads of a group, as the powers of two that a program has sums for
MOST_FEW_TOKENS = 16  # which one matrix product takes


def compute_factors(act_fn: nn.Module, eps: float, states: Tensor, *weights: Tensor | None) -> Tensor | None:
    """Compute compose weights on a device that runs the kernels; see [`Backend.factors`]."""
    given = [tensor for tensor in (states, *weights) if tensor is not None]
    hidden_weight, weight, gate_weight = weights
    device, approximate = states.device, _APPROXIMATIONS.get(type(act_fn))
    if approximate is None or are_replaced((act_fn, None)):
        return None
    if any(type(each) not in (Tensor, nn.Parameter) or each.dtype not in DTYPES for each in given):
        return None
    if weight is not None and math.prod([next_power_of_2(int(size)) for size in weight.shape[3:]]) > MOST_COLUMNS:
        return None
    lengths, is_compiling, traced = states.shape[:2], torch.compiler.is_compiling(), is_traced()
    # Autocast would set another type, and what replaces products of torch would miss those of the kernel.
    is_plain = not torch.is_autocast_enabled(device.type) and (is_compiling or not traced)
    if is_plain and all(map(is_number, lengths)) and 0 < lengths.numel() <= MOST_FEW_TOKENS:  # as in a decoding step
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        if not needs_gradient and all(x is weight or x.dtype == states.dtype for x in given):
            compute = factors_of_few_op if is_compiling else _factors_of_few
            return compute(approximate, eps, states, *weights)
    compute = factors_op if torch.is_grad_enabled() or traced else _factors
    return compute(approximate, eps, _products(states, hidden_weight, gate_weight), weight)


def _products(states: Tensor, *weights: Tensor | None) -> Any:
    wide = [weight for weight in weights if weight is not None]
    # Copying the weights takes less time than reading the states twice and adding two gradients of them.
    return product(states, torch.cat(wide, dim=3) if len(wide) > 1 else wide[0])


def _factors_of_few(
    approximate: str, eps: float, states: Tensor, hidden: Tensor | None, weight: Tensor | None, gates: Tensor | None
) -> Tensor:
    from .compose_weights_kernels import launch_partial_products

    with torch.cuda.device_of(states):
        return _factors(approximate, eps, launch_partial_products(states, hidden, gates), weight, states.dtype)


def _new_factors_of_few(approximate: str, eps: float, states: Tensor, hidden: Any, weight: Any, gates: Any) -> Tensor:
    return _new_factors(approximate, eps, _products(states, hidden, gates), weight)


def _factors(
    approximate: str, eps: float, products: Tensor, weight: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    from .compose_weights_kernels import launch_factors

    factors = _new_factors(approximate, eps, products, weight, dtype)
    with torch.cuda.device_of(factors):
        launch_factors(approximate, eps, products, weight, factors)
    return factors


def _new_factors(_: str, eps: float, products: Tensor, weight: Any, dtype: torch.dtype | None = None) -> Tensor:
    (batch, length, groups, slots), width = products.shape[:4], products.shape[-1]
    inner, channels, heads = (0, 0, width) if weight is None else weight.shape[2:]
    return products.new_empty(slots, batch, length, channels + int(width > inner), groups * heads, dtype=dtype)


def _gradients(
    approximate: str, eps: float, gradient: Tensor, products: Tensor, weight: Tensor | None, needs_weight: bool
) -> list[Tensor]:
    """Compute the gradient of the products, and that of the weight if it is needed."""
    from .compose_weights_kernels import launch_gradients

    of_products = torch.empty_like(products)
    with torch.cuda.device_of(products):
        activated, of_maps = launch_gradients(approximate, eps, gradient, products, weight, of_products)
    if weight is None or activated is None or not needs_weight:
        return [of_products]
    parts = torch.bmm(activated.mT, of_maps).unflatten(0, (weight.shape[:2].numel(), -1))
    return [of_products, parts.sum(1, dtype=weight.dtype).view(weight.shape)]


def _new_gradients(*call: Any) -> list[Tensor]:
    products, weight, needs_weight = call[3:]
    return [torch.empty_like(products), *([weight.new_empty(weight.shape)] if needs_weight else [])]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.options = inputs[:2]
    ctx.save_for_backward(*inputs[2:4])


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    needs_weight = ctx.needs_input_grad[3]
    compute = _differentiable_gradients if torch.is_grad_enabled() else gradients_op
    with torch.autocast(gradient.device.type, enabled=False):
        of_products, *of_weight = compute(*ctx.options, gradient, *ctx.saved_tensors, needs_weight)
    return None, None, of_products, *(of_weight or [None]), None


def _differentiable_gradients(
    approximate: str, eps: float, gradient: Tensor, products: Tensor, weight: Any, needs_weight: bool
) -> tuple[Tensor, ...]:
    """Compute the gradients by torch's operators, which have derivatives of any order."""
    # Hooks of the caller's tensors would see a gradient twice.
    products, weight = products.view_as(products).requires_grad_(), None if weight is None else weight.view_as(weight)
    hidden, gates = products.tensor_split([0 if weight is None else weight.shape[2]], dim=4)
    gelu = functools.partial(functional.gelu, approximate=approximate)
    factors = plain_factors(gelu, eps, hidden, weight, gates if gates.shape[4] > 0 else None)
    return torch.autograd.grad(factors, (products, weight)[: 1 + needs_weight], gradient, create_graph=True)


def _flops(_: str, eps: float, tokens: Tensor, *weights: Any) -> int:
    return 2 * tokens.shape[:2].numel() * sum(weight.numel() for weight in weights if isinstance(weight, Tensor))


def _gradient_flops(approximate: str, eps: float, gradient: Tensor, *operands: Any) -> int:
    return (1 + operands[-1]) * _flops(approximate, eps, *operands)


factors_of_few_op = register_op("compose_factors_of_few", _factors_of_few, _flops, _new_factors_of_few)
factors_op = register_op("compose_factors", _factors, _flops, _new_factors)
gradients_op = register_op("compose_factors_backward", _gradients, _gradient_flops, _new_gradients)
factors_op.register_autograd(_differentiate, setup_context=_save_for_backward)
