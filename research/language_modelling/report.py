"""Print the tables of the study from its recorded results, and draw its figures.

python -m research.language_modelling.report        # tables; figures go to results/
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

from dcformer.common.plotting import draw_grid, picture
from dcformer.experiments import compare_seeds, seed_interval
from dcformer.training import load_recipe

from ..head_tasks.report import ROWS_OF_TABLE_9
from ..sweeps import recorded


RESULTS = Path(__file__).parent / "results"
MODELS = {"transformer": "Transformer++", "dcformer": "DCFormer++"}
COLOURS = {"transformer": "#D55E00", "dcformer": "#0072B2"}
MARKERS = {"code": "o", "prose": "s"}
PUBLISHED_RATIO = (1.7, 2.0)  # compute of a Transformer that is as good, abstract of the paper
# Rows of the ablation that are models of code.yaml: name of the row -> variant.
OF_CODE = {"none": "transformer_small", "rank_2": "dcformer_small"}
PUBLISHED = "ablation-405m"  # recipe with the perplexities of the paper
_RESAMPLES = 10_000


def read_pairs(folder: Path) -> pd.DataFrame:
    """
    A row per finished run in `<text>.json` and `<text>-*.json`: `text`, `model`, `size`, `seed`, its costs, losses,
    `curve` and `test`. Seconds follow from `speed.json`; those of a variant that it has not are what the run took.
    """
    rows = []
    speed = folder / "speed.json"
    step_seconds = json.loads(speed.read_text(encoding="utf-8"))["seconds"] if speed.is_file() else {}
    for text in MARKERS:
        files = (folder / f"{text}.json", *sorted(folder.glob(f"{text}-*.json")))
        for run in (run for file in files for run in recorded(file)["runs"] if "test" in run):
            model, size = run["variant"].split("_")
            row = {"text": text, "model": model, "size": size, "seed": run["seed"], "parameters": run["parameters"]}
            row |= {key: run["training"][key] for key in ("tokens", "flops", "seconds")}
            curve = dict(run["curve"])
            if (of_step := step_seconds.get(run["variant"])) is not None:
                row["seconds"] = run["training"]["steps"] * of_step
                curve["seconds"] = [step * of_step for step in curve["step"]]
            rows.append(row | {"loss": run["test"]["loss"], "curve": curve, "test": run["test"]})
    if not rows:
        raise ValueError(f"{str(folder)!r} has no results of the pairs; run python -m research.language_modelling.run.")
    return pd.DataFrame(rows)


def further_seed_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval in which the value of one more seed is expected: 95 %, by Student's t."""
    mean, half_width = seed_interval(values)
    half_width *= math.sqrt(len(values) + 1)  # the variance of the mean, and that of one seed more
    return mean - half_width, mean + half_width


def compute_ratios(pairs: pd.DataFrame, axis: str) -> pd.DataFrame:
    """
    Compute how many times the cost of DCFormer++ the baseline needs for the same loss.

    For each model a line is fitted through the sizes: logarithm of the mean loss on that of the cost. At the cost of
    DCFormer++ of a size, its line gives a loss, and the baseline's line the cost of that loss. Seeds are drawn with
    replacement 10,000 times for the intervals, the same for both models of a size.

    Args:
        pairs: Rows of one text, as of `read_pairs`.
        axis: `"flops"` or `"seconds"`.

    Returns:
        A row per size and one of their geometric mean, `all`: `ratio`, `low` and `high` (2.5 and 97.5 %; NaN with fewer
        than two seeds of a size).
    """
    generator = np.random.default_rng(0)
    cost: dict[str, list[float]] = {model: [] for model in MODELS}
    loss: dict[str, list[np.ndarray]] = {model: [] for model in MODELS}
    sizes, fewest = dict(iter(pairs.groupby("size", sort=False))), np.inf
    for rows in sizes.values():
        losses = rows.pivot(index="seed", columns="model", values="loss")
        drawn = generator.integers(len(losses), size=(_RESAMPLES, len(losses)))
        drawn[0] = np.arange(len(losses))  # the first sample is the seeds themselves
        for model in MODELS:
            cost[model].append(np.log(rows.loc[rows["model"] == model, axis].mean()))
            loss[model].append(np.log(losses[model].to_numpy()[drawn].mean(axis=1)))  # (samples,)
        fewest = min(fewest, len(losses))
    own_cost, base_cost = (np.array(cost[model]) for model in ("dcformer", "transformer"))  # (sizes,)
    own = _line(own_cost, np.stack(loss["dcformer"], axis=1))
    base = _line(base_cost, np.stack(loss["transformer"], axis=1))
    level = own[0] + own[1] * own_cost  # (samples, sizes)
    logarithms = (level - base[0]) / base[1] - own_cost
    ratios = np.exp(np.concatenate([logarithms, logarithms.mean(axis=1, keepdims=True)], axis=1))
    low, high = np.percentile(ratios, [2.5, 97.5], axis=0) if fewest > 1 else np.full((2, len(sizes) + 1), np.nan)
    return pd.DataFrame({"ratio": ratios[0], "low": low, "high": high}, index=[*sizes, "all"])


