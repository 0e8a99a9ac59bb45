"""The `dcformer` command: its help, its errors, and the commands on golden checkpoints."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
import typer
from command_line import call

import dcformer
from dcformer.cli import app, kernel_check, main
from dcformer.cli.running import print_line, print_table, running_command
from dcformer.dcmha import BACKENDS, Backend
from dcformer.plain_dcformer import plain_attention


HEAVY = {"torch", "transformers", "datasets", "lm_eval", "numpy", "gradio", "matplotlib", "dcformer.public"}
STATUS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
PACKAGE = Path(dcformer.__file__).parent
# Options of git, of all programs, and of CSS, lm-eval and vLLM.
OTHERS = {"--abbrev", "--always", "--dirty", "--exclude", "--no-optional-locks", "--help"}
OTHERS |= {"--body-text-color", "--metadata", "--include", "--model"}


def commands():
    """All commands of typer by their names."""
    named, waiting = {}, [((), typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop()
        named[name] = command
        waiting += [((*name, key), child) for key, child in getattr(command, "commands", {}).items()]
    return named


def test_help_of_every_command_explains_every_option_and_imports_nothing_heavy():
    assert call("--version").output.strip() == f"dcformer {dcformer.__version__}"
    for name, command in commands().items():
        assert command.help and all(parameter.help for parameter in command.params), name
    code = (
        "import contextlib, dcformer_command, io, sys\n"
        "dcformer_command.is_running = True\n"
        "from dcformer.cli import app\n"
        f"for name in {[(), ('convert',), *commands().keys() - {('lm-eval',)}]!r}:\n"  # whose help is lm-eval's
        "    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):\n"
        "        app([*name, '--help'], prog_name='dcformer')\n"
        "    usage, *lines = text.getvalue().splitlines()\n"
        "    assert any(line.startswith('  --help') for line in lines) and max(map(len, [usage, *lines])) <= 80, name\n"
        "    assert not any('…' in line or line.endswith('...') for line in lines), name\n"
        "print(*sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "COLUMNS": "80"}
    printed = subprocess.run([sys.executable, "-c", code], stdout=-1, text=True, env=environment, check=True).stdout
    assert "dcformer.cli.evaluate" in printed and HEAVY.isdisjoint(printed.split())


def test_options_that_messages_advise_exist():
    parameters = [parameter for command in commands().values() for parameter in command.params]
    known = OTHERS.union(*({*parameter.opts, *parameter.secondary_opts} for parameter in parameters))
    for file in PACKAGE.rglob("*.py"):
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", file.read_text(encoding="utf-8")):
            assert option in known, f"{file} names {option}"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_a_terminal_cannot_show_is_replaced(encoding, monkeypatch):
    def command(prog_name):
        print("é東\udcff")
        print_table("é東", ("é東",), [("é東",)] * 3)
        print_line("é東")

    monkeypatch.setattr("dcformer.cli.app", command)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    main()
    sys.stdout.flush()
    text = sys.stdout.buffer.getvalue().decode(encoding)
    assert text.count("é東".encode(encoding, "replace").decode(encoding)) == 7


def test_a_table_ends_in_silence_when_its_reader_leaves(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        with running_command(debug=False):
            print_table("", ("a",), [("b" * 100,)] * 1000)


@pytest.fixture
def default_signals():
    """The handlers of a process that was started from a terminal; those in the background ignore some signals."""
    usual = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
    before = {name: signal.signal(getattr(signal, name), handler) for name, handler in usual.items()}
    yield
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("name", STATUS)
def test_a_signal_ends_a_command_with_its_status_and_a_message(name, capsys):
    before = [signal.getsignal(getattr(signal, other)) for other in STATUS]
    with pytest.raises(typer.Exit) as ended, running_command(debug=False, interrupted="Stopped."):
        try:
            os.kill(os.getpid(), getattr(signal, name))
            pytest.fail("the signal was not heard")
        except KeyboardInterrupt as error:
            if error.args:  # a closing terminal sends two
                os.kill(os.getpid(), signal.SIGHUP)
            raise
    assert ended.value.exit_code == STATUS[name] and capsys.readouterr().err == "Stopped.\n"
    assert [signal.getsignal(getattr(signal, other)) for other in STATUS] == before


def test_an_ignored_signal_stays_ignored_and_torchrun_keeps_its_own(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with running_command(debug=False):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with running_command(debug=False):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("command", ["inspect {a}", "verify {a} {b}", "convert torch {a} {b}", "card {a}"])
def test_a_wrong_path_is_one_line_and_a_traceback_with_debug(command, tmp_path):
    words = [word.format(a=tmp_path / "nothing", b=tmp_path / "b") for word in command.split()]
    failed = call(*words)
    assert failed.exit_code == 1 and failed.stdout == ""
    assert failed.stderr.startswith("Error: ") and failed.stderr.count("\n") == 1
    with pytest.raises((OSError, ValueError)):
        call(*words, "--debug", catch_exceptions=False)


def test_a_text_that_is_not_utf8_is_named_with_its_line(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"int a;\nint caf\xe9;\n")
    for words in (["analyse", "dcformer-tiny", "--data"], ["chat", "dcformer-tiny", "--chat-template"]):
        failed = call(*words, file)
        assert failed.exit_code == 1 and f"'{file}' must be UTF-8" in failed.stderr and "line 2" in failed.stderr


def test_checkpoints_may_be_bundled_models_or_folders_with_similar_names(tmp_path, monkeypatch):
    shutil.copytree(dcformer.pretrained_path("dcformer-tiny"), tmp_path / "dcformer-tny")
    monkeypatch.chdir(tmp_path)
    assert call("verify", "dcformer-tny", "dcformer-tiny").exit_code == 0
    assert json.loads(call("inspect", "dcformer-tiny", "--json").output)["total_parameters"] == 1_111_424
    command = ("convert", "torch", "dcformer-tiny", "new", "--tokenizer", "transformer-tiny")
    done, refused, replaced = call(*command), call(*command), call(*command, "--force")
    assert (done.exit_code, refused.exit_code, replaced.exit_code) == (0, 1, 0) and "--force" in refused.stderr
    assert call("verify", "new", "dcformer-tiny").exit_code == 0
    unlike = call("verify", "new", "transformer-tiny")
    assert unlike.exit_code == 1 and "38 of 50 tensors compared: different" in unlike.output


def test_neither_a_bar_nor_a_spinner_is_drawn_into_a_file_where_colours_are_forced(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    for command in (
        ("convert", "torch", "dcformer-tiny", tmp_path / "new"),
        ("verify", tmp_path / "new", "dcformer-tiny"),
    ):
        done = call(*command)
        assert done.exit_code == 0 and done.stderr == ""


def test_maxtext_there_and_back(golden, tmp_path):
    pytest.importorskip("tensorstore")
    maxtext, model = golden / "A_jax/A1/checkpoints", tmp_path / "model"
    done = call("convert", "maxtext", maxtext, model, "--step", 14000)
    assert done.exit_code == 0 and "step 14000" in done.output.splitlines()[0], done.output
    assert call("verify", model).exit_code == call("verify", maxtext, model).exit_code == 0
    shown = json.loads(call("inspect", maxtext, "--json").output)
    assert shown["step"] == 14000 and shown["total_bytes"] == sum(array["nbytes"] for array in shown["tensors"])
    done = call("convert", "to-maxtext", model, tmp_path / "run", "--step", 7, "--approximate")
    assert done.exit_code == 0 and "step 7" in done.output
    different = call("verify", maxtext, golden / "B_torch/B1_dcformer_9769ae6")
    assert different.exit_code == 1 and "different" in different.output


def test_pax_needs_its_configuration(golden, tmp_path):
    config = json.loads((golden / "C_pax/C2_info.json").read_text())["config"]
    # The golden logits were computed with one key more than window_size.
    (tmp_path / "config.json").write_text(json.dumps({**config, "window_size": config["window_size"] + 1}))
    weights, options = golden / "C_pax/C2_pax_weights.npz", ("--config", tmp_path / "config.json")
    assert call("convert", "pax", weights, tmp_path / "model", *options).exit_code == 0
    assert json.loads(call("inspect", weights, *options, "--json").output)["architecture"]
    assert call("verify", weights, tmp_path / "model", *options).exit_code == 0


@pytest.mark.parametrize("wrong", ["nothing", "forward", "backward", "decode"])
def test_env_names_versions_and_checks_kernels(wrong, monkeypatch):
    class OffByOnePercent(Backend):
        name, device_type = "off", "cpu"

        def attention(self, inputs):
            output = plain_attention(inputs)
            passed = "backward" if output.requires_grad else "decode" if inputs.query.shape[2] == 1 else "forward"
            return output * 1.01 if passed == wrong else output

    layers = [*kernel_check._published_layers()]
    monkeypatch.setattr(kernel_check, "_published_layers", lambda: iter(layers[:1]))
    monkeypatch.setattr(kernel_check, "LENGTH", 24)
    monkeypatch.setitem(BACKENDS, "off", OffByOnePercent())
    done = call("env", "--check", "--device", "cpu")
    rows = [line for line in done.stdout.splitlines() if line.startswith("dcformer-2.8b")]
    assert f"transformers {transformers.__version__}" in done.stdout and "  off: chosen" in done.stdout
    assert len({layer.num_heads * layer.head_dim for _, layer, _ in layers}) > 5 < len(layers)
    is_wrong = wrong != "nothing"
    assert done.exit_code == is_wrong and [row.endswith("WRONG") for row in rows] == 2 * [is_wrong], done.output
