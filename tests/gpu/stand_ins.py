"""The operators of `dcformer.ops` by the reference, for tests of what lies around the kernels, and inputs for them."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dcformer import ComposeSide, ComposeWeights, Visibility
from dcformer.dcmha_chunked import chunked_attention
from dcformer.dcmha_reference import reference_attention, reference_compose
from dcformer.gpu.verdicts import in_fresh_thread
from dcformer.ops.arguments import Composition


def make_inputs(
    queries=20,
    keys=None,
    *,
    batch=2,
    heads=4,
    key_value_heads=2,
    channels=8,
    groups=1,
    has_static=True,
    dtype=torch.float32,
    needs_gradient=False,
):
    """Query, key, value and both compositions with every branch, the factors of rank 1 with a gate."""
    keys = keys or queries
    generator = torch.Generator().manual_seed(queries + 100 * keys)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_(needs_gradient)

    def stage():
        sides = (ComposeSide(factors=normal(batch, heads, length, 3)) for length in (queries, keys))
        static = normal(groups, heads // groups, heads // groups) if has_static else None
        return ComposeWeights(*sides, static, groups)

    states = [normal(batch, heads, queries, channels)]
    states += [normal(batch, key_value_heads, keys, channels) for _ in range(2)]
    return *states, stage(), stage()


def tensors_of(inputs):
    """All tensors of such inputs."""
    found = list(inputs[:3])
    for stage in inputs[3:]:
        found += [part for part in (stage.query.factors, stage.key.factors, stage.static) if part is not None]
    return found


def to_weights(composition: Composition | None) -> ComposeWeights | None:
    if composition is None:
        return None
    sides = (None if side is None else ComposeSide(factors=side) for side in (composition.query, composition.key))
    return ComposeWeights(*sides, composition.static, composition.groups)


def to_visibility(mask, queries, keys) -> Visibility:
    return Visibility(
        queries,
        keys,
        is_causal=mask.is_causal,
        sliding_window=mask.sliding_window,
        query_offset=mask.query_offset,
        padding=mask.padding,
        sequence_ids=mask.sequence_ids,
        dense=mask.visible,
    )


def composed_forward(query, key, value, pre, post, *, scaling, mask, workspace_bytes, config=None):
    assert workspace_bytes > 0
    visibility = to_visibility(mask, query.shape[2], key.shape[2])
    output, _ = reference_attention(
        query, key, value, to_weights(pre), to_weights(post), scaling=scaling, mask=visibility
    )
    shared = query.shape[1] // key.shape[1]
    scores = query.float() @ key.float().repeat_interleave(shared, dim=1).mT * scaling
    scores = reference_compose(scores, to_weights(pre))
    hidden = visibility.hidden(0, query.shape[2], 0, key.shape[2])
    scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    return output, scores.logsumexp(-1) / math.log(2)


def composed_backward(
    output_gradient, query, key, value, pre, post, log_sum_exp, *, scaling, mask, workspace_bytes, config=None
):
    assert log_sum_exp.shape == query.shape[:3]
    given = [query, key, value, *(pre or Composition())[:3], *(post or Composition())[:3]]

    def differentiate():
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in given]
        stages = [
            None if stage is None else Composition(*parts, stage.groups)
            for stage, parts in ((pre, leaves[3:6]), (post, leaves[6:9]))
        ]
        output, _ = composed_forward(*leaves[:3], *stages, scaling=scaling, mask=mask, workspace_bytes=workspace_bytes)
        present = [leaf for leaf in leaves if leaf is not None]
        return iter(torch.autograd.grad(output, present, output_gradient))

    found = in_fresh_thread(differentiate)  # torch switches autograd off where an operator runs
    gradients = [None if tensor is None else next(found) for tensor in given]
    pre_gradients = None if pre is None else Composition(*gradients[3:6], pre.groups)
    post_gradients = None if post is None else Composition(*gradients[6:9], post.groups)
    return *gradients[:3], pre_gradients, post_gradients


def composed_decode(query, key, value, pre, post, *, scaling, mask, config=None, **cache):
    assert query.shape[2] <= 8 and mask.sequence_ids is None
    return composed_forward(query, key, value, pre, post, scaling=scaling, mask=mask, workspace_bytes=1)[0]


@pytest.fixture
def stand_ins(monkeypatch):
    """Puts these in the place of the kernels, and the chunked form in that of the compiled one, and counts calls."""
    calls = SimpleNamespace(forward=0, backward=0, decode=0)

    def counted(name, function):
        def call(*arguments, **options):
            setattr(calls, name, getattr(calls, name) + 1)
            return function(*arguments, **options)

        return call

    operators = {"forward": composed_forward, "backward": composed_backward, "decode": composed_decode}
    for name, function in operators.items():
        module = ModuleType(f"dcformer.ops.{name}")
        setattr(module, f"composed_{name}", counted(name, function))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    compiled = ModuleType("dcformer.gpu.compiled")
    compiled.compiled_forward = chunked_attention
    compiled.why_not_compiled = lambda *arguments, **options: None
    monkeypatch.setitem(sys.modules, compiled.__name__, compiled)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return calls
