"""Statistics, published numbers, the control of Pythia, and the report in every format."""

import dataclasses
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas
import pytest

from dcformer.eval import (
    TABLE4_COLUMNS,
    Record,
    Settings,
    build_report,
    holm,
    paired_difference,
    plot_deltas,
    published,
    source_of,
    write_record,
)
from dcformer.eval.comparison import short_names
from dcformer.eval.control import control_of
from dcformer.eval.stats import Difference, accuracy_stderr, metric_and_stderr


PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
PYTHIA, DCPYTHIA = "EleutherAI/pythia-2.8b", "models/DCPythia-2.8B"
ROWS = {"Pythia-2.8B": PYTHIA, "Pythia-6.9B": "EleutherAI/pythia-6.9b", "Pythia-12B": "models/pythia-12b"}
RESAMPLES = 2000  # enough for what is checked here
SETTINGS = Settings(dtype="float32", task_version=1.0, oov_policy="clamp")


def hits(accuracy, count=200, shift=0):
    """Zeros and ones with this share of ones; `shift` says which documents are right."""
    return np.roll(np.arange(count) < round(accuracy * count), shift).astype(float)


def as_samples(values, metric="acc", name="document"):
    numbered = enumerate(values)
    return [{"doc_id": n, "doc_hash": f"{name} {n}", "metrics": {metric: value}} for n, value in numbered]


def write_accuracy(output, model, task, accuracy, shots=0, count=200, documents=None, shift=0, flipped=0, **settings):
    """A record of `count` documents, of which the nearest number to the accuracy and `flipped` more are right."""
    right, observed = (round(accuracy * count) + flipped) / count, settings.pop("observed", {})
    samples = as_samples(hits(right, count, shift).tolist(), name=settings.pop("name", task))
    metrics = {"acc": {"value": right, "stderr": accuracy_stderr(right, count) if count > 1 else None}}
    settings = dataclasses.replace(SETTINGS, limit=count if documents else None, **settings)
    record = Record(model, task, shots, metrics, count, documents or count, settings, observed)
    write_record(output, record, samples)


def write_table4(output, model, accuracies, count=200, **options):
    """Without a count, of as many documents as the columns have."""
    for number, task in enumerate(TABLE4_COLUMNS):
        documents = count or source_of(task).count
        write_accuracy(output, model, task, accuracies[task], shift=number, count=documents, **options)


def write_authors(output, model, seed, texts=60):
    """Answers of one or two tokens; returns the log-likelihoods and tokens, `(6, texts)` each."""
    generator = np.random.default_rng(seed)
    log_likelihoods = -generator.gamma(2.0, 1.0, size=(6, texts))
    tokens = np.where(np.arange(6 * texts).reshape(6, texts) % 4, 1, 2)
    question = {"subject": "persons", "pattern": "p", "transformation": "object->superclass", "task": "task0"}
    context = "\n< Ruth has a sweater. Steven has a taxi. Ruth has a handgun. >. Ruth does not have a kind of"
    for row, shots in enumerate(range(2, 8)):
        samples = as_samples((log_likelihoods[row] > -1).astype(float).tolist(), name=shots)
        for sample, value, count in zip(samples, log_likelihoods[row].tolist(), tokens[row].tolist()):
            sample["metrics"] |= {"token_perplexity": [value, count], "answer_perplexity": [value, 1]}
            sample["requests"] = [{"context": context, "continuation": " vehicle"}]
            sample["fields"] = {"document": sample["doc_id"], "shots": shots, **question}
        names, parts = samples[0]["metrics"], ("value", "stderr")
        values = {name: dict(zip(parts, metric_and_stderr(samples, name))) for name in names}
        task = f"head_tasks_authors_k{shots}"
        write_record(output, Record(model, task, 0, values, texts, texts, SETTINGS), samples)
    return log_likelihoods, tokens


def row_of(report, model, task, shots=0, metric="acc"):
    frame = report.frame
    chosen = (frame.model == model) & (frame.task == task) & (frame.shots == shots) & (frame.metric == metric)
    (row,) = frame[chosen].itertuples()
    return row


def rows_of_columns(report):
    return [row_of(report, DCPYTHIA, task) for task in TABLE4_COLUMNS]


