"""DCMultiheadAttention: equal to torch's module where it starts as identity, the paper's formulas where it composes."""

import copy
import inspect
import math
import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dcformer import DCMultiheadAttention


# Two orders of summation in float32, of outputs near 1.
CLOSE = {"rtol": 0, "atol": 1e-5}
BATCH, QUERIES, KEYS, WIDTH, HEADS = 3, 7, 9, 32, 4


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def torch_module(**options):
    """With weights of ordinary size, biases too."""
    module = nn.MultiheadAttention(WIDTH, HEADS, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed) / math.sqrt(WIDTH))
    return module


def composing(**options):
    """A module whose composition is strong enough that no part of it goes unnoticed."""
    module = DCMultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            fan_in = parameter.shape[2] if parameter.dim() == 5 else parameter.shape[-1 if parameter.dim() < 3 else 0]
            parameter.copy_(normal(*parameter.shape, seed=seed) / math.sqrt(fan_in))
    return module


def sequences(keys=KEYS, key_width=WIDTH, value_width=WIDTH):
    """Query, key and value with the batch first."""
    shapes = (QUERIES, WIDTH), (keys, key_width), (keys, value_width)
    return [normal(BATCH, *shape, seed=seed) for seed, shape in enumerate(shapes)]


# Every query sees key 0, since torch's module gives nan to one that sees none.
PADDING = torch.arange(KEYS) >= torch.tensor([[9], [4], [6]])  # (batch, key)
PAIRS = (normal(BATCH * HEADS, QUERIES, KEYS, seed=3) > 0.5).index_fill(2, torch.tensor([0]), False)
BIAS = normal(BATCH * HEADS, QUERIES, KEYS, seed=4)
FLOAT_PADDING = normal(BATCH, KEYS, seed=5).masked_fill(PADDING, -math.inf)
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "float_padding": {"key_padding_mask": FLOAT_PADDING},
    "pairs": {"attn_mask": PAIRS[0]},
    "bias": {"attn_mask": BIAS[0]},
    "padding_and_pairs": {"key_padding_mask": PADDING, "attn_mask": PAIRS},
    "float_padding_and_pairs": {"key_padding_mask": FLOAT_PADDING, "attn_mask": PAIRS[0]},
    "float_padding_and_bias": {"key_padding_mask": FLOAT_PADDING, "attn_mask": BIAS},
}


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("average", [True, False], ids=["averaged", "every_head"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_copy_of_torchs_module_computes_the_same(mask, average):
    for batch_first in (True, False):
        theirs = torch_module(batch_first=batch_first)
        ours = DCMultiheadAttention.from_torch(theirs, static=True)
        inputs = sequences() if batch_first else [states.transpose(0, 1) for states in sequences()]
        options = {**MASKS[mask], "average_attn_weights": average}
        expected = theirs(*inputs, **options)
        assert_close(ours(*inputs, **options), expected, **CLOSE)
        without_weights, nothing = ours(*inputs, **MASKS[mask], need_weights=False)
        assert nothing is None
        assert_close(without_weights, expected[0], **CLOSE)
    unbatched = {
        name: tensor[0] if name == "key_padding_mask" else tensor[:HEADS] if tensor.dim() == 3 else tensor
        for name, tensor in MASKS[mask].items()
    }
    inputs = [states[0] for states in sequences()]
    options = {**unbatched, "average_attn_weights": average}
    assert_close(ours(*inputs, **options), theirs(*inputs, **options), **CLOSE)


@pytest.mark.parametrize("off", [{}, {"pre": False, "post": False}], ids=["identity", "no_composition"])
@pytest.mark.parametrize("widths", [{}, {"kdim": 24, "vdim": 40}, {"vdim": 40, "bias": False}], ids=str)
def test_the_state_of_torchs_module_lacks_only_the_composition(widths, off):
    theirs = torch_module(batch_first=True, **widths)
    ours = DCMultiheadAttention(WIDTH, HEADS, batch_first=True, identity=True, **widths, **off)
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert unexpected == [] and missing == [f"compose.{name}" for name, _ in ours.compose.named_parameters()]
    inputs = sequences(KEYS, widths.get("kdim", WIDTH), widths.get("vdim", WIDTH))
    assert_close(ours(*inputs), theirs(*inputs), **CLOSE)


def position_maps(compose, states, slot, gate_weight, hidden_weight):
    """Equations 5 and 6, position by position: (batch, length, heads in, heads out)."""
    hidden = nn.functional.gelu(states @ hidden_weight[:, 0, slot])
    w1, w2 = torch.einsum("blk,krh->blrh", hidden, compose.low_rank_weight[0, slot]).split(compose.rank, dim=2)
    w1 = w1 / (w1.pow(2).mean(-1, keepdim=True) + compose.norm_eps).sqrt()
    gates = torch.tanh(states @ gate_weight[:, 0].unflatten(1, (4, HEADS))[:, slot])
    return torch.einsum("blrj,blrh->bljh", w1, w2) + torch.diag_embed(gates)


@pytest.mark.parametrize("key_width", [WIDTH, 24], ids=["one_width", "other_width"])
def test_cross_attention_takes_query_wise_weights_from_the_query_and_key_wise_from_the_key(key_width):
    module = composing(kdim=key_width, vdim=key_width)
    # In one case the key has the shape of the query and is another tensor.
    query, key, value = sequences(KEYS if key_width < WIDTH else QUERIES, key_width, key_width)
    compose = module.compose
    of_key = compose.hidden_weight, compose.gate_weight
    if key_width == WIDTH:
        projections = module.in_proj_weight.chunk(3)
    else:
        projections = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        of_key = compose.key_hidden_weight, compose.key_gate_weight
    q, k, v = (
        (states @ weight.T + bias).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for states, weight, bias in zip((query, key, value), projections, module.in_proj_bias.chunk(3))
    )

    def composed(a, stage):
        """Equation 7 on (batch, heads, query, key)."""
        by_query = position_maps(compose, query, 2 * stage, compose.gate_weight, compose.hidden_weight)
        by_key = position_maps(compose, key, 2 * stage + 1, of_key[1], of_key[0])
        return a + torch.einsum("bjts,btjh->bhts", a, by_query) + torch.einsum("bjts,bsjh->bhts", a, by_key)

    weights = composed(composed(q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS), 0).softmax(-1), 1)
    expected = (weights @ v).transpose(1, 2).flatten(2) @ module.out_proj.weight.T + module.out_proj.bias
    output, given = module(query, key, value, average_attn_weights=False)
    assert_close(given, weights, rtol=0, atol=1e-4)  # composed weights reach 10 here
    assert_close(output, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mask", ["none", "padding_and_pairs", "float_padding_and_bias"])
def test_the_same_without_weights_and_with_a_copy_of_the_query_as_the_key(mask):
    module, masks = composing(static=True, groups=2, rank=1), MASKS[mask]
    output, weights = module(*sequences(), **masks, average_attn_weights=False)
    assert weights.min() < 0 and (weights.sum(-1) - 1).abs().max() > 0.1
    assert_close(module(*sequences(), **masks, need_weights=False)[0], output, rtol=0, atol=1e-4)
    x = normal(BATCH, QUERIES, WIDTH)
    assert_close(module(x, x.clone(), x.clone()), module(x, x, x), **CLOSE)


def test_causality_and_window_hide_what_they_say_unless_a_mask_decides():
    module, x = composing(is_causal=True, sliding_window=3), normal(BATCH, QUERIES, WIDTH)
    _, weights = module(x, x, x, average_attn_weights=False)
    age = torch.arange(QUERIES)[:, None] - torch.arange(QUERIES)
    assert torch.equal(weights.ne(0).any((0, 1)), (age >= 0) & (age < 3))
    module = composing()
    by_mask = module(x, x, x, attn_mask=age < 0)
    assert_close(module(x, x, x, is_causal=True), by_mask, **CLOSE)
    assert_close(module(x, x, x, is_causal=True, attn_mask=age < 0), by_mask, **CLOSE)
    assert_close(module(x, x, x, is_causal=True, attn_mask=age > QUERIES), module(x, x, x), **CLOSE)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_query_that_sees_no_key_gets_nothing_and_never_nan(need_weights):
    module = composing()
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[1] = True
    output, weights = module(*sequences(), key_padding_mask=padding, need_weights=need_weights)
    assert_close(output[1], module.out_proj.bias.expand(QUERIES, -1), **CLOSE)
    assert weights is None or weights[1].count_nonzero() == 0
    module.dropout = 1.0
    assert torch.equal(module.eval()(*sequences(), key_padding_mask=padding, need_weights=need_weights)[0], output)
    dropped = module.train()(*sequences(), need_weights=need_weights)[0]
    assert_close(dropped, module.out_proj.bias.expand(BATCH, QUERIES, -1), **CLOSE)


@pytest.mark.parametrize("widths", [{}, {"kdim": 192, "vdim": 128}], ids=str)
def test_projections_start_as_torchs(widths):
    ours, theirs = (kind(256, HEADS, **widths) for kind in (DCMultiheadAttention, nn.MultiheadAttention))
    for name, parameter in theirs.named_parameters():
        assert ours.get_parameter(name).std().item() == pytest.approx(parameter.std().item(), rel=0.02), name


def test_after_a_start_as_identity_every_parameter_learns():
    module = DCMultiheadAttention(WIDTH, HEADS, batch_first=True, identity=True, static=True)
    before = copy.deepcopy(module)
    optimizer = torch.optim.Adam(module.compose.parameters(), lr=0.02)
    for _ in range(2):  # what multiplies a zero has its gradient after the first step
        module(*sequences(), need_weights=False)[0].square().mean().backward()
        optimizer.step()
    for name, parameter in module.compose.named_parameters():
        assert not torch.equal(parameter, before.compose.get_parameter(name)), name


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_encoder_layers_never_pass_it_over_for_their_own_kernel():
    """Their fast path reads in_proj_weight itself and would leave the composition out, in evaluation alone."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, dim_feedforward=16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=1)
    encoder.layers[0].self_attn = composing()
    x = normal(BATCH, KEYS, WIDTH)
    expected = encoder.train()(x, src_key_padding_mask=PADDING)
    with torch.no_grad(), pytest.raises(ValueError, match="use_nested_tensor"):
        encoder.eval()(x, src_key_padding_mask=PADDING)
    encoder.use_nested_tensor = False
    with torch.no_grad():
        assert_close(encoder(x, src_key_padding_mask=PADDING), expected, **CLOSE)


@pytest.mark.parametrize("side", ["query_wise", "key_wise"])
def test_one_side_alone_has_no_parameters_of_the_other(side):
    """One without a gradient would stop distributed training."""
    module = composing(kdim=24, vdim=24, **{"query_wise": False, "key_wise": False, side: True})
    module(*sequences(KEYS, 24, 24))[0].square().mean().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in module.parameters())


def test_arguments_are_torchs_in_its_order():
    for name in ("__init__", "forward"):
        ours, theirs = (
            [(p.name, p.kind, p.default) for p in inspect.signature(getattr(kind, name)).parameters.values()]
            for kind in (DCMultiheadAttention, nn.MultiheadAttention)
        )
        assert ours[: len(theirs)] == theirs
        assert all(kind > inspect.Parameter.POSITIONAL_OR_KEYWORD for _, kind, _ in ours[len(theirs) :])
    for added in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match=f"{added} must be False, got True"):
            DCMultiheadAttention.from_torch(torch_module(**{added: True}))
    copied = DCMultiheadAttention.from_torch(torch_module(dropout=0.5, dtype=torch.bfloat16).eval())
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.bfloat16}
    assert (copied.training, copied.dropout, isinstance(copied, nn.MultiheadAttention)) == (False, 0.5, True)
    older = {name: value for name, value in vars(copied).items() if name != "_qkv_same_embed_dim"}
    (restored := DCMultiheadAttention.__new__(DCMultiheadAttention)).__setstate__(older)
    assert not restored._qkv_same_embed_dim  # or torch's encoder layers leave the composition out
    with pytest.raises(TypeError, match=r"DCMultiheadAttention\(\) got an unexpected keyword argument 'key_size'"):
        DCMultiheadAttention(WIDTH, HEADS, key_size=24)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_heads", 5), ("num_heads", -4), ("embed_dim", 0), ("groups", 3), ("rank", 0), ("sliding_window", 0)]
    + [("add_zero_attn", True), ("dropout", 1.5), ("dropout", math.nan), ("activation", "'x'"), ("norm_eps", -1)],
)
def test_values_that_no_module_can_have_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name}.*got (.* and )?{value}"):
        DCMultiheadAttention(**{"embed_dim": WIDTH, "num_heads": HEADS, name: value if value != "'x'" else "x"})


@pytest.mark.parametrize(
    ("lengths", "masks", "got"),
    [
        ((9, 8), {}, "value (3, 8, 32)"),
        ((9, 9), {"key_padding_mask": [[True] * 9] * 3}, "got <class 'list'>"),
        ((9, 9), {"key_padding_mask": torch.zeros(3, 8)}, "got (3, 8)"),
        ((9, 9), {"attn_mask": torch.zeros(9, 7)}, "got (9, 7)"),
        ((9, 9), {"attn_mask": torch.zeros(3, 7, 9)}, "got (3, 7, 9)"),
        ((9, 9), {"attn_mask": torch.zeros(7, 9).int()}, "got torch.int32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_shapes_that_do_not_fit_are_refused(lengths, masks, got):
    query, key, value = (torch.zeros(3, length, WIDTH) for length in (7, *lengths))
    module = DCMultiheadAttention(WIDTH, HEADS, batch_first=True)
    with pytest.raises(ValueError, match=re.escape(got)):
        module(query, key, value, **masks)
    with pytest.raises(ValueError, match=re.escape("key (2, 9, 32)")):
        module(query, key[:2], value[:2])
    with pytest.raises(ValueError, match=re.escape("(32, 32, 32) channels, got query (3, 7, 32), key (3, 9, 30)")):
        module(query, key[:, :, :30], value)
    with pytest.raises(ValueError, match=re.escape("must be (9,), got (1, 9)")):
        module(query[0], key[0], key[0], key_padding_mask=torch.zeros(1, 9))
