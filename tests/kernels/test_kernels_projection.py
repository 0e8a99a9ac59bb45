"""The factors of the composition and their gradients in Triton kernels, in its interpreter where there is no GPU.

The interpreter multiplies no bfloat16, so that float16 stands for both.
"""

import copy
import functools

import pytest
import torch
from operator_inputs import DEVICE
from test_kernels_native import DispatchMode, FunctionMode, error_of
from tiny_models import VARIANTS, random_tokens, tiny_model
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers.utils import import_utils

from dcformer import DCMultiheadAttention, compose_dcformer
from dcformer.compose_dcformer import ComposeProjection
from dcformer.kernels.cpu import cpu_backend
from dcformer.kernels.triton import attention_forward
from dcformer.kernels.triton import compose_weights as projection
from dcformer.kernels.triton import triton_backend as triton_form
from dcformer.modeling_dcformer import DCFormerRMSNorm
from dcformer.parallel_dcformer import DIMENSION_OF_GROUPS


NAMED = "dcmha_native" if DEVICE == "cpu" else "dcmha_triton"  # which is fast, whatever a device stands for
HIDDEN, TOKENS = 24, (2, 9)  # two more than a kernel multiplies itself
CASES = {
    "rank_2": {"num_heads": 4},
    "16_heads_of_rank_1": {"num_heads": 16, "rank": 1},
    "24_heads_of_rank_3": {"num_heads": 24, "rank": 3},
    "52_heads_of_rank_4_query_wise_before": {"num_heads": 52, "rank": 4, "key_wise": False, "post": False},
    "groups_of_3_after_the_softmax": {"num_heads": 6, "groups": 2, "pre": False},
    "groups_of_1_key_wise": {"num_heads": 3, "groups": 3, "query_wise": False},
    "low_rank_alone_and_tanh": {"num_heads": 5, "gate": False, "activation": "gelu_pytorch_tanh"},
    "gates_alone": {"num_heads": 5, "groups": 5, "low_rank": False},
}


def watch(monkeypatch, name):
    """The shapes of the last arguments of the calls of this function."""
    from dcformer.kernels.triton import compose_weights_kernels as projection_kernel

    found, launch = [], getattr(projection_kernel, name)

    def watched(*call):
        found.append(call[-1].shape)
        return launch(*call)

    monkeypatch.setattr(projection_kernel, name, watched)
    return found


@pytest.fixture
def launched(monkeypatch):
    """The shapes of the factors that the kernel was launched for, with a CPU in place of a CUDA device."""
    monkeypatch.setattr(triton_form.TritonBackend, "device_type", DEVICE)
    torch._dynamo.reset()
    return watch(monkeypatch, "launch_factors")


@pytest.fixture
def differentiated(monkeypatch):
    """The shapes of the products that the kernel of the gradients was launched for."""
    return watch(monkeypatch, "launch_gradients")


@pytest.fixture
def multiplied(launched, monkeypatch):
    """The shapes of the states that the kernel of the wide products was launched for."""
    from dcformer.kernels.triton import compose_weights_kernels as projection_kernel

    found, launch = [], projection_kernel.launch_partial_products

    def watched(states, *weights):
        found.append(states.shape)
        return launch(states, *weights)

    monkeypatch.setattr(projection_kernel, "launch_partial_products", watched)
    return found


def make_compose(dtype, hidden_size=HIDDEN, **options):
    """With parameters of a size that every branch shows, which `dtype` holds exactly."""
    compose = ComposeProjection(hidden_size, **options, dtype=torch.float64, device=DEVICE)
    for name, parameter in compose.named_parameters():
        size = parameter.shape[2 if name == "low_rank_weight" else 0]
        parameter.data = (torch.randn(parameter.shape) / size**0.5).to(DEVICE, dtype).double()
    return compose


def factors_of(compose, *states):
    sides = [side for stage in compose(*states) if stage is not None for side in (stage.query, stage.key)]
    return [side.factors for side in sides if side is not None]


def factors_and_gradients(compose, *states):
    """Of all slots, with the gradients of a sum with fixed weights by the states and all parameters."""
    states = [each.detach().requires_grad_() for each in states]
    factors = factors_of(compose, *states)
    weights = [torch.randn(each.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE) for each in factors]
    compose.zero_grad()
    sum((each.double() * weight).sum() for each, weight in zip(factors, weights)).backward()
    return [each.detach() for each in factors], [leaf.grad for leaf in (*states, *compose.parameters())]


