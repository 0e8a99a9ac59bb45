"""The C++ operator beyond what the tests of the operator hold it to: threads, memory, bfloat16, graphs, loading."""

import ctypes
import functools
import logging
import shutil
import struct
import sys
from unittest import mock

import pytest
import torch
from operator_inputs import (
    INSTRUCTION_SETS,
    attend,
    largest_error,
    library_of,
    make_inputs,
    sixteen_bit_attention,
    value_and_gradients,
)
from reference import composed_attention_reference, hidden_pairs
from tiny_models import random_tokens, tiny_model
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from dcformer.compose_dcformer import pack
from dcformer.dcmha import AttentionInputs, ComposeSide, Visibility, composed_attention
from dcformer.kernels.call import Call
from dcformer.kernels.cpu import build
from dcformer.kernels.cpu import cpu_backend as native


native_form = functools.partial(attend, "native")


@pytest.fixture(autouse=True, scope="module", params=INSTRUCTION_SETS)
def instruction_set(request):
    """Every test runs with the code of each instruction set that this CPU executes."""
    with library_of(request.param) as name:
        yield name


@pytest.fixture
def threads():
    """Set torch's number of threads; at the end it is what it was."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [{"batch": 3}, {"batch": 2, "queries": 3}], ids=str)
def test_threads_compute_and_project_the_same(threads, calls, shape):
    """Of 400 channels and 39 heads, which two and three threads share unevenly."""
    inputs = make_inputs(**{"queries": 230, "keys": 230, **shape}).to(torch.float32)
    model = tiny_model(num_hidden_layers=1, hidden_size=400, num_attention_heads=13, head_dim=8)
    results = []
    for number in (1, 2, 5):
        threads(number)
        with torch.no_grad():
            logits = model(random_tokens(2, 3)).logits
        results.append((logits, *value_and_gradients(native_form, inputs, sliding_window=100)))
    assert calls.count("dcformer_project") == 3
    for logits, output, gradients in results[1:]:
        assert_close(logits, results[0][0], rtol=1e-5, atol=1e-5)
        assert_close(output, results[0][1], rtol=1e-5, atol=1e-6)
        assert_close(gradients, results[0][2], rtol=1e-4, atol=1e-5)


@pytest.fixture
def fresh_memory_of_large_numbers():
    """glibc fills what it hands out with the complement of a byte, floats of 3e38, and torch its tensors with NaN."""
    perturb = -6  # M_PERTURB in malloc.h
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    ctypes.CDLL(None).mallopt(perturb, 128)
    yield
    ctypes.CDLL(None).mallopt(perturb, 0)
    torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no mallopt")
@pytest.mark.usefixtures("fresh_memory_of_large_numbers")
def test_memory_is_not_read_before_it_is_written():
    for shape in ({"queries": 60, "keys": 131}, {"queries": 3, "keys": 50}, {"queries": 50, "keys": 50}):
        inputs = make_inputs(**shape).to(torch.float32)
        with torch.no_grad():
            assert native_form(*inputs, sliding_window=40).isfinite().all()
        output, gradients = value_and_gradients(native_form, inputs)
        assert all(tensor.isfinite().all() for tensor in (output, *gradients.values()))


def test_gradients_do_not_depend_on_the_default_type():
    inputs = make_inputs(queries=9, keys=9).to(torch.float32).leaves()
    tensors = list(inputs.tensors().values())
    expected = torch.autograd.grad(native_form(*inputs).square().sum(), tensors)
    torch.set_default_dtype(torch.float64)
    try:
        gradients = torch.autograd.grad(native_form(*inputs).square().sum(), tensors)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(gradients, expected)


def error_of(output, expected):
    """Root mean square."""
    return float((output.double() - expected).square().mean().sqrt())


@pytest.mark.parametrize(
    "options",
    [{"is_causal": False}, {"sliding_window": 70, "groups": 2}, {"key_value_heads": 2, "keys": 400}, {"padding": 270}],
    ids=str,
)
def test_products_in_bfloat16_are_as_exact_as_those_of_plain_attention(monkeypatch, options):
    """The way of CPUs that have such products, taken on one that may not."""
    shape = {key: options[key] for key in ("groups", "key_value_heads", "keys") if key in options}
    masks = {key: options[key] for key in ("is_causal", "sliding_window") if key in options}
    inputs = make_inputs(**{"queries": 300, "keys": 300, "channels": 16, **shape}).to(torch.bfloat16)
    padding = torch.arange(inputs.key.shape[2]) >= torch.tensor([[options.get("padding", 0)], [0]])
    visibility = Visibility(300, inputs.key.shape[2], **masks, padding=padding)
    visible = ~hidden_pairs(visibility, inputs.query.device)
    expected = composed_attention_reference(*inputs.to(torch.float64), attention_mask=visibility)
    monkeypatch.setattr(native, "has_bfloat16_products", lambda: True)
    with torch.no_grad():
        output = native_form(*inputs, attention_mask=visibility)
        key, value = (states.repeat_interleave(inputs.query.shape[1] // states.shape[1], 1) for states in inputs[1:3])
        eager = sixteen_bit_attention(inputs._replace(key=key, value=value), visible)
    assert output.dtype == torch.bfloat16
    seen = visible.any(-1).expand(2, inputs.query.shape[1], -1)
    assert not output[~seen].any()
    assert error_of(output[seen], expected[seen]) <= 2 * error_of(eager[seen], expected[seen])


def test_compiled_graphs_hold_it_as_one_operator():
    inputs = make_inputs(queries=1, keys=20).to(torch.float32)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda *tensors: native_form(*tensors), backend=backend, fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(*inputs), native_form(*inputs))
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("native_attention" in name for name in called) == 1
    torch._dynamo.reset()


def test_its_operators_keep_the_rules_of_torch():
    inputs = make_inputs(queries=10, keys=12).to(torch.float32)
    call = Call.of(AttentionInputs(*inputs, 0.5, Visibility(10, 12)))
    leaves = [tensor.detach().requires_grad_() if isinstance(tensor, torch.Tensor) else tensor for tensor in call]
    rules = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(native.forward_op, tuple(leaves), test_utils=rules)


@pytest.fixture
def calls(monkeypatch):
    """The names of the C++ functions that are called."""
    names, run = [], native._run
    monkeypatch.setattr(native, "_run", lambda name, *call: (names.append(name), run(name, *call)))
    return names


ROTATES_HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 2},
        {"compose_groups": 2, "compose_rank": 1, "compose_query": False},
        {"compose_low_rank": False, "qk_norm": False, "attention_bias": True},
        {"compose_gate": False, "compose_activation": "gelu_pytorch_tanh", "compose_pre": False},
        {"compose_rank": 7, "compose_key": False, "rope_parameters": ROTATES_HALF},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_projection_of_a_few_tokens_is_that_of_the_modules(monkeypatch, calls, changes, dtype):
    model, ids = tiny_model(**changes, hidden_size=35, head_dim=8), random_tokens(2, 3)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.compose.norm_eps = 0.3
        for norm, eps in ((attention.q_norm, 0.5), (attention.k_norm, 0.2)):
            if norm is not None:
                norm.eps = eps
    with torch.no_grad():
        logits = model.to(dtype)(ids).logits
        monkeypatch.setattr(native.CPUBackend, "projection", lambda *arguments: None)
        of_modules = model(ids).logits
        exact = model.double()(ids).logits  # of the same, rounded weights
    assert calls.count("dcformer_project") == model.config.num_hidden_layers
    if dtype == torch.float32:
        assert_close(logits, of_modules, rtol=1e-5, atol=1e-5)
    else:
        assert error_of(logits, exact) <= 1.5 * error_of(of_modules, exact)


def give_it_another_gelu(attention):
    attention.compose.act_fn = torch.nn.GELU(approximate="tanh")
    attention.compose.hidden_weight.data *= 20  # where the two differ


def parametrise(attention):
    class Half(torch.nn.Module):
        def forward(self, weight):
            return weight / 2

    for name in ("hidden_weight", "low_rank_weight", "gate_weight"):
        torch.nn.utils.parametrize.register_parametrization(attention.compose, name, Half())


CHANGES = {
    "hook": lambda attention: attention.compose.register_forward_hook(lambda module, inputs, output: output),
    "hook of a part": lambda attention: attention.compose.act_fn.register_forward_hook(lambda *call: 2 * call[2]),
    "forward of the activation": lambda attention: setattr(attention.compose.act_fn, "forward", torch.sin),
    "another GELU": give_it_another_gelu,
    "parametrised": parametrise,
    "no norm of the type": lambda attention: setattr(attention, "k_norm", torch.nn.Identity()),
    "plain": lambda attention: setattr(attention.config, "_attn_implementation", "dcmha_plain"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_were_changed_compute_for_themselves(calls, change):
    model, ids = tiny_model(num_hidden_layers=1), random_tokens(1, 2)
    CHANGES[change](model.model.layers[0].self_attn)
    with torch.no_grad():
        logits = model(ids).logits
    assert "dcformer_project" not in calls
    with torch.enable_grad():  # where nothing is projected at once
        assert_close(logits, model(ids).logits, rtol=1e-5, atol=1e-5)


WEIGHTS = [f"compose.{name}_weight" for name in ("hidden", "low_rank", "gate")]
WEIGHTS += ["qkv_proj.weight", "qkv_proj.bias", "q_norm.weight", "k_norm.weight"]


@pytest.mark.parametrize("put", [torch.nn.Module.register_buffer, setattr])
def test_tensors_in_the_place_of_parameters_are_projected(calls, put):
    """As FSDP's first version has them, and code that computes weights."""
    model, ids = tiny_model(num_hidden_layers=1, attention_bias=True), random_tokens(1, 2)
    with torch.no_grad():
        for path in WEIGHTS:
            owner, _, name = path.rpartition(".")
            module = model.model.layers[0].self_attn.get_submodule(owner)
            weight = getattr(module, name).detach() * 1.5
            getattr(module, name).copy_(weight)
            expected = model(ids).logits
            delattr(module, name)
            put(module, name, weight)
            assert torch.equal(model(ids).logits, expected)
    assert calls.count("dcformer_project") == 2 * len(WEIGHTS)


