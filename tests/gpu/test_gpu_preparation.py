"""Decode steps that one product and one kernel prepare: equal to the model's own way, or left to it."""

import copy
import io
import pickle

import pytest
import torch
from tiny_models import VARIANTS, random_tokens, tiny_model
from torch import nn
from transformers import DynamicCache, StaticCache

from dcformer import implementations, register_implementation


pytest.importorskip("triton")

from dcformer.gpu import preparation, preparation_ops


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATION = "dcmha_prepared_in_tests"


@pytest.fixture(autouse=True)
def implementation():
    register_implementation(
        IMPLEMENTATION.removeprefix("dcmha_"),
        implementations()["chunked"].forward,
        prepare=preparation.prepare_step,
    )


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """Grows by the number of queries of every step that the kernel prepares."""
    lengths = []

    def counted(projected, *arguments, **options):
        lengths.append(projected.shape[1])
        return original(projected, *arguments, **options)

    original = preparation_ops.prepare_step
    monkeypatch.setattr(preparation_ops, "prepare_step", counted)
    return lengths


def one_layer(variant: str = "gates_only", layer_type: str = "full_attention", **overrides):
    return tiny_model(variant, num_hidden_layers=1, layer_types=[layer_type], **overrides).to(DEVICE)


def attention_of(model) -> nn.Module:
    return model.model.layers[0].self_attn


