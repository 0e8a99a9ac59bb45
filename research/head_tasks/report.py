"""Print the tables of the study from its recorded results, and draw its figures.

python -m research.head_tasks.report                # figures go to results/
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dcformer.common.plotting import draw_grid, draw_rows, picture
from dcformer.eval import holm
from dcformer.experiments import compare_seeds, seed_interval
from dcformer.head_tasks import REFERENCES
from dcformer.training import load_recipe


RESULTS = Path(__file__).parent / "results"
EVALUATION_DOCUMENTS = 1000
# Model and baseline; the baseline with its best learning rate, and with that of the model.
PAIRS = [
    (f"dcformer_{width}", f"transformer_{width}_rate_{rate}") for width in (32, 48, 64) for rate in ("2e-2", "4e-2")
]
TAKE_OFF, EQUAL_END = "better than blind choice", "higher final loss"
# Of DCFormer++, and of Transformer++ with its best learning rate and with that of DCFormer++.
COLOURS = {"dcformer": "#0072B2", "2e-2": "#D55E00", "4e-2": "#E69F00"}
ROWS_OF_TABLE_9 = {
    "none": "no composition",
    "static": "static composition",
    "low_rank": "dynamic, low rank only",
    "gate": "dynamic, gate only",
    "query_wise": "query-wise only",
    "key_wise": "key-wise only",
    "pre": "scores only (pre-compose)",
    "post": "weights only (post-compose)",
    "rank_1": "both, rank 1",
    "rank_2": "DCFormer++ (both, rank 2)",
    "rank_4": "both, rank 4",
    "all": "both, rank 2, and static",
}

Runs = dict[str, dict[int, dict[str, list[float]]]]  # variant -> seed -> evaluation curve


def further_share_interval(shares: Sequence[float], documents: int) -> tuple[float, float]:
    """The 95 % prediction interval for one more seed, computed on the logits of shares of right answers."""
    least = 0.5 / documents  # 0 and 1 have no logit: they count as half an answer more or less
    bounded = [min(max(share, least), 1.0 - least) for share in shares]
    mean, half_width = seed_interval([math.log(share / (1.0 - share)) for share in bounded])
    # The variance of one seed is added to that of the mean, which is the same divided by the number of seeds.
    half_width *= math.sqrt(len(shares) + 1)
    low, high = (1.0 / (1.0 + math.exp(-end)) for end in (mean - half_width, mean + half_width))
    return low, high


class Costs(NamedTuple):
    """
    The costs of a model and its baseline of reaching the same loss, by seed.

    Attributes:
        model, baseline: Names of the variants.
        goal: The loss to reach.
        axis: `"flops"` or `"seconds"`.
        by_seed: Seed -> what the model and the baseline spent; `None` if the loss was not reached.
    """

    model: str
    baseline: str
    goal: str
    axis: str
    by_seed: dict[int, tuple[float | None, float | None]]

    @property
    def logarithms(self) -> list[float]:
        """Logarithms of baseline / model; empty unless both reached the loss in every seed."""
        pairs = list(self.by_seed.values())
        return [] if any(None in pair for pair in pairs) else [math.log(base / spent) for spent, base in pairs]

    def interval(self) -> tuple[float, float, float]:
        """Geometric mean of baseline / model, and its 95 % interval (Student's t on logarithms)."""
        if not self.logarithms:
            return (math.nan,) * 3
        mean, half_width = seed_interval(self.logarithms)
        return math.exp(mean), math.exp(mean - half_width), math.exp(mean + half_width)


def read_results(name: str) -> dict[str, Any]:
    """The recorded results of a sweep."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def curves_of(results: Mapping[str, Any]) -> Runs:
    curves: Runs = {}
    for run in results["runs"]:
        curves.setdefault(run["variant"], {})[run["seed"]] = run["curve"]
    return curves


def reaches(curve: Mapping[str, Sequence[float]], quantity: str, level: float, axis: str) -> float | None:
    """
    The cost after which the loss has fallen to a level, or the accuracy risen to it, for good.

    For good means in all later evaluations too, since a model that stays at a blind choice crosses its loss by chance.
    Between evaluations the curve is a straight line. `None` if the last evaluation has not reached the level.
    """
    sign = -1 if quantity == "loss" else 1
    gaps = [sign * (value - level) for value in curve[quantity]]  # negative: not yet reached
    if gaps[-1] < 0:
        return None
    first = max((index + 1 for index, gap in enumerate(gaps) if gap < 0), default=0)
    if first == 0:
        return curve[axis][0]
    share = gaps[first - 1] / (gaps[first - 1] - gaps[first])
    return curve[axis][first - 1] + share * (curve[axis][first] - curve[axis][first - 1])


def costs_of(curves: Runs, blind_loss: float) -> list[Costs]:
    """The costs of all pairs, of the loss of blind choice and of the higher final loss of a seed, by both axes."""
    costs = []
    for model, baseline in PAIRS:
        for goal in (TAKE_OFF, EQUAL_END):
            for axis in ("flops", "seconds"):
                by_seed = {}
                for seed in sorted(curves[model].keys() & curves[baseline].keys()):
                    pair = curves[model][seed], curves[baseline][seed]
                    level = blind_loss if goal == TAKE_OFF else max(curve["loss"][-1] for curve in pair)
                    spent, base = (reaches(curve, "loss", level, axis) for curve in pair)
                    by_seed[seed] = spent, base
                costs.append(Costs(model, baseline, goal, axis, by_seed))
    return costs


def corrected_p(costs: Sequence[Costs]) -> list[float]:
    """P-values of t tests on logarithms against no difference, by Holm's correction for all of them."""
    values = []
    for cost in costs:
        ratios = dict(enumerate(cost.logarithms))
        pair = {"ratio": ratios, "none": dict.fromkeys(ratios, 0.0)}
        values.append(compare_seeds(pair, [("ratio", "none")])[0].p)
    return holm(values)


def claim_tables(results: Mapping[str, Any]) -> Iterable[str]:
    """The tables of the pairs with their costs, then of all runs."""
    curves, references = curves_of(results), results["references"]["evaluation"]
    parameters = {run["variant"]: run["parameters"] for run in results["runs"]}
    costs = costs_of(curves, references["blind_choice"]["loss"])
    rows = []
    for model, baseline in PAIRS:
        row = [model.removeprefix("dcformer_"), f"{parameters[model] / 1e6:.2f} million", _rate(results, baseline)]
        for name in (baseline, model):
            mean, half = (100 * value for value in seed_interval(_final(curves[name], "accuracy")))
            row.append(f"{mean:.1f} % ({mean - half:.1f} to {min(100.0, mean + half):.1f})".replace("100.0", "100"))
        for goal, axis in ((TAKE_OFF, "flops"), (EQUAL_END, "flops"), (EQUAL_END, "seconds")):
            (cost,) = (cost for cost in costs if cost[:4] == (model, baseline, goal, axis))
            row.append("{:.2f} ({:.2f} to {:.2f})".format(*cost.interval()))
        rows.append(row)
    columns = ["width", "parameters", "rate of Transformer++", "accuracy, Transformer++", "accuracy, DCFormer++"]
    columns += [f"cost until {TAKE_OFF}, FLOPs", f"cost of the {EQUAL_END}, FLOPs", "the same, seconds"]
    yield table(columns, rows)
    for goal, axis in ((TAKE_OFF, "flops"), (EQUAL_END, "flops"), (EQUAL_END, "seconds")):
        smallest = min(corrected_p([cost for cost in costs if cost[2:4] == (goal, axis) and cost.logarithms]))
        yield f"Smallest corrected p, {goal}, {axis}: {smallest:.2f}"
    rows = []
    for name, by_seed in curves.items():
        accuracies = _final(by_seed, "accuracy")
        low, high = (100 * end for end in further_share_interval(accuracies, EVALUATION_DOCUMENTS))
        blind = [reaches(curve, "loss", references["blind_choice"]["loss"], "step") for curve in by_seed.values()]
        many = [reaches(curve, "accuracy", 0.9, "step") for curve in by_seed.values()]
        model = "DCFormer++" if name.startswith("dcformer") else "Transformer++"
        row = [model, name.split("_")[1], _rate(results, name), _joined(accuracies, 100, ".1f")]
        rows.append([*row, f"{low:.1f} to {high:.1f}", _joined(blind, 1, ".0f"), _joined(many, 1, ".0f")])
    columns = ["model", "width", "rate", "accuracy of seeds 0 to 3, %", "of a further seed, %"]
    yield table([*columns, "steps to the loss of blind choice", "steps to 90 %"], rows)


def rates_table(results: Mapping[str, Any]) -> str:
    """Final losses by learning rate."""
    variants, rows = results["recipe"]["sweep"]["variants"], []
    for name, by_seed in curves_of(results).items():
        losses = _final(by_seed, "loss")
        model = "DCFormer++" if name.startswith("dcformer") else "Transformer++"
        compose_rate = variants[name]["training"].get("compose_learning_rate")
        compose_rate = "" if compose_rate is None else f"{compose_rate:g}"
        mean = f"{math.fsum(losses) / len(losses):.3f}"
        rows.append([model, _rate(results, name), compose_rate, mean, _joined(losses, 1, ".3f")])
    return table(["model at width 48", "rate", "of compose weights", "loss, mean", "by seed"], rows)


def ablation_table(results: Mapping[str, Any]) -> str:
    """Rows of Table 9 by their mean final loss."""
    curves, published = curves_of(results), load_recipe("ablation-405m").sweep["published"]
    losses = {name: {seed: curve["loss"][-1] for seed, curve in by_seed.items()} for name, by_seed in curves.items()}
    pairs = [(name, "none") for name in losses if name != "none"]
    compared = {item.first: item for item in compare_seeds(losses, pairs)}
    means = {name: math.fsum(values.values()) / len(values) for name, values in losses.items()}
    rows = []
    for name in sorted(means, key=means.__getitem__):
        row = [ROWS_OF_TABLE_9[name], _joined(_final(curves[name], "accuracy"), 100, ".1f"), f"{means[name]:.3f}"]
        difference = p = ""
        if name in compared:
            item = compared[name]
            low, high = item.difference - item.half_width, item.difference + item.half_width
            difference, p = f"{item.difference:+.3f} ({low:+.3f} to {high:+.3f})", f"{item.corrected_p:.2f}"
        rows.append([*row, difference, p, f"{published[name]:.2f}"])
    columns = ["what composes", "accuracy of seeds 0 to 3, %", "loss, mean", "loss above that of no composition"]
    return table([*columns, "corrected p", "perplexity in Table 9"], rows)


def seeds_table(results: Mapping[str, Any]) -> str:
    """Right answers of the models of seeds.yaml after training, by questions: means and 95 % intervals."""
    questions = {
        "held-out questions without an example before": ("held_out", "by_shots", "0"),
        "of these about persons": ("held_out", "by_subject", "persons", "by_shots", "0"),
        "of these about lists": ("held_out", "by_subject", "lists", "by_shots", "0"),
        "with seven examples before": ("held_out", "by_shots", "7"),
        "held-out tasks, none to seven examples": ("held_out",),
        "the authors' 888 texts, two to seven examples": ("authors",),
    }
    names, rows = ("dcformer", "transformer"), []
    for title, keys in questions.items():
        row = [title]
        for name in names:
            runs = [run["evaluation"] for run in results["runs"] if run["variant"] == name]
            shares = [100 * functools.reduce(operator.getitem, keys, run)["accuracy"] for run in runs]
            mean, half = seed_interval(shares)
            row.append(f"{mean:.1f} % ({mean - half:.1f} to {min(100.0, mean + half):.1f})")
        rows.append(row)
    return table(["", *names], rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _final(by_seed: Mapping[int, Mapping[str, Sequence[float]]], quantity: str) -> list[float]:
    return [curve[quantity][-1] for _, curve in sorted(by_seed.items())]


def _rate(results: Mapping[str, Any], name: str) -> str:
    return f"{results['recipe']['sweep']['variants'][name]['training']['muon_learning_rate']:g}"


def _joined(values: Iterable[float | None], scale: float, digits: str) -> str:
    return ", ".join("-" if value is None else format(scale * value, digits) for value in values)


def plot_final(results: Mapping[str, Any], path: Path) -> None:
    """Final loss and accuracy of every variant: the seeds as circles, means with 95 % intervals."""
    curves = curves_of(results)
    names = list(curves)
    with picture(path, (9.0, 1.6 + 0.32 * len(names)), "train") as figure:
        for axis, quantity in zip(figure.subplots(1, 2, sharey=True), ("loss", "accuracy")):
            draw_rows(axis, [ROWS_OF_TABLE_9.get(name, name) for name in names])
            for row, name in enumerate(names):
                values = _final(curves[name], quantity)
                mean, half_width = seed_interval(values)
                style = {"color": "0.45", "markerfacecolor": "none", "markersize": 4}
                axis.plot(values, [row] * len(values), "o", gid=f"data.{quantity}.{name}", **style)
                axis.errorbar(mean, row, xerr=half_width, fmt="D", color="black", markersize=4)
            axis.set_xlabel("evaluation loss (nats per token)" if quantity == "loss" else "share of right answers")


def plot_curves(results: Mapping[str, Any], path: Path) -> None:
    """Accuracy and loss, means over the seeds, against FLOPs and seconds; rules that read no question in grey."""
    curves, references = curves_of(results), results["references"]["evaluation"]
    styles = {32: "-", 48: "--", 64: ":"}
    with picture(path, (10.0, 8.3), "train") as figure:
        panels = figure.subplots(2, 2, sharex="col", sharey="row")
        for quantity, row in zip(("accuracy", "loss"), panels):
            for axis, panel in zip(("flops", "seconds"), row):
                for name, by_seed in curves.items():
                    kind = "dcformer" if name.startswith("dcformer") else name.rpartition("_")[2]
                    spent, values = (
                        [_mean(step) for step in zip(*(curve[key] for curve in by_seed.values()))]
                        for key in (axis, quantity)
                    )
                    style = {"color": COLOURS[kind], "linestyle": styles[int(name.split("_")[1])]}
                    gid = f"data.{quantity}_by_{axis}.{name}"
                    panel.plot(spent, values, label=name.replace("_", " "), gid=gid, **style)
                for rule in REFERENCES:
                    if quantity in references[rule]:
                        panel.axhline(references[rule][quantity], color="0.35", linewidth=1.0, linestyle="-.")
                panel.set_xscale("log" if axis == "flops" else "linear")
                draw_grid(panel)
        panels[1][0].set_yscale("log")
        for panel, title in zip(panels[1], ("FLOPs of training", "seconds of training")):
            panel.set_xlabel(title)
        for panel, title in zip(panels[:, 0], ("share of right answers", "evaluation loss (nats per token)")):
            panel.set_ylabel(title)
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)


def plot_seeds(results: Mapping[str, Any], path: Path) -> None:
    """Accuracy of both models of seeds.yaml while they are trained: a thin line per seed, a thick one at their mean."""
    references = results["references"]["evaluation"]
    with picture(path, (9.6, 4.5), "train") as figure:
        axis = figure.subplots()
        draw_grid(axis, "y")
        for name, by_seed in curves_of(results).items():
            colour = COLOURS.get(name, COLOURS["2e-2"])
            for seed, curve in by_seed.items():
                style = {"color": colour, "alpha": 0.35, "linewidth": 1, "gid": f"data.accuracy.{name}-{seed}"}
                axis.plot(curve["flops"], curve["accuracy"], **style)
            # All seeds are evaluated after the same steps, and so after the same FLOPs.
            means = [_mean(shares) for shares in zip(*(curve["accuracy"] for curve in by_seed.values()))]
            label = f"{name}, {100 * means[-1]:.1f} % at the end"
            axis.plot(curve["flops"], means, color=colour, linewidth=3, label=label, gid=f"data.accuracy.{name}-mean")
        for rule, title in REFERENCES.items():
            share = references[rule]["accuracy"]
            axis.axhline(share, color="0.35", linewidth=1.0, linestyle="-.", gid=rule)
            label = f"{title}, {100 * share:.1f} %"
            axis.text(1.01, share, label, va="center", transform=axis.get_yaxis_transform())
        axis.set(ylim=(0, 1), xlabel="FLOPs of training", ylabel="share of right answers to held-out questions")
        axis.set_title("Without an example before the question", loc="left")
        axis.legend(loc="lower right", frameon=False)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def draw_figures(folder: Path) -> None:
    """Draw every figure of the page from the recorded results."""
    plot_final(read_results("ablation"), folder / "ablation.svg")
    plot_curves(read_results("claim"), folder / "claim_curves.svg")
    plot_seeds(read_results("seeds"), folder / "head_tasks.svg")


def main() -> None:
    rates, claim, ablation, seeds = (read_results(name) for name in ("rates", "claim", "ablation", "seeds"))
    tables = [*claim_tables(claim), rates_table(rates), ablation_table(ablation), seeds_table(seeds)]
    print(*tables, sep="\n\n")
    draw_figures(RESULTS)


if __name__ == "__main__":
    main()
