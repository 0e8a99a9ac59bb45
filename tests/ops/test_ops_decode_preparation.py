"""The kernel that prepares a decode step, against the modules of the model."""

import pytest
import torch
from transformers import DynamicCache

from dcformer import DCFormerConfig
from dcformer.modeling_dcformer import DCFormerAttention


pytest.importorskip("triton")

from dcformer.ops.decode_preparation import JoinedProjection, join_weights, prepare_step


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sizes that no power of two fits, and every switch of the composition.
CASES = {
    "B2-T1-H6-D10": {"num_attention_heads": 6, "head_dim": 10},
    "B1-T2-H6-groups2-rank1": {"num_attention_heads": 6, "compose_groups": 2, "compose_rank": 1},
    "B1-T1-H6-served3-rank4-tanh": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "compose_rank": 4,
        "compose_activation": "gelu_pytorch_tanh",
    },
    "B1-T2-H3-partial-rotary-biases": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "num_attention_heads": 3,
        "attention_bias": True,
        "qk_norm": False,
    },
    "B2-T1-H4-keys-after-softmax-gates": {"compose_query": False, "compose_pre": False, "compose_low_rank": False},
    "B1-T1-H2-gates": {"num_attention_heads": 2, "compose_low_rank": False},
    "B2-T1-H4-queries-before-softmax": {"compose_key": False, "compose_post": False, "compose_gate": False},
}


def make_attention(case: str = "B1-T1-H2-gates", dtype: torch.dtype = torch.float32) -> DCFormerAttention:
    values = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8, **CASES[case]}
    attention = DCFormerAttention(DCFormerConfig(**values), 0)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            parameter.copy_(1 + 0.2 * torch.randn_like(parameter) if "norm" in name else torch.randn_like(parameter))
            if name.startswith(("qkv_proj", "compose.hidden", "compose.gate")):
                parameter.mul_(0.2)
    return attention.to(DEVICE, dtype)


def layout_of(attention: DCFormerAttention) -> JoinedProjection:
    config, compose = attention.config, attention.compose
    return JoinedProjection(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.compose_groups,
        config.compose_rank if config.compose_low_rank else 0,
        config.compose_gate,
        tuple(compose.slots),
    )