def _line(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least-squares intercepts and slopes, each (samples, 1), of y (samples, sizes) on x (sizes,)."""
    centred = x - x.mean()
    slope = (y * centred).sum(axis=1, keepdims=True) / (centred**2).sum()
    return y.mean(axis=1, keepdims=True) - slope * x.mean(), slope


def complete(pairs: pd.DataFrame) -> pd.DataFrame:
    """The rows whose seed both models of a size have, trained on as many tokens."""
    return pairs[pairs.groupby(["text", "size", "seed", "tokens"])["model"].transform("nunique") == len(MODELS)]


def with_interval(values: Sequence[float], sign: str = "") -> str:
    mean, half = seed_interval(values)
    return f"{mean:{sign}.3f}" + ("" if math.isnan(half) else f" ({mean - half:{sign}.3f} to {mean + half:{sign}.3f})")


def pairs_table(pairs: pd.DataFrame) -> pd.DataFrame:
    """Losses of both models by text and size, and how far apart they are."""
    rows = []
    for (text, size), group in pairs.groupby(["text", "size"], sort=False):
        wide = group.pivot(index="seed", columns="model", values="loss")
        first = group.drop_duplicates("model").set_index("model")
        difference = list(wide["dcformer"] - wide["transformer"])
        low, high = further_seed_interval(difference)
        seconds = group.groupby("model")["seconds"].mean()
        row = {"text": text, "size": size, "million tokens": f"{first['tokens'].iloc[0] / 1e6:.0f}"}
        for model, name in MODELS.items():
            row[f"parameters, {name}"] = f"{first.loc[model, 'parameters'] / 1e6:.2f} million"
            row[f"loss, {name}"] = f"{wide[model].mean():.3f}"
        row["difference"] = with_interval(difference, "+")
        row["of a further seed"] = "" if math.isnan(low) else f"{low:+.3f} to {high:+.3f}"
        row["FLOPs, ratio"] = f"{first.loc['dcformer', 'flops'] / first.loc['transformer', 'flops']:.2f}"
        row["seconds, ratio"] = f"{seconds['dcformer'] / seconds['transformer']:.2f}"
        rows.append(row)
    return pd.DataFrame(rows)


def mean_curve(runs: pd.DataFrame, key: str) -> np.ndarray:
    """`step`, `flops`, `seconds` or `loss` of the evaluations, the mean of these runs: (evaluations,)."""
    return np.mean([curve[key] for curve in runs["curve"]], axis=0)


def training_table(pairs: pd.DataFrame) -> pd.DataFrame:
    """Differences between the models while they are trained, from the evaluations, as means of the seeds."""
    rows = []
    for (text, size), group in pairs.groupby(["text", "size"], sort=False):
        loss = {model: mean_curve(runs, "loss") for model, runs in group.groupby("model")}
        steps, difference = group["curve"].iloc[0]["step"], loss["dcformer"] - loss["transformer"]
        row = {"text": text, "size": size}
        for share in (0.1, 0.25, 0.5, 1.0):
            place = min(range(len(steps)), key=lambda place: abs(steps[place] - share * steps[-1]))
            row[f"at {share:.0%}"] = f"{difference[place]:+.3f} (step {steps[place]:,})"
        rows.append(row)
    return pd.DataFrame(rows)


def ratios_table(pairs: pd.DataFrame) -> pd.DataFrame:
    """Costs of equal loss by text, size and axis."""
    rows = []
    for text, group in pairs.groupby("text", sort=False):
        if group["size"].nunique() < 2:
            continue
        found = {axis: compute_ratios(group, axis) for axis in ("flops", "seconds")}
        for size in found["flops"].index:
            cells = {axis: _ratio(*ratios.loc[size]) for axis, ratios in found.items()}
            rows.append({"text": text, "at the cost of": size} | cells)
    return pd.DataFrame(rows).rename(columns={"flops": "FLOPs"})


def length_table(runs: pd.DataFrame) -> pd.DataFrame:
    """
    Multiples of DCFormer++'s FLOPs that the baseline of its size needs for the same loss if it reads more tokens.

    A line through the baseline's lengths, logarithm of the loss on that of the FLOPs, is read at the loss of
    DCFormer++. Other lengths of a size have its name with a hyphen and more behind it, such as `11m-half`.
    """
    runs = runs.assign(size=runs["size"].str.partition("-")[0])
    rows = []
    for (text, size), group in runs.groupby(["text", "size"], sort=False):
        ratios = {}
        for seed, of_seed in group.groupby("seed"):
            own, base = (of_seed[of_seed["model"] == model] for model in ("dcformer", "transformer"))
            if len(own) == 1 and base["tokens"].nunique() > 1:
                slope, level = np.polyfit(np.log(base["flops"]), np.log(base["loss"]), 1)
                cost = np.exp((np.log(own["loss"].item()) - level) / slope)
                ratios[seed] = cost / own["flops"].item()
        if ratios:
            rows.append({"text": text, "size": size, "seeds": len(ratios), "FLOPs": with_interval([*ratios.values()])})
    return pd.DataFrame(rows)


def _ratio(ratio: float, low: float, high: float) -> str:
    return f"{ratio:.2f}" + ("" if math.isnan(low) else f" ({low:.2f} to {high:.2f})")


def losses_of(results: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Variant -> seed -> test loss."""
    losses: dict[str, dict[int, float]] = {}
    for run in results["runs"]:
        losses.setdefault(run["variant"], {})[run["seed"]] = run["test"]["loss"]
    return losses


def rows_table(
    losses: dict[str, dict[int, float]], published: dict[str, float], names: dict[str, str], reference: str
) -> pd.DataFrame:
    """Variants by their mean loss, with their differences to one of them, corrected for their number by Holm's rule."""
    seeds = losses[reference].keys()
    others = [(name, reference) for name in losses if name != reference and len(seeds & losses[name].keys()) > 1]
    compared = {item.first: item for item in compare_seeds(losses, others)}
    means = {name: fmean(by_seed.values()) for name, by_seed in losses.items()}
    rows = []
    for name in sorted(means, key=means.__getitem__):
        by_seed = [f"{losses[name][seed]:.3f}" for seed in sorted(losses[name])]
        row = {"variant": names[name], "loss": ", ".join(by_seed), "mean": f"{means[name]:.3f}"}
        row[f"over {names[reference]}"] = row["corrected p"] = ""
        if name in compared:
            item = compared[name]
            half = item.simultaneous_half_width
            low, high = item.difference - half, item.difference + half
            row[f"over {names[reference]}"] = f"{item.difference:+.3f} ({low:+.3f} to {high:+.3f})"
            row["corrected p"] = f"{item.corrected_p:.3f}"
        rows.append(row | {"published perplexity": f"{published[name]:.2f}" if name in published else ""})
    return pd.DataFrame(rows)


def breakdown_table(pairs: pd.DataFrame, size: str, part: str) -> pd.DataFrame:
    """Losses of both models by class or position of a token, and the share that each has in the difference."""
    rows = []
    for text, group in pairs[pairs["size"] == size].groupby("text", sort=False):
        tests = dict(zip(zip(group["model"], group["seed"]), group["test"]))
        seeds = sorted(set(group["seed"]))
        whole = [tests["dcformer", seed]["loss"] - tests["transformer", seed]["loss"] for seed in seeds]
        for name, (tokens, _) in tests["dcformer", seeds[0]][part].items():
            loss = {model: [tests[model, seed][part][name][1] / tokens for seed in seeds] for model in MODELS}
            share = tokens / tests["dcformer", seeds[0]]["tokens"]
            difference = [own - base for own, base in zip(loss["dcformer"], loss["transformer"])]
            gain = share * math.fsum(difference) / math.fsum(whole)
            row = {"text": text, "tokens": f"{name}, {100 * share:.0f} %"}
            row |= {MODELS[model]: f"{fmean(values):.3f}" for model, values in loss.items()}
            rows.append(row | {"difference": with_interval(difference, "+"), "share of it": f"{100 * gain:.0f} %"})
    return pd.DataFrame(rows)


def plot_scaling(pairs: pd.DataFrame, path: Path) -> None:
    """Loss on test text against FLOPs, with the fitted lines, and the ratios of compute at equal loss."""
    texts = [text for text, group in pairs.groupby("text", sort=False) if group["size"].nunique() > 1]
    with picture(path, (3.6 * len(texts) + 3.6, 3.9), "train") as figure:
        *panels, last = figure.subplots(1, len(texts) + 1)
        for panel, text in zip(panels, texts):
            for model, rows in pairs[pairs["text"] == text].groupby("model"):
                means = rows.groupby("size", sort=False)[["flops", "loss"]].mean()
                (intercept,), (slope,) = (
                    part[0] for part in _line(np.log(means["flops"].to_numpy()), np.log(means[["loss"]].to_numpy().T))
                )
                costs = np.geomspace(pairs["flops"].min() / 1.2, pairs["flops"].max() * 1.2)
                style = {"color": COLOURS[model], "label": MODELS[model]}
                gid = f"data.{text}.{model}"
                panel.plot(costs, np.exp(intercept + slope * np.log(costs)), linewidth=1.2, gid=f"{gid}-line", **style)
                panel.plot(rows["flops"], rows["loss"], "o", color=COLOURS[model], markersize=4, gid=f"{gid}-seeds")
            _scale_costs(panel)
            panel.set_title(f"English {text}" if text == "prose" else text.capitalize(), fontsize=10)
            panel.set_xlabel("FLOPs of training")
            draw_grid(panel)
        panels[0].set_ylabel("loss on test text (nats per token)")
        panels[0].legend(frameon=False)
        last.axvspan(*PUBLISHED_RATIO, color="0.85", label="the paper, from 405 million\nparameters: 1.7 to 2.0")
        found = {text: compute_ratios(pairs[pairs["text"] == text], "flops") for text in texts}
        ratios = pd.concat(found).drop(index="all", level=1)
        places = range(len(ratios))
        spread = (ratios["ratio"] - ratios["low"], ratios["high"] - ratios["ratio"])
        style = {"color": COLOURS["dcformer"], "capsize": 3, "gid": "data.ratios.all"}
        last.errorbar(ratios["ratio"], places, xerr=spread, fmt="D", **style)
        for place, ratio in zip(places, ratios["ratio"]):
            last.annotate(f"{ratio:.2f}", (ratio, place), (0, 8), textcoords="offset points", ha="center")
        last.axvline(1, color="black", linewidth=0.8)
        last.set_xlim(left=ratios[["ratio", "low"]].min(axis=None) - 0.1)
        last.set_yticks(places, [", ".join(each) for each in ratios.index])
        last.set_ylim(len(ratios) - 0.1, -0.9)
        last.set_title("FLOPs of Transformer++\nfor the loss of DCFormer++", fontsize=10)
        last.legend(frameon=False, loc="lower right", fontsize=8)
        draw_grid(last, "x")


def _scale_costs(panel: Any) -> None:
    """A logarithmic axis across, with labels at 1, 2 and 5 that do not touch."""
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(math.inf, math.inf)))
    panel.xaxis.set_minor_formatter(NullFormatter())