def by_hand(compose, states):
    """Equation 6 and the gates, a token, slot and group at a time: (channels, heads) each."""
    rank, heads = compose.rank, compose.heads
    for slot in compose.slots:
        for state in states.flatten(0, 1):
            rows = []
            for group in range(compose.groups):
                parts = []
                if compose.hidden_weight is not None:
                    hidden = compose.act_fn(state @ compose.hidden_weight[:, group, slot])
                    maps = torch.einsum("k,krh->rh", hidden, compose.low_rank_weight[group, slot])
                    norm = (maps[:rank].square().sum(1, keepdim=True) / heads + compose.norm_eps).sqrt()
                    parts += [maps[:rank] / norm, maps[rank:]]
                if compose.gate_weight is not None:
                    columns = slice(slot * heads, (slot + 1) * heads)
                    parts.append(torch.tanh(state @ compose.gate_weight[:, group, columns])[None])
                rows.append(torch.cat(parts))
            yield torch.cat(rows, dim=1)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_factors_and_gradients_are_as_exact_as_those_of_torch(name, dtype, launched, differentiated, monkeypatch):
    exact = make_compose(dtype, **CASES[name])
    compose = copy.deepcopy(exact).to(dtype)
    states = torch.randn(*TOKENS, HIDDEN).to(DEVICE, dtype)
    expected, expected_gradients = factors_and_gradients(exact, states.double())
    with torch.no_grad():
        hands = torch.stack(list(by_hand(exact, states.double())))
    assert_close(torch.cat([each.permute(0, 2, 3, 1).flatten(0, 1) for each in expected]), hands)
    assert launched == []  # float64 is torch's
    found, gradients = factors_and_gradients(compose, states)
    with torch.no_grad():
        assert_close(factors_of(compose, states), found, rtol=0, atol=0)
    assert len(launched) == 2 and len(differentiated) == 1
    assert all(each.dtype == dtype and each.stride(1) == 1 for each in found)  # heads side by side
    strides = [parameter.stride() for parameter in compose.parameters()]
    assert [each.stride() for each in gradients[1:]] == strides  # as DDP asks for
    monkeypatch.setattr(triton_form.TritonBackend, "factors", lambda *operands: None)
    of_torch, gradients_of_torch = factors_and_gradients(compose, states)
    triples = zip(found + gradients, of_torch + gradients_of_torch, expected + expected_gradients)
    for one, other, exactly in triples:
        assert error_of(one, exactly) <= 1.5 * error_of(other, exactly) + 1e-7 * float(exactly.abs().max())


@torch.no_grad()
def test_small_gates_keep_all_their_digits(launched):
    compose = make_compose(torch.float32, **CASES["gates_alone"])
    compose.gate_weight.data /= 500
    states = torch.randn(*TOKENS, HIDDEN).to(DEVICE)
    exact = factors_of(compose.double(), states.double())
    for found, expected in zip(factors_of(compose.float(), states), exact):
        assert (found - expected).abs().max() < 1e-8
    assert len(launched) == 1


@torch.no_grad()
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "name, dtype", [(name, torch.float16) for name in CASES] + [("rank_2", torch.float32)], ids=str
)
def test_few_tokens_are_as_exact_as_those_of_torch_and_the_same_bits_alone(name, dtype, multiplied, monkeypatch):
    hidden_size = 600  # the last of its parts are short or have nothing, and are up to two steps of a program
    exact = make_compose(dtype, hidden_size, **CASES[name])
    compose = copy.deepcopy(exact).to(dtype)
    states = torch.randn(2, 4, hidden_size).to(DEVICE, dtype)[:, 1:]  # no rows side by side
    expected = torch.stack(list(by_hand(exact, states.double())))
    found = factors_of(compose, states)
    assert all(each.dtype == dtype and each.stride(1) == 1 for each in found)
    alone = factors_of(compose, states[1:, 2:])
    assert_close(alone, [each[1:, :, 2:] for each in found], rtol=0, atol=0)
    assert multiplied == [(2, 3, hidden_size), (1, 1, hidden_size)]
    monkeypatch.setattr(triton_form.TritonBackend, "factors", lambda *operands: None)
    both = [torch.cat([x.permute(0, 2, 3, 1).flatten(0, 1) for x in y]) for y in (found, factors_of(compose, states))]
    assert error_of(both[0], expected) <= 1.5 * error_of(both[1], expected)


