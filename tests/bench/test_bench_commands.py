"""`dcformer bench` at tiny sizes on a CPU: every part runs, and shows no time of what is wrong."""

import itertools
import json
import time

import pytest
import torch
from typer.testing import CliRunner

from dcformer import DCFormerConfig, dcmha, register_implementation
from dcformer.bench import attention, candidates, models, roofline
from dcformer.bench.measure import Case, Run, Timer
from dcformer.bench.operands import prompt_operands, step_operands
from dcformer.cli import app


CPU = torch.device("cpu")
TINY = attention.Shape(4, 8, 20)
WINDOW = TINY._replace(window=6)


@pytest.fixture(autouse=True)
def small_probes(monkeypatch):
    """The machine's own rates are of no interest here, and take seconds."""
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
    content = json.loads(path.read_text(encoding="utf-8"))
    return done, content, {(row["group"], row["name"]): row for row in content["rows"]}


def test_attention_times_everything_beside_its_baselines(tmp_path, only_plain, monkeypatch):
    monkeypatch.setattr(attention, "shapes", lambda is_quick: [TINY, WINDOW])

    done, content, rows = command(tmp_path, "attention")

    assert done.exit_code == 0, done.output
    for way, (shape, base) in itertools.product(
        ("forward", "forward and backward"), ((TINY, "sdpa"), (WINDOW, "sdpa, same window"))
    ):
        group = f"{way}: {shape}"
        for name in ("plain", "authors", base):
            timing, figures = rows[group, name]["timing"], rows[group, name]["figures"]
            assert timing["median"] >= timing["minimum"] > 0 and timing["samples"] >= 3, (group, name)
            assert figures[f"/ {base}"] > 0 and figures["roofline / time"] > 0
        assert "torch.compile" in rows[group, "authors, compiled"]["note"]
    assert [name for group, name in rows if group.startswith("branches, forward by plain")] == list(attention.BRANCHES)
    assert rows[f"packed: {TINY}", "plain, documents of 2"]["figures"]["/ one document"] > 0
    assert content["environment"]["torch"] == torch.__version__ and content["rates"]["flops"] > 0


@pytest.mark.parametrize(
    "what, setting, figure",
    [
        ("decode", "batch 1, prompt 24", "GB/s at least"),
        ("train", "1 rows of 48 tokens", "TFLOP/s"),
        ("model", "1 rows of 48 tokens", "TFLOP/s"),
    ],
)
def test_models_are_timed_beside_transformer_plus_plus(tmp_path, only_plain, what, setting, figure):
    done, _, rows = command(tmp_path, what)

    assert done.exit_code == 0, done.output
    group = f"{'forward' if what == 'model' else what}: 4 layers of tiny, {setting}"
    for name in ("DCFormer++, plain", "DCFormer++, plain, query-wise", models.ALL_GLOBAL.name):
        timing, figures = rows[group, name]["timing"], rows[group, name]["figures"]
        base = rows[group, models.BASELINE.name]["timing"]["median"]
        assert figures[figure] > 0
        assert figures[f"time / {models.BASELINE.name}"] == pytest.approx(timing["median"] / base)
    if what == "model":
        assert rows["Table 2: what composition adds, in %", "dcformer-6.9b, 2048 tokens"]["figures"]["parameters"] > 0


def test_nothing_is_begun_after_the_time_is_over(only_plain):
    run = Run("attention", CPU, is_quick=True, seconds=1e-9)
    attention.run(run)
    assert run.rows and not any(row.has_failed or row.timing for row in run.rows)


def _wrong(error):
    """The plain implementation with a fault."""

    def attend(query, key, value, pre, post, **options):
        if error == "no gate of the keys":
            side = post.key.factors.clone()
            side[..., -1] = 0
            post = post._replace(key=type(post.key)(factors=side))
        output = dcmha.plain_attention(query, key, value, pre, post, **options)
        if error == "one value is not a number":
            output = output.clone()
            output[0, 0, 0, 0] = torch.nan
        return output if error != "gradient" else output.detach() + 0.5 * (output - output.detach())

    return attend


@pytest.mark.parametrize("error", ["no gate of the keys", "one value is not a number", "gradient"])
def test_an_implementation_that_is_wrong_has_no_time(error, only_plain, run):
    register_implementation("wrong", _wrong(error))
    rows = {
        entry.name: attention.timed(run, "group", entry, TINY, with_gradients=error == "gradient")
        for entry in candidates.own_candidates()
    }
    assert rows["wrong"].has_failed and rows["wrong"].timing is None and "is wrong" in rows["wrong"].note
    assert rows["plain"].timing.median > 0


def test_the_gate_sees_a_window_that_is_one_key_too_wide_and_lets_others_pass():
    plain, authors = candidates._own("plain"), candidates.authors_candidates(False)[0]

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
    factors = {side.factors.untyped_storage().data_ptr() for side in (of.pre.key, of.post.key)}
    assert factors == {states.untyped_storage().data_ptr() for states in (of.key, of.value)}


def test_a_step_of_the_decoder_starts_where_the_prompt_ends(run):
    config = models.configuration("tiny", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    decoder = models.Decoder(models.make_model(run, config, "eager"), False, 2, 24, 4)
    for _ in range(2):
        decoder.step()
    sliding, full = decoder.cache.layers
    assert int(full.cumulative_length) == 26 and sliding.keys.shape[2] == 16
    decoder.reset()
    assert int(full.cumulative_length) == 24


def test_calls_are_timed_in_turns_at_the_threads_asked_for():
    before, seen = torch.get_num_threads(), []

    def case(name, threads):
        return Case(lambda given: seen.append((name, torch.get_num_threads(), given)), lambda: "made", threads)

    timings = Timer(CPU, seconds=0, most=3)({name: case(name, place + 1) for place, name in enumerate("ab")})
    assert torch.get_num_threads() == before and timings["a"].samples == 3
    assert seen[-4:] == [("a", 1, "made"), ("b", 2, "made")] * 2
    slow = Timer(CPU, seconds=0, most=3).time(lambda _: time.sleep(0.02), prepare=lambda: None, parts=2)
    assert 0.01 <= slow.minimum < 0.2


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
