"""The compiled torch form of composed attention as an implementation of the operator: arguments, and where it runs."""

import functools
import importlib.util

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.utils.weak import WeakTensorKeyDictionary

from ..dcmha_factors import ComposeWeights
from ..dcmha_mask import Visibility
from ..ops.arguments import Mask
from ..ops.compiled import compiled_attention
from .adapters import to_composition


_FEWEST_QUERIES = 16

# The boolean form of floating point masks, which all layers of a model share, with the masks' versions.
_VISIBLE: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def compiled_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    scaling: float,
    mask: Visibility,
    dropout: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """As every implementation in the table; compiles when a kind of input comes for the first time."""
    visible, bias = _dense_parts(mask.dense)
    return compiled_attention(
        query,
        key,
        value,
        to_composition(pre),
        to_composition(post),
        scaling=scaling,
        mask=Mask(
            mask.is_causal, mask.sliding_window, mask.query_offset, mask.padding, mask.sequence_ids, visible=visible
        ),
        bias=bias,
        dropout=dropout,
        chunk_size=chunk_size,
    )


def why_not_compiled(query: Tensor, *_: Tensor | ComposeWeights | None, mask: Visibility, dropout: float) -> str | None:
    """None if the compiled form can run, else the reason why not, as the end of a sentence."""
    # In a graph that is being compiled, or on a device without arithmetic, it is a part of that graph.
    if torch.compiler.is_compiling() or query.is_meta:
        return None
    return _why_no_compiler(query.device.type, query.device.index)


def why_not_unasked(
    query: Tensor, *arguments: Tensor | ComposeWeights | None, mask: Visibility, dropout: float
) -> str | None:
    """Why the automatic choice passes over it: also where there are few queries for what it lays out anew."""
    reason = why_not_compiled(query, *arguments, mask=mask, dropout=dropout)
    if reason is None and has_static_value(query.shape[2]) and query.shape[2] < _FEWEST_QUERIES:
        return f"it copies keys and values, which pays from {_FEWEST_QUERIES} queries on"
    return reason


@functools.cache
def _why_no_compiler(device: str, index: int | None) -> str | None:
    """Whether torch can compile for a device here; it is asked once, as the answer takes a process of its own."""
    if not torch._dynamo.is_dynamo_supported():
        return "torch.compile is not available for this version of Python"
    if device == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "torch.compile is not available here, since there is no C++ compiler"
        return None
    if device != "cuda":
        return f"torch.compile is used on CPUs and CUDA devices here, and the tensors are on {device}"
    if importlib.util.find_spec("triton") is None:
        return "torch.compile is not available here, since Triton is missing; pip install 'dcformer[triton]'"
    if torch.version.hip is None and torch.cuda.get_device_capability(index) < (7, 0):
        return "torch.compile needs a GPU of compute capability 7.0 or later"
    return why_compiling_fails(torch.device(device, index))


def why_compiling_fails(device: torch.device) -> str | None:
    """
    What goes wrong when a line of arithmetic is compiled for a device, None if nothing does.

    Whatever is raised is the answer: a missing C compiler, headers of Python, or a driver that is too old for Triton
    show here alone, and would otherwise end the first forward of a model that never asked to be compiled.
    """
    numbers = torch.arange(8.0, device=device)
    try:
        is_right = torch.equal(torch.compile(_a_line_of_arithmetic, dynamic=False)(numbers), numbers * 2 + 1)
    except Exception as error:
        first_line = str(error).strip().split("\n")[0]
        return f"torch.compile fails on this device ({type(error).__name__}: {first_line})"[:300]
    return None if is_right else "torch.compile gives wrong results on this device"


def _a_line_of_arithmetic(numbers: Tensor) -> Tensor:
    return numbers * 2 + 1


def _dense_parts(dense: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Which pairs a dense mask shows, and what it adds to their scores if it is of floating point."""
    if dense is None:
        return None, None
    if not dense.dtype.is_floating_point:
        return dense.to(torch.bool), None
    visible = _visible(dense)
    return visible, dense.masked_fill(~visible, 0.0)


def _visible(dense: Tensor) -> Tensor:
    """One tensor for as long as the mask is not written to, since the operator reads it once for each tensor."""
    if torch.compiler.is_compiling() or dense.is_inference() or type(dense) is not Tensor:
        return dense > torch.finfo(dense.dtype).min / 2
    version, visible = _VISIBLE.get(dense, (None, None))
    if visible is None or version != dense._version:
        visible = dense.detach() > torch.finfo(dense.dtype).min / 2
        _VISIBLE[dense] = (dense._version, visible)
    return visible
