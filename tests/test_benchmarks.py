"""What the benchmarks compute: nothing wrong is timed, cases, ratios, time limits, and the decoder of the authors."""

import contextlib
import json
import time
from types import SimpleNamespace

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from benchmarks import attention, cpu, measure, models, quantization, serving
from benchmarks.authors import AuthorsDecoder
from benchmarks.measure import Case, Entry, Run, Timer
from dcformer import AttentionInputs, dcmha, register_implementation


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def once(monkeypatch):
    """Whatever is timed is called three times alone."""
    monkeypatch.setattr(measure, "_LEAST_SAMPLES", 1)
    monkeypatch.setattr(measure, "_SECONDS_PER_SAMPLE", 0)
    monkeypatch.setattr(measure, "Timer", lambda device, seconds, most=1, end=None: Timer(device, 0, most, end))


@pytest.mark.parametrize("module", [attention, models, cpu], ids=lambda module: module.__name__)
def test_every_row_is_measured_at_tiny_sizes_beside_its_baseline(module, once, tmp_path, monkeypatch):
    monkeypatch.setattr(dcmha, "BACKENDS", {"plain": dcmha.BACKENDS["plain"]})
    arguments = ["--quick", "--device", "cpu", "--json", str(file := tmp_path / "rows.json")]
    assert measure.run_command(module.__doc__, module.REGISTRY, arguments) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert {row["group"].split(":")[0] for row in rows} >= {each.name for each in module.REGISTRY} - {"attention"}
    for row in rows:
        assert row["timing"]["median"] >= row["timing"]["minimum"] > 0 and not row["note"], row
        assert any("/" in name and value > 0 for name, value in row["figures"].items()), row


