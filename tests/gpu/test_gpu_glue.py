"""What lies between the operator's table and the operators of `dcformer.ops`, mostly with the reference as kernels."""

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stand_ins import make_inputs, stand_ins, tensors_of
from tiny_models import random_tokens, tiny_model
from torch.testing import assert_close
from transformers import StaticCache

import dcformer
from dcformer import ComposeWeights, Visibility, composed_attention
from dcformer.dcmha import explain_choice
from dcformer.gpu import triton_form
from dcformer.gpu.adapters import to_composition, to_mask
from dcformer.gpu.custom_ops import FlatCall, backward_op, decode_op, forward_op
from dcformer.gpu.triton_form import triton_attention, why_not_triton


__all__ = ["stand_ins"]

triton = functools.partial(composed_attention, implementation="triton")
reference = functools.partial(composed_attention, implementation="reference")
# Both compute in float32, in another order.
TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}


def left_padding(queries, keys):
    mask = torch.ones(2, keys, dtype=torch.long)
    mask[0, : keys // 2] = 0
    return mask


def packed(queries, keys):
    ids = (torch.arange(keys) * 3 // keys).expand(2, -1)
    return Visibility(queries, keys, sequence_ids=ids)


def boolean(queries, keys):
    mask = torch.arange(queries * keys).view(1, 1, queries, keys) % 3 > 0
    return mask | torch.eye(queries, keys, dtype=torch.bool)


CALLS = {
    "T20": ((20,), {}, None),
    "T20-win5": ((20,), {"sliding_window": 5}, None),
    "T20-bidirectional": ((20,), {"is_causal": False}, None),
    "T9-of-20": ((9, 20), {}, None),
    "T20-left-padding": ((20,), {}, left_padding),
    "T20-packed": ((20,), {}, packed),
    "T20-boolean": ((20,), {}, boolean),
    "T1-of-20": ((1, 20), {}, None),
    "T8-of-20-win5": ((8, 20), {"sliding_window": 5}, None),
    "T2-of-20-left-padding": ((2, 20), {}, left_padding),
    "T3-packed": ((3,), {}, packed),
}


def build(name, **changes):
    lengths, options, mask = CALLS[name]
    if mask is not None:
        options = options | {"attention_mask": mask(lengths[0], lengths[-1])}
    return make_inputs(*lengths, **changes), options


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_reaches_the_kernels(name, stand_ins):
    inputs, options = build(name)
    assert_close(triton(*inputs, **options), reference(*inputs, **options), **TOLERANCE)
    is_short = inputs[0].shape[2] <= 8 and name != "T3-packed"
    assert (stand_ins.decode, stand_ins.forward) == (is_short, not is_short)


@pytest.mark.parametrize("name", ["T20-win5", "T20-packed", "T1-of-20"])
def test_gradients_of_every_input_come_from_the_backward_kernels(name, stand_ins):
    inputs, options = build(name, needs_gradient=True, groups=2)
    expected = torch.autograd.grad(reference(*inputs, **options).sin().sum(), tensors_of(inputs))
    found = torch.autograd.grad(triton(*inputs, **options).sin().sum(), tensors_of(inputs))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, **TOLERANCE)
    assert (stand_ins.forward, stand_ins.backward, stand_ins.decode) == (1, 1, 0)


def test_absent_compositions_have_no_gradients(stand_ins):
    query, key, value, pre, _ = make_inputs(12, needs_gradient=True, has_static=False)
    inputs = (query, key, value, pre._replace(key=None), None)
    leaves = [query, key, value, pre.query.factors]
    expected = torch.autograd.grad(reference(*inputs).square().sum(), leaves)
    for one, other in zip(torch.autograd.grad(triton(*inputs).square().sum(), leaves), expected, strict=True):
        assert_close(one, other, **TOLERANCE)


def test_a_second_derivative_is_refused_in_a_sentence(stand_ins):
    inputs = make_inputs(12, needs_gradient=True)
    (gradient,) = torch.autograd.grad(triton(*inputs).sin().sum(), inputs[:1], create_graph=True)
    with pytest.raises(ValueError, match=r"Second derivatives .* implementation='chunked'"):
        gradient.sum().backward()


def flat_call(queries, keys=None, *, needs_gradient=False, mask=None, **changes):
    query, key, value, pre, post = make_inputs(queries, keys, needs_gradient=needs_gradient, **changes)
    mask = mask or Visibility(queries, keys or queries, sliding_window=5)
    return FlatCall.of(query, key, value, to_composition(pre), to_composition(post), to_mask(mask), 0.3)


def test_the_forward_operator_passes_torchs_own_check(stand_ins):
    torch.library.opcheck(forward_op, flat_call(10, 12, needs_gradient=True))
    padded = Visibility(10, 10, padding=left_padding(10, 10))
    torch.library.opcheck(
        forward_op, flat_call(10, has_static=False, mask=padded), test_utils=("test_schema", "test_faketensor")
    )


def test_the_backward_operator_passes_torchs_own_check(stand_ins):
    call = flat_call(10, 12)
    output, log_sum_exp = forward_op(*call)
    torch.library.opcheck(backward_op, (torch.ones_like(output), *call, log_sum_exp))


def test_the_decode_operator_passes_torchs_own_check(stand_ins):
    torch.library.opcheck(decode_op, (*flat_call(2, 12), None, None, None, None))
    torch.library.opcheck(
        decode_op,
        (*flat_call(1, 12), torch.tensor([12, 7]), torch.zeros(2, 3), 4, 16),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_one_graph_holds_forward_and_backward_of_any_length(stand_ins):
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    def attend(*inputs):
        return triton(*inputs, sliding_window=5).sin()

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=count)
    for queries in (17, 20, 33):
        inputs = make_inputs(queries, needs_gradient=True)
        expected = torch.autograd.grad(attend(*inputs).sum(), tensors_of(inputs))
        for one, other in zip(torch.autograd.grad(compiled(*inputs).sum(), tensors_of(inputs)), expected):
            assert_close(one, other, **TOLERANCE)
    assert len(graphs) == 1


def test_a_compiled_gradient_calls_the_backward_operator(stand_ins):
    inputs = make_inputs(17, needs_gradient=True)
    compiled = torch.compile(triton, fullgraph=True, dynamic=True, backend="aot_eager")
    expected = torch.autograd.grad(triton(*inputs).sin().sum(), tensors_of(inputs))
    for one, other in zip(torch.autograd.grad(compiled(*inputs).sin().sum(), tensors_of(inputs)), expected):
        assert_close(one, other, **TOLERANCE)
    assert stand_ins.backward == 2


def test_states_with_strided_channels_are_laid_out_for_the_kernels(stand_ins, monkeypatch):
    query, key, value, pre, post = make_inputs(12)
    strides = []
    module = sys.modules["dcformer.ops.forward"]
    attend = module.composed_forward

    def recorded(*arguments, **options):
        strides.extend(states.stride(-1) for states in arguments[:3])
        return attend(*arguments, **options)

    monkeypatch.setattr(module, "composed_forward", recorded)
    strided = [states.mT.contiguous().mT for states in (query, key, value)]
    assert_close(triton(*strided, pre, post), triton(query, key, value, pre, post), atol=0, rtol=0)
    assert set(strides) == {1}


def wrong_groups(inputs):
    return *inputs[:4], ComposeWeights(static=torch.zeros(2, 2, 2), groups=2)


REFUSALS = {
    "float64": (lambda inputs: tuple(make_inputs(10, dtype=torch.float64)), {}, "not float64"),
    "mixed": (lambda inputs: (inputs[0].half(), *inputs[1:]), {}, "one type, and are float16, float32, float32"),
    "dropout": (None, {"dropout": 0.1}, "it has no dropout"),
    "groups": (wrong_groups, {}, "1 groups of heads before the softmax and 2 after it"),
    "channels": (lambda inputs: make_inputs(10, channels=257), {}, "256 channels at most"),
    "learned-mask": (
        None,
        {"attention_mask": torch.zeros(1, 1, 10, 10, requires_grad=True)},
        "the mask has a gradient",
    ),
    "mask-per-head": (None, {"attention_mask": torch.ones(1, 4, 10, 10).bool()}, "the mask differs between heads"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_explicit_choice_that_cannot_run_says_why(name, stand_ins):
    change, options, reason = REFUSALS[name]
    inputs = make_inputs(10)
    inputs = inputs if change is None else change(inputs)
    with pytest.raises(ValueError, match=rf"'triton' cannot run here: .*{reason}.*; leave it out to have one chosen\."):
        triton(*inputs, **options)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, r"Triton is not installed; install it with `pip install 'dcformer\[triton\]'`"),
        ("3.3.1", r"Triton 3\.3\.1 is too old; install 3\.4 or later"),
    ],
    ids=["absent", "old"],
)
def test_a_missing_triton_names_the_extra(version, reason, monkeypatch):
    monkeypatch.setattr(triton_form, "triton_version", lambda: version)
    with pytest.raises(ValueError, match=reason):
        triton(*make_inputs(10))


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="the tensors are on the CPU"):
        triton(*make_inputs(10))


