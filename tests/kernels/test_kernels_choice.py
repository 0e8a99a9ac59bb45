"""The kernels in the operator's table: as operators of torch, by name in models, and selected automatically."""

import contextlib
import functools

import numpy as np
import pytest
import torch
from golden_runs import JAX_RUNS, TORCH_RUNS, convert_jax
from golden_runs import TOLERANCE as GOLDEN_TOLERANCE
from operator_inputs import CASES, DEVICE, Case, make_inputs
from reference import as_visibility
from tiny_models import random_tokens, tiny_model
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from dcformer import ComposeWeights, Visibility, composed_attention
from dcformer.dcmha import AttentionInputs, plain_attention
from dcformer.kernels.call import Call
from dcformer.kernels.cpu import cpu_backend as native
from dcformer.kernels.triton import attention_decode as decode
from dcformer.kernels.triton import attention_forward as forward
from dcformer.kernels.triton import triton_backend as triton_form
from dcformer.kernels.triton.triton_backend import decode_op, forward_op


triton = functools.partial(composed_attention, implementation="triton")
# Both compute in float32, in another order.
TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}


def inputs_of(queries, keys=None, dtype=torch.float32, **changes):
    inputs = make_inputs(**{"batch": 1, "heads": 2, "channels": 8, "queries": queries, "keys": keys, **changes})
    return inputs.map(lambda tensor: tensor.to(DEVICE, dtype))


def call_of(queries, keys=None, leaves=False, **changes):
    inputs = inputs_of(queries, keys, **changes)
    inputs = inputs.leaves() if leaves else inputs
    return Call.of(AttentionInputs(*inputs, 0.3, Visibility(queries, keys or queries, sliding_window=5)))


def test_the_operators_pass_torchs_own_check():
    rules = ("test_schema", "test_faketensor")
    call = call_of(3, 4)
    output, log_sums = forward_op(*call)
    torch.library.opcheck(
        torch.ops.dcformer.composed_backward, (torch.ones_like(output), *call, log_sums), test_utils=rules
    )
    torch.library.opcheck(decode_op, (*call_of(2, 4), None, None), test_utils=rules)
    rules = (*rules, "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(forward_op, tuple(call_of(3, 4, leaves=True)), test_utils=rules)


BLOCKS = Case({"queries": 600, "keys": 700, "key_value_heads": 2, "value_channels": 5}, {"sliding_window": 90})
COUNTED = ["bidirectional_window_5", "left_padding", "multi_query_scaling", "two_groups_grouped_query_wide_values"]
COUNTED += ["rank_3", "one_head", "groups_of_one_head", "neither", "static_and_query_gate", "one_query_grouped_query"]


@pytest.mark.parametrize("case", [*map(CASES.get, COUNTED), BLOCKS], ids=[*COUNTED, "blocks"])
def test_the_operators_count_flops_as_plain_pytorch_does(case):
    """On no device, where masks have no values that spare anything."""
    inputs, options = case.build()
    inputs = inputs.map(lambda tensor: tensor.to("meta", torch.float32)).leaves()
    band = options.get("is_causal", True), options.get("sliding_window")
    mask = as_visibility(options.get("attention_mask"), inputs.query.shape[2], inputs.key.shape[2], *band).to("meta")
    arguments = AttentionInputs(*inputs, 1.0, mask)
    call, plain = Call.of(arguments), functools.partial(plain_attention, arguments)
    counts = []
    for attend in (plain, lambda: native.forward_op(*call)[0], lambda: forward_op(*call)[0]):
        with FlopCounterMode(display=False) as forwards:
            output = attend()
        with FlopCounterMode(display=False) as backwards:
            output.sum().backward()
        counts.append((forwards.get_total_flops(), backwards.get_total_flops()))
    assert counts[0] == counts[1] == counts[2]
    with torch.no_grad(), FlopCounterMode(display=False) as forwards:
        native.attention_op(*call)
        decode_op(*call, None, None)
    assert forwards.get_total_flops() == 2 * counts[0][0]


def test_one_graph_holds_forward_and_backward_of_any_length():
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    def attend(*inputs):
        return triton(*inputs, sliding_window=5).sin()

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=count)
    for queries in (9, 13):
        inputs = inputs_of(queries).leaves()
        tensors = list(inputs.tensors().values())
        expected = torch.autograd.grad(attend(*inputs).sum(), tensors)
        for one, other in zip(torch.autograd.grad(compiled(*inputs).sum(), tensors), expected):
            assert_close(one, other, **TOLERANCE)
    assert len(graphs) == 1