def plot_curves(pairs: pd.DataFrame, path: Path) -> None:
    """Evaluation loss against FLOPs and seconds: a line per size and model, the mean of the seeds."""
    texts = list(dict.fromkeys(pairs["text"]))
    sizes = dict(zip(dict.fromkeys(pairs["size"]), ("-", "--", ":")))
    with picture(path, (10.0, 3.4 * len(texts) + 0.8), "train") as figure:
        panels = figure.subplots(len(texts), 2, sharey="row", squeeze=False)
        for text, row in zip(texts, panels):
            halfway: list[float] = []
            for panel, axis, title in zip(row, ("flops", "seconds"), ("FLOPs of training", "seconds of training")):
                for (size, model), group in pairs[pairs["text"] == text].groupby(["size", "model"], sort=False):
                    spent, losses = mean_curve(group, axis), mean_curve(group, "loss")
                    label = f"{MODELS[model]}, {size}"
                    halfway.append(losses[len(losses) // 2])
                    style = {"color": COLOURS[model], "linestyle": sizes[size], "gid": f"data.{text}_{axis}.{label}"}
                    panel.plot(spent, losses, label=label, **style)
                _scale_costs(panel)
                panel.set_xlabel(title)
                draw_grid(panel)
            row[0].set_ylim(top=1.1 * max(halfway))
            row[0].set_ylabel(f"evaluation loss on {text}\n(nats per token)")
        handles = panels[0][0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=len(sizes), frameon=False)


def rates_table(folder: Path) -> pd.DataFrame:
    """Losses by learning rate, of the seeds in the order of their numbers."""
    rows = []
    for text, file in (("code", "rates.json"), ("prose", "rates_prose.json")):
        for variant, by_seed in losses_of(recorded(folder / file)).items():
            losses = ", ".join(f"{by_seed[seed]:.3f}" for seed in sorted(by_seed))
            rows.append({"text": text, "model, rate": variant.replace("_", " "), "loss": losses})
    return pd.DataFrame(rows)


def ablation_table(folder: Path) -> pd.DataFrame:
    """Rows of Table 9; the pair of the small size is recorded with the others."""
    ablation, code = (losses_of(recorded(folder / file)) for file in ("ablation.json", "code.json"))
    if not ablation:
        return pd.DataFrame()
    losses = ablation | {row: code[variant] for row, variant in OF_CODE.items() if variant in code}
    return rows_table(losses, load_recipe(PUBLISHED).sweep["published"], ROWS_OF_TABLE_9, "none")


def tables_of(folder: Path) -> dict[str, pd.DataFrame]:
    """Title -> every table that the results of a folder have."""
    runs = read_pairs(folder)
    pairs = complete(runs)
    tables = {
        "Pairs": pairs_table(pairs),
        "Difference while training": training_table(pairs),
        "Cost of equal loss": ratios_table(pairs),
        "Cost of equal loss by more tokens": length_table(runs),
    }
    for size in dict.fromkeys(pairs["size"]):
        parts = [part for part in ("classes", "positions") if part in pairs[pairs["size"] == size].iloc[0]["test"]]
        for part in parts:
            tables[f"Loss by {part} of tokens, {size}"] = breakdown_table(pairs, size, part)
    tables |= {"Ablation": ablation_table(folder), "Learning rates": rates_table(folder)}
    return {title: table for title, table in tables.items() if len(table)}  # the fit over sizes needs two


def draw_figures(results: Path, folder: Path) -> None:
    """Draw every figure of the page from the results of one folder into another."""
    pairs = complete(read_pairs(results))
    plot_curves(pairs, folder / "curves.svg")
    if pairs.groupby("text")["size"].nunique().max() > 1:
        plot_scaling(pairs, folder / "scaling.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the recorded results")
    folder = parser.parse_args().results
    for title, table in tables_of(folder).items():
        print(f"## {title}\n\n{table.to_markdown(index=False, disable_numparse=True)}\n")
    draw_figures(folder, folder)


if __name__ == "__main__":
    main()