def test_devices_that_triton_does_not_compile_for_are_refused(monkeypatch):
    monkeypatch.setattr(triton_form, "_capability", {0: (7, 5), 1: (8, 0)}.get)
    assert "compute capability 7.5" in triton_form._why_not_here("cuda", 0)
    assert triton_form._why_not_here("cuda", 1) is None
    assert triton_form._why_not_here("mps", None) == "the tensors are on mps"


def test_transforms_of_functions_are_refused(stand_ins):
    query, key, value, pre, post = make_inputs(10)
    with pytest.raises(ValueError, match=r"torch\.func does not see through it"):
        torch.func.grad(lambda query: triton(query, key, value, pre, post).sum())(query)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(ValueError, match="no derivatives in forward mode"),
    ):
        triton(torch.autograd.forward_ad.make_dual(query, query), key, value, pre, post)


@pytest.mark.parametrize("queries", [1, 4, 20])
def test_nothing_changes_on_a_cpu_unless_asked_for(queries, stand_ins):
    inputs = make_inputs(queries)
    composed_attention(*inputs)
    assert not {"triton", "compiled"} & {name for name, _ in explain_choice(*inputs)}
    assert (stand_ins.forward, stand_ins.decode) == (0, 0)


def test_models_take_the_triton_form_by_name(stand_ins):
    model, tokens = tiny_model(), random_tokens(2, 20)
    expected = model(tokens).logits
    model.set_attn_implementation("dcmha_triton")
    with torch.no_grad():
        assert_close(model(tokens).logits, expected, **TOLERANCE)
        static = StaticCache(config=model.config, max_cache_len=24)
        model(tokens[:, :19], past_key_values=static)
        assert_close(model(tokens[:, 19:], past_key_values=static).logits, expected[:, 19:], **TOLERANCE)
    assert stand_ins.forward == 4
    assert stand_ins.decode == 2
    named = tiny_model(attn_implementation="dcmha_triton")
    assert_close(named(tokens).logits, expected, **TOLERANCE)