def test_standard_errors_are_those_of_lm_eval_and_of_linearised_ratios():
    values = hits(0.3, 50)
    expected = np.std(values, ddof=1) / math.sqrt(50)
    assert accuracy_stderr(0.3, 50) == pytest.approx(expected, rel=1e-12)
    assert metric_and_stderr(as_samples(values), "acc") == pytest.approx((0.3, expected), rel=1e-12)
    assert math.isnan(accuracy_stderr(1.0, 1))
    generator = np.random.default_rng(5)
    pairs = np.stack([-generator.gamma(5.0, 1.0, 300), generator.integers(1, 9, 300)], axis=1)
    value, stderr = metric_and_stderr(as_samples(pairs.tolist(), "token_perplexity"), "token_perplexity")
    assert value == pytest.approx(math.exp(-pairs[:, 0].sum() / pairs[:, 1].sum()))
    left_out = [math.exp(-np.delete(pairs[:, 0], n).sum() / np.delete(pairs[:, 1], n).sum()) for n in range(300)]
    jackknife = math.sqrt(299 / 300 * ((np.array(left_out) - np.mean(left_out)) ** 2).sum())
    assert stderr == pytest.approx(jackknife, rel=0.02)


@pytest.mark.parametrize("metric", ("token_perplexity", "bits_per_byte"))
def test_interval_and_p_value_of_a_ratio_are_those_of_its_linearisation(metric):
    generator = np.random.default_rng(4)
    counts = generator.integers(50, 150, 600)
    first, second = (-counts * generator.normal(rate, 0.2, 600) for rate in (2.0, 2.01))
    samples, others = (as_samples([*zip(values, counts)], metric) for values in (first, second))
    measured = paired_difference({"x": (samples, others)}, metric)
    per_token = -(first - second) / (math.log(2) if metric == "bits_per_byte" else 1)
    rate = per_token.sum() / counts.sum()
    error = np.sqrt(((per_token - rate * counts) ** 2).sum()) / counts.sum()
    assert measured.value == pytest.approx(rate, rel=1e-9) and measured.wins is None
    assert (measured.high - measured.low) / 2 == pytest.approx(1.96 * error, rel=0.05)
    assert measured.p_value == pytest.approx(math.erfc(abs(rate) / error / math.sqrt(2)), abs=0.02)


@pytest.mark.parametrize(("documents", "wins", "losses"), [(100, 21, 17), (100, 6, 0), (100, 0, 0), (4000, 800, 640)])
def test_p_value_of_accuracies_is_of_the_exact_sign_test_and_their_interval_the_normal_one(documents, wins, losses):
    """A third of the documents that both models answer alike are right."""
    first = np.where(np.arange(documents) % 3, 0.0, 1.0)
    second = first.copy()
    first[: wins + losses] = np.arange(wins + losses) < wins
    second[: wins + losses] = 1 - first[: wins + losses]
    measured, total = paired_difference({"x": (as_samples(first), as_samples(second))}, "acc"), wins + losses
    tail = sum(math.comb(total, few) for few in range(min(wins, losses) + 1)) / 2**total
    assert (measured.wins, measured.losses, measured.documents) == (wins, losses, documents)
    assert measured.p_value == pytest.approx(min(1, 2 * tail))
    mean, half = (first - second).mean(), 1.96 * (first - second).std(ddof=1) / math.sqrt(documents)
    assert measured.value == pytest.approx(mean, abs=1e-12)
    # Of 10,000 resamples the 2.5 % point is known to about 0.03 standard errors, 1.5 % of the half width.
    if documents > 100:
        assert (measured.low, measured.high) == pytest.approx((mean - half, mean + half), abs=0.04 * half)


def test_documents_are_matched_by_hash_and_occurrence_and_must_be_the_same():
    first, second = as_samples(hits(0.4, 60)), as_samples(hits(0.6, 60))
    for samples in (first, second):
        samples[7]["doc_hash"] = samples[50]["doc_hash"]  # the same document twice
    straight = paired_difference({"x": (first, second)}, "acc", resamples=RESAMPLES)
    assert paired_difference({"x": (first, second[::-1])}, "acc", resamples=RESAMPLES) == straight
    # Pairing takes away what is common: unpaired, the interval would be as wide as two independent errors.
    assert straight.high - straight.low < 2 * 1.96 * math.sqrt(2) * accuracy_stderr(0.5, 60)
    with pytest.raises(ValueError, match=r"'piqa'.*0 in both"):
        paired_difference({"piqa": (as_samples(hits(0.5)), as_samples(hits(0.5), name="other"))}, "acc")


