"""`dcformer bench` at tiny sizes on a CPU: every part runs, writes its rows, and shows no time of what is wrong."""

import json

import pytest
import torch
from typer.testing import CliRunner

from dcformer import dcmha, register_implementation
from dcformer.bench import attention, decode, forms, gate, layers, roofline
from dcformer.bench.__main__ import main
from dcformer.bench.context import Context
from dcformer.bench.operands import prompt_operands
from dcformer.bench.report import Report
from dcformer.bench.timing import Budget, Timer
from dcformer.cli import app
from dcformer.dcmha_plain import plain_attention


CPU = torch.device("cpu")
TINY = attention.Shape(4, 8, 20, None)
WINDOW = TINY._replace(window=6)


@pytest.fixture(autouse=True)
def small_probes(monkeypatch):
    """The machine's own rates are of no interest here, and take seconds."""
    monkeypatch.setitem(roofline._MATMUL_SIZES, "cpu", 64)
    monkeypatch.setitem(roofline._MEMORY_BYTES, "cpu", 2**20)


@pytest.fixture
def context():
    return Context(CPU, torch.float32, True, False, Report("test", CPU, {}), Timer(CPU, seconds=0), Budget(100))


@pytest.fixture
def only_plain(monkeypatch):
    """The form for every device alone, so that little is timed."""
    for table in ("_TABLE", "_AUTOMATIC"):
        monkeypatch.setattr(dcmha, table, {"plain": getattr(dcmha, table)["plain"]})


@pytest.fixture
def tiny_plan(monkeypatch):
    wanted = attention.Plan([TINY, WINDOW], TINY, 5, TINY, [TINY])
    monkeypatch.setattr(attention, "plan", lambda is_quick: wanted)


