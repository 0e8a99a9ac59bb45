"""Trackers of Transformers' Trainer follow a run, also one that was stopped."""

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_recipes import tiny_recipe

from dcformer.training import train


@pytest.fixture
def logged(monkeypatch):
    """The id of wandb's run, and step and training loss, of every such record that it is given, offline."""
    for name in ("RUN_ID", "PROJECT", "DIR", "NAME"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # Neither lists the packages that are installed, nor imports what starts jobs.
    monkeypatch.setenv("WANDB_X_SAVE_REQUIREMENTS", "false")
    monkeypatch.setattr(wandb.Run, "_detect_and_apply_job_inputs", lambda run: None, raising=False)
    records, log = [], wandb.Run.log

    def log_and_keep(run, values, *args, **kwargs):
        if "train/loss" in values:
            records.append((run.id, values["train/global_step"], values["train/loss"]))
        log(run, values, *args, **kwargs)

    monkeypatch.setattr(wandb.Run, "log", log_and_keep)
    yield records
    wandb.teardown()


def test_wandb_and_tensorboard_continue_a_stopped_run(tmp_path, logged):
    trackers = ["wandb", "tensorboard", "wandb"]
    recipe = tiny_recipe(tmp_path, name="a-b", training={"report_to": trackers, "save_steps": 2, "logging_steps": 1})

    def stop(step, total, record):
        if step == 6:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train(recipe, on_progress=stop)
    assert wandb.run is None  # a later run of this process is another one
    train(recipe)
    (name, *_), *_ = logged
    assert [record[:2] for record in logged] == [(name, step) for step in (1, 2, 3, 4, 5, 5, 6)]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    again = {step: pytest.approx(loss) for _, step, loss in logged}  # step 5 is purged when it is repeated
    assert [(event.step, event.value) for event in events] == [*again.items()]
    assert len([*tmp_path.glob(f"wandb/offline-run-*-{name}*/run-{name}.wandb")]) == 2
    train(recipe, resume=False)
    assert len({name for name, *_ in logged}) == 2
    count = len(logged)
    train(recipe, dry_run=True)
    assert len(logged) == count and wandb.run is None


def test_a_tracker_that_is_missing_or_unknown_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("dcformer.training.trainer.get_available_reporting_integrations", lambda: ["wandb"])
    for name, words in (("comet_ml", "comet-ml"), ("mlflow", "mlflow"), ("wndb", "wndb.* wandb")):
        for dry_run in (False, True):
            with pytest.raises((ImportError, ValueError), match=words):
                train(tiny_recipe(tmp_path / "run", training={"report_to": ["wandb", name]}), dry_run=dry_run)
    assert not (tmp_path / "run").exists()
