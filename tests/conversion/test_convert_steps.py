"""Which step of a run folder is read: orbax's names, interrupted steps, and what the report says of them."""

import json
import shutil

import numpy as np
import pytest
from fake_bucket import FakeBucket, files_of
from orbax_writer import maxtext_leaves, write_checkpoint
from test_convert_errors import PAX_CONFIG, pax_arrays

from dcformer.conversion import convert_maxtext, inspect_checkpoint
from dcformer.conversion.formats.orbax import open_orbax
from dcformer.conversion.formats.pax import plan_pax


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


def test_a_copy_beside_the_steps_is_none_of_them(make_run):
    assert open_orbax(make_run("100", "200", "300", "backup_9999")).step == 300


@pytest.mark.parametrize("names", [("checkpoint_9", "checkpoint_10"), ("checkpoint_00000009", "checkpoint_00000010")])
def test_steps_under_one_prefix_are_read(make_run, names):
    assert open_orbax(make_run(*names)).step == 10


def test_folders_of_another_prefix_without_checkpoints_are_ignored(make_run):
    run = make_run("step_9", "step_10")
    (run / "plots_2024").mkdir()
    assert open_orbax(run).step == 10


def test_steps_under_several_prefixes_are_refused_by_name(make_run):
    run = make_run("step_9", "step_10", "backup_9999")
    with pytest.raises(ValueError, match=r"backup_9999, step_10, step_9.*give the folder of one step"):
        open_orbax(run)
    assert open_orbax(run, 9).store.location == str(run / "step_9" / "state")
    assert open_orbax(run / "backup_9999").step == 9999


def test_a_step_that_is_there_twice_is_refused_by_name(make_run):
    with pytest.raises(ValueError, match="step 7 twice, as '007' and as '7'"):
        open_orbax(make_run("7", "007"))


def test_a_folder_with_a_prefix_and_no_checkpoint_hides_no_checkpoints_folder(make_run, tmp_path):
    run = make_run("5").rename(tmp_path / "checkpoints").parent
    (run / "log_2024").mkdir()
    assert open_orbax(run).step == 5


def leave_temporary_step(run, item):
    shutil.copytree(item, run / f"300{TEMPORARY}-1" / "state")


def leave_empty_item(run, item):
    (run / "300" / "state").mkdir(parents=True)


def leave_empty_step(run, item):
    (run / "300").mkdir()


def leave_temporary_item(run, item):
    shutil.copytree(item, run / "300" / f"state{TEMPORARY}-17")


def leave_another_item(run, item):
    shutil.copytree(item, run / "300" / f"state{TEMPORARY}-17")
    write_checkpoint(run / "300" / "iterator", {"position": np.int32(4)})


def leave_uncommitted(run, item):
    shutil.copytree(item, run / "300" / "state")
    for step in ("100", "200"):
        (run / step / "commit_success.txt").write_text("done")
    # As after a crash: the database is not complete either.
    (run / "300" / "state" / "_METADATA").write_text("")


INTERRUPTED = {
    "temporary_step": (leave_temporary_step, f"300{TEMPORARY}-1"),
    "empty_item": (leave_empty_item, "only state"),
    "empty_step": (leave_empty_step, "empty"),
    "temporary_item": (leave_temporary_item, f"state{TEMPORARY}-17"),
    "only_another_item": (leave_another_item, f"state{TEMPORARY}-17"),
    "uncommitted": (leave_uncommitted, "commit_success.txt"),
}


@pytest.mark.parametrize("case", INTERRUPTED)
def test_an_interrupted_newest_step_is_passed_over_and_told(make_run, item, tmp_path, case):
    run, (leave, reason) = make_run("100", "200"), INTERRUPTED[case]
    leave(run, item)
    report = convert_maxtext(run, tmp_path / "model", verify=False)
    assert report.source["step"] == 200
    assert list(report.source["skipped_steps"]) == ["300"]
    assert reason in report.source["skipped_steps"]["300"]
    saved = json.loads((tmp_path / "model" / "conversion_report.json").read_text())
    assert saved["source"] == report.source
    assert inspect_checkpoint(run).skipped_steps == report.source["skipped_steps"]
    with pytest.raises(ValueError, match=r"Step 300 in .* is incomplete: .*200, 100") as caught:
        open_orbax(run, 300)
    assert reason in str(caught.value)
    assert "skipped_steps" not in open_orbax(run, 100).source("")


def test_nothing_is_skipped_where_the_newest_step_is_whole(make_run, item):
    run = make_run("100", "200")
    shutil.copytree(item, run / f"150{TEMPORARY}-1" / "state")
    assert "skipped_steps" not in open_orbax(run).source("")


def test_a_finished_step_counts_though_an_attempt_at_it_was_interrupted(make_run, item):
    run = make_run("100", "300")
    leave_temporary_step(run, item)
    found = open_orbax(run)
    assert (found.step, found.skipped_steps) == (300, {})


def test_steps_from_before_orbax_wrote_that_it_was_done_are_whole(make_run):
    run = make_run("100", "400", committed=("200", "300"))
    assert open_orbax(run, 100).step == 100
    assert open_orbax(run).step == 300


def test_a_run_without_a_whole_step_says_which_were_interrupted(make_run, item):
    run = make_run()
    for step in (100, 200):
        shutil.copytree(item, run / f"{step}{TEMPORARY}-{step}" / "state")
    with pytest.raises(ValueError, match="no complete step") as caught:
        open_orbax(run)
    assert f"100{TEMPORARY}-100" in str(caught.value)
    assert f"200{TEMPORARY}-200" in str(caught.value)


@pytest.mark.parametrize("committed,step", [(("100", "200"), 200), ((), 300)], ids=["some", "none"])
def test_uncommitted_steps_of_a_bucket(make_run, monkeypatch, committed, step):
    bucket = FakeBucket(files_of(make_run("100", "200", "300")))
    bucket.files |= {f"{name}/commit_success.txt": b"done" for name in committed}
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert open_orbax("s3://runs").step == step
    bucket.stop()


def test_skipped_steps_of_pax_are_told_too(tmp_path):
    write_checkpoint(tmp_path / "run" / "checkpoint_00000040" / "state", pax_arrays(), metadata=False)
    (tmp_path / "run" / f"checkpoint_00000080{TEMPORARY}-3").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(PAX_CONFIG))
    source = plan_pax(tmp_path / "run", tmp_path / "config.json").source
    assert source["step"] == 40
    assert "checkpoint_00000080" in source["skipped_steps"]["80"]


def test_a_step_that_is_a_link_is_read(make_run, tmp_path):
    run = make_run("100")
    (run / "100").rename(tmp_path / "elsewhere")
    (run / "100").symlink_to(tmp_path / "elsewhere")
    assert open_orbax(run).step == 100