def test_mean_of_tasks_is_unweighted_and_resampled_in_each():
    pairs = {"small": (hits(0.6, 100), hits(0.5, 100, 5)), "large": (hits(0.7, 3000), hits(0.7, 3000, 5))}
    measured = paired_difference({name: [*map(as_samples, pair)] for name, pair in pairs.items()}, "acc")
    errors = [np.std(first - second) / math.sqrt(len(first)) for first, second in pairs.values()]
    assert measured.value == pytest.approx(0.05)
    assert (measured.high - measured.low) / 2 == pytest.approx(1.96 * math.hypot(*errors) / 2, rel=0.05)


def test_holms_rule_and_an_interval_that_ends_at_zero():
    # Of four, the smallest is multiplied by 4, the next by 3, and none is below one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02]) and holm([]) == []
    assert not Difference(0.03, 1e-17, 0.06).excludes_zero and Difference(0.03, 0.01, 0.06).excludes_zero


def test_published_numbers_are_those_of_the_sources(fixtures):
    table = json.loads((fixtures / "paper" / "table4.json").read_text())
    synthetic = json.loads((fixtures / "paper" / "tables.json").read_text())["table5_synthetic"]
    for row in published.PAPER_ROWS:
        for shots in (0, 5):
            cells = published.paper_accuracies(row, shots)
            expected = {name.replace("lambada", "lambada_openai"): v for name, v in table[f"{shots}-shot"][row].items()}
            assert {task: round(100 * value, 6) for task, value in cells.items()} == expected
            assert tuple(cells) == (*TABLE4_COLUMNS, published.AVERAGE)
            assert sum(cells[task] for task in TABLE4_COLUMNS) / 11 == pytest.approx(cells["average"], abs=0.0005)
        perplexities = {f"{name}_ppl": value for name, value in table["perplexity"][row].items()}
        assert published.paper_perplexities(row) == perplexities
        ours, theirs = published.paper_authors_texts(row), synthetic.get(row, {})
        assert 100 * ours.get("acc", 0) == pytest.approx(theirs.get("acc", 0))
        assert ours.get("token_perplexity") == theirs.get("ppl")
    pythia = json.loads((fixtures / "benchdata" / "pythia_published" / "pythia_v1_evals.json").read_text())
    for name, scores in pythia["eleuther"].items():
        model, shots = name.split("|")
        row = published.paper_row(model)
        accuracies = published.eleuther_accuracies(row, int(shots))
        assert accuracies == {task: score["acc"] for task, score in scores.items() if task != "_path"}
        for task, value in accuracies.items():
            assert value == pytest.approx(published.paper_accuracies(row, int(shots))[task], abs=5.1e-4)


def test_the_last_part_of_a_models_name_is_its_row_and_paths_are_shortened_as_far_as_they_differ():
    models = ["EleutherAI/pythia-12b", "Caiyun-AI/DCFormer-2.8B", "/anywhere/DCPythia-6.9B/"]
    rows = ["Pythia-12B", "DCFormer++2.8B", "DCPythia-6.9B", None]
    assert [*map(published.paper_row, [*models, "EleutherAI/pythia-2.8b-deduped"])] == rows
    given = {"runs/best": "Pythia-12B", "mine/pythia-2.8b": "none"}
    assert [published.paper_row(model, given) for model in ("runs/best/", "mine/pythia-2.8b")] == ["Pythia-12B", None]
    with pytest.raises(ValueError, match="'Pythia-3B'"):
        published.paper_row("runs/best", {"runs/best": "Pythia-3B"})
    names = short_names(["/a/one/model", "/a/two/model", "./other", "Org/name"])
    assert list(names.values()) == ["one/model", "two/model", "other", "Org/name"]


def published_of(row, shots=0):
    return published.paper_accuracies(row, shots) | published.eleuther_accuracies(row, shots)


@pytest.mark.parametrize("row", ROWS)
def test_published_accuracies_pass_the_control_and_those_of_others_do_not(row, tmp_path):
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for shots in (0, 5):
        write_table4(right, ROWS[row], published_of(row, shots), count=None, shots=shots)
    zero, five = build_report(right).banners
    assert zero == f"CONTROL PASSED: {ROWS[row]}, 0-shot, agrees with 12 published accuracies."
    assert five.startswith("CONTROL INCOMPLETE")  # which examples cannot tell
    other = next(name for name in ROWS if name != row)
    write_table4(wrong, ROWS[row], published_of(other), count=None)
    (failed,) = build_report(wrong).banners
    assert failed.startswith("CONTROL FAILED") and failed.count("instead of") > 6


