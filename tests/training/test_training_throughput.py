"""FLOPs of training per token, compared with an independent count, and the peak of GPUs."""

import pytest
import torch
from tiny_models import tiny_config, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from dcformer import DCFormerConfig
from dcformer.training import flops_per_token, peak_flops, throughput, visible_pairs


VARIANTS = ["plain_gated_transformer", "plain_transformer_with_learned_positions", "grouped_query_attention"]


@pytest.mark.parametrize("variant", [*VARIANTS, "mlp_gate_and_one_global_in_four"])
def test_plain_models_count_as_torch_counts_their_matrix_products(variant):
    length, plain = 24, {"compose_pre": False, "compose_post": False}
    config = tiny_config(variant, **plain)
    model = tiny_model(variant, attn_implementation="eager", **plain)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long), use_cache=False)
    # torch counts all scores, also masked ones.
    hidden_pairs = sum(
        length**2 - visible_pairs(length, config.sliding_window if layer == "sliding_attention" else None)
        for layer in config.layer_types
    )
    seen = counter.get_total_flops() - hidden_pairs * 4 * config.num_attention_heads * config.head_dim
    assert flops_per_token(config, length) == pytest.approx(3 * seen / length, rel=1e-6)


def compose_flops(length: int, **switches) -> float:
    """FLOPs that composition adds to the forward pass of a token in one layer without a window."""
    shape = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 1, "sliding_window": None}
    plain = DCFormerConfig(**shape, compose_pre=False, compose_post=False)
    return (flops_per_token(DCFormerConfig(**shape, **switches), length) - flops_per_token(plain, length)) / 3


def test_composition_counts_as_in_equation_11():
    hidden, heads, rank, length = 256, 8, 2, 100
    pairs = (length + 1) / 2  # keys that a query sees, on average
    low_rank = 2 * hidden * 2 * rank * heads + 2 * (2 * rank * heads) ** 2 + 4 * rank * heads * pairs
    gate = 2 * hidden * heads + 2 * heads * pairs
    assert compose_flops(length) == pytest.approx(4 * (low_rank + gate), abs=1)
    assert compose_flops(length, compose_gate=False) == pytest.approx(4 * low_rank, abs=1)
    for one_of_two in ("compose_pre", "compose_post", "compose_query", "compose_key"):
        assert compose_flops(length, **{one_of_two: False}) == pytest.approx(2 * (low_rank + gate), abs=1)
    static = compose_flops(length, compose_static=True, compose_query=False, compose_key=False)
    assert static == pytest.approx(2 * 2 * heads * heads * pairs, abs=1)
    whole, grouped = (compose_flops(length, compose_gate=False, compose_groups=groups) for groups in (1, 4))
    assert whole - grouped == pytest.approx(4 * 2 * 32 * 32 * 3 / 4, abs=1)


def test_windows_spare_the_keys_outside_them():
    for window in (1, 3, 99, None):
        assert visible_pairs(10, window) == sum(min(query + 1, window or 10) for query in range(10))


def test_automatic_precision_is_bf16_only_where_the_device_multiplies_in_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for on_cpu, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(throughput, "has_bfloat16_products", lambda on_cpu=on_cpu: on_cpu)
        assert [throughput.resolve_precision(name) for name in ("auto", "bf16", "fp32")] == [expected, "bf16", "fp32"]


def test_gpus_are_known_by_their_names():
    assert peak_flops("bf16", "NVIDIA H100 80GB HBM3") == 989.5e12
    assert peak_flops("fp32", "NVIDIA H100 PCIe") == 378e12
    assert peak_flops("fp32", "NVIDIA A100-SXM4-80GB") == 156e12
    # Slower GPUs, and parts of one, that have the same words in their names.
    assert peak_flops("bf16", "NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert peak_flops("bf16", "NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
