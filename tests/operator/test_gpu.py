"""The same results on a GPU as on a CPU, in memory that grows linearly with the length."""

import pytest
import torch
from operator_inputs import make_inputs
from tiny_models import random_tokens, tiny_model

from dcformer import composed_attention


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
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


def test_memory_grows_linearly_with_the_length():
    def peak(length):
        inputs = make_inputs(batch=1, heads=16, queries=length, channels=32).map(lambda x: x.float().to(DEVICE))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        composed_attention(*inputs)
        return torch.cuda.max_memory_allocated() - before

    assert peak(8192) < 2.5 * peak(4096)