def make_step(attention: DCFormerAttention, batch: int, length: int, rows: int | None = None) -> dict:
    """Arguments of `prepare_step`, whose outputs hold NaN."""
    layout, dtype = layout_of(attention), attention.qkv_proj.weight.dtype
    hidden_states = torch.randn(batch, length, 24).to(DEVICE, dtype)
    rotary_size = int(attention.head_dim * attention.config.rope_parameters.get("partial_rotary_factor", 1.0))
    angles = torch.rand(batch, length, rotary_size) * 6
    angles = torch.cat([angles[..., : angles.shape[-1] // 2]] * 2, dim=-1).to(DEVICE)
    weights = [attention.qkv_proj.weight, attention.qkv_proj.bias, attention.compose.hidden_weight]
    weight, bias = join_weights(layout, *weights, attention.compose.gate_weight)
    keys, values = (
        torch.full((batch, layout.key_value_heads, rows or length, width), float("nan"))
        for width in (attention.head_dim + extra for extra in attention.config.compose_cache_channels)
    )
    norms = {}
    if attention.q_norm is not None:
        norms = {"query_norm": attention.q_norm.weight, "key_norm": attention.k_norm.weight}
        norms["norm_eps"] = attention.q_norm.eps
    return {
        "hidden_states": hidden_states,
        "projected": torch.nn.functional.linear(hidden_states, weight, bias),
        "layout": layout,
        "keys": keys.to(DEVICE, dtype),
        "values": values.to(DEVICE, dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "low_rank_weight": attention.compose.low_rank_weight,
        "compose_norm_eps": attention.compose.norm_eps,
        "activation": "gelu" if attention.config.compose_activation == "gelu" else "gelu_tanh",
        **norms,
    }


def run(step: dict, **changed) -> tuple[torch.Tensor, torch.Tensor]:
    return prepare_step(**{name: value for name, value in (step | changed).items() if name != "hidden_states"})


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, of the largest number."""
    assert value.shape == expected.shape
    return float((value - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    "case, dtype",
    [*((case, torch.float32) for case in CASES), ("B1-T2-H3-partial-rotary-biases", torch.float16)],
    ids=[*CASES, "B1-T2-H3-float16"],
)
@torch.no_grad()
def test_step_equals_the_modules(case, dtype):
    attention = make_attention(case, dtype)
    batch, length = (int(part[1:]) for part in case.split("-")[:2])
    step = make_step(attention, batch, length)
    query, factors = run(step)

    cache = DynamicCache()
    ordinary = attention._prepare(step["hidden_states"], (step["cos"], step["sin"]), cache)
    pairs = [(query, ordinary[0]), (step["keys"], cache.layers[0].keys), (step["values"], cache.layers[0].values)]
    sides = [stage.query.factors for stage in ordinary[3:] if stage is not None and stage.query is not None]
    assert len(factors) == len(sides)
    pairs += zip(factors, sides)
    # A few roundings of float32; in float16 that of the result and of the steps between which the model rounds.
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    assert max(error(value, expected) for value, expected in pairs) <= tolerance


@torch.no_grad()
def test_rows_go_to_their_positions_and_nowhere_else():
    step = make_step(make_attention(), batch=2, length=2, rows=7)
    rows = make_step(make_attention(), 2, 2)
    packed = {name: rows[name][:, :, :2] for name in ("keys", "values")}
    run(step, **packed)
    positions = torch.tensor([[4, 0], [6, 2]], device=DEVICE)
    run(step, positions=positions)
    for name, new in packed.items():
        expected = torch.full_like(step[name], float("nan"))
        for sequence in range(2):
            expected[sequence, :, positions[sequence]] = new[sequence]
        assert torch.equal(step[name].nan_to_num(99.0), expected.nan_to_num(99.0))


@torch.no_grad()
def test_tokens_follow_a_first_position_and_stop_at_the_last_row():
    step = make_step(make_attention(), batch=1, length=2, rows=3)
    run(step, positions=torch.tensor([2], device=DEVICE, dtype=torch.int32))
    assert step["keys"][:, :, 2].isfinite().all()
    assert step["keys"][:, :, :2].isnan().all()


@torch.no_grad()
def test_wide_rows_are_filled_with_zeros():
    step = make_step(make_attention(), batch=1, length=1)
    wide = torch.full((1, 2, 1, 40), float("nan"), device=DEVICE)
    run(step, keys=wide)
    used = step["layout"].row_channels(0)
    assert (wide[..., used:] == 0).all()
    assert wide.isfinite().all()


@torch.no_grad()
def test_rows_may_lie_beyond_two_to_the_31_elements():
    step = make_step(make_attention(dtype=torch.float16), batch=1, length=1)
    run(step)
    heads, width = step["keys"].shape[1], step["keys"].shape[3]
    last = 2**31 // (heads * width) + 1
    # Memory that nothing touches costs nothing.
    far = torch.empty(1, last + 1, heads, width, dtype=torch.float16, device=DEVICE).transpose(1, 2)
    run(step, keys=far, values=torch.empty_like(far), positions=torch.tensor([last], device=DEVICE))
    assert torch.equal(far[:, :, last], step["keys"][:, :, 0])


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"activation": "silu"}, "gelu, gelu_tanh, got 'silu'"),
        ({"positions": torch.tensor([0.0])}, "positions must be integers"),
        ({"low_rank_weight": None}, "low_rank_weight must be .*got None"),
        ({"cos": torch.ones(1, 1, 3)}, "cos and sin must be"),
        ({"keys": torch.ones(1, 6, 1, 8)}, "keys must be .*at least 15 channels"),
        ({"projected": torch.ones(1, 1, 8)}, "projected must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@torch.no_grad()
def test_what_does_not_fit_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        run(make_step(make_attention("B2-T1-H6-D10"), 1, 1), **changed)
