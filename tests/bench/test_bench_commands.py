"""`dcformer bench` at tiny sizes on a CPU: every part runs, and shows no time of what is wrong."""

import contextlib
import functools
import itertools
import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from dcformer import DCFormerConfig, dcmha, register_implementation
from dcformer.bench import attention, candidates, models, roofline
from dcformer.bench.measure import AS_CALLED, Case, Run, Timer
from dcformer.bench.operands import prompt_operands, step_operands
from dcformer.cli import app


CPU = torch.device("cpu")
TINY = attention.Shape(4, 8, 20)
WINDOW = TINY._replace(window=6)
CUDA = torch.device("cuda")
BASELINE = "Transformer++, sdpa, same windows"


@pytest.fixture(autouse=True)
def small_probes(monkeypatch):
    """The rates of the machine do not matter here, and take seconds to measure."""
    monkeypatch.setitem(roofline._MATMUL_SIZES, "cpu", 64)
    monkeypatch.setitem(roofline._MEMORY_BYTES, "cpu", 2**20)


@pytest.fixture
def run():
    run = Run("test", CPU, is_quick=True)
    run.timer = Timer(CPU, seconds=0, most=3)
    return run


@pytest.fixture
def only_plain(monkeypatch):
    monkeypatch.setattr(dcmha, "_TABLE", {"plain": dcmha._TABLE["plain"]})


def command(tmp_path, *arguments):
    path = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["bench", *arguments, "--quick", "--device", "cpu", "--json", str(path)])
    assert done.exit_code == 0, done.output
    content = json.loads(path.read_text(encoding="utf-8"))
    return content, {(row["group"], row["name"]): row for row in content["rows"]}


def test_attention_times_everything_beside_its_baselines(tmp_path, only_plain, monkeypatch):
    monkeypatch.setattr(attention, "shapes", lambda is_quick: [TINY, WINDOW])
    content, rows = command(tmp_path, "attention")
    bases = {TINY: "sdpa", WINDOW: "sdpa, same window"}
    for way, (shape, base) in itertools.product(("forward", "forward and backward"), bases.items()):
        group = f"{way}: {shape}"
        for name in ("plain", "authors", base):
            timing, figures = rows[group, name]["timing"], rows[group, name]["figures"]
            assert timing["median"] >= timing["minimum"] > 0 and timing["samples"] >= 3, (group, name)
            assert figures[f"/ {base}"] > 0 and figures["roofline / time"] > 0
        assert "torch.compile" in rows[group, "authors, compiled"]["note"]
    assert [name for group, name in rows if group.startswith("branches, forward by plain")] == list(attention.BRANCHES)
    assert rows[f"packed: {TINY}", "plain, documents of 2"]["figures"]["/ one document"] > 0
    assert content["environment"]["torch"] == torch.__version__ and content["rates"]["flops"] > 0


@pytest.mark.parametrize("what", ["decode", "train", "model"])
def test_models_are_timed_beside_transformer_plus_plus(tmp_path, only_plain, what):
    _, rows = command(tmp_path, what)
    setting, figure = "1 rows of 48 tokens", "TFLOP/s"
    if what == "decode":
        setting, figure = "batch 1, prompt 24", "GB/s at least"
    group = f"{'forward' if what == 'model' else what}: 4 layers of tiny, {setting}"
    for name in ("DCFormer++, plain", "DCFormer++, plain, query-wise", "Transformer++, sdpa, all global"):
        timing, figures = rows[group, name]["timing"], rows[group, name]["figures"]
        base = rows[group, BASELINE]["timing"]["median"]
        assert figures[figure] > 0 and figures["time / all global"] > 0
        assert figures["time / same windows"] == pytest.approx(timing["median"] / base)
    if what == "model":
        assert rows["Table 2: what composition adds, in %", "dcformer-6.9b, 2048 tokens"]["figures"]["parameters"] > 0