def test_a_kernel_multiplies_up_to_16_tokens_that_need_no_gradient(multiplied):
    compose = make_compose(torch.float32, num_heads=4).float()
    states = torch.randn(2, 17, HIDDEN, device=DEVICE)
    for weights_are_trained, states_are_trained, grad_mode in ((1, 0, 1), (0, 1, 1), (0, 0, 1), (1, 1, 0)):
        compose.requires_grad_(bool(weights_are_trained))
        with torch.set_grad_enabled(bool(grad_mode)):
            factors_of(compose, states[:, :8].detach().requires_grad_(bool(states_are_trained)))
    assert multiplied == [(2, 8, HIDDEN)] * 2
    with torch.no_grad():
        factors_of(compose, states[:1])
        factors_of(compose, states[:0, :1])
        with torch.autocast(DEVICE, torch.float16):
            assert factors_of(compose, states[:, :1])[0].dtype == torch.float16
    assert len(multiplied) == 2


@torch.no_grad()
def test_a_compiled_step_multiplies_few_tokens_too(multiplied):
    compose = make_compose(torch.float32, num_heads=4).float()
    states = torch.randn(*TOKENS, HIDDEN, device=DEVICE)
    for tokens, is_dynamic in (((2, 8), False), ((2, 8), True), (TOKENS, False)):
        torch._dynamo.reset()
        multiplied.clear()
        some = states[:, : tokens[1]]
        found = torch.compile(compose, backend="eager", fullgraph=True, dynamic=is_dynamic)(some)
        assert multiplied == ([] if is_dynamic or tokens == TOKENS else [some.shape])
        for stage, expected in zip(found, compose(some)):
            assert_close(stage.query.factors, expected.query.factors, rtol=1e-5, atol=1e-6)
            assert_close(stage.key.factors, expected.key.factors, rtol=1e-5, atol=1e-6)


def products_and_weight(batch, length, slots, rank, heads, gates=True, groups=2, dtype=torch.float32):
    products = torch.randn(batch, length, groups, slots, (2 * rank + gates) * heads).to(DEVICE, dtype)
    weight = torch.randn(groups, slots, 2 * rank * heads, 2 * rank, heads) / (2 * rank * heads) ** 0.5
    return products.requires_grad_(), weight.to(DEVICE, dtype).requires_grad_()


def test_the_operators_keep_the_rules_of_torch():
    rules = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    call = products_and_weight(1, 5, slots=4, rank=2, heads=2)
    torch.library.opcheck(projection.factors_op, ("none", 1e-6, *call), test_utils=rules)
    gradient, call = torch.randn(4, 1, 5, 5, 4, device=DEVICE), [each.detach() for each in call]
    for needs_weight in (True, False):
        torch.library.opcheck(projection.gradients_op, ("tanh", 1e-6, gradient, *call, needs_weight), test_utils=rules)
    weights = [torch.randn(5, *sizes, device=DEVICE) for sizes in ((2, 4, 8), (2, 4, 2))]  # of 5 channels
    call = torch.randn(2, 3, 5, device=DEVICE), weights[0], call[1], weights[1]
    torch.library.opcheck(projection.factors_of_few_op, ("tanh", 1e-6, *call), test_utils=rules)


def test_the_operators_count_flops_as_plain_pytorch_does():
    states, hidden, gates = (torch.randn(*shape, device=DEVICE) for shape in ((2, 3, 5), (5, 2, 4, 8), (5, 2, 4, 2)))
    weight, counts = products_and_weight(1, 1, slots=4, rank=2, heads=2)[1].detach(), []

    def plain():
        products = [compose_dcformer.product(states, each) for each in (hidden, gates)]
        return compose_dcformer.plain_factors(torch.tanh, 1e-6, products[0], weight, products[1])

    def whole():
        return projection.factors_op("tanh", 1e-6, projection._products(states, hidden, gates), weight)

    for factors, *trained in ((plain, states, weight), (whole, states, weight), (plain, states), (whole, states)):
        with FlopCounterMode(display=False) as counter:
            for tensor in (states, weight):
                tensor.requires_grad_(any(each is tensor for each in trained))
            factors().sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] and counts[2] == counts[3]
    with torch.no_grad(), FlopCounterMode(display=False) as few:
        projection.factors_of_few_op("tanh", 1e-6, states, hidden, weight, gates)
    with torch.no_grad(), FlopCounterMode(display=False) as of_plain:
        plain()
    assert few.get_total_flops() == of_plain.get_total_flops()


