"""The same results on a GPU as on a CPU, in memory that grows linearly with the length."""

import pytest
import torch
from operator_inputs import hold_errors_to_those_of_pytorch, make_inputs
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"heads": 32, "channels": 128, "queries": 700}, {}),
        ({"heads": 32, "channels": 80, "queries": 700}, {"sliding_window": 256}),
        ({"heads": 16, "channels": 64, "queries": 1100, "batch": 2}, {"sliding_window": 300}),
        ({"heads": 24, "channels": 104, "queries": 333, "rank": 1}, {}),
        ({"heads": 40, "channels": 128, "queries": 333, "key_value_heads": 8}, {}),
        ({"heads": 52, "channels": 64, "queries": 333, "rank": 4}, {"sliding_window": 100}),
        ({"heads": 64, "channels": 64, "queries": 333, "groups": 4, "rank": 3}, {}),
        ({"heads": 64, "channels": 64, "queries": 333, "post": None}, {}),
    ],
    ids=str,
)
def test_kernels_err_at_most_twice_as_much_as_pytorch(shape, options, dtype):
    hold_errors_to_those_of_pytorch(make_inputs(**{"batch": 1, **shape}).map(lambda x: x.to(DEVICE, dtype)), **options)


def test_memory_grows_linearly_with_the_length():
    def peak(length):
        inputs = make_inputs(batch=1, heads=16, queries=length, channels=32).map(lambda x: x.float().to(DEVICE))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        composed_attention(*inputs)
        return torch.cuda.max_memory_allocated() - before

    assert peak(8192) < 2.5 * peak(4096)
