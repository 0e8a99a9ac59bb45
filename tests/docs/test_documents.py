"""README and docs/: examples run and print what is shown, links and commands exist, figures are the recorded ones."""

import json
import math
import re
import runpy
import shlex
import sys
from itertools import combinations
from pathlib import Path

import pytest
import setuptools
import torch
import yaml
from scipy import stats

import dcformer
from dcformer import cache_bytes_per_token, cli
from dcformer.eval.table4_tasks import TABLE4_COLUMNS
from dcformer.experiments.claim import COSTS, EQUAL_END, TAKE_OFF, analyse_claim, curves_of
from dcformer.experiments.report import agreement, best_rates, differences
from dcformer.experiments.results import read_results, summarise_variants
from dcformer.head_tasks.intervals import compare_seeds, further_share_interval, seed_interval
from dcformer.pretrained import seed_results
from dcformer.training import load_recipe


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Their examples train or convert; tests of their rooms run those.
RUN_ELSEWHERE = ("conversion", "evaluation", "sweeps", "training")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SWEEPS = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
HEAD_TASKS = ROOT / "benchmarks" / "results" / "head_tasks"
# The page names a checkpoint of 5.7 GB; the bundled model stands in for it.
PUBLISHED, BUNDLED = '"Caiyun-AI/DCFormer-2.8B"', repr(dcformer.pretrained_path("dcformer-tiny"))


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """(language, text) of a page's fenced blocks."""
    found = re.findall(r"^```([^`\n]*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    return [(language, text) for language, text in found if language in languages]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def table(text: str, first_heading: str) -> list[list[str]]:
    """Cells of the rows below the heading of a Markdown table."""
    lines = text[re.search(rf"^\| {re.escape(first_heading)} \|", text, re.M).start() :].splitlines()[2:]
    rows = lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in RUN_ELSEWHERE], ids=lambda page: page.stem)
def test_its_examples_run_and_print_what_it_says(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    found = blocks(page, "python", "text")
    for number, (language, text) in enumerate(found):
        if language == "text":
            assert number > 0 and found[number - 1][0] == "python", f"output without its code: {text}"
            continue
        capsys.readouterr()
        exec(compile(text.replace(PUBLISHED, BUNDLED), str(page), "exec"), namespace)
        if number + 1 < len(found) and found[number + 1][0] == "text":
            assert capsys.readouterr().out == found[number + 1][1]


def test_the_readme_shows_a_bundled_model_and_a_published_checkpoint():
    first, second, *_ = (text for _, text in blocks(ROOT / "README.md", "python"))
    assert "pretrained_path" in first and second.count(PUBLISHED) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in {
                re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
            }


def command_lines() -> dict[str, list[list[str]]]:
    """`dcformer` command -> the argument lists with which the pages show it."""
    found: dict[str, list[list[str]]] = {}
    for page in PAGES:
        for _, text in blocks(page, "bash"):
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] != ["dcformer"]:
                    continue
                if "--" in words:
                    del words[words.index("--") :]  # another program's options
                depth = 3 if words[1] == "convert" else 2
                found.setdefault(" ".join(words[1:depth]), []).append(words[depth:])
    return found


