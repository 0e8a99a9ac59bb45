"""Evaluation curves and what pairs of variants spend on equal quality, on curves made by hand."""

import csv
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from tiny_recipes import tiny_recipe

from dcformer.experiments import runner
from dcformer.experiments.claim import EQUAL_END, HALF, TAKE_OFF, analyse_claim
from dcformer.experiments.claim_report import print_claim, sentences, write_costs, write_take_offs
from dcformer.experiments.curves import Curve, evaluation_curve
from dcformer.experiments.plot import plot_sweep
from dcformer.experiments.plot_curves import plot_curves
from dcformer.experiments.reference_lines import evaluation_references
from dcformer.experiments.runner import run_sweep
from dcformer.head_tasks import build_tokenizer
from dcformer.training import load_recipe
from dcformer.training.data import IGNORED_LABEL, build_datasets


BLIND = 0.8
# The model falls below 0.8 between 100 and 200 steps, the baseline between 200 and 300.
MODEL, BASELINE = [1.2, 0.6, 0.5, 0.4], [1.2, 1.0, 0.6, 0.5]


def curve_of(losses, accuracies=None, flops=1e9, seconds=0.5) -> dict:
    steps = [100 * (place + 1) for place in range(len(losses))]
    return {
        "step": steps,
        "tokens": [64 * step for step in steps],
        "flops": [flops * step for step in steps],
        "seconds": [seconds * step for step in steps],
        "loss": list(losses),
        "accuracy": list(accuracies or [1 - loss / 2 for loss in losses]),
    }


def results_of(curves: dict[str, list[dict]], pairs) -> dict:
    runs = [
        {
            "variant": variant,
            "seed": seed,
            "parameters": 1000,
            "training": {"evaluation_loss": curve["loss"][-1]},
            "curve": curve,
            "evaluation": None,
        }
        for variant, of_seeds in curves.items()
        for seed, curve in enumerate(of_seeds)
    ]
    references = {"blind_choice": {"loss": BLIND, "accuracy": 0.33}, "lone_name": {"accuracy": 0.62}}
    sweep = {"variants": dict.fromkeys(curves), "pairs": pairs}
    return {"recipe": {"name": "made up", "sweep": sweep}, "references": {"evaluation": references}, "runs": runs}


def two(model, baseline) -> dict:
    return results_of({"model": model, "baseline": baseline}, [["model", "baseline"]])


def ratio_of(results, goal, axis="flops"):
    (found,) = [item for item in analyse_claim(results).ratios if (item.goal, item.axis) == (goal, axis)]
    return found


def test_a_curve_has_what_was_spent_without_evaluating_and_saving():
    records = [
        {"step": 50, "loss": 3.0, "tokens_per_second": 100.0},
        {"step": 100, "loss": 2.0, "tokens_per_second": 50.0},  # after an evaluation at 60, of which it knows nothing
        {"step": 60, "eval_loss": 1.23456789, "eval_accuracy": 0.5},
        {"step": 100, "eval_loss": 1.0, "eval_accuracy": 0.75},
    ]
    curve = evaluation_curve(records, batch_tokens=10, flops_per_token=1_234_567)
    assert curve["step"] == [60, 100] and curve["tokens"] == [600, 1000]
    assert curve["seconds"] == [5 + 2, 5 + 10]
    assert curve["flops"] == [740740000.0, 1234570000.0]  # six digits
    assert curve["loss"] == [1.23457, 1.0] and curve["accuracy"] == [0.5, 0.75]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.2, 0.4, 0.3], 150),
        ([1.2, 0.8, 0.3], 200),
        ([0.7, 0.4, 0.3], 100),
        ([1.2, 0.7, 0.9, 0.7], 350),
        ([1.2, 0.4, 0.9], None),
        ([1.2, 1.0], None),
        ([math.inf, 0.4], 200),
    ],
    ids=["between", "at_an_evaluation", "at_the_first", "for_good", "lost_again", "never", "after_infinity"],
)
def test_a_level_is_reached_on_the_line_between_evaluations(losses, expected):
    curve = Curve.of({"curve": curve_of(losses)})
    found = curve.reaches("loss", 0.8, "steps")
    assert found == (None if expected is None else pytest.approx(expected))
    if expected is not None:
        assert curve.reaches("loss", 0.8, "seconds") == pytest.approx(expected / 2)