def test_a_second_derivative_is_refused_in_a_sentence():
    inputs = inputs_of(12).leaves()
    (gradient,) = torch.autograd.grad(triton(*inputs).sin().sum(), inputs[:1], create_graph=True)
    with pytest.raises(ValueError, match=r"Second derivatives .* implementation='plain'"):
        gradient.sum().backward()


class Forget(torch.autograd.Function):
    """The input, which has no gradient."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.parametrize("form", ["triton", "native"] if DEVICE == "cpu" else ["triton"])
def test_an_output_without_a_gradient_gives_none(form):
    inputs = inputs_of(10).leaves()
    output = composed_attention(*inputs, implementation=form)
    (Forget.apply(output).sum() + 3 * inputs.query.sum()).backward()
    assert (inputs.query.grad == 3).all() and inputs.key.grad is None


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (lambda inputs: inputs.to(torch.float64), {}, "not float64"),
        (lambda inputs: inputs._replace(query=inputs.query.half()), {}, "float16, float32, float32"),
        (lambda inputs: inputs, {"dropout": 0.1}, "dropout"),
        (lambda inputs: inputs._replace(post=ComposeWeights(static=torch.zeros(2, 1, 1), groups=2)), {}, "groups"),
        (lambda inputs: inputs_of(10, channels=257), {}, "256 channels"),
        (lambda inputs: inputs_of(10, dtype=torch.bfloat16), {}, "interpreter multiplies no bfloat16"),
        (lambda inputs: inputs_of(2, heads=65), {}, "64 heads of a group at most, not 65"),
        (lambda inputs: inputs_of(2, rank=9), {}, "rank 8 at most, not 9"),
        (lambda inputs: inputs, {"attention_mask": torch.zeros(1, 1, 10, 10, requires_grad=True)}, "gradient"),
        (lambda inputs: inputs, {"attention_mask": torch.ones(1, 2, 10, 10).bool()}, "between heads"),
    ],
)
def test_a_choice_by_name_that_cannot_run_says_why(change, options, reason):
    with pytest.raises(ValueError, match=rf"'triton' cannot run here: .*{reason}"):
        triton(*change(inputs_of(10)), **options)


def test_machines_without_triton_or_a_gpu_that_it_compiles_for_are_refused(monkeypatch):
    monkeypatch.setattr(triton_form, "_why_not_on", triton_form._why_not_on.__wrapped__)  # asks each time
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in triton_form._why_not_here("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", {0: (7, 5), 1: (8, 0)}.get)
    assert "compute capability 7.5" in triton_form._why_not_here("cuda", 0)
    assert triton_form._why_not_here("cuda", 1) is None
    assert triton_form._why_not_here("mps", None) == "the tensors are on mps"
    for version, reason in ((None, "pip install triton"), ("3.3.1", r"3\.3\.1 is too old")):
        monkeypatch.setattr(triton_form, "triton_version", lambda version=version: version)
        with pytest.raises(ValueError, match=reason):
            triton(*inputs_of(10))
    monkeypatch.setattr(triton_form, "triton_version", lambda: "3.6")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "the tensors are on the CPU" in triton_form._why_not_here("cpu", None)


def test_transforms_of_functions_are_refused():
    query, *rest = inputs_of(10)
    with pytest.raises(ValueError, match=r"torch\.func does not see through it"):
        torch.func.grad(lambda query: triton(query, *rest).sum())(query)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="no derivatives in forward mode"):
        triton(torch.autograd.forward_ad.make_dual(query, query), *rest)


@torch.no_grad()
@pytest.mark.parametrize("name", ["A6", "B2_dcpythia"])
def test_golden_logits_of_the_authors(name, golden, tmp_path):
    folder, field = golden / ("A_jax" if name in JAX_RUNS else "B_torch") / name, TORCH_RUNS.get(name, "logits")
    if name in JAX_RUNS:
        convert_jax(golden, name, tmp_path / "converted")
    source = tmp_path / "converted" if name in JAX_RUNS else folder
    model, arrays = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), np.load(folder / "io.npz")
    model.to(DEVICE).set_attn_implementation("dcmha_triton")
    tokens, expected = torch.from_numpy(arrays["tokens"][:1]).long(), torch.from_numpy(arrays[field][:1])
    assert_close(model(tokens.to(DEVICE)).logits.cpu(), expected, atol=GOLDEN_TOLERANCE, rtol=0)


@torch.no_grad()
def test_models_generate_the_same_by_name():
    model = tiny_model("grouped_query_attention", num_hidden_layers=1).to(DEVICE)
    tokens = random_tokens(1, 9).to(DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    arguments |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(tokens, **arguments)
    model.set_attn_implementation("dcmha_triton")
    # Compiling the step would take longer than the kernels.
    found = model.generate(tokens, cache_implementation="static", disable_compile=True, **arguments)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-5, rtol=1e-5)


@pytest.fixture
def unasked(monkeypatch):
    """A CPU stands for a CUDA device, where the kernels are selected automatically."""
    monkeypatch.setattr(triton_form.TritonBackend, "device_type", DEVICE)
    monkeypatch.setattr(triton_form, "FEWEST_SCORES_IN_A_GRAPH", 0)
    torch._dynamo.reset()


@pytest.fixture
def ran(unasked, monkeypatch):
    """The numbers of queries that the kernels were run with."""
    found: list[int] = []

    def watched(function):
        def run(call, *arguments):
            found.append(call.query.shape[2])
            return function(call, *arguments)

        return run

    monkeypatch.setattr(forward, "composed_forward", watched(forward.composed_forward))
    monkeypatch.setattr(decode, "composed_decode", watched(decode.composed_decode))
    return found


@pytest.mark.parametrize(
    ("options", "context"),
    [
        ({"mode": "reduce-overhead"}, torch.inference_mode),
        ({"backend": "eager", "dynamic": True}, contextlib.nullcontext),
    ],
    ids=str,
)
def test_what_is_compiled_before_it_ever_ran_runs_on_the_kernels(options, context, ran):
    compiled = torch.compile(lambda *inputs: composed_attention(*inputs), fullgraph=True, **options)
    with context():
        for queries in (13, 1):
            inputs = inputs_of(queries, 14, batch=2)
            assert_close(compiled(*inputs), composed_attention(*inputs, implementation="plain"), **TOLERANCE)
    assert ran == [13, 1]


@pytest.mark.parametrize(("limit", "expected"), [(2 * 2 * 13 * 5, [13, 1]), (2 * 2 * 13 * 5 + 1, [1])])
def test_small_calls_in_a_compiled_graph_run_on_pytorch_but_for_decoding(limit, expected, ran, monkeypatch):
    monkeypatch.setattr(triton_form, "FEWEST_SCORES_IN_A_GRAPH", limit)
    attend = functools.partial(composed_attention, sliding_window=5)
    compiled = torch.compile(lambda *inputs: attend(*inputs), fullgraph=True, backend="eager", dynamic=False)
    for queries in (13, 1):
        compiled(*inputs_of(queries, 13, batch=2))
    assert ran == expected
    attend(*inputs_of(13, batch=2))
    assert ran == [*expected, 13]


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["dcmha_triton", "eager"])
def test_a_model_exported_for_every_length_holds_the_kernels_only_if_they_are_named(implementation, unasked):
    length = torch.export.Dim("length", min=2, max=64)
    inputs = {"input_ids": random_tokens(1, 13).to(DEVICE), "use_cache": False}
    shapes = {"input_ids": {1: length}, "use_cache": None}
    model = tiny_model(num_hidden_layers=1, attn_implementation=implementation).to(DEVICE)
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=True)
    assert ("dcformer." in str(exported.graph)) == (implementation != "eager")