def logits(model, implementation: str, cache, tokens: torch.Tensor, lengths: tuple[int, ...], **options):
    """Of all tokens, computed in as many calls as there are lengths."""
    model.set_attn_implementation(implementation)
    parts = []
    with torch.no_grad():
        for part in tokens.to(DEVICE).split(lengths, dim=1):
            parts.append(model(part, past_key_values=cache, **options).logits)
    return torch.cat(parts, dim=1)


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    assert value.shape == expected.shape
    return float((value - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def step_both_ways(model, length: int = 1, batch: int = 1):
    """What the kernel and what the layer's own modules prepare for tokens at other positions in every row."""
    attention = attention_of(model)
    dtype = attention.qkv_proj.weight.dtype
    past, new = torch.randn(batch, 3 + length, 32).to(DEVICE, dtype).split((3, length), dim=1)
    positions = torch.arange(3 + length, device=DEVICE) + 2 * torch.arange(batch, device=DEVICE)[:, None]
    angles = [None, None]
    if model.model.rotary_emb is not None:
        cos, sin = model.model.rotary_emb(past, positions)
        angles = list(zip(cos.split((3, length), dim=1), sin.split((3, length), dim=1)))
    results = []
    for prepare in (preparation.prepare_step, attention._prepare):
        cache = DynamicCache(config=model.config)
        attention._prepare(past, angles[0], cache)
        arguments = (attention,) if prepare is preparation.prepare_step else ()
        results.append(prepare(*arguments, new, angles[1], cache))
    return results


def tensors(prepared) -> list[torch.Tensor]:
    found = list(prepared[:3])
    for stage in prepared[3:]:
        if stage is not None:
            found += [side.factors for side in (stage.query, stage.key) if side is not None]
            found += [stage.static] * (stage.static is not None)
    return found


# The others have the attention of "dcformer", or compose nothing.
SAME_ATTENTION = ("mlp_gate_and_one_global_in_four", "seven_to_one", "all_global", "window_of_one")
COMPOSING = [name for name in VARIANTS if not name.startswith("plain") and name not in SAME_ATTENTION]


@pytest.mark.parametrize("variant", COMPOSING)
@torch.no_grad()
def test_step_equals_the_model_s_own(variant):
    fused, ordinary = step_both_ways(one_layer(variant))
    assert [stage is None for stage in fused[3:]] == [stage is None for stage in ordinary[3:]]
    pairs = list(zip(tensors(fused), tensors(ordinary), strict=True))
    assert max(error(value, expected) for value, expected in pairs) <= 2e-6  # a few roundings of float32


@torch.no_grad()
def test_batch_of_several_queries_in_half_precision_equals_the_model_s_own():
    fused, ordinary = step_both_ways(one_layer("low_rank_only", compose_key=False).half(), length=2, batch=2)
    pairs = zip(tensors(fused), tensors(ordinary), strict=True)
    assert max(error(value, expected) for value, expected in pairs) <= 4e-3  # the model rounds more often


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_logits_and_caches_equal_those_of_the_model_s_own_steps(is_static, layer_type, launches):
    """A window of 6 is first filled, where the kernel writes itself, and then moves on, which is left to `update`."""
    model = one_layer(layer_type=layer_type)
    tokens = random_tokens(1, 7)
    caches = [
        StaticCache(config=model.config, max_cache_len=10) if is_static else DynamicCache(config=model.config)
        for _ in range(2)
    ]
    lengths = (2, 1, 2, 1, 1)
    expected = logits(model, "eager", caches[0], tokens, lengths)
    value = logits(model, IMPLEMENTATION, caches[1], tokens, lengths)
    assert launches == list(lengths)
    assert error(value, expected) <= 2e-6
    one, other = (cache.layers[0] for cache in caches)
    assert error(other.keys, one.keys) <= 2e-6
    assert error(other.values, one.values) <= 2e-6
    for name in ("cumulative_length", "cumulative_length_int"):
        assert getattr(other, name, 0) == getattr(one, name, 0)
    assert other.get_seq_length() == one.get_seq_length() == 7


def test_left_padded_rows_equal_those_of_the_model_s_own_steps(launches):
    model = one_layer("dcpythia")
    tokens = random_tokens(2, 11)
    mask = torch.ones(2, 11, dtype=torch.int64, device=DEVICE)
    mask[0, :3] = 0

    def decode(implementation):
        cache = DynamicCache(config=model.config)
        model.set_attn_implementation(implementation)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            for first, last in ((0, 10), (10, 11)):
                output = model(
                    tokens[:, first:last].to(DEVICE),
                    attention_mask=mask[:, :last],
                    position_ids=positions[:, first:last],
                    past_key_values=cache,
                )
        return output.logits

    expected = decode("eager")
    assert error(decode(IMPLEMENTATION), expected) <= 2e-6
    assert launches == [1]


@torch.no_grad()
def test_compiled_step_is_one_graph_and_writes_the_static_cache(launches):
    model = one_layer()
    model.set_attn_implementation(IMPLEMENTATION)
    attention = attention_of(model)
    states = torch.randn(1, 12, 32, device=DEVICE)
    caches = [StaticCache(config=model.config, max_cache_len=13) for _ in range(2)]

    def step(layer, cache, first, last):
        visible = torch.arange(13, device=DEVICE) <= torch.arange(first, last, device=DEVICE)[:, None]
        angles = model.model.rotary_emb(states, torch.arange(first, last, device=DEVICE)[None])
        return layer(states[:, first:last], angles, visible[None, None], cache)[0]

    for cache in caches:
        step(attention, cache, 0, 10)  # derives the joined weight, as the first call of `generate` does
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for place in (10, 11):
        value = step(compiled, caches[0], place, place + 1)
        assert launches.pop() == 1
        attention.config._attn_implementation = "eager"
        expected = step(attention, caches[1], place, place + 1)
        attention.config._attn_implementation = IMPLEMENTATION
        assert error(value, expected) <= 2e-6
    assert error(caches[0].layers[0].keys, caches[1].layers[0].keys) <= 2e-6
    assert caches[0].layers[0].cumulative_length == 12
    preparation.drop(attention)
    step(compiled, caches[0], 11, 12)
    assert launches == []  # nothing compiled holds on to the weight


@torch.no_grad()
def test_operator_passes_torch_s_checks():
    attention = attention_of(one_layer())
    joined = preparation._derive(attention)
    projected = torch.randn(1, 1, joined.weight.shape[0], device=DEVICE)
    rows = [torch.zeros(1, 4, 3, 16, device=DEVICE) for _ in range(2)]
    positions = torch.tensor([1], device=DEVICE)
    numbers = [*joined.layout[:-1], list(joined.layout.slots), 1e-6, 1e-6, "gelu"]
    arguments = [projected, *rows, positions, *[None] * 5, *numbers]
    torch.library.opcheck(preparation_ops.prepare_decode_step, arguments)


def after_optimizer_step(model):
    with torch.enable_grad():
        model(random_tokens(1, 3).to(DEVICE)).logits.sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()


def after_loading(model):
    model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})