def test_accuracy_is_reached_from_below():
    curve = Curve.of({"curve": curve_of([1.0, 1.0, 1.0], [0.3, 0.8, 0.95])})
    assert curve.reaches("accuracy", 0.9, "steps") == pytest.approx(200 + 100 * 2 / 3)


def test_the_ratio_is_that_of_a_calculation_by_hand():
    model = [curve_of(MODEL), curve_of(MODEL, flops=2e9), curve_of(MODEL)]
    found = ratio_of(two(model, [curve_of(BASELINE)] * 3), TAKE_OFF)
    # 250 steps of the baseline against 166.67 of the model: 1.5, 0.75 and 1.5.
    assert list(found.by_seed.values()) == pytest.approx([1.5, 0.75, 1.5])
    logarithms = [math.log(1.5), math.log(0.75), math.log(1.5)]
    mean = sum(logarithms) / 3
    error = math.sqrt(sum((value - mean) ** 2 for value in logarithms) / 2 / 3)
    expected = [math.exp(mean + sign * 4.302653 * error) for sign in (0, -1, 1)]
    assert found.interval() == pytest.approx(expected, rel=1e-6)
    assert found.bound() is None


def test_what_one_seed_did_not_reach_enters_no_mean():
    stuck = curve_of([1.2, 1.1, 1.1, 1.1])
    results = two([curve_of(MODEL)] * 2, [curve_of(BASELINE), stuck])
    found = ratio_of(results, TAKE_OFF)
    assert (found.model_reached, found.baseline_reached, found.interval(), found.p) == (2, 1, None, None)
    # The second baseline needs more than its 400 steps.
    assert found.bound() == ("at least", pytest.approx(math.sqrt(1.5 * 400 / (500 / 3))))
    assert ratio_of(results, HALF).bound() == ("at least", pytest.approx(1.0))  # reached at the model's last step
    take_off = [item for item in analyse_claim(results).take_offs if item.goal == "loss of blind choice"]
    assert [(item.variant, item.reached) for item in take_off] == [("model", 2), ("baseline", 1)]
    assert take_off[1].spent["steps"] == {0: pytest.approx(250), 1: None}
    both = ratio_of(two([curve_of(MODEL), stuck], [curve_of(BASELINE), stuck]), TAKE_OFF)
    assert (both.interval(), both.bound()) == (None, None)


def test_the_higher_of_the_final_losses_is_reached_by_both():
    found = ratio_of(two([curve_of(MODEL)], [curve_of(BASELINE)]), EQUAL_END)
    assert found.levels == {0: 0.5} and found.costs == {0: (pytest.approx(3e11), 4e11)}
    assert found.interval()[0] == pytest.approx(4 / 3) and math.isnan(found.interval()[1]) and found.p is None


def near(losses, factor) -> dict:
    return curve_of(losses, flops=1e9 * factor, seconds=0.5 * factor)


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((1.0, 1.01, 0.99), "which contains 1): no advantage at this scale."),
        ((1.5, 1.51, 1.49), "): an advantage of model."),
        ((0.5, 0.51, 0.49), "): a disadvantage of model."),
    ],
    ids=["none", "advantage", "disadvantage"],
)
def test_a_sentence_says_what_the_interval_says(factors, expected):
    results = two([curve_of(MODEL)] * 3, [near(MODEL, factor) for factor in factors])
    flops, seconds = sentences(analyse_claim(results))
    assert flops.startswith("FLOPs for the same final loss: baseline needs") and flops.endswith(expected)
    assert seconds.startswith("Seconds for the same final loss") and seconds.endswith(expected)


def test_p_values_are_corrected_for_the_number_of_pairs():
    one = two([curve_of(MODEL)] * 3, [near(MODEL, factor) for factor in (1.2, 1.3, 1.1)])
    curves = {
        f"{name}{copy}": [run["curve"] for run in one["runs"] if run["variant"] == name]
        for copy in (1, 2, 3)
        for name in ("model", "baseline")
    }
    three = results_of(curves, [[f"model{copy}", f"baseline{copy}"] for copy in (1, 2, 3)])
    alone = ratio_of(one, EQUAL_END).p
    corrected = [item.p for item in analyse_claim(three).ratios if (item.goal, item.axis) == (EQUAL_END, "flops")]
    assert alone == pytest.approx(0.0649, abs=0.001) and corrected == pytest.approx([3 * alone] * 3)