@pytest.mark.parametrize("path, kept", [("qkv_proj.weight", (slice(-8),)), (WEIGHTS[0], (slice(None), slice(1)))])
def test_weights_of_another_size_are_refused_by_the_modules(path, kept):
    model = tiny_model(num_hidden_layers=1, compose_groups=2)
    owner, _, name = path.rpartition(".")
    module = model.model.layers[0].self_attn.get_submodule(owner)
    setattr(module, name, torch.nn.Parameter(getattr(module, name)[kept].clone()))
    for length in (2, native.FEW_TOKENS + 1):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"size|shape"):
            model(random_tokens(1, length))


PRODUCTS = (functional.linear, torch.Tensor.__matmul__, torch.ops.aten.mm.default)


def twice_the_products(self, function, types, args=(), kwargs=None):
    result = function(*args, **(kwargs or {}))
    return 2 * result if function in PRODUCTS else result


class FunctionMode(TorchFunctionMode):
    __torch_function__ = twice_the_products


class DispatchMode(TorchDispatchMode):
    __torch_dispatch__ = twice_the_products


def patch_of(owner, name):
    function = getattr(owner, name)
    return lambda: mock.patch.object(owner, name, lambda *call, **options: 2 * function(*call, **options))


PATCHED = {functional: ("linear", "rms_norm"), torch: ("tanh", "bmm"), torch.nn.Linear: ("forward",)}
PATCHES = [patch_of(owner, name) for owner, names in PATCHED.items() for name in names]