def test_after_the_time_is_over_all_is_listed_what_matters_most_first_and_nothing_measured(only_plain):
    run = Run("test", CPU, seconds=1e-9)
    attention.run(run)
    models.decode(run)
    models.train(run)
    assert not any(row.has_failed or row.timing for row in run.rows)
    groups = list(dict.fromkeys(row.group for row in run.rows))
    assert groups[:4:2] == [f"forward: H 32, D 128, T 2048, {mask}, batch 1" for mask in ("global", "window 256")]
    seen = [(row.group, row.name) for row in run.rows if row.group.startswith("forward and backward")]
    assert [name == "authors, compiled" for _, name in seen] == [False] * 42 + [True] * 14
    lengths = [group.split("T ")[1].split(",")[0] for group, name in seen if name == "plain"]
    assert lengths == ["2048"] * 4 + ["4096"] * 4 + ["2048"] * 2 + ["8192"] * 4
    for kind, count in (("decode", 8), ("train", 2)):
        seen = [(row.group, row.name) for row in run.rows if row.group.startswith(kind)]
        assert seen[0] == (seen[1][0], BASELINE) and "6.9b" in seen[0][0] and seen[1][1] == "DCFormer++, plain"
        assert [name for _, name in seen[: 2 * count]] == [BASELINE, "DCFormer++, plain"] * count


class CallsOf(TorchDispatchMode):
    """Records the calls of operators with a text in their name."""

    def __init__(self, text):
        super().__init__()
        self.text, self.calls = text, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.text in str(function):
            self.calls.append((str(function), args, kwargs))
        return function(*args, **(kwargs or {}))


def window_of(call):
    """The window that FlashAttention was asked for, from sizes without key t of query t, and whether it is causal."""
    _, args, kwargs = call
    left, right = kwargs.get("window_size_left"), kwargs.get("window_size_right")
    return None if left is None else left + 1 + right, args[8]


def test_the_baseline_on_a_gpu_is_flash_attention_with_the_windows_of_its_layers(run):
    """On meta tensors, which take what the operator and its derivative take on a GPU."""
    assert models.families(CUDA)[0].attention == models.FLASH_ATTENTION
    assert models.families(CUDA)[0].name == "Transformer++, FlashAttention 2, same windows"
    run.device, run.dtype = torch.device("meta"), torch.bfloat16
    config = models.configuration("tiny", **models.families(CUDA)[0].values)
    model = models.make_model(run, config, models.FLASH_ATTENTION)
    states = torch.randn(2, 40, 64, dtype=run.dtype, device="meta", requires_grad=True)
    with CallsOf("attention") as seen:
        output = model(inputs_embeds=states, use_cache=False).last_hidden_state
        torch.autograd.grad(output, [states, *model.layers.parameters()], torch.ones_like(output))
    windows = [16 if kind == "sliding_attention" else None for kind in config.layer_types]
    assert sorted(map(str, windows)) == ["16", "16", "None", "None"]
    assert [call[0] for call in seen.calls[:4]] == ["aten._flash_attention_forward.default"] * 4
    assert [window_of(call) for call in seen.calls[:4]] == [(window, True) for window in windows]
    backward = [call[2].get("window_size_left") for call in seen.calls[4:]]
    assert backward == [window and window - 1 for window in reversed(windows)]

    decoder = models.Decoder(model, False, 2, 24)
    with CallsOf("attention") as seen:
        decoder.decode()
    assert len(seen.calls) == 4 * models.STEPS and {window_of(call) for call in seen.calls} == {(None, False)}
    keys = [call[1][1].shape[1] for call in seen.calls[:4]]
    assert keys == [window or 24 + models.STEPS for window in windows]


def flash_attention_by_its_documentation(
    query, key, value, _, __, queries, keys, dropout, causal, debug, *, scale, **window
):
    """What the operator says that it does: a query at i sees the keys from i - left to i + right."""
    age = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    shown = age >= 0 if causal else torch.ones_like(age, dtype=torch.bool)
    if window:
        shown = shown & (age <= window["window_size_left"]) & (age >= -window["window_size_right"])
    scores = torch.einsum("bthd,bshd->bhts", query, key) * scale
    weights = scores.masked_fill(~shown, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, value), None


