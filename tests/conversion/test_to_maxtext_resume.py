"""`convert_to_maxtext` after an end at any moment: the same command goes on, and ends with the same bytes."""

import os
import shutil
import time
from pathlib import Path

import killable
import pytest
from tiny_models import tiny_model
from typer.testing import CliRunner

from dcformer import conversion
from dcformer.cli import app
from dcformer.conversion import convert_to_maxtext, destination, to_maxtext
from dcformer.conversion.formats import orbax_writer


JAX = {"compose_activation": "gelu_pytorch_tanh", "norm_eps": 1e-5, "qk_norm_eps": 1e-5}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    tiny_model(num_hidden_layers=4, **JAX).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    destination = tmp_path_factory.mktemp("whole") / "run"
    convert_to_maxtext(source, destination)
    return contents(destination)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kill_after(monkeypatch, writes: int, partial: Path, killed: Path):
    """Copy what a kill before the given write of a chunk would leave to `killed`; the run itself goes on."""
    write, count = to_maxtext.write_array, []

    def writing(part, values):
        count.append(1)
        if len(count) == writes:
            shutil.copytree(partial, killed)
            # tensorstore writes to such a file before it renames it.
            (killed / "model" / "0" / "state" / "params.decoder.decoder_norm.scale" / "0.__lock").write_bytes(b"torn")
        write(part, values)

    monkeypatch.setattr(to_maxtext, "write_array", writing)
    return count


@pytest.mark.parametrize("options", [{}, {"scan_layers": False}], ids=["scan", "no_scan"])
@pytest.mark.parametrize("done", [0.0, 0.3, 0.7, 1.0], ids="{} written".format)
def test_a_killed_run_goes_on_at_the_first_try(source, tmp_path, monkeypatch, done, options):
    run, partial, killed = tmp_path / "run", tmp_path / ".run.partial", tmp_path / "killed"
    with monkeypatch.context() as patch:
        whole = kill_after(patch, 0, partial, killed)
        convert_to_maxtext(source, run, **options)
    expected = contents(run)
    shutil.rmtree(run)
    before = 1 + round(done * (len(whole) - 1))
    with monkeypatch.context() as patch:
        kill_after(patch, before, partial, killed)
        convert_to_maxtext(source, run, **options)
    shutil.rmtree(run)
    killed.rename(partial)
    told = []
    with monkeypatch.context() as patch:
        again = kill_after(patch, 0, partial, killed)
        report = convert_to_maxtext(source, run, progress=lambda total: (told.append(total), told.append)[1], **options)
    assert len(again) == len(whole) - (before - 1)
    assert contents(run) == expected
    assert told[0] == sum(told[1:]) == report.source_bytes
    assert os.listdir(tmp_path) == ["run"]


def test_a_killed_run_and_then_other_options(source, tmp_path, monkeypatch):
    run, partial, killed = tmp_path / "run", tmp_path / ".run.partial", tmp_path / "killed"
    with monkeypatch.context() as patch:
        kill_after(patch, 20, partial, killed)
        convert_to_maxtext(source, run)
    shutil.rmtree(run)
    killed.rename(partial)
    convert_to_maxtext(source, run, layers_per_block=4, step=9)
    assert not (run / "0").exists() and (run / "9" / "state").is_dir()
    assert any("mlp_3" in name for name in contents(run)) and os.listdir(tmp_path) == ["run"]


def test_an_end_while_the_rest_of_another_run_is_removed(source, expected, tmp_path, monkeypatch):
    """What is left then must not be taken for what the first run had finished."""
    run, partial, killed = tmp_path / "run", tmp_path / ".run.partial", tmp_path / "killed"
    with monkeypatch.context() as patch:
        kill_after(patch, 20, partial, killed)
        convert_to_maxtext(source, run)
    shutil.rmtree(run)
    killed.rename(partial)

    def removing(path):
        if path.name != "model":  # it comes first, whatever the order on the disk
            return
        shutil.rmtree(path / "0" / "state" / "params.token_embedder.embedding")
        shutil.copytree(partial, killed)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(destination, "remove", removing)
        with pytest.raises(KeyboardInterrupt):
            convert_to_maxtext(source, run, step=9)
    shutil.rmtree(partial, ignore_errors=True)
    killed.rename(partial)
    convert_to_maxtext(source, run)
    assert contents(run) == expected


def test_an_interrupted_run_goes_on(source, expected, tmp_path, monkeypatch):
    """As the command promises after Ctrl-C."""
    write, count = to_maxtext.write_array, []

    def writing(part, values):
        count.append(1)
        if len(count) == 30:
            raise KeyboardInterrupt
        write(part, values)

    command = ["convert", "to-maxtext", str(source), str(tmp_path / "run")]
    monkeypatch.setattr(to_maxtext, "write_array", writing)
    stopped = CliRunner().invoke(app, command)
    assert stopped.exit_code == 130 and "finished chunks are kept, run the same command" in stopped.stderr
    assert CliRunner().invoke(app, command).exit_code == 0
    whole = sum("/state/" in name and name.rsplit("/", 1)[-1][0].isdigit() for name in expected)
    assert len(count) == whole + 1  # the one that was interrupted
    assert contents(tmp_path / "run") == expected


def test_a_killed_process(source, expected, tmp_path):
    process = killable.start(convert_to_maxtext, source, tmp_path / "run")
    state, deadline = tmp_path / ".run.partial" / "model" / "0" / "state", time.monotonic() + 120
    while process.is_alive() and time.monotonic() < deadline and len(list(state.glob("*/0*"))) < 5:
        time.sleep(0.002)
    process.kill()
    process.join()
    assert os.listdir(tmp_path) == [".run.partial"]
    conversion.convert_to_maxtext(source, tmp_path / "run")
    assert contents(tmp_path / "run") == expected
    assert os.listdir(tmp_path) == ["run"]


def test_a_full_disk_keeps_what_is_written(source, expected, tmp_path, monkeypatch):
    """tensorstore's own error is no OSError."""

    class Full:
        def result(self):
            raise ValueError('RESOURCE_EXHAUSTED: Error writing local file "x": No space left [source locations=...]')

    done, count = orbax_writer._written, []

    def filling(future):
        count.append(1)
        return done(Full() if len(count) > 60 else future)

    with monkeypatch.context() as patch:
        patch.setattr(orbax_writer, "_written", filling)
        failed = CliRunner().invoke(app, ["convert", "to-maxtext", str(source), str(tmp_path / "run")])
    assert failed.exit_code == 1 and failed.stderr.startswith(
        "Error: The disk is full; free some space and run the same"
    )
    assert "No space left" in failed.stderr and "source locations" not in failed.stderr
    assert os.listdir(tmp_path) == [".run.partial"]
    convert_to_maxtext(source, tmp_path / "run")
    assert contents(tmp_path / "run") == expected