def test_one_seed_decides_nothing_and_other_runs_are_left_alone(capsys):
    results = two([curve_of(MODEL)], [curve_of(BASELINE)])
    assert all("one seed, which decides nothing" in sentence for sentence in sentences(analyse_claim(results)))
    for run in results["runs"]:
        del run["curve"]  # as older versions wrote it
    assert analyse_claim(results) is None
    print_claim(results, Console(width=160))
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match=r"no pair of sweep\.pairs has evaluation curves"):
        plot_curves(results, "never.png")


def test_tables_count_the_seeds_that_reached_a_goal(capsys):
    print_claim(two([curve_of(MODEL)] * 2, [curve_of(BASELINE), curve_of([1.2] * 4)]), Console(width=200))
    text = capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if "baseline" in line and "loss of blind choice" in line]
    assert [cell.strip() for cell in row.split("│")[3:-1]] == ["1 of 2", "-", "-", "-", "250, not reached"]
    (row,) = [line for line in text.splitlines() if line.startswith("│ model │ baseline │ blind choice")]
    assert "2 and 1 of 2" in row and "at least 1.90" in row


def test_costs_by_seed_are_written_as_csv(tmp_path):
    file = tmp_path / "pairs.csv"
    write_costs(two([curve_of(MODEL)] * 2, [curve_of(BASELINE), curve_of([1.2] * 4)]), file)
    rows = [row for row in csv.DictReader(file.open()) if (row["goal"], row["axis"]) == (TAKE_OFF, "flops")]
    assert [(row["seed"], row["loss"], row["ratio"]) for row in rows] == [("0", "0.8", "1.5"), ("1", "0.8", "")]
    assert [row["baseline_cost"] for row in rows] == ["2.5e+11", ""]


def test_take_offs_by_seed_are_written_as_csv(tmp_path):
    file = tmp_path / "take_offs.csv"
    write_take_offs(two([curve_of(MODEL)] * 2, [curve_of(BASELINE), curve_of([1.2] * 4)]), file)
    rows = [row for row in csv.DictReader(file.open()) if row["goal"] == "loss of blind choice"]
    assert [row["axis"] for row in rows[::2]] == ["steps", "flops", "seconds"] * 2
    spent = {(row["variant"], row["axis"], row["seed"]): row["spent"] for row in rows}
    assert spent["baseline", "flops", "0"] == "2.5e+11" and spent["baseline", "steps", "0"] == "250"
    assert spent["baseline", "steps", "1"] == spent["baseline", "seconds", "1"] == ""


def test_a_sweep_with_pairs_writes_and_prints_what_they_say(tmp_path, monkeypatch, capsys):
    curves = {"model": curve_of(MODEL), "baseline": curve_of(BASELINE)}
    made_up = results_of({name: [curve] * 2 for name, curve in curves.items()}, [])
    rows = {(run["variant"], run["seed"]): run for run in made_up["runs"]}
    monkeypatch.setattr(runner, "_train_and_score", lambda run, *_: rows[run.variant, run.seed])
    sweep = {"seeds": [0, 1], "variants": dict.fromkeys(curves), "pairs": [["model", "baseline"]]}
    results = run_sweep(tiny_recipe(tmp_path, data={"loss_on": "answers"}, sweep=sweep))
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert 0.3 < results["references"]["evaluation"]["blind_choice"]["loss"] < 0.8
    for name in ("sweep.png", "curves.png", "pairs.csv", "take_offs.csv"):
        assert (tmp_path / name).stat().st_size > 0
    assert "FLOPs for the same final loss: baseline needs 1.33 times those of model" in capsys.readouterr().out


def test_blind_choice_has_the_loss_of_the_tokens_that_training_scores():
    """Its nats over the labels of the very rows that the evaluation loss is a mean over, line feeds included."""
    recipe = load_recipe("head-tasks", ["data.evaluation.documents=50", "data.stages=[{documents: 1, examples: 1}]"])
    references = evaluation_references(recipe)
    _, rows = build_datasets(recipe.data, build_tokenizer())
    labels = [label for row in rows for label in row["labels"] if label != IGNORED_LABEL]
    feed = build_tokenizer()("\n")["input_ids"][-1]
    assert labels.count(feed) == 50  # one behind each answer
    # One in three, and one in six for the few adjectives with two opposites.
    nats = references["blind_choice"]["loss"] * len(labels)
    assert 50 * math.log(3) <= nats + 1e-3 < 50 * math.log(3) + 5 * math.log(2)
    assert references["blind_choice"]["accuracy"] == pytest.approx(1 / 3, abs=0.02)
    assert references["lone_name"]["accuracy"] < references["odd_one_out"]["accuracy"]