def test_the_gate_holds_the_baseline_to_the_window_too(monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention_by_its_documentation)
    of_window, of_all = (candidates.plain_candidates(CUDA, True, window)[0] for window in (48, None))
    assert (of_window.name, of_all.name) == ("FlashAttention 2, same window", "FlashAttention 2")
    options = {"with_gradients": True, "window": 48}
    wide = candidates.Candidate("wide", lambda of, window, mask: of_window.make(of, window + 1, mask), composes=False)
    assert "output is wrong" in wide.problem(4, 8, CPU, torch.float32, **options)
    assert of_window.problem(4, 8, CPU, torch.float32, **options) is None
    assert of_all.problem(4, 8, CPU, torch.float32) is None
    assert of_all.problem(4, 8, CPU, torch.float32, is_step=True) is None
    sdpa = candidates.plain_candidates(CPU, False, 48)[0]
    assert sdpa.problem(4, 8, CPU, torch.float32, **options) is None
    assert [entry.name for entry in candidates.plain_candidates(CUDA, True, None)] == ["FlashAttention 2", "cuDNN"]


@pytest.mark.parametrize("waits", [False, True])
def test_on_a_gpu_calls_are_timed_as_a_graph_and_as_they_are(waits, run, monkeypatch):
    recording, states, generator = set(), [], torch.Generator()

    @contextlib.contextmanager
    def record(graph, stream):
        recording.add(stream)
        try:
            yield
        except RuntimeError as error:  # as on a GPU
            raise RuntimeError("the recording was invalidated") from error
        finally:
            recording.clear()

    def call():
        if waits and recording:
            raise RuntimeError("it waits for the device")
        assert recording <= {"a stream"}
        time.sleep(0.02)

    default = SimpleNamespace(clone_state=lambda: generator, graphsafe_set_state=states.append)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: time.sleep(0.001)))
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "a stream")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", [default])
    run.device = CUDA

    row = run.measured("group", "name", lambda: Case(call, parts=2))
    assert 10 <= row.figures[AS_CALLED] < 1000 and not row.has_failed
    if waits:
        assert row.timing is None and row.note == "no CUDA graph: RuntimeError: it waits for the device"
        assert states == [generator]  # random numbers can be sampled again
    else:
        assert 0.0005 <= row.timing.minimum < 0.01 and not states and not row.note


@pytest.mark.parametrize("error", ["no key-wise gate", "one value is not a number", "gradient"])
def test_an_implementation_that_is_wrong_has_no_time(error, only_plain, run):
    def attend(query, key, value, pre, post, **options):
        if error == "no key-wise gate":
            factors = post.key.factors.clone()
            factors[..., -1] = 0
            post = post._replace(key=type(post.key)(factors=factors))
        output = dcmha.plain_attention(query, key, value, pre, post, **options)
        if error == "one value is not a number":
            output = output.clone()
            output[0, 0, 0, 0] = torch.nan
        return output if error != "gradient" else output.detach() + 0.5 * (output - output.detach())

    register_implementation("wrong", attend)
    rows = {
        entry.name: attention.timed(run, "group", entry, TINY, with_gradients=error == "gradient")
        for entry in candidates.our_candidates()
    }
    assert rows["wrong"].has_failed and rows["wrong"].timing is None and "is wrong" in rows["wrong"].note
    assert rows["plain"].timing.median > 0


def test_the_gate_sees_a_window_that_is_one_key_too_wide_and_lets_others_pass():
    plain, authors = candidates._implementation("plain"), candidates.authors_candidates(False)[0]

    def too_wide(operands, window, mask):
        return lambda: operands.composed(sliding_window=window + 1, implementation="plain")

    wide = candidates.Candidate("wide", too_wide)
    assert "output is wrong" in wide.problem(4, 8, CPU, torch.float32, window=100)
    for entry in (plain, authors):
        assert entry.problem(4, 8, CPU, torch.float32, is_packed=True, with_gradients=True) is None
    assert plain.problem(4, 8, CPU, torch.float32, is_step=True) is None


def test_branches_change_what_is_computed():
    of = prompt_operands(4, 8, 20, CPU, torch.float32)
    outputs = [vary(of).composed() for vary in attention.BRANCHES.values()]
    for one, other in itertools.combinations(outputs, 2):
        assert (one - other).abs().max() > 1e-3


def test_the_step_reads_factors_from_rows_of_a_cache():
    of = step_operands(4, 8, 40, CPU, torch.float32)
    factors = {key_wise.factors.untyped_storage().data_ptr() for key_wise in (of.pre.key, of.post.key)}
    assert factors == {states.untyped_storage().data_ptr() for states in (of.key, of.value)}