def test_three_documents_may_differ_and_one_more_may_not_nor_all_columns_to_one_side(tmp_path):
    write_table4(tmp_path, PYTHIA, published_of("Pythia-2.8B"), count=None)
    for flipped in (3, 4):
        write_accuracy(tmp_path, PYTHIA, "logiqa", published_of("Pythia-2.8B")["logiqa"], count=651, flipped=flipped)
        (banner,) = build_report(tmp_path).banners
        assert ("FAILED" in banner and "logiqa" in banner) == (flipped == 4), banner
    for task in TABLE4_COLUMNS:
        count = source_of(task).count
        record = Record(PYTHIA, task, 0, {}, count, count, SETTINGS)
        held = control_of("Pythia-2.8B", record)
        record.metrics["acc"] = {"value": held.published + held.tolerance - 1e-6, "stderr": 0.01}
        write_record(tmp_path, record, [])
    (banner,) = build_report(tmp_path).banners
    assert "misses 1 of 12" in banner and "average" in banner


def test_a_limited_run_or_other_documents_are_no_control(tmp_path):
    accuracies = published_of("Pythia-2.8B")
    write_accuracy(tmp_path, PYTHIA, "piqa", accuracies["piqa"], documents=1838)
    write_accuracy(tmp_path, PYTHIA, "race_middle", accuracies["race_middle"], count=1436)
    observed = {"documents": {"as_known": False}}
    write_accuracy(tmp_path, PYTHIA, "logiqa", accuracies["logiqa"], count=651, observed=observed)
    write_accuracy(tmp_path, PYTHIA, "sciq", 0.2, count=1000, observed={"documents": {"stands_in_for": "test"}})
    control, partial = build_report(tmp_path).banners
    assert control.startswith("CONTROL INCOMPLETE") and partial.startswith("PARTIAL: 200 of 1838 documents of piqa")
    for words in ("logiqa, race_middle of other documents", "piqa", "sciq"):
        assert words in control
    write_table4(tmp_path / "all", PYTHIA, accuracies, count=None)
    write_accuracy(tmp_path / "all", PYTHIA, "piqa", accuracies["piqa"], documents=1838)
    assert not row_of(build_report(tmp_path / "all"), PYTHIA, "average").control


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    output = tmp_path_factory.mktemp("results")
    for shots in (0, 5):
        for model, row in ((PYTHIA, "Pythia-2.8B"), (DCPYTHIA, "DCFormer++2.8B")):
            write_table4(output, model, published.paper_accuracies(row, shots), shots=shots)
    pairs = {PYTHIA: write_authors(output, PYTHIA, 1), DCPYTHIA: write_authors(output, DCPYTHIA, 2)}
    return output, pairs


@pytest.fixture(scope="module")
def report(compared):
    rows = {DCPYTHIA: "DCFormer++2.8B"}
    return build_report(compared[0], baseline=PYTHIA, resamples=RESAMPLES, paper_rows=rows)


def test_differences_averages_and_the_papers_numbers_are_in_the_frame(report):
    assert report.results.models == [PYTHIA, DCPYTHIA]
    row, average = row_of(report, DCPYTHIA, "piqa"), row_of(report, DCPYTHIA, "average")
    accuracies = published.paper_accuracies("DCFormer++2.8B", 0)
    assert row.value == pytest.approx(accuracies["piqa"], abs=0.0026) and row.paper == accuracies["piqa"]
    assert row.verdict == "within 2 stderr" and math.isnan(row.published)
    values, stderrs, deltas = zip(*((r.value, r.stderr, r.delta) for r in rows_of_columns(report)))
    assert average.value == pytest.approx(np.mean(values))
    assert average.stderr == pytest.approx(math.hypot(*stderrs) / 11)
    assert average.delta == pytest.approx(np.mean(deltas)) and average.low < average.delta < average.high
    assert row_of(report, PYTHIA, "piqa").published == pytest.approx(0.7388465723612623)
    cells = report.tables()["Accuracy in percent, 0-shot"].set_index("model").loc["wins : losses, p"]
    counts = [map(int, cells[task].split(", p")[0].split(" : ")) for task in TABLE4_COLUMNS]
    differences = [wins - losses for wins, losses in counts]
    assert differences == [round(200 * delta) for delta in deltas] and max(differences) > 0


