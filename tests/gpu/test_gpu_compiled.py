"""The compiled torch form through the operator and in models, against the reference and the other forms."""

import functools

import pytest
import torch
from operator_inputs import (
    MASKED_CASES,
    ONE_QUERY_CASES,
    SHAPED_CASES,
    VECTORISED_CASES,
    Case,
    attend,
    float_mask,
    make_inputs,
    value_and_gradients,
)
from test_parallel import assert_near, run_in_two_processes
from tiny_models import random_tokens, tiny_model
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from dcformer import Visibility
from dcformer.dcmha import composed_attention_reference
from dcformer.gpu import compiled as adapter
from dcformer.ops import compiled as compiled_module


# float64 against float64: sums of some hundred terms of order 1 to 10 in another order, and those of gradients.
EXACT = {"rtol": 1e-11, "atol": 1e-11}
CASES = MASKED_CASES | SHAPED_CASES | VECTORISED_CASES
CASES |= {f"one_query_{name}": case for name, case in ONE_QUERY_CASES.items()}
COMPILED = "dcmha_compiled"


@pytest.fixture
def not_compiled(monkeypatch):
    """The same functions, run by torch operation by operation: whether the compiler is right shows elsewhere."""
    monkeypatch.setattr(compiled_module, "compiled", lambda function: function)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_value_and_gradients_equal_the_reference(case: Case, not_compiled):
    inputs, options = case.build()
    without_chunks = {name: option for name, option in options.items() if name != "chunk_size"}
    exact, exact_gradients = value_and_gradients(composed_attention_reference, inputs, **without_chunks)
    options.setdefault("chunk_size", 8)
    form = functools.partial(attend, "compiled", **options)
    output, gradients = value_and_gradients(form, inputs)
    assert_close(output, exact, **EXACT)
    for name, expected in exact_gradients.items():
        assert_close(gradients[name], expected, msg=name, **EXACT)
    # In float32 the error is some units of 2e-7 for outputs of order 1 to 10.
    output, _ = value_and_gradients(form, inputs.to(torch.float32))
    assert (output - exact).square().mean().sqrt() <= 2e-6 * max(1.0, float(exact.square().mean().sqrt()))


def test_a_floating_point_mask_that_is_written_to_hides_other_keys(not_compiled):
    inputs, mask = make_inputs(), float_mask(2, 4, 20, 20)
    for shift in (0, 3):
        mask.copy_(mask.roll(shift, dims=3))
        expected = composed_attention_reference(*inputs, attention_mask=mask)
        assert_close(attend("compiled", *inputs, attention_mask=mask, chunk_size=8), expected, **EXACT)


def test_a_machine_without_a_compiler_is_refused_with_the_reason():
    adapter._why_no_compiler.cache_clear()
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ValueError, match=r"'compiled' cannot run here: .*no C\+\+ compiler; leave it out"),
    ):
        attend("compiled", *make_inputs())
    adapter._why_no_compiler.cache_clear()


@pytest.mark.parametrize("variant", ["dcpythia", "all_branches", "grouped_query_attention"])
@torch.no_grad()
def test_logits_and_generated_tokens_equal_those_of_eager(variant, not_compiled):
    model, tokens = tiny_model(variant), random_tokens(2, 20)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected, generated = model(tokens, attention_mask=mask).logits, model.generate(tokens, **options)
    model.set_attn_implementation(COMPILED)
    assert model.config._attn_implementation == COMPILED
    # Sums of float32 in another order.
    assert_close(model(tokens, attention_mask=mask).logits[mask == 1], expected[mask == 1], rtol=1e-5, atol=2e-5)
    for cache in (None, "static"):
        assert torch.equal(model.generate(tokens, cache_implementation=cache, **options), generated)


def gradients_of(model, tokens):
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_gradients_equal_those_of_eager_with_and_without_checkpointing(not_compiled):
    model, tokens = tiny_model().double().train(), random_tokens(2, 40)
    expected = gradients_of(model, tokens)
    model.set_attn_implementation(COMPILED)
    for _ in range(2):
        for name, gradient in gradients_of(model, tokens).items():
            assert_close(gradient, expected[name], rtol=1e-6, atol=1e-9, msg=name)  # the loss is computed in float32
        model.gradient_checkpointing_enable({"use_reentrant": False})


def test_a_model_compiled_whole_takes_it_in_and_knows_all_lengths_from_the_second(not_compiled):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    model = tiny_model(num_hidden_layers=1, attn_implementation=COMPILED)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    counts = []
    for length in (9, 20, 7):
        tokens = random_tokens(2, length)
        logits = compiled(tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        with torch.no_grad():
            expected = model(tokens, use_cache=False).logits
        assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        counts.append(len(graphs))
    assert counts == [1, 2, 2]


def learns_in_two_processes():
    """A step of each process's own rows gives the gradients of all rows, replicated (DDP) and sharded (FSDP2)."""
    tokens = random_tokens(2, 21)
    expected = gradients_of(tiny_model().double().train(), tokens)
    rows = tokens[dist.get_rank() :][:1]
    for shard in (False, True):
        model = tiny_model(attn_implementation=COMPILED).double().train()
        if shard:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
            found = gradients_of(model, rows)
            found = {name: gradient.full_tensor() for name, gradient in found.items()}
        else:
            replicated = DistributedDataParallel(model)
            replicated(input_ids=rows, labels=rows, use_cache=False).loss.backward()
            found = {name: parameter.grad for name, parameter in model.named_parameters()}
        for name, gradient in found.items():
            assert_near(gradient, expected[name], name, 1e-6)  # of losses in float32


def test_two_processes_learn_what_one_does(not_compiled):
    run_in_two_processes(learns_in_two_processes)


def test_a_compiler_that_fails_is_a_reason_and_not_an_error(monkeypatch):
    def broken(function, **options):
        def call(*arguments):
            raise RuntimeError("Failed to find C compiler. Please specify via CC.\nmore lines")

        return call

    assert adapter.why_compiling_fails(torch.device("cpu")) is None
    monkeypatch.setattr(torch, "compile", broken)
    reason = adapter.why_compiling_fails(torch.device("cpu"))
    assert reason == (
        "torch.compile fails on this device (RuntimeError: Failed to find C compiler. Please specify via CC.)"
    )


def test_the_automatic_choice_leaves_few_queries_to_other_forms():
    def reason(queries):
        inputs = make_inputs(batch=1, queries=queries, keys=20)
        mask = Visibility(queries, 20)
        return adapter.why_not_unasked(*inputs, mask=mask, dropout=0.0)

    assert reason(15) == "it copies keys and values, which pays from 16 queries on"
    assert reason(16) is None
