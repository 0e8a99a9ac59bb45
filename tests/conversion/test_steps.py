"""Which step of a run folder is read: orbax's names, interrupted steps, and the report's note of them."""

import json
import shutil

import numpy as np
import pytest
from orbax_writer import maxtext_leaves, write_checkpoint

from dcformer.conversion import convert_maxtext, inspect_checkpoint
from dcformer.conversion.orbax import open_orbax


TEMPORARY = ".orbax-checkpoint-tmp"


@pytest.fixture(scope="module")
def item(tmp_path_factory):
    """A checkpoint of parameters, copied for every step."""
    folder = tmp_path_factory.mktemp("item") / "state"
    write_checkpoint(folder, maxtext_leaves(0, layers=2))
    return folder


@pytest.fixture
def make_run(item, tmp_path):
    """Function that makes a run folder: names of whole steps, and of those with the file that says so."""

    def make(*names, committed=()):
        run = tmp_path / "run"
        for name in {*names, *committed}:
            shutil.copytree(item, run / name / "state")
        for name in committed:
            (run / name / "commit_success.txt").write_text("done")
        return run

    return make


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/3", "checkpoints/3/state"])
def test_any_folder_of_the_run_may_be_given(item, tmp_path, below):
    shutil.copytree(item, tmp_path / "run" / "checkpoints" / "3" / "state")
    item = open_orbax(f"{tmp_path / 'run' / below}/")
    assert (item.step, item.location) == (3, str(tmp_path / "run" / "checkpoints" / "3" / "state"))


@pytest.mark.parametrize(
    "names, step",
    [
        (("9", "10", "2"), 10),
        (("100", "300", "backup_9999"), 300),
        (("checkpoint_9", "checkpoint_10"), 10),
        (("checkpoint_00000009", "checkpoint_00000010"), 10),
    ],
)
def test_the_latest_step_is_read(make_run, names, step):
    run = make_run(*names)
    (run / "plots_2024").mkdir()
    assert open_orbax(run).step == step
    assert open_orbax(run, 9 if step == 10 else 100).step in (9, 100)
    with pytest.raises(FileNotFoundError, match="8"):
        open_orbax(run, 8)


def test_steps_of_two_runs_or_twice_the_same_are_refused(make_run):
    run = make_run("step_9", "step_10", "backup_9999")
    with pytest.raises(ValueError, match="backup"):
        open_orbax(run)
    assert open_orbax(run, 9).location == str(run / "step_9" / "state")
    assert open_orbax(run / "backup_9999").step == 9999
    with pytest.raises(ValueError, match="step 7 twice"):
        open_orbax(make_run("7", "007"))


def leave_temporary_step(run, item):
    shutil.copytree(item, run / f"300{TEMPORARY}-1" / "state")


def leave_another_item(run, item):
    shutil.copytree(item, run / "300" / f"state{TEMPORARY}-17")
    write_checkpoint(run / "300" / "iterator", {"position": np.int32(4)})


def leave_uncommitted(run, item):
    shutil.copytree(item, run / "300" / "state")
    for step in ("100", "200"):
        (run / step / "commit_success.txt").write_text("done")
    # As after a crash: the names are not complete either.
    (run / "300" / "state" / "_METADATA").write_text("")


@pytest.mark.parametrize("leave", [leave_temporary_step, leave_another_item, leave_uncommitted])
def test_an_interrupted_newest_step_is_passed_over_and_reported(make_run, item, tmp_path, leave):
    run = make_run("100", "200")
    write_checkpoint(run / "200" / "iterator", {"position": np.int32(4)})
    leave(run, item)
    report = convert_maxtext(run, tmp_path / "model", verify=False)
    assert report.source["location"].endswith("/200/state")
    assert report.ignored["item iterator/"] == "another item of the step"
    assert report.source["step"] == 200
    assert list(report.source["skipped_steps"]) == ["300"]
    saved = json.loads((tmp_path / "model" / "conversion_report.json").read_text())
    assert saved["source"] == report.source
    assert inspect_checkpoint(run).skipped_steps == report.source["skipped_steps"]
    assert not open_orbax(run, 100).skipped_steps


def test_attempts_before_the_newest_step_are_not_reported(make_run, item):
    run = make_run("100", "300")
    leave_temporary_step(run, item)
    shutil.copytree(item, run / f"150{TEMPORARY}-1" / "state")
    newest = open_orbax(run)
    assert (newest.step, newest.skipped_steps) == (300, {})


def test_steps_from_before_orbax_wrote_that_it_was_done_are_whole(make_run):
    run = make_run("100", "250", "400", committed=("200", "300"))
    assert open_orbax(run, 100).step == 100
    with pytest.raises(FileNotFoundError, match="no complete step 250; there are: 100, 200, 300"):
        open_orbax(run, 250)
    assert open_orbax(run).step == 300


def test_a_run_without_a_whole_step_is_refused(make_run, item):
    run = make_run()
    shutil.copytree(item, run / f"100{TEMPORARY}-100" / "state")
    with pytest.raises(ValueError, match="complete"):
        open_orbax(run)


def test_a_step_that_is_a_link_is_read(make_run, tmp_path):
    run = make_run("100")
    (run / "100").rename(tmp_path / "elsewhere")
    (run / "100").symlink_to(tmp_path / "elsewhere")
    assert open_orbax(run).step == 100