def test_a_step_of_the_decoder_starts_where_the_prompt_ends(run):
    config = models.configuration("tiny", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    decoder = models.Decoder(models.make_model(run, config, "eager"), False, 2, 24)
    sliding, full = decoder.cache.layers
    before = full.keys.clone()
    for _ in range(2):
        decoder.decode()
        assert int(full.cumulative_length) == 24 + models.STEPS and sliding.keys.shape[2] == 16
    assert (full.keys != before).any(-1).all(1)[0].tolist() == [False] * 24 + [True] * models.STEPS
    read = [*decoder._read.layers.parameters(), sliding.keys, sliding.values]
    read += [states[:, :, :24] for states in (full.keys, full.values)]
    assert models.step_bytes(config, 2, 24, torch.float32) == sum(tensor.numel() * 4 for tensor in read)


@pytest.mark.parametrize("values, name", [(models.PLAIN, "sdpa"), ({}, "dcmha_plain")])
def test_nothing_in_a_compiled_step_waits_for_the_device(values, name, run, monkeypatch):
    graphs = []

    def keep(module, inputs):
        graphs.append(module)
        return module.forward

    compiler = functools.partial(torch.compile, backend=aot_autograd(fw_compiler=keep))
    monkeypatch.setattr(torch, "compile", compiler)
    config = models.configuration("tiny", num_hidden_layers=2, **values)
    models.Decoder(models.make_model(run, config, name), True, 2, 24).decode()

    (graph,) = graphs  # of one step, read again and again
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and hasattr(node.target, "tags")]
    waiting = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    assert len(nodes) > 50 and not [node for node in nodes if waiting & set(node.target.tags)]
    # Of the host only single numbers, which Inductor writes into its code: such as -1, the row that Transformers'
    # layers with a full window overwrite, and for which a step that is not compiled does wait.
    constants = [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    assert [-1] in [tensor.tolist() for tensor in constants] and {tensor.numel() for tensor in constants} == {1}


def test_on_a_cpu_calls_are_timed_in_turns_at_the_threads_asked_for():
    before, seen, timer = torch.get_num_threads(), [], Timer(CPU, seconds=0, most=3)
    record = lambda prepared: seen.append((*prepared, torch.get_num_threads()))  # noqa: E731
    timings = timer({name: Case(record, lambda name=name: name, ord(name) - ord("a") + 1) for name in "ab"})
    assert torch.get_num_threads() == before and timings["a"].samples == 3
    assert seen[-4:] == [("a", 1), ("b", 2)] * 2
    slow = timer.time(Case(lambda _: time.sleep(0.02), prepare=lambda: None, parts=2))
    assert 0.01 <= slow.minimum < 0.2


def test_on_a_gpu_do_bench_times_them_and_shares_the_seconds(monkeypatch):
    def do_bench(call, rep, return_mode):
        assert rep == 150 and return_mode == "all"
        return call()  # milliseconds

    monkeypatch.setattr(pytest.importorskip("triton.testing"), "do_bench", do_bench)
    timings = Timer(CUDA, seconds=0.3)({"a": Case(lambda: [8.0, 2.0, 4.0], parts=2), "b": lambda: [5.0]})
    assert timings == {"a": (0.001, 0.002, 3), "b": (0.005, 0.005, 1)}


def test_explain_says_of_every_implementation_whether_it_is_chosen():
    arguments = ["--explain", "--device", "cpu", "--heads", "6", "--queries", "1", "--keys", "77", "--gradient"]
    shown = CliRunner().invoke(app, ["bench", *arguments]).stdout
    lines = dict(line.split(": ", 1) for line in shown.splitlines())
    assert {"plain", "triton"} <= lines.keys() and list(lines.values()).count("is chosen") == 1
    assert CliRunner().invoke(app, ["bench"]).exit_code != 0


@pytest.mark.parametrize("preset", ["dcformer-1.4b", "dcformer-6.9b"])
def test_extra_parameters_are_those_of_equation_10_with_its_second_term(preset):
    config = DCFormerConfig.from_preset(preset)
    rank, heads, width = config.compose_rank, config.num_attention_heads, config.hidden_size
    inner = 2 * rank * heads
    per_layer = 4 * (width * inner + inner * inner + width * heads)  # pre and post, each of queries and keys
    layer = 4 * width**2 + 3 * width * config.intermediate_size
    assert models.overhead(config, 2048)["of layers"] == pytest.approx(100 * per_layer / layer, rel=1e-3)
