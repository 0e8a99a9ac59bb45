"""SIGTERM and SIGHUP end a command as Ctrl-C does."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import pytest
import yaml
from tiny_recipes import tiny_mapping, tiny_recipe
from typer import Exit
from typer.testing import CliRunner

from dcformer.cli import app
from dcformer.common.signals import Terminated, without_ctrl_c
from dcformer.common.terminal import one_line_errors
from dcformer.training import train
from dcformer.training.checkpoints import checkpoint_folders, newest_checkpoint, step_of
from dcformer.training.trainer import RecipeTrainer


STATUS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}


def send(name):
    os.kill(os.getpid(), getattr(signal, name))


def handlers():
    return [signal.getsignal(getattr(signal, name)) for name in STATUS]


@pytest.mark.parametrize("name", STATUS)
def test_a_signal_ends_the_block_with_its_status_and_a_message(name, capsys):
    before = handlers()
    with pytest.raises(Exit) as ended, one_line_errors(debug=False, interrupted="Stopped."):
        send(name)
        pytest.fail("the signal was not heard")
    assert ended.value.exit_code == STATUS[name]
    assert capsys.readouterr().err == "Stopped.\n"
    assert handlers() == before


@pytest.mark.parametrize("later", STATUS)
def test_later_signals_stop_nothing_that_the_first_one_ends(later, capsys):
    before, cleaned = handlers(), []
    with pytest.raises(Exit) as ended, one_line_errors(debug=False, interrupted="Stopped."):
        try:
            send("SIGTERM")
        finally:
            if later != "SIGINT":  # a person who presses Ctrl-C does not want to wait
                send(later)
            cleaned.append(True)
    assert ended.value.exit_code == 143 and cleaned
    assert capsys.readouterr().err == "Stopped.\n"
    assert handlers() == before


def test_ctrl_c_twice_says_it_once(capsys):
    with pytest.raises(Exit) as ended, one_line_errors(debug=False, interrupted="Stopped."):
        try:
            send("SIGINT")
        finally:
            send("SIGINT")
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "Stopped.\n"


def test_ctrl_c_while_the_message_is_printed_is_ignored(monkeypatch, capsys):
    def echo(*_, **__):
        send("SIGINT")
        print("Stopped.")

    monkeypatch.setattr("typer.echo", echo)
    before = handlers()
    with pytest.raises(Exit) as ended, one_line_errors(debug=False):
        send("SIGINT")
    assert ended.value.exit_code == 130
    assert capsys.readouterr().out == "Stopped.\n"
    assert handlers() == before


def test_handlers_are_put_back_after_a_block_that_ends_well():
    before = handlers()
    with one_line_errors(debug=False):
        assert handlers() != before
    assert handlers() == before


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with one_line_errors(debug=False):
            send("SIGHUP")
    finally:
        assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


def test_other_threads_and_processes_of_torchrun_are_left_alone(monkeypatch):
    before, found = handlers(), []

    def look():
        with one_line_errors(debug=False):
            found.append(handlers())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    monkeypatch.setenv("WORLD_SIZE", "2")
    look()
    assert found == [before, before]


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_libraries_that_handle_ctrl_c_handle_the_others_too(debug):
    with pytest.raises(Exit), one_line_errors(debug):
        try:
            send("SIGTERM")
        except KeyboardInterrupt as error:
            assert isinstance(error, Terminated) and error.number == signal.SIGTERM
            raise


def test_training_that_is_terminated_keeps_its_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr("dcformer.training.final._plot", lambda *_: None)
    compute_loss = RecipeTrainer.compute_loss

    def terminated(self, *args, **kwargs):
        if self.state.global_step == 4:
            send("SIGTERM")
        return compute_loss(self, *args, **kwargs)

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_mapping(tmp_path / "run")))
    with monkeypatch.context() as patch:
        patch.setattr(RecipeTrainer, "compute_loss", terminated)
        result = CliRunner().invoke(app, ["train", str(recipe)])
    assert result.exit_code == 143
    assert result.stderr.splitlines()[-1] == "Interrupted; checkpoints are kept, run the same command to resume."
    assert [step_of(folder) for folder in checkpoint_folders(tmp_path / "run")] == [3]
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-3"
    assert train(tiny_recipe(tmp_path / "run"))["resumed_from"] == 3


def test_processes_that_are_started_do_not_hear_of_ctrl_c():
    command = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    with without_ctrl_c():
        heard = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
        before = multiprocessing.get_context("spawn").Semaphore()  # starts the helper of multiprocessing
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert before is not None
    assert heard.stdout == "True\n" and signal.SIGINT in blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