def strided(gradient, layout):
    if layout == "model":  # as gradients of (batch, heads, length, channels) are stacked
        return gradient.transpose(2, 4).contiguous().transpose(2, 4).transpose(2, 3).contiguous().transpose(2, 3)
    return gradient[:1, :1, :1].expand_as(gradient) if layout == "expanded" else gradient


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "layout, eps, case",
    [
        ("model", 1e-6, {"batch": 7, "length": 5, "slots": 2, "rank": 2, "heads": 3}),
        ("contiguous", 1e-6, {"batch": 7, "length": 5, "slots": 2, "rank": 2, "heads": 3}),
        # In two parts, which have room for more.
        ("expanded", 0.0, {"batch": 3, "length": 200, "slots": 1, "rank": 1, "heads": 9}),
        ("model", 1e-6, {"batch": 2, "length": 3, "slots": 3, "rank": 3, "heads": 20, "gates": False}),
    ],
)
def test_gradients_of_any_strides_over_any_tokens(layout, eps, case):
    call = products, weight = products_and_weight(**case)
    if eps > 0:
        products.data[0, 0] = 0
    exact = [each.detach().double().requires_grad_() for each in call]
    hidden, gates = exact[0].split([weight.shape[2], products.shape[4] - weight.shape[2]], dim=4)
    expected = compose_dcformer.plain_factors(
        functional.gelu, eps, hidden, exact[1], gates if case.get("gates", True) else None
    )
    gradient = strided(torch.randn(expected.shape).to(DEVICE), layout)
    found = projection.factors_op("none", eps, *call)
    assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    first, second = (torch.autograd.grad(found, call, gradient, retain_graph=True) for _ in range(2))
    assert_close(first, second, rtol=0, atol=0)
    for one, exactly in zip(first, torch.autograd.grad(expected, exact, gradient.double())):
        assert_close(one, exactly.float(), rtol=1e-5, atol=1e-5 * float(exactly.abs().max()))


@pytest.mark.parametrize("trains_low_rank", [True, False])
def test_training_multiplies_the_states_once_and_sums_up_only_what_is_needed(trains_low_rank, launched):
    compose = make_compose(torch.float32, num_heads=4).float()
    compose.low_rank_weight.requires_grad_(trains_low_rank)
    with torch.profiler.profile() as profile:
        factors_and_gradients(compose, torch.randn(*TOKENS, HIDDEN, device=DEVICE))
    names = [event.name for event in profile.events()]
    assert names.count("aten::mm") == 3 and names.count("aten::bmm") == trains_low_rank
    assert (compose.low_rank_weight.grad is not None) == trains_low_rank


def test_no_tokens_have_gradients_of_zero(launched, differentiated):
    compose = make_compose(torch.float32, num_heads=4).float()
    _, gradients = factors_and_gradients(compose, torch.randn(2, 0, HIDDEN, device=DEVICE))
    assert [each.shape for each in gradients[1:]] == [each.shape for each in compose.parameters()]
    assert len(differentiated) == 1 and not any(each.any() for each in gradients)


def test_gradients_have_gradients(launched, differentiated, monkeypatch):
    """Plain attention has derivatives of any order, so what its factors come from has too."""
    compose = make_compose(torch.float32, num_heads=4).float()
    states = torch.randn(*TOKENS, HIDDEN, device=DEVICE, requires_grad=True)
    tensors = [states, *compose.parameters()]

    def second():
        first = torch.autograd.grad(torch.cat(factors_of(compose, states)).sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), tensors)

    found = second()
    monkeypatch.setattr(triton_form.TritonBackend, "factors", lambda *operands: None)
    assert_close(found, second(), rtol=1e-4, atol=1e-4 * float(found[0].abs().max()))
    assert len(launched) == 1 and len(differentiated) == 1  # for the gradient's gradient alone