def test_the_authors_texts_are_pooled_and_resampled_whole(compared, report):
    (ours, tokens), (theirs, _) = compared[1][DCPYTHIA], compared[1][PYTHIA]
    pooled = row_of(report, DCPYTHIA, "head_tasks_authors_all", metric="token_perplexity")
    assert pooled.value == pytest.approx(math.exp(-ours.sum() / tokens.sum()))
    assert pooled.delta == pytest.approx((theirs.sum() - ours.sum()) / tokens.sum())
    per_text = (theirs - ours).sum(axis=0)
    half = 1.96 * per_text.std(ddof=1) * math.sqrt(60) / tokens.sum()
    assert (pooled.high - pooled.low) / 2 == pytest.approx(half, rel=0.1)
    ((title, table),) = report.breakdown.items()
    assert "authors" in title and list(table.questions[:3]) == ["all", "shots 2", "shots 3"]
    assert list(table.answers[:3]) == ["360", "60", "60"]
    assert table[report.results.names[PYTHIA]][1] == f"{100 * (theirs[0] > -1).mean():.1f}"
    assert table[report.results.names[DCPYTHIA]][0] == f"{100 * (ours > -1).mean():.1f}"
    assert table["blind choice"][0] == "33.3"


def test_p_values_are_corrected_within_a_table_and_summaries_apart(compared, report):
    corrected = build_report(compared[0], baseline=PYTHIA, resamples=RESAMPLES, correction="holm")
    rows = rows_of_columns(corrected)
    assert [row.p_corrected for row in rows] == pytest.approx(holm([row.p for row in rows]))
    average = row_of(corrected, DCPYTHIA, "average")
    assert average.p_corrected == average.p
    # Eight wins and no loss: p = 2 / 2**8, which times 9 is more than 0.05.
    for each, expected in ((report, ""), (corrected, "undecided")):
        assert row_of(each, DCPYTHIA, "winogrande").undecided == expected
    with pytest.raises(ValueError, match="'bonferroni'"):
        build_report(compared[0], correction="bonferroni")


def test_every_format_holds_the_same_numbers_and_sentences(compared, report, tmp_path, monkeypatch):
    """HTML and CSV are pandas's, by the example of docs/evaluation.md."""
    rich = pytest.importorskip("rich.console")
    cell = report.tables()["Accuracy in percent, 0-shot"]["piqa"][0]
    console = rich.Console(width=90, file=io.StringIO(), color_system=None)
    report.print(console)
    texts = [report.to_markdown().replace("\\", ""), console.file.getvalue()]
    assert cell.startswith("74.0±") and all(cell in text for text in texts)
    assert all(" ".join(report.banners[0].split()) in " ".join(text.split()) for text in texts)
    assert max(map(len, texts[1].splitlines())) <= 90 and texts[1].count("Accuracy in percent, 0-shot") > 1
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(compared[0])
    (example,) = re.findall(r"^```python\n([^`]*to_csv[^`]*)^```", PAGE.read_text(encoding="utf-8"), re.M)
    exec(example, {})
    assert cell in (tmp_path / "table4.html").read_text(encoding="utf-8")
    rows = pandas.read_csv(tmp_path / "report.csv").set_index(["model", "task", "shots", "metric"])
    numbers = json.loads(report.to_json())["numbers"]
    assert len(rows) == len(numbers) == len(report.frame)
    for number in numbers:
        assert number["value"] == pytest.approx(rows.value[tuple(number[name] for name in rows.index.names)], rel=1e-14)


