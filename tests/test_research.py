"""The figures, tables and sentences about our own studies say what the records hold."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from research.head_tasks import report as head_tasks
from research.language_modelling import report as language_modelling
from research.sweeps import recorded
from research.upcycling import run as upcycling


ROOT = Path(__file__).parents[1]


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def table(name, first_heading):
    """Cells of the rows below the heading of a Markdown table on a page."""
    text = page(name)
    lines = text[re.search(rf"^\| {re.escape(first_heading)} \|", text, re.M).start() :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture(scope="module")
def tables():
    return language_modelling.tables_of(language_modelling.RESULTS)


def drawn(file):
    """Panel -> line -> points (point, axis) of a picture, of what its program has named `data.PANEL.LINE`."""
    panels = {}
    for group in ElementTree.parse(file).getroot().iter("{http://www.w3.org/2000/svg}g"):
        if (name := group.get("id", "")).startswith("data."):
            markers = [(use.get("x"), use.get("y")) for use in group.iter("{http://www.w3.org/2000/svg}use")]
            lines = [re.findall(r"[ML] (\S+) (\S+)", path.get("d")) for path in group.findall("{*}path")]
            _, panel, line = name.split(".", 2)
            panels.setdefault(panel, {})[line] = np.array(markers or lines[0], float)
    return panels


@pytest.mark.parametrize("study", ["head_tasks", "language_modelling"])
def test_figures_show_the_records(study, tmp_path):
    """Whatever the version of matplotlib, which may place a panel otherwise."""
    stored = ROOT / "research" / study / "results"
    if study == "head_tasks":
        head_tasks.draw_figures(tmp_path)
    else:
        language_modelling.draw_figures(stored, tmp_path)
    names = {path.name for path in stored.glob("*.svg")}
    assert names == {path.name for path in tmp_path.iterdir()}
    assert names == set(re.findall(r"!\[.*\]\(results/(.*)\)", page(f"research/{study}/README.md")))
    for name in names:
        before, now = drawn(stored / name), drawn(tmp_path / name)
        assert len(before) > 0 and before.keys() == now.keys()
        for panel, lines in before.items():
            assert lines.keys() == now[panel].keys()
            for axis in (0, 1):
                old, new = (np.concatenate([each[line][:, axis] for line in lines]) for each in (lines, now[panel]))
                # A straight line from the one picture to the other.
                np.testing.assert_allclose(np.polyval(np.polyfit(old, new, 1), old), new, atol=0.05)


def test_tables_of_the_head_tasks_are_the_records():
    results = head_tasks.read_results("claim")
    printed = next(iter(head_tasks.claim_tables(results))).splitlines()[2:]
    assert [f"| {' | '.join(row)} |" for row in table("research/head_tasks/README.md", "width")] == printed
    seeds = head_tasks.seeds_table(head_tasks.read_results("seeds")).splitlines()[2:]
    card = page("research/head_tasks/models/dcformer/README.md")
    assert seeds == re.findall(r"^\| .* to .* \| .* to .*\) \|$", card, re.M)


def test_tables_of_language_modelling_are_the_records(tables):
    pairs = []
    for pair in tables["Pairs"].to_dict("records"):
        losses = language_modelling.losses_of(recorded(language_modelling.RESULTS / f"{pair['text']}.json"))
        of_models = [losses[f"{model}_{pair['size']}"] for model in ("transformer", "dcformer")]
        by_seed = [", ".join(f"{losses[seed]:.3f}" for seed in (0, 1, 2)) for losses in of_models]
        pairs.append([f"{pair['text']}, {pair['size']}", *by_seed, pair["difference"], pair["of a further seed"]])
    assert table("research/language_modelling/README.md", "text, size") == pairs
    costs = {text: rows.drop(columns="text") for text, rows in tables["Cost of equal loss"].groupby("text")}
    code = costs["code"].replace({"all": "geometric mean"}).to_numpy().tolist()
    assert table("research/language_modelling/README.md", "size | in FLOPs") == code
    code, prose = ([ratio.split()[0] for ratio in costs[text].FLOPs[:-1]] for text in ("code", "prose"))
    _, *shown = [row[-1] for row in table("README.md", "text")]
    assert shown[0] == "{}, {} and {}".format(*code) and shown[1].startswith("{} and {}".format(*prose))


def test_the_table_of_upcycling_is_the_record():
    results = recorded(ROOT / "research" / "upcycling" / "results.json")
    untouched, *rows = table("research/upcycling/README.md", "method | learning rate")
    assert untouched[2] == f"{np.exp(np.mean(results['before'])):.3f}"
    first_seeds = [row[2].partition(",")[0] for row in (untouched, *rows)]
    assert re.findall(r"\d\.\d{3}", page("docs/upcycling.md")) == first_seeds
    made = upcycling.table(results["runs"], results["before"])
    for row, (_, _, rate, *expected) in zip(rows, made.to_numpy().tolist(), strict=True):
        assert float(row[1]) == float(rate) and row[2:] == expected
    for row, method in zip(table("research/upcycling/README.md", "method | 3e-4"), upcycling.RANKS, strict=True):
        runs = [run for run in results["runs"] if run["method"] == method and "validation" in run]
        assert row[1:] == [f"{np.mean(run['validation']):.3f}" for run in sorted(runs, key=lambda run: run["rate"])]


def test_the_table_of_quantisation_is_the_record():
    figures = recorded(ROOT / "benchmarks" / "results" / "quantization.json")["figures"]
    rows = table("docs/quantization.md", "method | with composition")
    assert {method for method, *_ in rows} == figures["DCFormer++"].keys() - {"float32"}
    for method, *cells in rows:
        of_models = (figures[model][method] for model in ("DCFormer++", "Transformer++"))
        assert cells == [f"{row['change']:+.4f} ± {row['interval']:.4f}" for row in of_models]


def test_what_the_page_on_looking_inside_says_of_copying_is_the_record():
    folder, text = language_modelling.RESULTS / "inside", " ".join(page("docs/inside.md").split())
    attention = pd.read_csv(folder / "attention_on_copied.csv").pivot(index=["layer", "head"], columns="map")
    attention, rises = attention.attention, pd.read_csv(folder / "rises.csv").set_index(["layer", "without", "class"])
    *_, third, second, first = attention.weights.sort_values().round(2)
    assert f"with {first} and {second} of their attention, all other heads with at most {third}" in text
    composed = attention.composed_weights[3]
    assert f"sums of weights from {composed.min():.1f} to {composed.max():.1f}" in text

    def rise(layer, name, kind="repeated word"):
        return f"{rises.rise[layer, name, kind]:.2f}"

    errors = [f"{1.96 * rises.standard_error[3, 'all', kind]:.2f}" for kind in ("repeated word", "new word")]
    assert f"{rise(3, 'all')} ± {errors[0]} nats per token of repeated words (95 %) and" in text
    assert f"{rise(3, 'all', 'new word')} ± {errors[1]} of new ones" in text
    for words, name in (
        ("its key-wise low-rank branch by", "key_low_rank"),
        ("the query-wise one", "query_low_rank"),
        ("the key-wise gate", "key_gate"),
        ("the query-wise gate", "query_gate"),
    ):
        assert f"{words} {rise(3, name)} and {rise(3, name, 'new word')}" in text
