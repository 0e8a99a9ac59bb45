"""The forms of attention that are compared: ours by the table of implementations, torch's, and the authors'."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..dcmha import Visibility, implementations
from . import authors, operands
from .gate import Maker, compose_tensors
from .operands import Operands
from .timing import Call, in_cuda_graph


SDPA, SDPA_WINDOW, FLEX = "sdpa", "sdpa, same window", "FlexAttention, same window"
AUTHORS, AUTHORS_COMPILED = "authors", "authors, compiled"


class Form(NamedTuple):
    """
    One way to compute attention.

    Args:
        name (`str`): Of its rows.
        make (`Callable`): From operands, a window and packed documents to a call without arguments.
        tensors (`Callable`): Of the operands, those that it reads, whose gradients are asked for.
        why_not (`Callable`): Of operands, window and documents: why it cannot run, or None.
        composes (`bool`): Whether it composes heads; only then it can be compared with the plain form.
        is_own (`bool`): Whether it is one of the table of implementations.
        in_graph (`bool`): Whether it is timed as a CUDA graph, so that its many launches cost nothing.
    """

    name: str
    make: Maker
    tensors: Callable[[Operands], list[Tensor]]
    why_not: Callable[[Operands, int | None, Visibility | None], str | None]
    composes: bool = True
    is_own: bool = False
    in_graph: bool = False


def own_forms() -> list[Form]:
    """Every implementation of the operator's table."""
    return [_own_form(name) for name in implementations() if name != operands.NAME]


def plain_forms(device: torch.device, compiles: bool, window: int | None) -> list[Form]:
    """Attention without composition: torch's for all keys, and with the same window."""
    forms = [_plain(SDPA, _sdpa)]
    if window is not None:
        forms.append(_plain(SDPA_WINDOW, _sdpa_in_window))
        missing = None if device.type == "cuda" and compiles else "it is for GPUs, and for torch.compile"
        forms.append(_plain(FLEX, _flex_attention, missing))
    return forms


def authors_forms(compiles: bool) -> list[Form]:
    """Their formulation in chunks, as it is and compiled."""
    missing = None if compiles else "torch.compile is switched off"
    return [
        Form(AUTHORS, functools.partial(_authors, None), _authors_tensors, _why_not_authors()),
        Form(AUTHORS_COMPILED, _authors_compiled, _authors_tensors, _why_not_authors(missing), in_graph=True),
    ]


def gradient_call(form: Form, of: Operands, window: int | None, mask: Visibility | None) -> Call:
    """Forward and backward to all that the form reads; `of` are leaves."""
    forward = form.make(of, window, mask)
    tensors = form.tensors(of)
    upstream = torch.randn_like(of.query)
    return lambda: torch.autograd.grad(forward(), tensors, upstream)


def finished(form: Form, call: Call, device: torch.device) -> Call:
    """The call as it is timed."""
    return in_cuda_graph(call, device) if form.in_graph else call


def _own_form(name: str) -> Form:
    def make(of: Operands, window: int | None, mask: Visibility | None) -> Callable[[], Tensor]:
        return functools.partial(of.composed, implementation=name, sliding_window=window, attention_mask=mask)

    def why_not(of: Operands, window: int | None, mask: Visibility | None) -> str | None:
        mask = mask or Visibility(of.query.shape[2], of.key.shape[2], sliding_window=window)
        return implementations()[name].supports(*of[:5], mask=mask, dropout=0.0)

    return Form(name, make, lambda of: [*of.states, *compose_tensors(of)], why_not, is_own=True)


def _plain(name: str, make: Callable[..., Any], missing: str | None = None) -> Form:
    def why_not(of: Operands, window: int | None, mask: Visibility | None) -> str | None:
        return missing or ("it does not tell documents apart" if mask is not None else None)

    return Form(name, make, lambda of: of.states, why_not, composes=False)


def _sdpa(of: Operands, window: int | None, mask: Visibility | None) -> Callable[[], Tensor]:
    """All keys before the query, on a GPU by FlashAttention alone."""
    is_flash = of.query.is_cuda and of.query.dtype.itemsize == 2

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if is_flash else contextlib.nullcontext():
            return functional.scaled_dot_product_attention(of.query, of.key, of.value, is_causal=True)

    return call


def _sdpa_in_window(of: Operands, window: int | None, mask: Visibility | None) -> Callable[[], Tensor]:
    shown = visible(of.query.shape[2], window, of.query.device)
    return lambda: functional.scaled_dot_product_attention(of.query, of.key, of.value, attn_mask=shown)


def _flex_attention(of: Operands, window: int | None, mask: Visibility | None) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask

    reach = window or of.query.shape[2]

    def shown(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < reach)

    length = of.query.shape[2]
    blocks = create_block_mask(shown, None, None, length, length, device=of.query.device)
    return lambda: _compiled_flex_attention()(*of.states, block_mask=blocks)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def _authors(
    attend: Callable[..., Tensor] | None, of: Operands, window: int | None, mask: Visibility | None
) -> Callable[[], Tensor]:
    """In chunks of queries; documents are a mask alone, as they are there: the whole row is computed."""
    length, scaling = of.query.shape[2], of.query.shape[3] ** -0.5
    shown = visible(length, window, of.query.device)
    if mask is not None and mask.sequence_ids is not None:
        numbers = mask.sequence_ids[0]
        shown = shown & (numbers[:, None] == numbers)

    def call() -> Tensor:
        peer = of.peer
        if peer is None and of.pre is not None and of.post is not None:
            peer = authors.Factors.of(of.pre, of.post)
        if peer is None:
            raise ValueError("The authors' formulation composes before the softmax and after it.")
        return authors.attend_in_chunks(of.query, of.key, of.value, peer, shown, scaling, window, attend=attend)

    return call


def _authors_compiled(of: Operands, window: int | None, mask: Visibility | None) -> Callable[[], Tensor]:
    return _authors(_compiled_chunk(), of, window, mask)


@functools.cache
def _compiled_chunk() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(authors.attend_chunk, dynamic=True)
    return compiled


def _authors_tensors(of: Operands) -> list[Tensor]:
    return [*of.states, *(of.peer or ())]


def _why_not_authors(missing: str | None = None) -> Callable[..., str | None]:
    return lambda *_: missing


def visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """(query, key) boolean, True for the keys that causality and the window leave."""
    age = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (age >= 0) & (age < (window or length))
