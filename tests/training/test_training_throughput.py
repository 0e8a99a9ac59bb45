"""Operations of training per token, counted twice; tokens per second and their share of the hardware's peak."""

import pytest
import torch
from tiny_models import tiny_config, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from dcformer import DCFormerConfig
from dcformer.training import flops_per_token, gpu_peak_flops, throughput, visible_pairs


def counted_flops(variant: str, length: int, **overrides) -> float:
    """Matrix products of a forward pass per token, as torch counts them: every score, also those that are hidden."""
    model = tiny_model(variant, attn_implementation="eager", **overrides)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long), use_cache=False)
    return counter.get_total_flops() / length


@pytest.mark.parametrize(
    "variant",
    [
        "plain_gated_transformer",
        "plain_transformer_with_learned_positions",
        "grouped_query_attention",
        "wide_heads",
        "mlp_gate_and_one_global_in_four",
    ],
)
def test_plain_models_count_as_torch_counts_their_matrix_products(variant):
    length, plain = 24, {"compose_pre": False, "compose_post": False}
    config = tiny_config(variant, **plain)
    hidden_pairs = sum(
        length - visible_pairs(length, config.sliding_window if layer == "sliding_attention" else None) / length
        for layer in config.layer_types
    )
    hidden_flops = hidden_pairs * 4 * config.num_attention_heads * config.head_dim

    counted = counted_flops(variant, length, **plain)
    assert flops_per_token(config, length) == pytest.approx(3 * (counted - hidden_flops), rel=1e-6)


def compose_flops(length: int, **switches) -> float:
    """What composition adds to a forward pass of a token in one layer without a window."""
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
    assert compose_flops(length, compose_low_rank=False) == pytest.approx(4 * gate, abs=1)
    for one_of_two in ("compose_pre", "compose_post", "compose_query", "compose_key"):
        assert compose_flops(length, **{one_of_two: False}) == pytest.approx(2 * (low_rank + gate), abs=1)


def test_talking_heads_counts_two_matrices_over_heads():
    static = compose_flops(100, compose_static=True, compose_query=False, compose_key=False)

    assert static == pytest.approx(2 * 2 * 8 * 8 * 50.5, abs=1)


def test_groups_spare_part_of_the_low_rank_weights():
    whole, grouped = (compose_flops(100, compose_gate=False, compose_groups=groups) for groups in (1, 4))

    assert whole - grouped == pytest.approx(4 * 2 * 32 * 32 * 3 / 4, abs=1)


def test_shares_of_table_2_are_met():
    """Table 2: composition adds 4.8 % to the operations of the 1.4B shape, over all pairs; over those seen, less."""
    values = {"sliding_window": None, "vocab_size": 1}
    composed = DCFormerConfig.from_preset("dcformer-1.4b", **values)
    plain = DCFormerConfig.from_preset("dcformer-1.4b", **values, compose_pre=False, compose_post=False)
    share = flops_per_token(composed, 2048) / flops_per_token(plain, 2048) - 1

    # Half of the second term of its formula, 4 (2 R + 1) rho / ((12 + rho) head_dim) = 2.4 %, is for such pairs.
    assert 0.048 - 0.012 < share < 0.048


def test_windows_spare_the_keys_outside_them():
    assert visible_pairs(10, None) == 55
    assert visible_pairs(10, 1) == 10
    assert visible_pairs(10, 3) == sum(min(query + 1, 3) for query in range(10))
    assert visible_pairs(10, 99) == 55


def test_training_is_about_six_operations_per_parameter_and_token():
    config = DCFormerConfig.from_preset("dcformer-405m")
    matrices = 24 * 12 * 1024**2 + 50257 * 1024  # layers and output, without the embedding

    assert 6 * matrices < flops_per_token(config, 2048) < 1.25 * 6 * matrices


def test_the_clock_leaves_out_what_is_not_training(monkeypatch):
    times = iter([0.0, 10.0, 12.0, 13.0, 15.0, 16.0])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(times))
    clock = throughput.TrainingClock()  # at 0
    clock.start()  # at 10
    clock.lap()  # at 12
    assert clock.seconds == 2
    clock.lap()  # at 13
    clock.start()  # at 15, after an evaluation
    clock.lap()  # at 16
    assert clock.seconds == 4


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5, 494.5),
        ("NVIDIA H100 PCIe", 756, 378),
        ("NVIDIA A100-SXM4-80GB", 312, 156),
        ("NVIDIA L4", 121, 60),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("Some GPU", None, None),
    ],
)
def test_gpus_are_known_by_their_names(name, bf16, fp32):
    for precision, expected in (("bf16", bf16), ("fp32", fp32)):
        assert gpu_peak_flops(name, precision) == (None if expected is None else pytest.approx(1e12 * expected))
