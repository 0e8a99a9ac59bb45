"""The picture of a run's losses."""

import pytest

from dcformer.training.plot import plot_losses


pytest.importorskip("matplotlib")

LOG = [
    {"step": 10, "loss": 4.0, "learning_rate": 1e-3},
    {"step": 20, "loss": 3.0, "learning_rate": 5e-4},
    {"step": 20, "eval_loss": 3.5, "eval_perplexity": 33.1},
    {"train_runtime": 3.0},
]


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_the_same_log_gives_the_same_file(ending, tmp_path):
    for name in ("a", "b"):
        plot_losses(LOG, tmp_path / f"{name}{ending}")

    content = (tmp_path / f"a{ending}").read_bytes()
    assert len(content) > 1000
    assert content == (tmp_path / f"b{ending}").read_bytes()


def test_training_evaluation_and_learning_rate_are_in_it(tmp_path):
    def words(log):
        plot_losses(log, tmp_path / "a.svg")
        return (tmp_path / "a.svg").read_text(encoding="utf-8")

    everything = words(LOG)
    assert all(word in everything for word in ("training", "evaluation", "learning rate", "loss (nats per token)"))
    assert "evaluation" not in words(LOG[:2])
    assert "training" not in words(LOG[2:])
    assert words(LOG[:2]) != words([{**LOG[0], "loss": 9.0}, LOG[1]])


def test_a_log_without_losses_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_losses([{"train_runtime": 3.0}], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'.*a\.bmp'.*\.png, \.svg, \.pdf"):
        plot_losses(LOG, tmp_path / "a.bmp")