def test_notes_say_what_cannot_be_compared_and_how_ids_and_lengths_were_handled(tmp_path):
    write_accuracy(tmp_path, PYTHIA, "piqa", 0.7, observed={"oov_documents": 19, "truncated_documents": 7})
    clamped = f"{PYTHIA}: oov_policy clamp (a token id without an embedding row is read as the last row)"
    for change, reason in (
        ({"dtype": "bfloat16"}, "dtype is bfloat16 for the former and float32 for the latter"),
        ({"task_version": 2.0}, "task_version"),
        ({"count": 100}, "different documents"),
        ({"name": "other"}, "different documents"),
    ):
        write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.8, **change)
        report = build_report(tmp_path, baseline=PYTHIA, resamples=RESAMPLES)
        assert math.isnan(row_of(report, DCPYTHIA, "piqa").delta)
        for sentence in (reason, clamped, "beyond the embedding: 19 of piqa", "cut from the left: 7 of piqa"):
            assert sentence in "\n".join(report.notes)
    for change in ({"count": 100}, {"data": "other"}, {}):  # without a baseline
        write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.8, **change)
        sentence = "piqa (0-shot): results of different documents, which do not compare."
        assert (sentence in build_report(tmp_path).notes) == bool(change)


def test_an_average_is_compared_only_if_all_columns_are(tmp_path):
    for model in (PYTHIA, DCPYTHIA):
        write_table4(tmp_path, model, published_of("Pythia-2.8B"))
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.8, name="other")
    average = row_of(build_report(tmp_path, baseline=PYTHIA, resamples=RESAMPLES), DCPYTHIA, "average")
    assert average.value > 0.5 and math.isnan(average.delta)


def test_a_single_document_has_no_interval_and_the_report_says_so(tmp_path):
    for model, accuracy in ((PYTHIA, 0.0), (DCPYTHIA, 1.0)):
        write_accuracy(tmp_path, model, "piqa", accuracy, count=1)
        write_accuracy(tmp_path, model, "sciq", accuracy, count=6, shift=1)
    report = build_report(tmp_path, baseline=PYTHIA, resamples=RESAMPLES)
    table = report.tables()["Accuracy in percent, 0-shot"].set_index("model").loc[f"Δ to {PYTHIA} [95 %]"]
    assert (table.piqa, table.sciq) == ("+100.0 (no interval)", "+100.0 [+100.0, +100.0]")
    assert [row_of(report, DCPYTHIA, task).undecided for task in ("piqa", "sciq")] == ["undecided", ""]
    notes = "\n".join(report.notes)
    assert "which a single document has not" in notes and "No interval: a single document has none" in notes
    # Two texts that differ by the same are no proof, however they are resampled.
    texts = (as_samples([(value, 10)] * 2, "token_perplexity") for value in (-30.0, -20.0))
    measured = paired_difference({"x": (*texts,)}, "token_perplexity", resamples=RESAMPLES)
    assert (measured.low, measured.high, measured.p_value) == pytest.approx((1.0, 1.0, 0.5))


def test_results_of_other_documents_and_windows_are_named(tmp_path):
    write_accuracy(tmp_path, PYTHIA, "piqa", 0.5, observed={"documents": {"as_known": True}}, max_length=128)
    write_accuracy(tmp_path, PYTHIA, "wikitext2_ppl", 0.5, max_length=128)
    for words, observed in {
        "other documents than the published ones": {"as_known": False, "source": "files of --data-dir"},
        "not known to be the published ones": {"as_known": None, "source": "files of --data-dir"},
        "of another split": {"as_known": None, "source": "allenai/sciq", "stands_in_for": "test"},
    }.items():
        write_accuracy(tmp_path, PYTHIA, "sciq", 0.5, shots=5, observed={"documents": observed})
        named = [note for note in build_report(tmp_path).notes if "documents" in note or "windows" in note]
        documents, windows = sorted(named, key=lambda note: "windows" in note)
        assert words in documents and documents.endswith(": sciq 5-shot.")
        assert windows.startswith(f"{PYTHIA}: windows of 128 tokens") and windows.endswith(": wikitext2_ppl 0-shot.")


def test_the_plot_is_written_and_always_the_same(compared, report, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        plot_deltas(report, tmp_path / name)
    content = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert content == (tmp_path / "two.svg").read_text(encoding="utf-8")
    assert all(words in content for words in ("5-shot", "head tasks", "K=7", "undecided", "in the paper"))
    with pytest.raises(ValueError, match="--baseline"):
        plot_deltas(build_report(compared[0]), tmp_path / "none.png")


def test_the_questions_of_a_text_are_one_document():
    samples = [
        {"doc_id": n, "doc_hash": "x", "metrics": {"acc": float(n == 0)}, "fields": {"document": n // 2}}
        for n in range(6)
    ]
    assert metric_and_stderr(samples, "acc") == pytest.approx((1 / 6, math.sqrt(np.var([1, 0, 0], ddof=1) / 3) / 2))
