"""The same results on a GPU as on a CPU, and ids outside the embedding that leave the GPU unharmed."""

import pytest
import torch
from operator_inputs import make_inputs
from tiny_models import random_tokens, tiny_model

from dcformer import composed_attention


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = "cuda"


@pytest.mark.parametrize("variant", ["dcformer", "dcpythia", "all_branches", "grouped_query_attention"])
def test_logits_and_gradients_equal_those_of_the_cpu(variant):
    tokens, mask = random_tokens(2, 300), torch.ones(2, 300, dtype=torch.long)
    mask[0, :40] = 0
    found = []
    for device in ("cpu", DEVICE):
        model = tiny_model(variant).double().to(device).train()
        outputs = model(tokens.to(device), attention_mask=mask.to(device), labels=tokens.to(device))
        outputs.loss.backward()
        gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
        found.append((outputs.logits.detach().cpu()[mask == 1], gradients))
    torch.testing.assert_close(found[1], found[0], atol=1e-8, rtol=1e-7)


@torch.no_grad()
def test_generation_is_the_same_with_every_cache():
    model, tokens = tiny_model().to(DEVICE), random_tokens(3, 9).to(DEVICE)
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens, use_cache=False, **arguments)
    for implementation in (None, "static", "offloaded"):
        assert torch.equal(model.generate(tokens, cache_implementation=implementation, **arguments), expected)


def test_an_id_outside_the_embedding_leaves_the_device_usable():
    model = tiny_model().to(DEVICE)
    with pytest.raises(ValueError, match="Token id 67"):
        model(torch.tensor([[1, 67]], device=DEVICE))
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 66]], device=DEVICE)).logits).all()


def test_memory_grows_linearly_with_the_length():
    def peak(length):
        inputs = make_inputs(batch=1, heads=16, queries=length, channels=32).map(lambda x: x.float().to(DEVICE))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        composed_attention(*inputs)
        return torch.cuda.max_memory_allocated() - before

    assert peak(8192) < 2.5 * peak(4096)