@torch.no_grad()
@pytest.mark.parametrize("variant", [name for name, options in VARIANTS.items() if "layer_types" not in options])
def test_models_compute_the_same(variant, launched, monkeypatch):
    layers = 2 if variant == "one_layer" else 1
    model, tokens = tiny_model(variant, num_hidden_layers=layers).to(DEVICE), random_tokens(2, 3).to(DEVICE)
    model.set_attn_implementation(NAMED if model.config.composes_heads else "sdpa")
    monkeypatch.setattr(cpu_backend.CPUBackend, "projection", lambda *operands: None)
    found = model(tokens).logits
    composing = [layer.self_attn.compose for layer in model.model.layers]
    assert len(launched) == sum(compose is not None and len(compose.slots) > 0 for compose in composing)
    monkeypatch.setattr(triton_form.TritonBackend, "factors", lambda *operands: None)
    assert_close(found, model(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["checkpoints", "compiled_checkpoints", "autocast", "compiled_autocast"])
def test_first_steps_of_training_run_on_the_kernels_and_are_the_same(way, launched, monkeypatch):
    model, tokens = tiny_model(num_hidden_layers=1).to(DEVICE).train(), random_tokens(2, 9).to(DEVICE)
    attended, attend = [], attention_forward.composed_forward
    monkeypatch.setattr(triton_form, "FEWEST_SCORES_IN_A_GRAPH", 0)
    monkeypatch.setattr(attention_forward, "composed_forward", lambda *call: (attended.append(way), attend(*call))[1])
    if "checkpoints" in way:
        model.gradient_checkpointing_enable({"use_reentrant": way == "checkpoints"})

    def gradients(forward):
        model.zero_grad()
        with torch.autocast(DEVICE, torch.float16, enabled="autocast" in way):
            loss = forward(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    backend = "aot_eager" if "checkpoints" in way else "eager"
    found = gradients(torch.compile(model, backend=backend, fullgraph=True) if "compiled" in way else model)
    assert len(launched) == len(attended) == (2 if "checkpoints" in way else 1)
    model.set_attn_implementation("dcmha_plain")
    monkeypatch.setattr(triton_form.TritonBackend, "factors", lambda *operands: None)
    tolerance = 2e-2 if "autocast" in way else 1e-5
    for name, expected in gradients(model).items():
        assert_close(found[name], expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_plain_by_name_is_torch_alone(launched):
    model, tokens = tiny_model(num_hidden_layers=1).to(DEVICE), random_tokens(1, 3).to(DEVICE)
    model.set_attn_implementation("dcmha_plain")
    model(tokens)
    assert launched == []
    model.set_attn_implementation(NAMED)
    model(tokens)
    assert launched == [(4, 1, 3, 5, 4)]


def relu(compose):
    compose.act_fn = torch.nn.ReLU()


def double_the_activation(compose):
    compose.act_fn.register_forward_hook(lambda module, inputs, output: 2 * output)


class Marked(torch.Tensor):
    pass


def mark_a_weight(compose):
    del compose.low_rank_weight
    compose.low_rank_weight = torch.randn(1, 4, 16, 4, 4).to(DEVICE).as_subclass(Marked)


def many_sums(compose):
    compose.__init__(HIDDEN, 33, rank=5, device=DEVICE)  # 330, which are 16 x 64 as powers of two
    compose.reset_parameters()


@pytest.mark.parametrize("change", [relu, double_the_activation, mark_a_weight, many_sums])
def test_what_the_kernel_does_not_know_is_left_to_torch(change, launched, monkeypatch):
    compose = make_compose(torch.float32, num_heads=4).float()
    change(compose)
    states = torch.randn(*TOKENS, HIDDEN, device=DEVICE)
    found = factors_of(compose, states)
    monkeypatch.setattr(triton_form.TritonBackend, "factors", lambda *operands: None)
    assert_close(found, factors_of(compose, states), rtol=0, atol=0)
    assert launched == []


def test_a_model_that_is_exported_has_no_kernels(launched, monkeypatch):
    monkeypatch.setattr(triton_form, "FEWEST_SCORES_IN_A_GRAPH", 0)
    model = tiny_model(num_hidden_layers=1).to(DEVICE).eval()
    exported = torch.export.export(model, (), {"input_ids": random_tokens(2, 9).to(DEVICE), "use_cache": False})
    assert "dcformer." not in str(exported.graph) and launched == []


def test_backward_hooks_of_an_activation_see_its_gradients(launched):
    compose, seen = ComposeProjection(32, 4, device=DEVICE), []
    compose.reset_parameters()
    compose.act_fn.register_full_backward_hook(lambda *call: seen.append(call))
    pre, _ = compose(torch.randn(1, 3, 32, device=DEVICE, requires_grad=True))
    pre.query.factors.sum().backward()
    assert len(seen) == 1 and launched == []


def test_transforms_of_functions_and_hooks_of_all_modules_are_left_to_torch(launched):
    compose = make_compose(torch.float32, num_heads=4).float()
    states, seen = torch.randn(*TOKENS, HIDDEN, device=DEVICE), []
    torch.func.grad(lambda states: compose(states)[0].query.factors.sum())(states)
    with torch.autograd.forward_ad.dual_level():
        compose(torch.autograd.forward_ad.make_dual(states, states))
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    compose(states)
    handle.remove()
    assert launched == [] and compose.act_fn in seen
    compose(states)
    assert len(launched) == 1


@torch.no_grad()
@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode])
def test_modes_see_the_products_of_a_few_tokens(mode, multiplied):
    compose = make_compose(torch.float32, num_heads=4).float()
    states = torch.randn(2, 17, HIDDEN, device=DEVICE)
    with mode():
        few, many = factors_of(compose, states[:, :2].contiguous()), factors_of(compose, states)
    assert multiplied == []
    assert_close(few, [each[:, :, :2] for each in many], rtol=1e-5, atol=1e-5)


def test_keys_of_another_sequence_have_their_own_tokens(launched, monkeypatch):
    attention = DCMultiheadAttention(HIDDEN, 4, kdim=8, vdim=8, batch_first=True, device=DEVICE)
    query, key = torch.randn(2, 3, HIDDEN, device=DEVICE), torch.randn(2, 5, 8, device=DEVICE)
    with torch.no_grad():
        attention.compose.low_rank_weight.normal_()
        found = attention(query, key, key)
        assert launched == [(2, 2, 3, 5, 4), (2, 2, 5, 5, 4)]
        monkeypatch.setattr(triton_form.TritonBackend, "factors", lambda *operands: None)
        assert_close(found, attention(query, key, key), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_shares_of_two_processes_are_the_halves_of_the_whole(launched):
    whole = make_compose(torch.float32, num_heads=12, groups=4).float()
    states = torch.randn(*TOKENS, HIDDEN, device=DEVICE)
    halves = []
    for first in (0, 2):
        share = copy.deepcopy(whole)
        share.groups = 2
        for name, parameter in share.named_parameters():
            parameter.data = parameter.narrow(DIMENSION_OF_GROUPS[name], first, 2)  # as it lies in the whole
        halves.append(factors_of(share, states))
    assert_close([torch.cat(pair, dim=1) for pair in zip(*halves)], factors_of(whole, states), rtol=1e-5, atol=1e-6)
    assert len(launched) == 3


@pytest.fixture
def rotated(monkeypatch):
    """The arguments of each launch of the kernel that normalises and rotates."""
    from dcformer.kernels.triton import rotation as rotation_kernel

    monkeypatch.setattr(triton_form.TritonBackend, "device_type", DEVICE)
    found, launch = [], rotation_kernel.launch_rotation
    monkeypatch.setattr(rotation_kernel, "launch_rotation", lambda *call: (found.append(call), launch(*call)))
    return found


@torch.no_grad()
@pytest.mark.usefixtures("rotated", "poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rotary", "has_norms", "rows"), [(12, True, 2), (8, True, 1), (12, False, 1), (0, True, 1)])
def test_queries_and_keys_are_normalised_and_rotated_as_complex_numbers(rotary, has_norms, rows, dtype):
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(2, 5, 11 * 12 + 3, generator=generator).to(DEVICE, dtype)[..., 3:]
    query, key = (states.unflatten(2, (-1, 12)).transpose(1, 2) for states in projected.split([9 * 12, 2 * 12], dim=2))
    norms = [DCFormerRMSNorm(12, eps).to(DEVICE, dtype) if has_norms else None for eps in (0.5, 1e-6)]
    angles = torch.randn(rows, 5, rotary // 2, generator=generator, dtype=torch.float64).to(DEVICE)
    positions = None
    if rotary:
        positions = tuple(torch.cat((part, part), dim=2).float() for part in (2 * angles.cos(), 2 * angles.sin()))
    for norm in norms if has_norms else ():
        norm.weight.copy_(0.5 + torch.rand(12, generator=generator))
    found = triton_form.TritonBackend().rotation(query, key, norms, positions)
    for states, norm, result in zip((query, key), norms, found):
        exact = states.double()
        if norm is not None:
            exact = norm.weight * exact / (exact.square().mean(3, keepdim=True) + norm.eps).sqrt()
        first, second, rest = exact.tensor_split([rotary // 2, rotary], dim=3)
        turned = torch.complex(first, second) * torch.polar(torch.full_like(angles, 2.0), angles).unsqueeze(1)
        exact = torch.cat((turned.real, turned.imag, rest), dim=3)
        assert result.shape == states.shape and result.transpose(1, 2).is_contiguous()
        assert_close(result.double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 5e-3)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["dcformer", "plain_gated_transformer"])
def test_layers_normalise_and_rotate_in_one_launch_where_nothing_forbids_it(variant, rotated, monkeypatch):
    layers = 2
    model, tokens = tiny_model(variant, num_hidden_layers=layers).to(DEVICE), random_tokens(2, 3).to(DEVICE)
    model.set_attn_implementation(NAMED if model.config.composes_heads else "sdpa")
    monkeypatch.setattr(cpu_backend.CPUBackend, "projection", lambda *operands: None)
    found = model(tokens).logits
    assert len(rotated) == layers
    with torch.enable_grad():
        assert_close(found, model(tokens).logits, rtol=1e-5, atol=1e-5)
    with torch.autocast(DEVICE, torch.float16):
        model(tokens)
    torch.compile(model, backend="eager", fullgraph=True)(tokens)
    assert len(rotated) == layers
    seen = []
    norm = model.model.layers[0].self_attn.k_norm
    if norm is not None:
        norm.register_forward_hook(lambda *call: seen.append(call))
        model(tokens)
        assert len(seen) == 1 and len(rotated) == 2 * layers - 1
    if model.config.composes_heads:
        rotated.clear()
        model.set_attn_implementation("dcmha_plain")
        model(tokens)
        assert rotated == []


@torch.no_grad()
def test_what_the_kernel_would_misread_is_left_to_pytorch(rotated):
    states, norm = torch.randn(2, 3, 5, 8, device=DEVICE), DCFormerRMSNorm(8, 1e-6).to(DEVICE)
    angles, of_column = torch.randn(2, 5, 8, device=DEVICE), copy.deepcopy(norm)
    of_column.weight = torch.nn.Parameter(torch.randn(8, 2, device=DEVICE)[:, 0])
    for wrong in (angles[:, :1], angles[:, :, :1].expand(-1, -1, 12), angles.double(), torch.cat((angles, angles))):
        assert triton_form.TritonBackend().rotation(states, states, (norm, norm), (wrong, wrong)) is None
    assert triton_form.TritonBackend().rotation(states, states, (of_column, norm), (angles, angles)) is None
    assert triton_form.TritonBackend().rotation(states, states, (norm, None), None) is None and rotated == []
    found = [
        triton_form.TritonBackend().rotation(states, states, norms, (angles, angles))[0]
        for norms in ((norm, None), (None,) * 2)
    ]
    assert torch.equal(*found)  # a layer with one norm applies none


@torch.no_grad()
def test_cuda_graphs_record_the_kernel_and_tracers_pytorch(rotated, launched, monkeypatch):
    layer = tiny_model(num_hidden_layers=1).to(DEVICE).requires_grad_(False).model.layers[0].self_attn
    states, other = torch.randn(2, 2, 9, 32, device=DEVICE)
    angles = torch.randn(1, 9, 8, device=DEVICE)
    monkeypatch.setattr(cpu_backend.CPUBackend, "projection", lambda *operands: None)

    def project(states):
        query, key, _, pre, post = layer.project(states, (angles, angles))
        return query, key, pre.query.factors, post.key.factors

    with monkeypatch.context() as patch:  # as while a stream is captured
        patch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
        project(states)
    assert len(rotated) == len(launched) == 1
    for trace in (functools.partial(torch.jit.trace, check_trace=False), lambda function, x: make_fx(function)(x)):
        traced = trace(project, states)
        assert len(rotated) == 1
        assert_close(traced(other), project(other), rtol=1e-5, atol=1e-5)
        rotated.pop()
