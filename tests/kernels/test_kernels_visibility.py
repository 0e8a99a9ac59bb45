"""Which key a query sees: every backend against the rule at the head of `visibility_dcformer.py`, pair by pair."""

import contextlib
import functools

import pytest
import torch
from operator_inputs import DEVICE, VARIANTS, attend, library_of
from torch.testing import assert_close

from dcformer import Visibility


GENERATOR = torch.Generator().manual_seed(0)
SOME = torch.rand(2, 135, generator=GENERATOR) < 0.7  # (batch, key)
DENSE = torch.rand(1, 1, 70, 135, generator=GENERATOR) < 0.7  # (batch, 1, query, key)
DOCUMENTS = (torch.arange(135) // 40) % 3  # the first comes back
# Queries, keys and what is not the default: some blocks of queries, then the few of decoding.
CASES = {
    "causal": (70, 135, {}),
    "not causal": (70, 135, {"is_causal": False}),
    "window": (135, 135, {"sliding_window": 37}),
    "window on both sides": (70, 135, {"sliding_window": 37, "is_causal": False}),
    "before the last keys": (70, 135, {"query_offset": 11, "sliding_window": 60}),
    "padding": (40, 135, {"padding": SOME, "sliding_window": 60}),
    "dense": (70, 135, {"dense": DENSE, "is_causal": False}),
    "documents": (135, 135, {"sequence_ids": DOCUMENTS[None], "sliding_window": 60}),
    "one": (1, 135, {"sliding_window": 70}),
    "few": (3, 135, {"padding": SOME}),
    "few in a window": (4, 135, {"sliding_window": 5, "padding": SOME}),
    "few in a small window on both sides": (7, 135, {"sliding_window": 2, "is_causal": False}),
    "few with a dense mask": (3, 135, {"dense": DENSE[:, :, :3]}),
}


def sees(mask: Visibility, b: int, t: int, s: int) -> bool:
    """The rule, for row t of the queries and key s in row b of the batch."""
    p, window = t + mask.query_offset, mask.sliding_window
    seen = s <= p or not mask.is_causal
    seen = seen and (window is None or (p - s < window and s - p < window))
    seen = seen and (mask.padding is None or bool(mask.padding[b, s]))
    seen = seen and (mask.dense is None or bool(mask.dense[b, 0, t, s]))
    return seen and (mask.sequence_ids is None or bool(mask.sequence_ids[b, p] == mask.sequence_ids[b, s]))


@functools.cache
def expected_of(case: str) -> tuple[Visibility, torch.Tensor, torch.Tensor]:
    """The mask, values, and the mean of those that each query sees, (batch, query, channel)."""
    queries, keys, options = CASES[case]
    mask, batch = Visibility(queries, keys, **options), len(options.get("padding", "1"))
    rule = [[[sees(mask, b, t, s) for s in range(keys)] for t in range(queries)] for b in range(batch)]
    weights = torch.tensor(rule).double()
    value = torch.randn(batch, 1, keys, 3, generator=torch.Generator().manual_seed(1))
    return mask, value, weights / weights.sum(2, keepdim=True).clamp(min=1) @ value[:, 0].double()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", [*VARIANTS, "triton"])
def test_a_query_gets_the_values_of_the_keys_that_it_sees(form, case):
    mask, value, expected = expected_of(case)
    batch, queries, _ = expected.shape
    query, key = torch.zeros(batch, 2, queries, 4), torch.ones(batch, 1, value.shape[2], 4)  # all scores are alike
    name, _, instruction_set = form.partition("-")
    device = DEVICE if name == "triton" else "cpu"
    with library_of(instruction_set) if instruction_set else contextlib.nullcontext():
        states = (states.to(device) for states in (query, key, value))
        output = attend(name, *states, None, None, attention_mask=mask.to(device))
    assert_close(output.cpu().double(), expected[:, None].expand(output.shape), rtol=0, atol=5e-6)