@pytest.mark.parametrize("command, uses", command_lines().items())
def test_commands_that_are_shown_exist_with_their_options(command, uses, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dcformer", *command.split(), "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr().out
    assert ended.value.code in (0, None)
    for words in uses:
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert re.search(rf"{option}\b", shown), f"dcformer {command} has no {option}"


def test_memory_needs_are_those_of_the_shapes():
    rows = table(README, "checkpoint")
    assert len(rows) == 2
    for name, parameters, bfloat16, float32, cache in rows:
        preset = re.search(r"\[([\w.-]+)\]", name).group(1).lower()
        family = "DCPythia" if preset.startswith("dcpythia") else "DCFormer"
        config = getattr(dcformer, f"{family}Config").from_preset(preset)
        with torch.device("meta"):
            count = getattr(dcformer, f"{family}ForCausalLM")(config).num_parameters()
        seen = [config.sliding_window if kind == "sliding_attention" else 2048 for kind in config.layer_types]
        cached = sum(seen) * cache_bytes_per_token(config, torch.bfloat16)
        assert parameters == f"{count / 1e9:.2f} billion"
        assert bfloat16 == f"{2 * count / 1e9:.1f} GB" and float32 == f"{4 * count / 1e9:.1f} GB"
        assert cache == f"{cached / 1e9:.2f} GB"


def test_the_cache_costs_what_the_feature_table_says():
    composed, plain = (
        cache_bytes_per_token(dcformer.DCFormerConfig.from_preset("dcformer-2.8b", **switches))
        for switches in ({}, {"compose_pre": False, "compose_post": False})
    )
    heads_by_heads = 2 * 32 * 32 * 2  # before and after the softmax, 32 heads, bytes of 16 bits
    row = next(row for row in table(README, "feature") if row[0].startswith("cache added"))
    assert row[1:3] == [f"{100 * (composed / plain - 1):.0f} %", f"{100 * heads_by_heads / plain:.0f} %"]


def test_the_page_on_the_cache_counts_channels_as_the_code_does():
    text = (ROOT / "docs" / "cache.md").read_text(encoding="utf-8")
    switches = ({}, {"compose_rank": 4}, {"compose_key": False}, {"num_key_value_heads": 8})
    counted = [dcformer.DCFormerConfig(**values).compose_cache_channels for values in switches]
    assert [(int(row[1]), int(row[1])) for row in table(text, "composition")] == counted
    # Keys and values of 32 heads of 80 channels, and two matrices of 32 x 32, in 16 bits.
    assert f"make it {2 * (2 * 32 * 80 + 2 * 32 * 32):,} bytes" in text


@pytest.mark.parametrize("values", sorted(set(re.findall(r"`(\w+=[^`]+)`", prose(ROOT / "docs" / "configuration.md")))))
def test_values_that_the_page_on_configuration_shows_make_a_configuration(values):
    shown = eval(f"dict({values})", {"w": 4})
    config = dcformer.DCFormerConfig(**shown)
    assert {name: getattr(config, name) for name in shown} == shown


@pytest.mark.parametrize(
    "name, subject", [("dcformer-tiny", "`dcformer-tiny` answers"), ("transformer-tiny", "baseline")]
)
def test_results_are_the_means_and_intervals_of_the_recorded_seeds(name, subject):
    accuracies = [
        100 * run["evaluation"]["held_out"]["accuracy"] for run in seed_results()["runs"] if run["variant"] == name
    ]
    mean = math.fsum(accuracies) / len(accuracies)
    low, high = stats.t.interval(0.95, len(accuracies) - 1, loc=mean, scale=stats.sem(accuracies))
    results = " ".join(README[README.index("## Results") :].split())
    assert f"{subject} {mean:.1f} % ({low:.1f} to {high:.1f})" in results


def test_the_picture_of_the_results_is_drawn_from_the_recorded_seeds():
    drawing = runpy.run_path(str(ROOT / "docs" / "images" / "draw_results.py"))
    assert drawing["FILE"].read_text(encoding="utf-8") == drawing["draw"]()


def test_the_picture_of_the_cache_is_drawn_from_the_shapes():
    drawing = runpy.run_path(str(ROOT / "docs" / "images" / "draw_cache.py"))
    assert drawing["FILE"].read_text(encoding="utf-8") == drawing["draw"]()
    per_token = cache_bytes_per_token(dcformer.DCFormerConfig.from_preset("dcformer-2.8b"))
    here = next(values for label, _, _, values in drawing["lines"]() if label == "DCFormer, here")
    # At 8,192 tokens 16 layers hold them all, and 16 the window of 256.
    assert here[-1] == per_token * 16 * (8192 + 256) / 1e9


def test_the_figures_of_the_reference_on_long_inputs_are_the_recorded_ones():
    recorded = {
        row[0]: row[3] for row in table((ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8"), "length")
    }
    rows = table((ROOT / "docs" / "long_inputs.md").read_text(encoding="utf-8"), "tokens")
    assert len(rows) == 4
    for tokens, here, per_token, reference in rows:
        length = int(tokens.replace(",", ""))
        assert int(per_token) == round(int(here.removesuffix(" MiB")) * 1024 / length)
        if reference:
            assert reference == f"{int(recorded[str(length)]):,} MiB"


def test_the_table_of_the_claim_is_that_of_its_recorded_runs():
    def text(mean, low, high, form):
        return f"{format(mean, form[0])}{form[1]} ({format(low, form[0])} to {format(high, form[0])})".replace(
            "100.0", "100"
        )

    results = read_results(HEAD_TASKS / "claim.json")
    claim, summaries = analyse_claim(results), {item.name: item for item in summarise_variants(results)}
    rows = table(SWEEPS, "width")
    assert len(rows) == len(claim.pairs)
    for (model, baseline), row in zip(claim.pairs, rows):
        rate = results["recipe"]["sweep"]["variants"][baseline]["training"]["muon_learning_rate"]
        expected = [model.removeprefix("dcformer_"), f"{summaries[model].parameters / 1e6:.2f} million", f"{rate:g}"]
        for name in (baseline, model):
            mean, half = (100 * value for value in summaries[name].interval("evaluation_accuracy"))
            expected.append(text(mean, mean - half, min(100.0, mean + half), (".1f", " %")))
        for goal, axis in ((TAKE_OFF, "flops"), *((EQUAL_END, axis) for axis in COSTS)):
            key = (model, baseline, goal, axis)
            (ratio,) = (each for each in claim.ratios if (each.model, each.baseline, each.goal, each.axis) == key)
            expected.append(text(*ratio.interval(), (".2f", "")))
        assert row == expected


def test_the_table_of_all_runs_of_the_claim_is_that_of_the_recorded_ones():
    def by_seed(values, form):
        return ", ".join("-" if value is None else format(value, form) for _, value in sorted(values.items()))

    results = read_results(HEAD_TASKS / "claim.json")
    take_offs = {(item.variant, item.goal): item.spent["steps"] for item in analyse_claim(results).take_offs}
    rows = table(SWEEPS, "model")
    summaries = summarise_variants(results)
    assert len(rows) == len(summaries)
    for row, item in zip(rows, summaries):
        accuracies = item.values["evaluation_accuracy"]
        low, high = further_share_interval(list(accuracies.values()), 1000)
        rate = results["recipe"]["sweep"]["variants"][item.name]["training"]["muon_learning_rate"]
        assert row == [
            item.label.split(",")[0],
            item.name.split("_")[1],
            f"{rate:g}",
            by_seed({seed: 100 * value for seed, value in accuracies.items()}, ".1f"),
            f"{100 * low:.1f} to {100 * high:.1f}",
            by_seed(take_offs[item.name, "loss of blind choice"], ".0f"),
            by_seed(take_offs[item.name, "accuracy of 90%"], ".0f"),
        ]


def test_what_seven_seeds_say_at_width_48_is_what_was_recorded():
    claim, rates = (read_results(HEAD_TASKS / f"{name}.json") for name in ("claim", "rates"))
    names = {
        "dcformer_48": "dcformer_48_rate_4e-2",
        **{f"transformer_48_rate_{rate}": f"transformer_48_rate_{rate}" for rate in ("2e-2", "4e-2")},
    }
    page = " ".join(SWEEPS.split())
    summaries, further = ({item.name: item for item in summarise_variants(results)} for results in (claim, rates))
    curves = {}
    for name, other in names.items():
        own, new = (each.values["evaluation_accuracy"] for each in (summaries[name], further[other]))
        low, high = further_share_interval(list(own.values()), 1000)
        assert len(new) == 3 and all(low <= value <= high for value in new.values())
        mean, half = (100 * value for value in seed_interval([*own.values(), *new.values()]))
        assert f"{mean:.1f} % ({mean - half:.1f} to {mean + half:.1f})" in page
        curves[name] = {**curves_of(claim)[name], **curves_of(rates)[other]}
    for name in list(names)[1:]:
        logarithms = []
        for seed, curve in curves["dcformer_48"].items():
            level = max(curve.loss[-1], curves[name][seed].loss[-1])
            own, base = (each.reaches("loss", level, "flops") for each in (curve, curves[name][seed]))
            logarithms.append(math.log(base / own))
        mean, half = seed_interval(logarithms)
        low, high = math.exp(mean - half), math.exp(mean + half)
        assert len(logarithms) == 7 and f"{math.exp(mean):.2f} ({low:.2f} to {high:.2f})" in page


def test_the_claim_has_the_best_learning_rates_of_the_recorded_sweep():
    results = read_results(HEAD_TASKS / "rates.json")
    variants = load_recipe("head-tasks-claim").sweep["variants"]
    best = best_rates(results)
    assert [item.variant.split("_")[0] for item in best] == ["dcformer", "transformer"]
    assert [item.at_end for item in best] == [[], []]
    assert variants["dcformer_48"]["training"] == best[0].training
    assert variants["transformer_48_rate_2e-2"]["training"] == best[1].training
    summaries = {item.name: item for item in summarise_variants(results)}
    rows = table(SWEEPS, "model at width 48")
    assert len(rows) == len(summaries)
    for row, (name, item) in zip(rows, summaries.items()):
        rates = results["recipe"]["sweep"]["variants"][name]["training"]
        compose = f"{rates['compose_learning_rate']:g}" if "compose_learning_rate" in rates else ""
        losses = [value for _, value in sorted(item.values["evaluation_loss"].items())]
        mean, _ = item.interval("evaluation_loss")
        assert row == [
            item.label.split(",")[0],
            f"{rates['muon_learning_rate']:g}",
            compose,
            f"{mean:.3f}",
            ", ".join(f"{loss:.3f}" for loss in losses),
        ]


def test_the_table_of_the_ablation_is_that_of_its_recorded_runs():
    results = read_results(HEAD_TASKS / "ablation.json")
    summaries = summarise_variants(results)
    compared = differences(summaries, "evaluation_loss")
    cells = table(SWEEPS, "what composes")
    rows = {row[0]: row[1:] for row in cells}
    assert len(rows) == len(summaries) == 12
    for item in summaries:
        accuracies = [value for _, value in sorted(item.values["evaluation_accuracy"].items())]
        mean, _ = item.interval("evaluation_loss")
        expected = [", ".join(f"{100 * value:.1f}" for value in accuracies), f"{mean:.3f}"]
        if item.name in compared:
            found = compared[item.name]
            low, high = found.difference - found.half_width, found.difference + found.half_width
            expected += [f"{found.difference:+.3f} ({low:+.3f} to {high:+.3f})", f"{found.corrected_p:.2f}"]
        else:
            expected += ["", ""]
        assert rows[item.label] == [*expected, f"{results['recipe']['sweep']['published'][item.name]:.2f}"]
    order = [row[2] for row in cells]
    assert order == sorted(order, key=float)
    page = " ".join(SWEEPS.split())
    values = {item.name: item.values["evaluation_loss"] for item in summaries}
    of_all_pairs = compare_seeds(values, list(combinations(values, 2)))
    assert f"the smallest corrected p is {min(found.corrected_p for found in of_all_pairs):.2f}." in page
    blind, rule = (results["references"]["evaluation"][name] for name in ("blind_choice", "odd_one_out"))
    runs = [run["training"]["evaluation_loss"] for run in results["runs"]]
    assert max(runs) < blind["loss"] and f"a loss of {blind['loss']:.3f} and {100 * blind['accuracy']:.1f} %" in page
    ahead = [value > rule["accuracy"] for item in summaries for value in item.values["evaluation_accuracy"].values()]
    assert f"{sum(ahead)} of the {len(ahead)} beyond the best rule" in page
    assert f"reads the question, {100 * rule['accuracy']:.1f} %." in page
    half_widths = [100 * found.half_width for found in differences(summaries, "evaluation_accuracy").values()]
    assert f"differences of {min(half_widths):.0f} to {max(half_widths):.0f} points of accuracy" in page
    same = agreement(summaries, "evaluation_loss", results["recipe"]["sweep"]["published"])
    assert f"{same.agreeing} of {same.pairs} pairs of rows are in it here (Kendall's tau {same.tau:.2f})" in page


def test_the_table_of_shared_beginnings_is_that_of_the_counted_tokens():
    recorded = json.loads((ROOT / "benchmarks" / "results" / "evaluation_tokens.json").read_text())["figures"]
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    rows = table(page, "all documents")
    names = [name.removesuffix(", 0-shot") for name in recorded if name.endswith("0-shot")]
    assert names == [*TABLE4_COLUMNS, "all"] and len(rows) == len(names)
    for name, row in zip(names, rows):
        both = [recorded[f"{name}, {shots}-shot"] for shots in (0, 5)]
        cells = [(f"{own['tokens'] / 1e6:.2f}", f"{100 - 100 * own['computed'] / own['tokens']:.0f} %") for own in both]
        assert row[1:] == [*cells[0], *cells[1]]
    for shots in (0, 5):
        own = recorded[f"all, {shots}-shot"]
        assert f"{own['tokens'] / own['computed']:.1f}" == "2.2"
    assert "there are 2.2 times fewer tokens" in page and "each beginning once: 2.2 times fewer" in README


def test_every_page_stands_once_in_the_lists_of_the_site():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = [
        line
        for block in re.findall(r"^:::{toctree}\n(.*?)^:::", text, re.S | re.M)
        for line in block.splitlines()
        if line and not line.startswith(":")
    ]
    docs = ROOT / "docs"
    pages = [page.relative_to(docs).with_suffix("").as_posix() for page in [*docs.glob("*.md"), *docs.glob("api/*.md")]]
    assert sorted(listed) == sorted(set(pages) - {"index"})


@pytest.fixture(scope="module")
def site():
    """The functions of docs/conf.py."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", list(sys.path))
        yield runpy.run_path(str(ROOT / "docs" / "conf.py"))


@pytest.mark.parametrize(
    "link, expected",
    [
        ("[x](cache.md#which-cache)", "[x](cache.md#which-cache)"),
        ("[x](https://example.org/y.md)", "[x](https://example.org/y.md)"),
        ("[x](#here)", "[x](#here)"),
        ("[x](../CONTRIBUTING.md#tests)", "[x](contributing.md#tests)"),
        ("[x](../README.md#speed)", "[x](results.md#speed)"),
        ("[`dcmha.py`](../dcformer/dcmha.py)", "`dcmha.py`"),
        ("[the table](../dcformer/dcmha.py)", "the table (`dcformer/dcmha.py`)"),
        ("```text\n[x](../dcformer/dcmha.py)\n```", "```text\n[x](../dcformer/dcmha.py)\n```"),
    ],
)
def test_links_of_a_page_lead_to_where_the_site_has_their_target(link, expected, site):
    shown = site["text_for_the_site"](f"See\n{link}\nthere.", ROOT / "docs" / "inputs.md")
    assert shown == f"See\n{expected}\nthere."


def test_a_link_that_stands_alone_becomes_the_section(site):
    shown = site["text_for_the_site"]("# Here\n\n[Speed](../README.md#speed)\n", ROOT / "docs" / "results.md")
    assert shown.startswith("# Here\n\n## Speed\n") and "## More" not in shown
    assert "(benchmarks.md)" in shown  # links of the README are made those of the page
    with pytest.raises(ValueError, match="0 sections have the anchor 'spede'"):
        site["section"](README, "spede")


def test_docstrings_are_turned_into_what_sphinx_reads(site):
    lines = [
        "See [`dcformer.eval.Record`], |t - s| < w.",
        "",
        "```python",
        ">>> a = 1",
        "",
        ">>> b = 2",
        "```",
        "Next.",
    ]
    site["read_docstring"](None, None, None, None, None, lines)
    assert lines == [
        "See :py:obj:`Record <.dcformer.eval.Record>`, \\|t - s\\| < w.",
        "",
        ".. code-block:: python",
        "",
        "   >>> a = 1",
        "",
        "   >>> b = 2",
        "",
        "Next.",
    ]


def test_the_citation_is_the_same_in_both_places():
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["preferred-citation"]
    ((_, entry),) = blocks(ROOT / "README.md", "bibtex")
    fields = dict(re.findall(r"^  (\w+) += {(.*)}", entry, re.M))
    authors = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    assert fields == {
        "title": paper["title"],
        "author": authors,
        "booktitle": paper["collection-title"],
        "year": str(paper["year"]),
        "url": paper["url"],
    }


@pytest.mark.parametrize("repository", ["", "https://example.org/dcformer"], ids=["unpublished", "published"])
def test_a_published_description_has_no_relative_links(repository, monkeypatch):
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **values: given.update(values))
    source = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert source.count('REPOSITORY = ""') == 1
    source = source.replace('REPOSITORY = ""', f'REPOSITORY = "{repository}"')
    exec(compile(source, str(ROOT / "setup.py"), "exec"), {"__file__": str(ROOT / "setup.py")})
    relative = re.findall(r"\]\((?!https?://)([^)]+)\)", given["long_description"])
    assert bool(relative) == (repository == "")
    assert ("Source" in given["project_urls"]) == (repository != "")
    if repository:
        assert f"]({repository}/blob/main/docs/cache.md)" in given["long_description"]
        assert f"]({repository}/raw/main/docs/images/dcmha.svg)" in given["long_description"]


def test_the_architecture_names_files_that_exist():
    sources = (ROOT / "docs" / "architecture.md", ROOT / "docs" / "images" / "token.svg")
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    names = {
        name.lstrip("/") for name in re.findall(r"[\w/]+\.(?:py|json)\b|\b[\w/]+/(?=[`\s])", text) if "NAME" not in name
    }
    assert len(names) > 15
    folders = [ROOT, *(ROOT / "dcformer" / room for room in ("", "head_tasks", "conversion", "eval"))]
    missing = {name for name in names if not any((folder / name).exists() for folder in folders)}
    assert missing == set()


def test_the_folders_of_tests_that_are_named_exist():
    named = re.findall(r"`(tests/\w+/)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) > 5
    assert [folder for folder in named if not any((ROOT / folder).glob("test_*.py"))] == []
