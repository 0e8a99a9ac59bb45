"""Models with the forms for GPUs: golden logits, gradients, generation; by the interpreter where there is no GPU."""

import pytest
import torch
from golden_runs import JAX_RUNS, TOLERANCE, TORCH_RUNS
from stand_ins import make_inputs
from test_golden import load_jax, load_torch
from tiny_models import random_tokens, tiny_model

from dcformer import Visibility
from dcformer.gpu.adapters import to_composition, to_mask
from dcformer.gpu.custom_ops import FlatCall, decode_op, forward_op
from dcformer.ops import compiled as compiled_module


RUNS = [*(name for name in JAX_RUNS if "_" not in name), *TORCH_RUNS]
# Of two layers; each of the others, of four and eight, takes the interpreter up to ten seconds.
SHALLOW = [name for name in RUNS if name in ("A3", "A4", "A5", "A6", "B2_dcpythia")]


@pytest.fixture
def not_compiled(monkeypatch):
    """What the compiler makes of these operations is looked at elsewhere; here it would compile for a minute."""
    monkeypatch.setattr(compiled_module, "compiled", lambda function: function)


@torch.no_grad()
@pytest.mark.parametrize(
    "implementation, name",
    [("dcmha_triton", name) for name in SHALLOW] + [("dcmha_compiled", name) for name in RUNS],
)
def test_golden_logits(fixtures, implementation, name, not_compiled):
    load = load_jax if name in JAX_RUNS else load_torch
    model, tokens, expected = load(fixtures, name)
    model.set_attn_implementation(implementation)
    torch.testing.assert_close(model(tokens[:1]).logits, expected[:1], atol=TOLERANCE, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("implementation", ["dcmha_triton", "dcmha_compiled"])
def test_generation_gives_the_logits_of_the_default(cache, implementation, not_compiled):
    model, tokens = tiny_model("grouped_query_attention"), random_tokens(1, 9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    arguments |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(tokens, **arguments)
    model.set_attn_implementation(implementation)
    # Compiling the step would take longer than the kernels.
    found = model.generate(tokens, cache_implementation=cache, disable_compile=True, **arguments)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "implementation, recomputes", [("dcmha_triton", True), ("dcmha_compiled", False), ("dcmha_compiled", True)]
)
def test_gradients_equal_those_of_the_default(implementation, recomputes, not_compiled):
    model, tokens = tiny_model().train(), random_tokens(1, 12)

    def gradients():
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = gradients()
    model.set_attn_implementation(implementation)
    if recomputes:
        model.gradient_checkpointing_enable()
    for name, found in gradients().items():
        # Sums of float32 in another order.
        assert (found - expected[name]).abs().max() <= 2e-5 * expected[name].abs().max(), name


@pytest.mark.parametrize("queries, keys", [(5, 5), (1, 6)], ids=["forward", "decode"])
def test_the_kernels_are_operators_of_torch_in_every_respect(queries, keys):
    differs = queries > 1
    sizes = {"batch": 1, "heads": 2, "key_value_heads": 1, "has_static": False}
    inputs = make_inputs(queries, keys, **sizes, needs_gradient=differs)
    mask = to_mask(Visibility(queries, keys, sliding_window=3))
    call = FlatCall.of(*inputs[:3], *(to_composition(stage) for stage in inputs[3:]), mask, 0.3)
    if differs:
        torch.library.opcheck(forward_op, tuple(call))
    else:
        torch.library.opcheck(decode_op, (*call, None, None, None, None))