def test_other_data_have_no_blind_choice():
    assert evaluation_references(load_recipe("head-tasks", ["data.loss_on=all"])) is None
    assert evaluation_references(load_recipe("head-tasks", ["tokenizer=gpt2"])) is None


def check_whole(figure):
    """All that is drawn, with legend, titles and names of axes and ticks, lies within the figure (to 0.02 inches)."""
    figure.canvas.draw()
    left, low, right, high = figure.get_tightbbox(figure.canvas.get_renderer()).extents
    width, height = figure.get_size_inches()
    assert min(left, low, width - right, height - high) > -0.02, (left, low, right, high)
    legend = figure.legends[0].get_window_extent().extents / figure.dpi
    panels = min(axis.get_tightbbox().y0 for axis in figure.axes) / figure.dpi
    assert legend[1] >= 0 and legend[3] <= panels + 0.02  # below all panels
    for axis in figure.axes:
        labels = [label for label in axis.get_xticklabels(which="both") if label.get_visible() and label.get_text()]
        boxes = sorted((label.get_window_extent().x0, label.get_window_extent().x1) for label in labels)
        assert all(end <= start for (_, end), (start, _) in pairwise(boxes)), [each.get_text() for each in labels]


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn."""
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self) or Path(path).touch())
    return drawn


def test_curves_are_drawn_whole_with_their_reference_lines(figures, tmp_path):
    widths = (32, 48, 64)
    curves = {}
    for width in widths:
        curves[f"dcformer_{width}"] = [curve_of([loss * factor for loss in MODEL]) for factor in (1, 1.1)]
        curves[f"transformer_{width}"] = [curve_of([loss * factor for loss in BASELINE]) for factor in (1, 1.1)]
    results = results_of(curves, [[f"dcformer_{width}", f"transformer_{width}"] for width in widths])
    plot_curves(results, tmp_path / "curves.png")
    (figure,) = figures
    check_whole(figure)
    assert [axis.get_xscale() for axis in figure.axes] == ["log"] * 4
    assert all(len(axis.get_xticks()) > 2 for axis in figure.axes)
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words[:2] == ["DCFormer++, width 32", "Transformer++, width 32"] and len(words) == 8
    lines = figure.axes[0].get_lines()
    assert len({line.get_color() for line in lines[:6]}) == 2 and len({line.get_linestyle() for line in lines[:6]}) == 3
    assert [line.get_ydata()[0] for line in lines[6:]] == [33, 62]
    mean = math.exp((math.log(1.2) + math.log(1.32)) / 2)
    assert figure.axes[2].get_lines()[0].get_ydata()[0] == pytest.approx(mean)


def test_a_model_with_two_baselines_is_drawn_once(figures, tmp_path):
    curves = {name: [curve_of(BASELINE)] * 2 for name in ("dcformer_48", "transformer_48", "transformer_48_rate_4e-2")}
    plot_curves(results_of(curves, [["dcformer_48", name] for name in list(curves)[1:]]), tmp_path / "curves.png")
    lines = figures[0].axes[0].get_lines()[:3]
    assert len({line.get_color() for line in lines}) == 3 and len({line.get_linestyle() for line in lines}) == 1
    words = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert words[:3] == ["DCFormer++, width 48", "Transformer++, width 48", "Transformer++, width 48, rate 4e-2"]


def test_variants_are_drawn_whole_by_gain_with_readable_names(figures, tmp_path):
    curves = {"none": [curve_of(BASELINE)] * 2, "gate": [curve_of(BASELINE)] * 2, "rank_2": [curve_of(MODEL)] * 2}
    plot_sweep(results_of(curves, None), tmp_path / "sweep.png")
    (figure,) = figures
    check_whole(figure)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["no composition", "DCFormer++ (both, rank 2)", "dynamic, gate only"]
    assert "blind choice" in [text.get_text() for text in figure.legends[0].get_texts()]