def after_loading_by_assignment(model):
    model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()}, assign=True)


def after_rounding_there_and_back(model):
    model.half().float()


@pytest.mark.parametrize(
    "change",
    [after_optimizer_step, after_loading, after_loading_by_assignment, after_rounding_there_and_back],
    ids=lambda change: change.__name__.removeprefix("after_"),
)
def test_joined_weight_follows_the_parameters(change):
    model = one_layer()
    with torch.no_grad():
        step_both_ways(model)
    old = attention_of(model)._joined_projection.weight
    change(model)
    with torch.no_grad():
        fused, ordinary = step_both_ways(model)
    assert not torch.equal(attention_of(model)._joined_projection.weight, old)
    assert error(fused[1], ordinary[1]) <= 2e-6


def test_training_frees_the_joined_weight():
    model = one_layer()
    with torch.no_grad():
        step_both_ways(model)
    model.set_attn_implementation(IMPLEMENTATION)
    model.train()(random_tokens(1, 3).to(DEVICE), use_cache=False)
    assert attention_of(model)._joined_projection is None


def test_joined_weight_is_neither_saved_nor_copied(tmp_path):
    model = one_layer()
    names, size = set(model.state_dict()), len(pickle.dumps(attention_of(model)))
    with torch.no_grad():
        step_both_ways(model)
    attention = attention_of(model)
    assert attention._joined_projection is not None
    assert set(model.state_dict()) == names
    assert {name for name, _ in model.named_buffers()} | {name for name, _ in model.named_parameters()} >= names
    assert copy.deepcopy(attention)._joined_projection is None
    assert pickle.loads(pickle.dumps(attention))._joined_projection is None
    assert len(pickle.dumps(attention)) < size + 100
    buffer = io.BytesIO()
    torch.save(model, buffer)
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).num_parameters() == model.num_parameters()


def hook(model):
    attention_of(model).qkv_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def hook_of_the_composition(model):
    attention_of(model).compose.register_forward_pre_hook(lambda module, inputs: None)


def another_forward(model):
    projection = attention_of(model).qkv_proj
    original = projection.forward
    projection.forward = lambda states: 2 * original(states)


def parametrization(model):
    torch.nn.utils.parametrizations.weight_norm(attention_of(model).qkv_proj)


def adapter(model):
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["qkv_proj"], init_lora_weights=False), model)


def quantization(model):
    quantize_ = pytest.importorskip("torchao.quantization").quantize_
    from torchao.quantization import Int8WeightOnlyConfig

    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: name.endswith("qkv_proj"))


@pytest.mark.parametrize(
    "change",
    [hook, hook_of_the_composition, another_forward, parametrization, adapter, quantization],
    ids=lambda change: change.__name__,
)
def test_what_stands_before_the_weights_goes_the_ordinary_way(change, launches):
    model = one_layer()
    change(model)
    tokens = random_tokens(1, 5)
    expected = logits(model, "eager", DynamicCache(config=model.config), tokens, (4, 1))
    value = logits(model, IMPLEMENTATION, DynamicCache(config=model.config), tokens, (4, 1))
    assert error(value, expected) <= 2e-6
    assert launches == []


def with_another_activation():
    model = one_layer()
    attention_of(model).compose.act_fn = nn.SiLU()
    return model


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: one_layer("window_of_one", "sliding_attention"), "window of 1"),
        (with_another_activation, "forms of gelu, not SiLU"),
        (lambda: one_layer().double(), "not torch.float64"),
        (lambda: one_layer("plain_gated_transformer"), "the composition is a NoneType"),
    ],
    ids=["window-of-1", "silu", "float64", "nothing-composed"],
)
@torch.no_grad()
def test_a_reason_says_what_the_kernel_cannot_do(make, reason):
    attention = attention_of(make())
    hidden_states = torch.randn(1, 1, 32, device=DEVICE, dtype=attention.qkv_proj.weight.dtype)
    assert reason in preparation.why_not(attention, hidden_states, DynamicCache())
    assert preparation.prepare_step(attention, hidden_states, None, DynamicCache()) is None
    with torch.enable_grad():
        assert "gradients" in preparation.why_not(attention, hidden_states, DynamicCache())
    assert "cache" in preparation.why_not(attention, hidden_states, None)