@torch.no_grad()
@pytest.mark.parametrize("way", [FunctionMode, DispatchMode, *PATCHES])
def test_what_replaces_functions_of_torch_reaches_steps_as_it_reaches_prompts(calls, way):
    model, ids = tiny_model(), random_tokens(2, 9)
    unchanged, cache = model(ids).logits[:, -1:], DynamicCache(config=model.config)
    with torch.device("cpu"):  # which is a mode as well
        model(ids[:1, :2])
    assert calls.count("dcformer_project") == model.config.num_hidden_layers
    calls.clear()
    with way():
        whole = model(ids).logits[:, -1:]
        model(ids[:, :-1], cache=cache)
        assert_close(model(ids[:, -1:], cache=cache).logits, whole, rtol=1e-5, atol=1e-5)
    assert "dcformer_project" not in calls and largest_error(whole, unchanged) > 0.05


@torch.no_grad()
def test_tensors_of_other_classes_go_through_the_operator():
    inputs = make_inputs().to(torch.float32)
    output = native_form(TwoTensor(inputs.query, 2 * inputs.query), *inputs[1:])  # which has no memory of its own
    assert_close(output.b, native_form(2 * inputs.query, *inputs[1:]))


@pytest.fixture
def not_yet_loaded(monkeypatch):
    """As in a process that has not looked for the library yet."""
    monkeypatch.setattr(native, "_library", functools.cache(native._library.__wrapped__))


