"""Attention on a GPU: the kernels are chosen, as exact as PyTorch, in memory that grows linearly with the length."""

import copy

import pytest
import torch
from operator_inputs import hold_errors_to_those_of_pytorch, make_inputs
from tiny_models import random_tokens, tiny_model

from dcformer.compose_dcformer import ComposeProjection
from dcformer.dcmha import composed_attention, compute_fused, explain_choice


pytestmark = pytest.mark.gpu
SHAPES = [
    ({"heads": 32, "channels": 128, "queries": 700}, {}),
    ({"heads": 16, "channels": 64, "queries": 1100, "batch": 2}, {"sliding_window": 300}),
    ({"heads": 32, "channels": 80, "queries": 700}, {"sliding_window": 256}),
    ({"heads": 24, "channels": 104, "queries": 333, "rank": 1}, {}),
    ({"heads": 40, "channels": 128, "queries": 333, "key_value_heads": 8}, {}),
    ({"heads": 52, "channels": 64, "queries": 333, "rank": 4}, {"sliding_window": 100}),
    ({"heads": 64, "channels": 64, "queries": 333, "groups": 4, "rank": 3}, {}),
    ({"heads": 64, "channels": 64, "queries": 333, "post": None}, {}),
]


@pytest.mark.parametrize("queries", [300, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernels_are_chosen_automatically(queries, dtype, device):
    inputs = make_inputs(queries=queries, keys=300).map(lambda x: x.to(device, dtype))
    assert explain_choice(*inputs) == [("triton", None)]


@pytest.mark.parametrize("variant", ["dcformer", "dcpythia", "all_branches", "grouped_query_attention"])
def test_logits_and_gradients_equal_those_of_the_cpu(variant, device):
    tokens, mask = random_tokens(2, 300), torch.ones(2, 300, dtype=torch.long)
    mask[0, :40] = 0
    found = []
    for where in ("cpu", device):
        model = tiny_model(variant).double().to(where).train()
        outputs = model(tokens.to(where), attention_mask=mask.to(where), labels=tokens.to(where))
        outputs.loss.backward()
        gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
        found.append((outputs.logits.detach().cpu()[mask == 1], gradients))
    torch.testing.assert_close(found[1], found[0], atol=1e-8, rtol=1e-7)


def test_memory_grows_linearly_with_the_length(device):
    def peak(length):
        inputs = make_inputs(batch=1, heads=16, queries=length, channels=32).map(lambda x: x.float().to(device))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        composed_attention(*inputs)
        return torch.cuda.max_memory_allocated() - before

    assert peak(8192) < 2.5 * peak(4096)


# Each takes seconds for the compilation of 17 kernels: the first two shapes, with full attention and with a window,
# stand for all in float16.
@pytest.mark.parametrize(
    ("dtype", "shape", "options"),
    [(torch.bfloat16, *each) for each in SHAPES] + [(torch.float16, *each) for each in SHAPES[:2]],
    ids=str,
)
def test_kernels_err_at_most_twice_as_much_as_pytorch(dtype, shape, options, device):
    hold_errors_to_those_of_pytorch(make_inputs(**{"batch": 1, **shape}).map(lambda x: x.to(device, dtype)), **options)


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_compose_weights_err_at_most_twice_as_much_as_pytorch(tokens, device):
    """Those of a decoding step, and with gradients those of training."""
    compose = ComposeProjection(512, 32, device=device, dtype=torch.bfloat16)
    for parameter in compose.parameters():
        parameter.data = torch.randn_like(parameter) / parameter.shape[2 if parameter.dim() == 5 else 0] ** 0.5
    exact, states = copy.deepcopy(compose).double(), torch.randn(1, tokens, 512, device=device).bfloat16()

    def results(module, states, trains, fused):
        with torch.set_grad_enabled(trains):
            stages = module(states.requires_grad_(trains), fused=fused)
            factors = [side.factors for stage in stages for side in (stage.query, stage.key)]
        if not trains:
            return factors
        return [*factors, *torch.autograd.grad(sum(each.sin().sum() for each in factors), [*module.parameters()])]

    for trains in (False, True):
        expected = results(exact, states.detach().double(), trains, fused=False)
        ours, theirs = (results(compose, states.detach(), trains, fused) for fused in (True, False))
        for one, other, exactly in zip(ours, theirs, [each.detach() for each in expected]):
            errors = [float((each.detach().double() - exactly).norm() / exactly.norm()) for each in (one, other)]
            assert errors[0] <= 2 * errors[1]


@torch.no_grad()
@pytest.mark.parametrize("variant", ["dcformer", "dcpythia", "plain_gated_transformer"])
def test_rotated_queries_and_keys_err_at_most_twice_as_much_as_pytorch(variant, device):
    model = tiny_model(variant, head_dim=80).to(device, torch.bfloat16)
    layer = model.model.layers[0].self_attn
    query, key = torch.randn(2, 2, 300, 4, 80, device=device, dtype=torch.bfloat16).transpose(2, 3)
    positions = model.model.rotary_emb(query, torch.arange(300, device=device)[None])
    fused = compute_fused("rotation", query.device, query, key, (layer.q_norm, layer.k_norm), positions)
    torch_alone = layer.rotate(query, key, positions)
    exact = layer.double().rotate(query.double(), key.double(), [each.double() for each in positions])
    for one, other, exactly in zip(fused, torch_alone, exact):
        errors = [float((each.double() - exactly).norm() / exactly.norm()) for each in (one, other)]
        assert errors[0] <= 2 * errors[1]