def test_gradient_checkpointing_leaves_the_gradients_as_they_are(stand_ins):
    tokens = random_tokens(2, 20)
    gradients = []
    for is_checkpointed in (False, True):
        model = tiny_model(attn_implementation="dcmha_triton").train()
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert (stand_ins.forward, stand_ins.backward) == (6, 4)
    for name, expected in gradients[0].items():
        assert_close(gradients[1][name], expected, atol=0, rtol=0)


def test_a_misspelt_form_is_refused_with_those_there_are():
    with pytest.raises(
        ValueError, match=r"implementation must be one of .*reference, .*compiled, triton.* got 'trition'"
    ):
        composed_attention(*make_inputs(10), implementation="trition")
    with pytest.raises(ValueError, match="attn_implementation='dcmha_trition' is not an attention implementation"):
        tiny_model(attn_implementation="dcmha_trition")


def test_operators_can_be_published_alone(tmp_path):
    """A copy of their folder imports neither this package nor Transformers."""
    shutil.copytree(
        Path(dcformer.__file__).parent / "ops", tmp_path / "kernels", ignore=shutil.ignore_patterns("__*__")
    )
    (tmp_path / "kernels" / "__init__.py").touch()
    code = """
import importlib, pkgutil, sys
import kernels
names = [module.name for module in pkgutil.iter_modules(kernels.__path__)]
for name in names:
    importlib.import_module(f"kernels.{name}")
assert "arguments" in names
print(sorted({name.partition(".")[0] for name in sys.modules} & {"dcformer", "transformers"}))
"""
    run = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr


def test_the_table_is_called_with_a_scaling_of_its_own(stand_ins):
    inputs = make_inputs(12)
    visibility = Visibility(12, 12)
    assert why_not_triton(*inputs, mask=visibility) is None
    found = triton_attention(*inputs, scaling=0.7, mask=visibility)
    assert_close(found, reference(*inputs, scaling=0.7), **TOLERANCE)