@pytest.fixture
def clock(monkeypatch):
    """Time passes only when a test sleeps, and then at once."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "perf_counter", lambda: sum(slept))


def test_a_limit_bounds_the_command_and_lists_what_it_left_out(capsys, clock):
    assert measure.run_command("", cpu.REGISTRY, ["--quick", "--seconds", "0", "--threads", "1"], device="cpu") == 0
    assert capsys.readouterr().out.count("not measured: the 0 seconds were over") == 5 * 3 + 3 + 4
    timings = Timer(CPU, seconds=60, end=0.1)({name: lambda: time.sleep(0.07) for name in "abc"})
    assert timings.keys() == {"a"} and timings["a"].samples == 1


def test_a_row_has_its_time_as_a_multiple_of_another_and_is_printed_when_it_is_measured(tmp_path, capsys, clock):
    run, shown = Run(CPU, is_quick=True, json=tmp_path / "rows.json"), []

    def make(name, seconds):
        shown.append(capsys.readouterr().out)
        return Case(lambda: time.sleep(seconds), parts=2, rates={"tokens/s": 3})

    entries = [Entry(name, lambda of=(name, seconds): make(*of)) for name, seconds in (("a", 0.02), ("b", 0.06))]
    run.compare("group", entries, {"a": "/ a"})
    assert shown[0] == "" and "  a: ms 1" in shown[1] and not run.rows[0].note
    assert run.rows[1].figures == pytest.approx({"tokens/s": 100, "/ a": 3})
    assert json.loads(run.json.read_text())["figures"]["group"]["b"] == run.rows[1].figures
    run.threads, seen = [1, 2], []
    entry = Entry("turn", lambda: Case(lambda prepared: seen.append(torch.get_num_threads()), int))
    run.compare("turns", [entry], in_turns=True)
    assert seen == sorted(seen) and {*seen} == {1, 2}
    assert [row.group for row in run.rows[2:]] == ["turns, 1 threads", "turns, 2 threads"]


@pytest.mark.parametrize("waits", [False, True])
def test_on_a_gpu_calls_are_timed_by_do_bench_as_a_graph_and_as_they_are(waits, monkeypatch):
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
        return [8.0, 2.0, 4.0]

    default = SimpleNamespace(clone_state=lambda: generator, graphsafe_set_state=states.append)
    fakes = {"graph": record, "current_stream": lambda: "a stream", "current_device": lambda: 0}
    fakes |= {"CUDAGraph": lambda: SimpleNamespace(replay=lambda: [1.0]), "default_generators": [default]}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    triton = pytest.importorskip("triton.testing")
    monkeypatch.setattr(triton, "do_bench", lambda call, rep, **_: call() if rep == 300 else [])
    run = Run(CUDA)
    run.compare("group", [Entry("name", lambda: Case(call, parts=2, figures={"MiB": 5}))], in_turns=True)
    assert (row := run.rows[0]).figures == {measure.AS_CALLED: 2, "MiB": 5} and not row.has_failed
    if waits:
        assert row.timing is None and row.note == "no CUDA graph: RuntimeError: it waits for the device"
        assert states == [generator]  # random numbers can be sampled again
    else:
        assert row.timing == (0.0005, 0.0005, 1) and not states and not row.note


@pytest.mark.parametrize("error", ["no key-wise gate", "not a number", "gradient", "window"])
def test_what_is_wrong_has_no_time(error, once, monkeypatch):
    def attend(query, key, value, pre, post, **options):
        if error == "no key-wise gate":
            factors = torch.cat((post.key.factors[..., :-1], 0 * post.key.factors[..., -1:]), -1)
            post = post._replace(key=type(post.key)(factors=factors))
        options |= {"mask": dcmha.Visibility(193, 193, sliding_window=7)} if error == "window" else {}
        output = dcmha.plain_attention(AttentionInputs(query, key, value, pre, post, **options))
        output = output.index_fill(2, torch.tensor([3]), torch.nan) if error == "not a number" else output
        return output if error != "gradient" else output.detach() + 0.5 * (output - output.detach())

    monkeypatch.setattr(dcmha, "BACKENDS", {"plain": dcmha.BACKENDS["plain"]})
    register_implementation("wrong", attend)
    run = Run(CPU, is_quick=True)
    attention.compare(run, attention.Shape(4, 8, 20, 6))
    rows = {row.name: row for row in run.rows if row.group.startswith("forward and backward")}
    assert rows["wrong"].has_failed and rows["wrong"].timing is None and "is wrong" in rows["wrong"].note
    assert all(row.timing for name, row in rows.items() if name != "wrong") and len(rows) == 4


def test_the_baseline_on_a_gpu_is_flash_attention_with_the_windows_of_its_layers():
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "attention" in str(function):
                left = (kwargs or {}).get("window_size_left")
                calls.append((str(function), None if left is None else left + 1, args))
            return function(*args, **(kwargs or {}))

    calls, (family, *_) = [], models.families(CUDA)
    config = models.configuration("tiny", **family.values)
    model = models.make_model(Run(torch.device("meta"), torch.bfloat16), config, family.attention)
    states = torch.randn(2, 40, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    windows = [16 if kind == "sliding_attention" else None for kind in config.layer_types]
    with Calls():
        output = model(inputs_embeds=states, use_cache=False).last_hidden_state
        torch.autograd.grad(output, [states, *model.layers.parameters()], torch.ones_like(output))
    assert [name for name, *_ in calls[:4]] == ["aten._flash_attention_forward.default"] * 4
    assert [window for _, window, _ in calls] == [*windows, *reversed(windows)] and all(c[2][8] for c in calls[:4])
    with Calls():
        models.Decoder(model, False, 2, 24).decode()
    steps = calls[-4 * models.STEPS :]
    assert all(window is None and not args[8] for _, window, args in steps)
    assert [args[1].shape[1] for *_, args in steps[:4]] == [window or 24 + models.STEPS for window in windows]


def test_a_step_of_a_decoder_starts_where_the_prompt_ends():
    config = models.configuration("tiny", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    decoder = models.Decoder(models.make_model(Run(CPU), config, "eager"), False, 2, 24)
    full, text = decoder.cache.layers[1], cpu.QUICK._replace(prompt=12, steps=3, vocabulary=50)
    before = full.keys.clone()
    for _ in range(2):
        decoder.decode()
        assert int(full.cumulative_length) == 24 + models.STEPS
    assert (full.keys != before).any(-1).all(1)[0].tolist() == [False] * 24 + [True] * models.STEPS
    for kind in ("dynamic", "static"):
        case = cpu.decode_case(tiny_model("dcformer"), text._replace(cache=kind))
        caches = case.prepare(), case.prepare()
        case.call(caches[0])
        assert [int(cache.get_seq_length(1)) for cache in caches] == [15, 12]


@pytest.mark.parametrize("variant, prompt", [("dcformer", 1), ("rank_1", 5), ("all_global", 24), ("dcformer", 24)])
def test_the_authors_decoder_has_our_logits_before_and_after_the_window_is_full(variant, prompt):
    model, token_ids = tiny_model(variant), random_tokens(2, 24)
    decoder = AuthorsDecoder(model, 24)
    cache = decoder.new_cache(batch=2)
    pieces = [token_ids[:, :prompt], *token_ids[:, prompt:].split(1, dim=1)]
    logits = torch.cat([decoder(piece, cache) for piece in pieces if piece.shape[1] > 0], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(token_ids).logits, atol=1e-4, rtol=0)


def test_losses_are_those_of_the_model_through_a_cache_too_with_the_interval_of_rows():
    model, rows = tiny_model("all_global", max_position_embeddings=256).double(), random_tokens(3, 140)
    expected = [model(row[None], labels=row[None]).loss.item() for row in rows]
    for new_cache in (None, lambda: DynamicCache(config=model.config)):
        losses = quantization.row_losses(model, rows, new_cache)
        assert losses.tolist() == pytest.approx(expected, abs=1e-5)  # float32 in the loss
    change = quantization.compare(torch.tensor([1.2, 1.1]), torch.tensor([1.0, 1.0]))
    assert change["loss"] == pytest.approx(1.15) and change["change"] == pytest.approx(0.15)
    assert change["interval"] == pytest.approx(1.96 * 0.05 * 2**0.5 / 2)


def test_padded_batches_write_what_single_prompts_get_and_other_tokens_are_not_timed():
    model, requests = tiny_model(), [(random_tokens(1, n, seed=n)[0].tolist(), n % 5 + 2) for n in (3, 9, 5)]
    single, padded = (serving.answer_by_generate(model, rows, requests) for rows in (1, 3))
    assert padded == single and [len(answer) for answer in single] == [number for _, number in requests]
    serving.check_tokens(model, requests, single, 1e-3)
    with pytest.raises(RuntimeError, match="not likeliest"):
        serving.check_tokens(model, requests, [*single[:2], [*single[2][:-1], single[2][-1] ^ 1]], 1e-3)
