"""`compose_attention`: the same outputs at first, everything else as it was, and refusals that name the module."""

import copy

import pytest
import torch
from test_module import CLOSE, normal
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.testing import assert_close

from dcformer import DCMultiheadAttention, compose_attention


BATCH, LENGTH, WIDTH, HEADS = 3, 7, 32, 4
X = normal(BATCH, LENGTH, WIDTH)
SEEN = (normal(BATCH, 1, LENGTH, LENGTH, seed=1) > 0.3).index_fill(3, torch.tensor([0]), True)
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "shared": {"attn_mask": SEEN[0, 0]},
    "padding": {"attn_mask": SEEN[:, :, :1]},
    "pairs": {"attn_mask": SEEN},
    "bias": {"attn_mask": normal(HEADS, LENGTH, LENGTH)},
}


class Attention(nn.Module):
    """As timm's, for where that is not installed."""

    __module__ = "timm.layers.attention"

    def __init__(
        self, dim, heads, attn_head_dim=8, qkv_bias=False, qk_norm=False, scale_norm=False, gated=False, **more
    ):
        super().__init__()
        norm, inner, self.num_heads = more.get("norm_layer"), heads * attn_head_dim, heads
        self.qkv, self.proj = nn.Linear(dim, 3 * inner, bias=qkv_bias), nn.Linear(inner, more.get("dim_out", dim))
        self.q_norm, self.k_norm = (norm(attn_head_dim) if qk_norm else nn.Identity() for _ in range(2))
        self.norm = norm(inner) if scale_norm else nn.Identity()
        self.gate = nn.Linear(dim, inner) if gated else None
        self.attn_drop, self.proj_drop = nn.Dropout(more.get("attn_drop", 0.0)), nn.Dropout(more.get("proj_drop", 0.0))

    def forward(self, x, attn_mask=None, is_causal=False):
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        options = {"attn_mask": attn_mask, "is_causal": is_causal}
        y = functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, **options)
        y = self.norm(y.transpose(1, 2).flatten(2))
        return self.proj_drop(self.proj(y if self.gate is None else y * self.gate(x).sigmoid()))


@pytest.fixture(params=["stand_in", "timm"])
def timm_attention(request):
    return Attention if request.param == "stand_in" else pytest.importorskip("timm.layers.attention").Attention


def strengthen(model):
    """Parameters of ordinary size, of the composition too."""
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed) / WIDTH**0.5)
    return model