@pytest.fixture
def not_installed(not_yet_loaded, monkeypatch, tmp_path):
    """The folder of an installation without the library, and its cache; compiling takes a third of the time."""
    monkeypatch.setattr(native, "SOURCES", tmp_path / "native")
    monkeypatch.setenv("DCFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "FLAGS", ("-O0", *build.FLAGS[1:]))
    return tmp_path


def test_keys_and_values_are_projected_into_rows_of_a_cache_unless_somebody_replaces_them():
    attention, states = tiny_model().model.layers[0].self_attn, torch.randn(3, 2, 32)
    with torch.no_grad():
        _, key, value, pre, post = attention.project(states, None)
    for given, side in ((key, pre.key), (value, post.key)):
        rows = pack(given, side)
        assert rows is side.packed
        for others in (pack(given.clone(), side), pack(given, ComposeSide(factors=side.factors))):
            factors = given.shape[-1] + side.factors.shape[-1]
            assert rows.shape == others.shape and torch.equal(rows[..., :factors], others[..., :factors])
        assert pack(given, side, rows.shape[-1] + 8).shape[-1] == rows.shape[-1] + 8
        assert torch.equal(pack(given + 1, side)[..., : given.shape[-1]], given + 1)


def test_structures_of_another_size_are_refused(not_yet_loaded, monkeypatch):
    monkeypatch.setattr(native, "_CALL", struct.Struct(native._CALL.format + "q"))
    with pytest.raises(ValueError, match="bytes, those of"):
        native._library()


def test_missing_memory_is_an_error():
    keys = torch.zeros(1, 1, 1, 4).expand(1, 1, 2**50, 4)
    with pytest.raises(RuntimeError, match="there is not enough memory"):
        native_form(torch.zeros(1, 1, 9, 4), keys, keys, None, None, is_causal=False)


COUNTER = """
extern "C" { __attribute__((visibility("default"))) int64_t arrays = 0, chosen = -1, shortened = 0; }
static int64_t shortens(int64_t number) { return arrays++ == chosen && number > 0 ? ++shortened : 0; }
"""


def test_it_is_compiled_once_and_every_array_that_is_too_small_is_an_error(
    not_installed, instruction_set, threads, monkeypatch
):
    """The bounds of one array after the other are one element too tight, in every function of the library."""
    sources = shutil.copytree(build.SOURCES, not_installed / "sources", ignore=shutil.ignore_patterns("*.so"))
    before, after = (sources / "vectors.h").read_text().split("\nnamespace {\n", 1)
    assert after.count(": size(number)") == 1
    after = after.replace(": size(number)", ": size(number - shortens(number))")
    (sources / "vectors.h").write_text(f"{before}{COUNTER}namespace {{\n{after}")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(native, "has_bfloat16_products", lambda: True)
    monkeypatch.setenv("CXX", f"env {shutil.which('c++') or 'g++'}")  # as `ccache g++`
    assert native._why_no_library() is None
    (library,) = (not_installed / "cache").iterdir()
    assert library == build.find_library(instruction_set, not_installed / "cache")
    native._library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    names = ("arrays", "chosen", "shortened")
    arrays, chosen, shortened = (ctypes.c_int64.in_dll(native._library(), name) for name in names)
    # Heads of 3 and 6 channels fill no vector, so that all arrays are read.
    model, ids = tiny_model(num_hidden_layers=1, head_dim=6), random_tokens(1, 2)
    shapes = ({"batch": 1, "heads": 2, "queries": queries, "keys": 100} for queries in (100, 3))
    long, short = (make_inputs(**shape).to(torch.float32) for shape in shapes)
    threads(1)

    def compute_everything():
        value_and_gradients(native_form, long)
        with torch.no_grad():
            for inputs in (long, short):
                native_form(*inputs)
                native_form(*inputs.to(torch.bfloat16))
            model(ids)

    compute_everything()
    for number in range(arrays.value):
        arrays.value, chosen.value, shortened.value = 0, number, 0
        try:
            compute_everything()
        except RuntimeError as error:
            assert shortened.value == 1 and "an array is too small" in str(error)
        else:
            assert shortened.value == 0  # it was empty


DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "one bit": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
}