def rows_of(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    return content, {(row["group"], row["name"]): row for row in content["rows"]}


def run(tmp_path, *arguments):
    path = tmp_path / "out.json"
    status = main([*arguments, "--quick", "--device", "cpu", "--json", str(path)])
    return status, *rows_of(path)


def test_attention_times_every_form_beside_its_baselines(tmp_path, only_plain, tiny_plan, capsys):
    status, content, rows = run(tmp_path, "attention")

    assert status == 0
    for way in ("forward", "forward and backward"):
        for shape, base in ((TINY, "sdpa"), (WINDOW, "sdpa, same window")):
            group = f"{way}: {shape}"
            for name in ("plain", "authors", base):
                row = rows[group, name]
                assert row["seconds"] >= row["minimum"] > 0 and row["samples"] >= 3, (group, name)
                assert row["figures"][f"/ {base}"] > 0 and row["figures"]["ps/element"] > 0
            assert "torch.compile" in rows[group, "authors, compiled"]["note"]
        branches = [name for group, name in rows if group.startswith(f"branches, {way} by plain")]
        assert branches == list(attention._BRANCHES)
    assert "for GPUs" in rows[f"forward: {WINDOW}", "FlexAttention, same window"]["note"]
    assert rows[f"packed: {TINY}", "plain, documents of 5"]["figures"]["/ one document"] > 0
    assert any("GPUs only" in note for note in content["notes"])
    assert content["environment"]["torch"] == torch.__version__ and content["rates"]["flops per second"] > 0
    assert (tmp_path / "out.png").stat().st_size > 0
    assert str(tmp_path / "out.json") in capsys.readouterr().out


def test_decode_extrapolates_whole_models_beside_the_baseline(tmp_path, only_plain, monkeypatch):
    monkeypatch.setattr(layers.LayerTimes, "are_sound", True)  # whatever noise there is

    status, _, rows = run(tmp_path, "decode")

    assert status == 0
    group = "decode: tiny shape, batch 1, prompt 24"
    for family in ("Transformer++", "DCFormer++, plain", "DCFormer++, plain, query-wise"):
        for depths in ("1 global + 1 local", "2 global + 1 local", "1 global + 2 local"):
            assert rows[group, f"{family}, {depths}"]["figures"]["GB/s at least"] > 0
    whole = f"{group}, whole model of 8 layers (extrapolated)"
    for ratio in ("1:1", "3:1", "7:1"):
        figures = rows[whole, f"DCFormer++, plain, local:global {ratio}"]["figures"]
        assert set(figures) == {"tokens/s", "/ all global", "/ same windows"}
    assert rows["attention of a step: H 4, D 16, 24 keys, batch 1", "plain"]["seconds"] > 0


def test_train_times_forward_and_backward(tmp_path, only_plain):
    status, content, rows = run(tmp_path, "train")

    assert status == 0
    row = rows["train: tiny shape, 1 rows of 48 tokens", "DCFormer++, plain, 1 global + 2 local"]
    assert row["seconds"] > 0 and row["figures"]["TFLOP/s"] > 0
    assert any("optimizer" in note for note in content["notes"])


def test_layer_times_make_up_whole_models():
    times = layers.LayerTimes(full=3.0, sliding=1.0, rest=0.5)

    assert times.total(16, 16) == 16 * 3 + 16 * 1 + 0.5
    assert times.are_sound and not times._replace(sliding=-0.1).are_sound


def test_nothing_is_begun_after_the_time_is_over(only_plain, tiny_plan, context):
    context.budget = Budget(1e-9)

    attention.run(context)

    assert context.report.rows and not context.report.has_failed
    assert all(row.seconds is None and "seconds were over" in row.note for row in context.report.rows)


def _wrong(error):
    """The plain form with a fault."""

    def attend(query, key, value, pre, post, **options):
        if error == "no gate of the keys":
            side = post.key.factors.clone()
            side[..., -1] = 0
            post = post._replace(key=type(post.key)(factors=side))
        output = plain_attention(query, key, value, pre, post, **options)
        if error == "one value is not a number":
            output = output.clone()
            output[0, 0, 0, 0] = torch.nan
        return output if error != "gradient" else output.detach() + 0.5 * (output - output.detach())

    return attend


@pytest.fixture
def wrong(request, only_plain):
    """In the table, a form with the fault that the test is told."""
    register_implementation("wrong", _wrong(request.param))
    return request.param


@pytest.mark.parametrize("wrong", ["no gate of the keys", "one value is not a number", "gradient"], indirect=True)
def test_a_form_that_is_wrong_has_no_time(wrong, context):
    operator = attention._Operator(context)
    with_gradients = wrong == "gradient"
    rows = {
        name: operator.row("group", forms._own_form(name), TINY, with_gradients=with_gradients)
        for name in ("wrong", "plain")
    }

    assert rows["wrong"].has_failed and rows["wrong"].seconds is None and "is wrong" in rows["wrong"].note
    assert rows["plain"].seconds > 0 and context.report.has_failed


@pytest.mark.parametrize("wrong", ["no gate of the keys"], indirect=True)
def test_a_form_that_is_wrong_fails_the_command(wrong, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention, "plan", lambda is_quick: attention.Plan([TINY], TINY, 5, TINY, []))
    for part in ("packed", "branches"):
        monkeypatch.setattr(attention._Operator, part, lambda *arguments: None)

    status, _, rows = run(tmp_path, "attention")

    assert status == 1
    assert rows[f"forward: {TINY}", "wrong"]["has_failed"] and rows[f"forward: {TINY}", "plain"]["seconds"] > 0
    assert "2 of 10 rows failed" in capsys.readouterr().out


def test_the_gate_sees_a_window_that_is_one_key_too_wide():
    def make(operands, window, mask):
        return lambda: operands.composed(sliding_window=window + 1, implementation="plain")

    failure = gate.check(make, 4, 8, CPU, torch.float32, window=gate.WINDOW)

    assert failure is not None and "output is wrong" in failure.reason


def test_the_gate_lets_forms_of_packed_documents_and_steps_pass():
    plain, authors = forms._own_form("plain"), forms.authors_forms(False)[0]

    for form in (plain, authors):
        assert gate.check(form.make, 4, 8, CPU, torch.float32, is_packed=True, with_gradients=True) is None
    assert gate.check(plain.make, 4, 8, CPU, torch.float32, is_step=True) is None


def test_static_and_single_branches_change_what_is_computed():
    of = prompt_operands(4, 8, 20, CPU, torch.float32)
    outputs = {name: vary(of).composed() for name, vary in attention._BRANCHES.items()}

    names = list(outputs)
    for index, name in enumerate(names):
        for other in names[:index]:
            assert (outputs[name] - outputs[other]).abs().max() > 1e-3, (name, other)


def test_a_step_of_the_decoder_starts_where_the_prompt_ends(context):
    setting = decode.Setting(2, 24, 4)
    config = layers.sizes(True)[0].config(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    decoder = decode.Decoder(layers.make_model(config, "eager", context).eval(), setting, False)

    for _ in range(2):
        decoder.step()
    sliding, full = decoder.cache.layers
    assert int(full.cumulative_length) == 26 and sliding.keys.shape[2] == 16
    decoder.reset()
    assert int(full.cumulative_length) == 24


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nothing"], "one of attention, decode, train, model"),
        ([], "got nothing"),
        (["attention", "--explain"], "leave out 'attention'"),
        (["attention", "--seconds", "0"], "--seconds must be above 0, got 0"),
        (["attention", "--device", "gpu"], "--device must be cpu, cuda or cuda:N, got 'gpu'"),
        (["attention", "--device", "cuda:99"], "There is no device 'cuda:99'"),
        (["attention", "--device", "cpu", "--dtype", "int8"], "--dtype must be one of"),
        (["attention", "--plot", "a.gif"], "--plot must end in .png, .svg or .pdf, got 'a.gif'"),
        (["--explain", "--heads", "6", "--key-value-heads", "4"], "--key-value-heads must divide the 6 heads, got 4"),
    ],
)
def test_a_wrong_argument_is_one_sentence_in_both_commands(arguments, message, capsys):
    assert main(arguments) == 1
    plain = capsys.readouterr().err
    shown = CliRunner().invoke(app, ["bench", *arguments])

    assert message in plain and plain.startswith("Error: ") and plain.count("\n") == 1
    assert shown.exit_code == 1 and shown.stderr == plain


def test_explain_says_of_every_implementation_whether_it_is_chosen(capsys):
    assert main(["--explain", "--device", "cpu", "--heads", "6", "--queries", "1", "--keys", "77", "--gradient"]) == 0

    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert {"plain", "triton"} <= lines.keys()
    assert list(lines.values()).count("is chosen") == 1
    assert lines["triton"] == "it is chosen unasked on CUDA devices only"