def encoder(layers=3, **options):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.0, batch_first=True, **options)
    return strengthen(nn.TransformerEncoder(layer, layers))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_model_of_torchs_modules_starts_the_same_and_its_state_goes_both_ways(training):
    model = strengthen(nn.Transformer(WIDTH, HEADS, 3, 2, 16, 0.0, batch_first=True)).train(training)
    model.extra = nn.MultiheadAttention(WIDTH, HEADS, kdim=24, vdim=40, batch_first=True)
    padding = torch.arange(LENGTH) >= torch.tensor([[7], [4], [6]])
    inputs = {"src": X, "tgt": X[:, :5], "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    context = X, X[..., :24], torch.cat((X, X), 2)[..., :40]
    old = copy.deepcopy(model)
    with torch.set_grad_enabled(training):  # without gradients PyTorch's layers have a fused kernel
        expected = model(**inputs), model.extra(*context)[0]
        assert compose_attention(model, rank=1, static=True) is model
        assert_close((model(**inputs), model.extra(*context)[0]), expected, **CLOSE)
        missing, unexpected = model.load_state_dict(old.state_dict(), strict=False)
        assert not unexpected and len({name.partition(".compose.")[0] for name in missing}) == 3 + 2 * 2 + 1
        assert all(".compose." in name for name in missing) and model.decoder.layers[1].self_attn.compose.rank == 1
        assert model.extra.identity
        trained = strengthen(model)(**inputs)
        assert (trained - expected[0]).abs().max() > 0.1
        fresh = compose_attention(old, rank=1, static=True)
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(fresh(**inputs), trained)
    assert_close(copy.deepcopy(model).requires_grad_(False).eval()(**inputs), trained, **CLOSE)


@pytest.mark.parametrize("mask", MASKS)
def test_timms_attention_starts_the_same_with_every_mask(timm_attention, mask):
    for options in (
        {"attn_head_dim": 8, "attn_drop": 0.5, "proj_drop": 0.5},
        {"attn_head_dim": 5, "qkv_bias": True, "qk_norm": True, "norm_layer": nn.LayerNorm, "dim_out": 20},
        {"attn_head_dim": 8, "scale_norm": True, "gated": True, "norm_layer": nn.LayerNorm},
    ):
        old = strengthen(timm_attention(WIDTH, HEADS, **options)).eval()
        new = compose_attention(copy.deepcopy(old), static=True)
        assert_close(new(X, **MASKS[mask]), old(X, **MASKS[mask]), **CLOSE)
        assert not new.load_state_dict(old.state_dict(), strict=False).unexpected_keys
        new.train().proj_drop.p, new.attn_drop.p = 0.0, 1.0
        assert torch.equal(new(X), new.proj.bias.expand_as(new(X))) == (not options.get("gated"))
        new.proj_drop.p = 1.0
        assert not new(X).any()


@pytest.mark.parametrize("mask", MASKS)
def test_timms_attention_composes_as_torchs(timm_attention, mask):
    timms = strengthen(compose_attention(timm_attention(WIDTH, HEADS, qkv_bias=True), static=True))
    torchs = DCMultiheadAttention(WIDTH, HEADS, batch_first=True, static=True)
    names = {"in_proj_": "qkv.", "out_proj.": "proj."}
    state = {}
    for name in torchs.state_dict():
        theirs = next((name.replace(ours, their) for ours, their in names.items() if name.startswith(ours)), name)
        state[name] = timms.state_dict()[theirs]
    torchs.load_state_dict(state)
    options = dict(MASKS[mask])
    if (seen := options.get("attn_mask")) is not None:
        pairs = seen.expand(BATCH, HEADS, LENGTH, LENGTH).flatten(0, 1)
        options["attn_mask"] = ~pairs if pairs.dtype == torch.bool else pairs
    assert_close(timms(X, **MASKS[mask]), torchs(X, X, X, **options)[0], rtol=0, atol=1e-4)
    for wrong in ({"attn_mask": SEEN, "is_causal": True}, {"attn_mask": SEEN.int()}):
        with pytest.raises(
            ValueError, match=r"attn_mask must be boolean .* got torch.(bool with is_causal=True|int32)"
        ):
            timms(X, **wrong)


def test_all_else_of_a_module_stays_and_its_composition_learns():
    model = encoder().to(torch.bfloat16).requires_grad_(False)
    model.layers[2].self_attn = model.layers[0].self_attn
    model.layers[1].eval()
    kept, seen = dict(model.named_parameters()), []
    handle = model.layers[1].self_attn.register_forward_hook(lambda module, *_: seen.append(module))
    compose_attention(model, "layers.[12].*", identity=False)
    first, second, third = (layer.self_attn for layer in model.layers)
    assert type(second) is DCMultiheadAttention and first is third and "compose" in first._modules
    assert not model.use_nested_tensor
    assert all(
        model.get_parameter(name) is parameter and not parameter.requires_grad for name, parameter in kept.items()
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert [part.training for part in (first.compose, second.compose)] == [True, False]
    model(X.bfloat16()).sum().backward()
    assert all(parameter.grad.any() for name, parameter in model.named_parameters() if ".compose." in name)
    handle.remove()
    assert seen == [second] and not second._forward_hooks


def test_only_what_the_patterns_name_and_each_must_name_something():
    model = compose_attention(encoder(12), ["layers.1?.*", "layers.0.self_attn"])
    kinds = [type(layer.self_attn) for layer in model.layers]
    assert [kind is DCMultiheadAttention for kind in kinds] == [number in (0, 10, 11) for number in range(12)]
    for names in ("layers.12.*", ["*", "encoder"]):
        with pytest.raises(
            ValueError, match=r"matches '(layers.12.\*|encoder)' is in this TransformerEncoder.*; 9 more"
        ):
            compose_attention(model, names)
    compose_attention(model)
    with pytest.raises(ValueError, match=r"TransformerEncoder: of layers\.0.*, what was chosen composes already"):
        compose_attention(model)
    with pytest.raises(ValueError, match=r"No attention to compose is in this Linear\.$"):
        compose_attention(nn.Linear(2, 2))
    model = encoder()
    model.layers[2].self_attn = nn.MultiheadAttention(WIDTH, 2)
    with pytest.raises(ValueError, match="groups must divide the 2 heads"):
        compose_attention(model, groups=4)
    assert {type(layer.self_attn) for layer in model.layers} == {nn.MultiheadAttention}


def attention(**options):
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)


def other_kind(name, base=nn.Module):
    """Attention of this name, which timm might have, with heads."""
    module = type(name, (base,), {"__module__": Attention.__module__})(*(() if base is nn.Module else (WIDTH, HEADS)))
    module.num_heads = HEADS
    return module


def changed(module, change):
    change(module)
    return module


UNFIT = {
    "add_bias_kv": lambda: attention(add_bias_kv=True),
    "add_zero_attn": lambda: attention(add_zero_attn=True),
    "WindowAttention": lambda: other_kind("WindowAttention"),
    "AttentionRope": lambda: other_kind("AttentionRope"),
    "ALiBi": lambda: other_kind("ALiBi", Attention),
    "Mine": lambda: other_kind("Mine", nn.MultiheadAttention),
    "'forward'": lambda: changed(attention(), lambda module: setattr(module, "forward", print)),
    "'in_proj_weight_": lambda: prune.l1_unstructured(attention(), "in_proj_weight", 0.5),
    "'relative'": lambda: changed(Attention(WIDTH, HEADS), lambda module: module.add_module("relative", nn.Identity())),
    "quantized 'qkv'": lambda: changed(Attention(WIDTH, HEADS), lambda module: module.qkv.to(torch.float8_e4m3fn)),
    "quantized 'out_proj'": lambda: changed(attention(), lambda module: setattr(module.out_proj, "weight", None)),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_cannot_be_composed_is_named_and_nothing_changes(what):
    model = nn.ModuleDict({"first": attention(), "block": nn.ModuleDict({"unfit": UNFIT[what]()}), "last": attention()})
    model["around"] = changed(other_kind("AttentionBlock"), lambda module: module.add_module("inner", attention()))
    with pytest.raises(ValueError, match=rf"Nothing was composed: block.unfit .*{what}"):
        compose_attention(model)
    assert not any("compose" in name for name, _ in model.named_parameters())
    compose_attention(model, ["first", "last", "around*"])
    assert {name.split(".")[0] for name, _ in model.named_parameters() if "compose" in name} == {
        "first",
        "last",
        "around",
    }


def test_it_comes_before_wrapping_for_several_processes():
    wrapped = nn.ModuleDict({"inner": encoder(1)})
    wrapped.inner.__class__ = type("Wrapped", (nn.parallel.DistributedDataParallel,), {"forward": None})
    with pytest.raises(ValueError, match="inner is wrapped in DistributedDataParallel; compose before wrapping"):
        compose_attention(wrapped)


def test_a_composed_model_is_exported_for_every_batch():
    model = strengthen(compose_attention(attention())).eval()
    exported = torch.export.export(model, (X, X, X), dynamic_shapes=({0: torch.export.Dim("batch")},) * 3)
    x = normal(5, LENGTH, WIDTH, seed=2)
    assert_close(exported.module()(x, x, x), model(x, x, x), **CLOSE)