@pytest.fixture(scope="module")
def whole_library(instruction_set, tmp_path_factory):
    installed = build.find_library(instruction_set, build.SOURCES)
    # It is not there where the package was installed without a compiler.
    return installed or build.compile_library(instruction_set, tmp_path_factory.mktemp("native"))


@pytest.mark.parametrize("folder", ["native", "cache"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_anew(damage, folder, whole_library, not_installed, monkeypatch):
    (not_installed / folder).mkdir()
    (not_installed / folder / whole_library.name).write_bytes(DAMAGES[damage](whole_library.read_bytes()))
    compiled = []

    def compile_library(instruction_set, into):
        compiled.append(into)
        return shutil.copy(whole_library, not_installed / "new.so")

    monkeypatch.setattr(native, "compile_library", compile_library)
    assert native._why_no_library() is None
    assert compiled == [not_installed / "cache"]


@pytest.fixture
def homeless(monkeypatch):
    """As a container's user without a name: no HOME, and no entry for the uid."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("DCFORMER_CACHE", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)


@pytest.mark.skipif(sys.platform == "win32", reason="there users have other homes")
@pytest.mark.usefixtures("homeless", "not_yet_loaded")
def test_without_a_home_an_installed_library_is_used_or_one_warning_says_why_not(monkeypatch, tmp_path, caplog):
    tokens, model = random_tokens(1, 9), tiny_model(num_hidden_layers=1)
    expected = model(tokens).logits
    monkeypatch.setattr(native, "SOURCES", tmp_path / "native")
    native._library.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-5)
    assert len(caplog.records) == 1 and "DCFORMER_CACHE" in caplog.text


@pytest.mark.usefixtures("not_installed")
def test_without_a_compiler_one_warning_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    inputs = make_inputs().to(torch.float32)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_close(composed_attention(*inputs), attend("plain", *inputs))
    assert len(caplog.records) == 1
    assert "C++ compiler" in caplog.text
    with pytest.raises(ValueError, match="there is no C\\+\\+ compiler"):
        native_form(*inputs)


def test_an_environment_variable_switches_it_off(not_yet_loaded, monkeypatch, caplog):
    monkeypatch.setenv("DCFORMER_NATIVE", "0")
    inputs = make_inputs().to(torch.float32)
    assert_close(composed_attention(*inputs), attend("plain", *inputs))
    assert not caplog.records
    with pytest.raises(ValueError, match="DCFORMER_NATIVE"):
        native_form(*inputs)
