"""Help is there for every command, in whole phrases, and does not wait for torch; commands register the models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import dcformer
from dcformer.cli import app
from dcformer.eval.suites import TASKS, list_tasks
from dcformer.eval.table4_tasks import tasks_folder


HEAVY = ("torch", "transformers", "datasets", "lm_eval", "numpy", "gradio", "matplotlib", "dcformer.public")


def commands_and_names():
    found = {}

    def walk(command, name):
        for key, child in getattr(command, "commands", {}).items():
            walk(child, (*name, key))
        found[name] = command

    walk(typer.main.get_command(app), ())
    return found


COMMANDS = commands_and_names()


@pytest.fixture
def as_command(tmp_path):
    """Run Python code in a process that was started as pip's script of the command is."""
    script = tmp_path / "bin" / "dcformer"
    script.parent.mkdir()

    def run(code):
        script.write_text(code)
        environment = {**os.environ, "PYTHONPATH": str(Path(dcformer.__file__).parents[1])}
        done = subprocess.run([sys.executable, script, "x"], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("name", COMMANDS, ids=lambda name: " ".join(name) or "dcformer")
def test_every_argument_and_option_says_what_it_is_in_a_phrase(name):
    command = COMMANDS[name]
    assert command.help and command.help.strip().split("\n")[0].endswith(".")
    for parameter in command.params:
        text = parameter.help or ""
        assert text.endswith(".") and text[0].isupper() and len(text.split()) >= 4, (parameter.name, text)
        assert not text.startswith(("Of ", "For ", "Such ")) or "head_tasks:" in text, (parameter.name, text)


def test_the_help_names_all_that_the_command_does():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    for command in ("generate", "demo", "serve", "train", "eval", "report", "tasks", "convert", "inspect", "verify"):
        assert f"│ {command} " in shown


def test_help_of_every_command_imports_nothing_heavy(as_command):
    names = [list(name) for name in COMMANDS]
    printed = as_command(
        "import contextlib, io, json, sys\n"
        "from dcformer.cli import app\n"
        "def shown(arguments):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as text:\n"
        "        try:\n"
        "            app(arguments, prog_name='dcformer')\n"
        "        except SystemExit as ended:\n"
        "            assert ended.code in (0, None), arguments\n"
        "    return text.getvalue()\n"
        f"lengths = [len(shown([*name, '--help'])) for name in {names!r}] + [len(shown(['--version']))]\n"
        "print(json.dumps([lengths, list(sys.modules)]))\n"
    )
    lengths, modules = json.loads(printed)
    assert all(lengths) and len(lengths) == len(COMMANDS) + 1
    assert [name for name in HEAVY if name in modules] == []


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "dcformer.cli", "eval", "--help"], capture_output=True, text=True
    )
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "--num-fewshot" in done.stdout and "dcformer.cli.evaluate" in imported
    assert imported.isdisjoint(HEAVY)


def test_a_command_that_loads_models_has_them_registered(as_command):
    printed = as_command(
        "import sys\n"
        "import dcformer\n"
        "from dcformer.cli.running import running_command\n"
        "assert 'torch' not in sys.modules\n"
        "with running_command(debug=True):\n"
        "    from transformers import AutoConfig\n"
        "    print(type(AutoConfig.for_model('dcformer')) is dcformer.DCFormerConfig)\n"
    )
    assert printed == "True\n"


def test_the_tasks_are_listed_with_what_they_ask():
    shown = CliRunner().invoke(app, ["tasks"]).stdout
    for task in list_tasks():
        (line,) = [line for line in shown.splitlines() if f"│ {task.name} " in line]
        assert task.suite in line and task.asks in line
    assert {"piqa", "pile_ppl"} <= set(TASKS) and "│ 0 and 5 " in shown


def test_the_folder_of_the_tasks_is_printed_alone():
    assert CliRunner().invoke(app, ["tasks", "--folder"]).stdout == f"{tasks_folder()}\n"


def test_the_old_name_of_the_converter_of_torch_files_works_and_gives_the_new_one(monkeypatch, tmp_path):
    told = []

    def fail(*arguments, **options):
        told.append((arguments, options))
        raise ValueError("nothing here")

    monkeypatch.setattr("dcformer.conversion.convert_torch", fail)
    results = [
        CliRunner().invoke(app, ["convert", name, "a", "b", "--max-shard-size", "1GB"]) for name in ("torch", "hub")
    ]
    for call, result in zip(told, results):
        options = {key: value for key, value in call[1].items() if key != "progress"}
        assert call[0] == ("a", "b") and options["max_shard_size"] == "1GB" and result.exit_code == 1
    assert len(told) == 2 and told[0][1].keys() == told[1][1].keys()
    new, old = (result.stderr.splitlines() for result in results)
    assert old == ["`dcformer convert hub` is now called `dcformer convert torch`.", *new] and len(new) == 1
    assert "hub" not in CliRunner().invoke(app, ["convert", "--help"]).output.split()
