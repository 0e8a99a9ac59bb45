"""The report of an evaluation: published numbers, intervals, tables in four formats, marks, warnings and the plot."""

import csv
import hashlib
import html.parser
import io
import json
import math
import re

import numpy as np
import pytest

from dcformer.eval import published
from dcformer.eval.bootstrap import (
    Difference,
    accuracy_stderr,
    holm,
    mean_stderr,
    metric_and_stderr,
    paired_difference,
    paired_mean_difference,
    sign_test,
    sign_test_error,
)
from dcformer.eval.records import Record, record_path, samples_path, write_record
from dcformer.eval.report import build_report
from dcformer.eval.table4_tasks import TABLE4_COLUMNS


PYTHIA, DCPYTHIA = "EleutherAI/pythia-2.8b", "models/DCPythia-2.8B"
RESAMPLES = 2000  # enough for what is checked here
SETTINGS = {"dtype": "float32", "task_version": 1.0, "oov_policy": "clamp"}


def hits(accuracy, count=200, shift=0):
    """Zeros and ones with this share of ones; `shift` says which documents are right."""
    return np.roll(np.arange(count) < round(accuracy * count), shift).astype(float)


def as_samples(values, metric="acc", name="document"):
    return [
        {
            "doc_id": place,
            "doc_hash": hashlib.sha256(f"{name} {place}".encode()).hexdigest(),
            "metrics": {metric: value},
        }
        for place, value in enumerate(values)
    ]


def write_accuracy(output, model, task, accuracy, shots=0, count=200, documents=None, shift=0, name=None, **settings):
    samples = as_samples(hits(accuracy, count, shift).tolist(), name=name or task)
    value = float(np.mean([sample["metrics"]["acc"] for sample in samples]))
    limit = None if documents is None else count
    metrics = {"acc": {"value": value, "stderr": accuracy_stderr(value, count)}}
    record = Record(model, task, shots, metrics, count, documents or count, limit, {**SETTINGS, **settings})
    return write_record(output, record, samples)


def write_table4(output, model, accuracies, **options):
    for number, task in enumerate(TABLE4_COLUMNS):
        write_accuracy(output, model, task, accuracies[task], shift=number, **options)


def write_authors(output, model, seed, texts=60):
    """Answers of one or two tokens; returns the log-likelihoods and tokens, `(6, texts)` each."""
    generator = np.random.default_rng(seed)
    log_likelihoods = -generator.gamma(2.0, 1.0, size=(6, texts))
    tokens = np.where(np.arange(6 * texts).reshape(6, texts) % 4, 1, 2)
    for row, shots in enumerate(range(2, 8)):
        samples = [
            {
                "doc_id": text,
                "doc_hash": f"{shots} {text}",
                "metrics": {
                    "acc": float(log_likelihood > -1),
                    "acc_first_token": float(log_likelihood > -2),
                    "token_perplexity": [log_likelihood, int(count)],
                    "answer_perplexity": [log_likelihood, 1],
                },
            }
            for text, (log_likelihood, count) in enumerate(zip(log_likelihoods[row].tolist(), tokens[row]))
        ]
        metrics = {}
        for metric in samples[0]["metrics"]:
            value, stderr = metric_and_stderr(samples, metric, task="head_tasks_authors")
            metrics[metric] = {"value": value, "stderr": stderr}
        write_record(
            output, Record(model, f"head_tasks_authors_k{shots}", 0, metrics, texts, texts, None, SETTINGS), samples
        )
    return log_likelihoods, tokens


def write_perplexity(output, model, seed, documents=40, task="pile_ppl"):
    generator = np.random.default_rng(seed)
    pairs = [[-1000 * value, 500] for value in generator.normal(1.0, 0.05, documents).tolist()]
    samples = as_samples(pairs, "token_perplexity")
    for sample, (log_likelihood, _) in zip(samples, pairs):
        sample["metrics"]["bits_per_byte"] = [log_likelihood, 2000]
    metrics = {}
    for metric in ("token_perplexity", "bits_per_byte"):
        value, stderr = metric_and_stderr(samples, metric, task=task)
        metrics[metric] = {"value": value, "stderr": stderr}
    write_record(output, Record(model, task, 0, metrics, documents, documents, None, SETTINGS), samples)
    return np.array(pairs)


def report_of(output, **options):
    return build_report(output, **{"resamples": RESAMPLES, **options})


def cell_of(report, model, task, shots=0, metric="acc"):
    return report.cells[model, task, shots, metric]


def csv_rows(report):
    return list(csv.DictReader(io.StringIO(report.to_csv())))


def terminal_text(report, width=400):
    console = pytest.importorskip("rich.console").Console(width=width, file=io.StringIO(), color_system=None)
    report.print(console)
    return console.file.getvalue()


def markdown_tables(text):
    """Rows of cells, unescaped, of all tables."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in lines]
    return [[re.sub(r"\\(.)", r"\1", cell.strip()) for cell in row] for row in rows]


class Page(html.parser.HTMLParser):
    """Tags that are open or were, text of cells by row, and all text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.rows, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "br":
            self.rows[-1][-1] += " "
        elif tag not in ("meta",):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


# Published numbers


@pytest.mark.parametrize("shots", (0, 5))
@pytest.mark.parametrize("row", published.PAPER_ROWS)
def test_averages_of_the_paper_are_unweighted_means(row, shots):
    cells = published.paper_accuracies(row, shots)
    assert tuple(cells) == (*TABLE4_COLUMNS, published.AVERAGE)
    mean = sum(cells[task] for task in TABLE4_COLUMNS) / 11
    assert abs(mean - cells[published.AVERAGE]) <= 0.0005  # rounded to 0.1 %


@pytest.mark.parametrize("shots", (0, 5))
@pytest.mark.parametrize("row", ("Pythia-2.8B", "Pythia-6.9B", "Pythia-12B"))
def test_the_paper_repeats_eleutherais_scores(row, shots):
    scores = published.eleuther_accuracies(row, shots)
    assert tuple(scores) == TABLE4_COLUMNS[:7]
    for task, score in scores.items():
        assert abs(score.value - published.paper_accuracies(row, shots)[task]) < 0.00051
        assert f"a19eecb807ec2c79a39ebf18108816e6ffffc1d5/evals/pythia-v1/{row.lower()}/" in score.source


def test_published_numbers_are_those_of_the_sources(fixtures):
    table = json.loads((fixtures / "paper" / "table4.json").read_text())
    synthetic = json.loads((fixtures / "paper" / "tables.json").read_text())["table5_synthetic"]
    for row in published.PAPER_ROWS:
        for shots in (0, 5):
            expected = {name.replace("lambada", "lambada_openai"): v for name, v in table[f"{shots}-shot"][row].items()}
            percent = {task: round(100 * value, 6) for task, value in published.paper_accuracies(row, shots).items()}
            assert percent == expected
        perplexities = {f"{name}_ppl": value for name, value in table["perplexity"][row].items()}
        assert published.paper_perplexities(row) == perplexities
        ours = published.paper_authors_texts(row)
        assert (ours.get("acc", 0) * 100, ours.get("token_perplexity")) == (
            pytest.approx(synthetic.get(row, {}).get("acc", 0)),
            synthetic.get(row, {}).get("ppl"),
        )
    pythia = json.loads((fixtures / "benchdata" / "pythia_published" / "pythia_v1_evals.json").read_text())
    for name, scores in pythia["eleuther"].items():
        model, shots = name.split("|")
        found = published.eleuther_accuracies(published.paper_row(model), int(shots))
        path = scores.pop("_path")
        assert {task: (s.value, s.stderr) for task, s in found.items()} == {
            task: (score["acc"], score["acc_stderr"]) for task, score in scores.items()
        }
        assert all(score.source.endswith(path) for score in found.values())


@pytest.mark.parametrize(
    ("model", "row"),
    [
        ("EleutherAI/pythia-2.8b", "Pythia-2.8B"),
        ("EleutherAI/pythia-12b", "Pythia-12B"),
        ("Caiyun-AI/DCFormer-2.8B", "DCFormer++2.8B"),
        ("Caiyun-AI/DCPythia-6.9B", "DCPythia-6.9B"),
        ("/anywhere/DCPythia-6.9B/", "DCPythia-6.9B"),
        ("EleutherAI/pythia-2.8b-deduped", None),
        ("EleutherAI/pythia-1.4b", None),
        ("meta-llama/Llama-2-7b", None),
    ],
)
def test_a_model_is_found_by_the_last_part_of_its_name(model, row):
    assert published.paper_row(model) == row


def test_a_row_may_be_chosen_or_refused():
    rows = {"runs/best": "Pythia-12B", "mine/pythia-2.8b": "none"}
    assert published.paper_row("runs/best/", rows) == "Pythia-12B"
    assert published.paper_row("mine/pythia-2.8b", rows) is None
    with pytest.raises(ValueError, match=r"no row 'Pythia-3B'; choose from Pythia-2\.8B"):
        published.paper_row("runs/best", {"runs/best": "Pythia-3B"})


def test_what_is_not_published_is_empty():
    assert published.paper_accuracies("Pythia-2.8B", 3) == {} == published.paper_accuracies(None, 0)
    assert published.eleuther_accuracies("DCPythia-2.8B", 0) == {} == published.eleuther_accuracies("Pythia-2.8B", 3)
    assert published.paper_authors_texts("Pythia-2.8B") == {} == published.paper_perplexities(None)


# Standard errors and intervals


def test_stderr_of_an_accuracy_is_that_of_lm_eval():
    values = hits(0.3, 50)
    expected = np.std(values, ddof=1) / math.sqrt(50)
    assert accuracy_stderr(0.3, 50) == pytest.approx(expected, rel=1e-12)
    assert metric_and_stderr(as_samples(values), "acc", task="x") == pytest.approx((0.3, expected), rel=1e-12)
    assert math.isnan(accuracy_stderr(1.0, 1))
    assert mean_stderr([3.0, 4.0]) == 2.5


def test_interval_of_accuracies_is_the_normal_one_for_many_documents():
    generator = np.random.default_rng(3)
    first, second = (generator.random(4000) < share for share in (0.7, 0.66))
    difference = first.astype(float) - second
    found = paired_difference(as_samples(first * 1.0), as_samples(second * 1.0), "acc", task="x")
    half = 1.96 * difference.std(ddof=1) / math.sqrt(4000)
    assert found.value == pytest.approx(difference.mean(), abs=1e-12)
    # Of 10,000 resamples the 2.5 % point is known to about 0.03 standard errors, 1.5 % of the half width.
    assert found.low == pytest.approx(found.value - half, abs=0.04 * half)
    assert found.high == pytest.approx(found.value + half, abs=0.04 * half)


@pytest.mark.parametrize("metric", ("token_perplexity", "bits_per_byte"))
def test_interval_of_a_ratio_is_that_of_its_linearisation(metric):
    generator = np.random.default_rng(4)
    counts = generator.integers(50, 150, 600)
    first, second = (-counts * generator.normal(rate, 0.2, 600) for rate in (2.0, 2.1))
    samples, others = (as_samples(list(map(list, zip(each, counts))), metric) for each in (first, second))
    found = paired_difference(samples, others, metric, task="x")
    unit = math.log(2) if metric == "bits_per_byte" else 1
    per_token = -(first - second) / unit
    rate = per_token.sum() / counts.sum()
    half = 1.96 * np.sqrt(((per_token - rate * counts) ** 2).sum()) / counts.sum()
    assert found.value == pytest.approx(rate, rel=1e-9)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.05)


def test_perplexity_and_its_stderr_are_those_of_the_sums():
    generator = np.random.default_rng(5)
    pairs = np.stack([-generator.gamma(5.0, 1.0, 300), generator.integers(1, 9, 300)], axis=1)
    value, stderr = metric_and_stderr(as_samples(pairs.tolist()), "acc", task="x")
    assert value == pytest.approx(pairs[:, 0].sum() / pairs[:, 1].sum())
    value, stderr = metric_and_stderr(as_samples(pairs.tolist(), "token_perplexity"), "token_perplexity", task="x")
    assert value == pytest.approx(math.exp(-pairs[:, 0].sum() / pairs[:, 1].sum()))
    left_out = [
        math.exp(-np.delete(pairs[:, 0], place).sum() / np.delete(pairs[:, 1], place).sum()) for place in range(300)
    ]
    jackknife = math.sqrt(299 / 300 * ((np.array(left_out) - np.mean(left_out)) ** 2).sum())
    assert stderr == pytest.approx(jackknife, rel=0.02)


@pytest.mark.parametrize("metric", ("acc", "token_perplexity"))
def test_identical_models_differ_by_exactly_nothing(metric):
    values = hits(0.4).tolist() if metric == "acc" else [[-1.1 * place, place + 1] for place in range(50)]
    found = paired_difference(as_samples(values, metric), as_samples(values, metric), metric, task="x")
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_documents_are_matched_by_hash_and_occurrence():
    first, second = as_samples(hits(0.4, 60)), as_samples(hits(0.6, 60))
    for samples in (first, second):
        samples[7]["doc_hash"] = samples[50]["doc_hash"]  # the same document twice
    straight = paired_difference(first, second, "acc", task="x", resamples=RESAMPLES)
    assert paired_difference(first, second[::-1], "acc", task="x", resamples=RESAMPLES) == straight
    # Pairing takes away what is common: unpaired, the interval would be as wide as two independent errors.
    assert straight.high - straight.low < 2 * 1.96 * math.sqrt(2) * accuracy_stderr(0.5, 60)


def test_a_seed_decides_the_interval():
    values = np.random.default_rng(0).normal(size=(2, 50)).tolist()
    first, second = (as_samples(each) for each in values)
    same, again, other = (
        paired_difference(first, second, "acc", task="x", seed=seed, resamples=RESAMPLES) for seed in (1, 1, 2)
    )
    assert same == again != other


def test_mean_of_tasks_is_unweighted_and_resampled_in_each():
    tasks = {
        name: (as_samples(hits(first, count)), as_samples(hits(second, count, shift=5)))
        for name, first, second, count in (("small", 0.6, 0.5, 100), ("large", 0.7, 0.7, 3000))
    }
    found = paired_mean_difference(tasks, "acc")
    assert found.value == pytest.approx(0.05)
    errors = []
    for first, second in tasks.values():
        pairs = [a["metrics"]["acc"] - b["metrics"]["acc"] for a, b in zip(first, second)]
        errors.append(np.std(pairs) / math.sqrt(len(pairs)))
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * mean_stderr(errors), rel=0.05)


def test_different_documents_are_refused():
    first, second = as_samples(hits(0.5)), as_samples(hits(0.5), name="other")
    with pytest.raises(ValueError, match=r"'piqa' was scored on different documents .*200 and 200, 0 in both"):
        paired_difference(first, second, "acc", task="piqa")
    with pytest.raises(ValueError, match="'piqa' lack the metric 'acc_norm'"):
        paired_difference(first, first, "acc_norm", task="piqa")


# Documents on which two models differ, and how many differences there are by chance


def two_models(only_here, only_there, count=100):
    """Samples of two models that differ on so many documents, and are right on a third of the others."""
    values = np.arange(count) % 3 == 0
    first, second = values.astype(float), values.astype(float)
    first[:only_here], second[:only_here] = 1, 0
    both = slice(only_here, only_here + only_there)
    first[both], second[both] = 0, 1
    return as_samples(first.tolist()), as_samples(second.tolist())


def test_documents_that_one_model_alone_has_right_are_counted():
    samples, others = two_models(21, 17, 1838)
    found = paired_difference(samples, others, "acc", task="piqa", resamples=RESAMPLES)
    assert (found.only_here, found.only_there, found.documents) == (21, 17, 1838)
    back = paired_difference(others, samples, "acc", task="piqa", resamples=RESAMPLES)
    assert (back.only_here, back.only_there, back.p_value) == (17, 21, found.p_value)


@pytest.mark.parametrize(("here", "there"), [(21, 17), (6, 0), (5, 0), (0, 0), (30, 10)])
def test_p_value_of_accuracies_is_of_the_exact_sign_test(here, there):
    found = paired_difference(*two_models(here, there), "acc", task="x", resamples=RESAMPLES)
    total = here + there
    tail = sum(math.comb(total, few) for few in range(min(here, there) + 1)) / 2**total
    assert found.p_value == pytest.approx(min(1, 2 * tail)) and found.by_sign_test


def test_p_values_agree_with_intervals_where_many_documents_differ():
    """Both are 5 % tests of the same; the exact one is the stricter by less than a document."""
    for here in range(190, 260, 12):
        found = paired_difference(*two_models(here, 200, 2000), "acc", task="x", resamples=RESAMPLES)
        stricter, laxer = sign_test(here - 3, 200), sign_test(here + 3, 200)
        if here > 203:
            assert not found.excludes_zero or laxer <= 0.05
            assert found.excludes_zero or stricter > 0.05


def test_p_value_of_a_ratio_is_that_of_its_interval():
    generator = np.random.default_rng(8)
    counts = generator.integers(50, 150, 200)
    base = -counts * generator.normal(2.0, 0.2, 200)
    for shift in (0.0, 0.02, 0.05):
        other = base + counts * generator.normal(shift, 0.2, 200)
        samples, others = (as_samples(list(map(list, zip(each, counts))), "token_perplexity") for each in (base, other))
        found = paired_difference(samples, others, "token_perplexity", task="x")
        assert found.only_here is None and not found.by_sign_test
        z = found.value / ((found.high - found.low) / 2 / 1.96)
        normal = math.erfc(abs(z) / math.sqrt(2))
        # Of 10,000 resamples a share of 2.5 % is known to 0.16 points; the bootstrap's tails are not quite normal.
        assert found.p_value == pytest.approx(normal, abs=0.02)
        assert (found.p_value <= 0.05) == found.excludes_zero


def test_holms_rule_is_that_of_its_definition():
    # Of four, the smallest is multiplied by 4, the next by 3, and none is below one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9, 0.02]) == pytest.approx([1.0, 1.0, 0.06]) and holm([]) == []


def test_the_error_of_the_sign_test_is_what_it_does_by_chance():
    assert sign_test_error(0) == sign_test_error(5) == 0.0
    assert sign_test_error(6) == pytest.approx(2 / 64)
    for discordant in (17, 38, 200):
        found = sum(
            math.comb(discordant, here) / 2**discordant
            for here in range(discordant + 1)
            if sign_test(here, discordant - here) <= 0.05
        )
        assert sign_test_error(discordant) == pytest.approx(found)


def test_stated_number_of_chance_differences_is_that_of_equal_models(tmp_path):
    """Eleven columns in which 30 documents differ, each either way by chance."""
    for task in TABLE4_COLUMNS:
        samples, others = two_models(15, 15, 200)
        for model, each in ((PYTHIA, others), ("mine", samples)):
            value = float(np.mean([sample["metrics"]["acc"] for sample in each]))
            write_record(tmp_path, Record(model, task, 0, {"acc": {"value": value}}, 200, 200, None, SETTINGS), each)
    (note,) = [note for note in report_of(tmp_path, baseline=PYTHIA).notes if "chance alone" in note]
    assert note == (
        "Accuracy in percent, 0-shot: 0 of 11 differences are decided. If no model differed, chance alone would decide "
        "0.5 on average, and at least one in 38 % of such tables."
    )
    generator = np.random.default_rng(0)
    here = generator.binomial(30, 0.5, size=(20_000, 11))
    decided = np.array([sign_test(count, 30 - count) <= 0.05 for count in range(31)])[here]
    # Four standard errors of 20,000 tables.
    assert decided.sum(axis=1).mean() == pytest.approx(11 * sign_test_error(30), abs=0.02)
    assert decided.any(axis=1).mean() == pytest.approx(0.38, abs=0.005 + 4 * math.sqrt(0.38 * 0.62 / 20_000))


@pytest.mark.parametrize(
    ("here", "there", "undecided"),
    [(6, 0, False), (5, 0, True), (10, 30, False)],
    ids=lambda value: str(value),
)
def test_undecided_differences_are_marked_in_every_format(tmp_path, here, there, undecided):
    for model, samples in zip((DCPYTHIA, PYTHIA), two_models(here, there)):
        value = float(np.mean([sample["metrics"]["acc"] for sample in samples]))
        metrics = {"acc": {"value": value, "stderr": 0.05}}
        write_record(tmp_path, Record(model, "piqa", 0, metrics, 100, 100, None, SETTINGS), samples)
    report = report_of(tmp_path, baseline=PYTHIA)
    assert cell_of(report, DCPYTHIA, "piqa").is_undecided == undecided
    row = report.sections()[0].rows[3]
    assert row.kind == "baseline" and ("undecided" in row.cells[0]) == undecided
    assert [row["undecided"] for row in csv_rows(report)] == ["", "undecided" if undecided else ""]
    assert [number["undecided"] for number in json.loads(report.to_json())["numbers"]][1] == (
        "undecided" if undecided else ""
    )
    assert any(
        note.startswith("A difference is undecided if its interval contains 0 or ends there") for note in report.notes
    )


def test_an_interval_that_ends_at_zero_is_undecided():
    found = Difference(0.03, 1e-17, 0.06, 0.01, 5, 1, 100, True)  # zero but for the order of a sum
    assert not found.excludes_zero and Difference(0.03, 0.01, 0.06).excludes_zero
    assert not Difference(-0.03, -0.06, -0.0).excludes_zero and Difference(-0.03, -0.06, -0.01).excludes_zero


def test_correction_is_within_a_table_and_leaves_summaries_apart(tmp_path):
    for shots, tasks in ((0, TABLE4_COLUMNS), (5, ("piqa", "logiqa"))):
        for model, row in ((PYTHIA, "Pythia-2.8B"), (DCPYTHIA, "DCFormer++2.8B")):
            for task in tasks:
                accuracy = published.paper_accuracies(row, shots)[task]
                write_accuracy(tmp_path, model, task, accuracy, shots=shots, count=400)
    options = {"baseline": PYTHIA, "resamples": 200}
    plain, corrected = (report_of(tmp_path, correction=name, **options) for name in ("none", "holm"))
    for shots, tasks in ((0, TABLE4_COLUMNS), (5, ("piqa", "logiqa"))):
        cells = [cell_of(corrected, DCPYTHIA, task, shots) for task in tasks]
        assert [cell.corrected for cell in cells] == holm([cell.delta.p_value for cell in cells])
    average = cell_of(corrected, DCPYTHIA, "average")
    assert average.corrected == average.delta.p_value
    columns = [cell_of(corrected, DCPYTHIA, task) for task in TABLE4_COLUMNS]
    assert average.delta.only_here == sum(cell.delta.only_here for cell in columns)
    before = cell_of(plain, DCPYTHIA, "logiqa")
    assert (before.corrected, before.delta) == (None, columns[TABLE4_COLUMNS.index("logiqa")].delta)
    assert "p-value by Holm's rule" in terminal_text(corrected) and "Holm" not in terminal_text(plain)
    assert any("any in at most 5 % of such tables" in note for note in corrected.notes)
    with pytest.raises(ValueError, match="no correction 'bonferroni'; choose from none, holm"):
        report_of(tmp_path, correction="bonferroni")


def test_a_correction_may_leave_a_difference_undecided(tmp_path):
    for task, here in (("piqa", 6), ("sciq", 0)):
        for model, samples in zip((DCPYTHIA, PYTHIA), two_models(here, 0)):
            value = float(np.mean([sample["metrics"]["acc"] for sample in samples]))
            metrics = {"acc": {"value": value, "stderr": 0.05}}
            write_record(tmp_path, Record(model, task, 0, metrics, 100, 100, None, SETTINGS), samples)
    plain, corrected = (
        cell_of(report_of(tmp_path, baseline=PYTHIA, correction=name), DCPYTHIA, "piqa") for name in ("none", "holm")
    )
    assert plain.p_value == 2 / 64 and not plain.is_undecided
    assert corrected.p_value == 4 / 64 and corrected.is_undecided


def test_the_command_takes_a_correction_and_prints_json(tmp_path):
    from typer.testing import CliRunner

    from dcformer.cli import app

    for accuracy, model in ((0.70, PYTHIA), (0.75, DCPYTHIA)):
        write_accuracy(tmp_path, model, "piqa", accuracy)
    options = ["--baseline", PYTHIA, "--correction", "holm", "--format", "json"]
    result = CliRunner().invoke(app, ["report", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["correction"] == "holm" and found["numbers"][1]["p_corrected"] == pytest.approx(2 * 0.5**10)


def test_a_single_document_has_no_interval():
    found = paired_difference(as_samples([1.0]), as_samples([0.0]), "acc", task="x")
    assert found.value == 1.0 and math.isnan(found.low) and math.isnan(found.high)


# Reports


def test_average_needs_all_eleven_and_has_the_error_of_their_mean(tmp_path):
    write_table4(tmp_path, PYTHIA, published.paper_accuracies("Pythia-2.8B", 0))
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.7)
    report = report_of(tmp_path)
    cells = [cell_of(report, PYTHIA, task) for task in TABLE4_COLUMNS]
    average = cell_of(report, PYTHIA, "average")
    assert average.value == pytest.approx(np.mean([cell.value for cell in cells]))
    assert average.stderr == pytest.approx(math.sqrt(sum(c.value * (1 - c.value) / 199 for c in cells)) / 11)
    assert (average.paper, average.verdict) == (0.531, "within 2 stderr")
    assert (DCPYTHIA, "average", 0, "acc") not in report.cells
    assert any(
        note.startswith(f"No average for {DCPYTHIA}, 0-shot: lambada_openai, winogrande") for note in report.notes
    )


def test_average_of_different_precisions_is_refused(tmp_path):
    write_table4(tmp_path, PYTHIA, published.paper_accuracies("Pythia-2.8B", 0))
    write_accuracy(tmp_path, PYTHIA, "piqa", 0.7, dtype="bfloat16")
    report = report_of(tmp_path)
    assert (PYTHIA, "average", 0, "acc") not in report.cells
    assert any("were run with different dtype" in note for note in report.notes)


def test_rows_columns_and_differences(tmp_path):
    for shots in (5, 0):
        for model, row in ((DCPYTHIA, "DCPythia-2.8B"), (PYTHIA, "Pythia-2.8B"), ("mine", "Pythia-12B")):
            write_table4(tmp_path, model, published.paper_accuracies(row, shots), shots=shots)
    report = report_of(tmp_path, baseline=PYTHIA)
    assert report.models == [PYTHIA, DCPYTHIA, "mine"]
    zero, five = report.sections()
    assert (zero.title, five.title) == ("Accuracy in percent, 0-shot", "Accuracy in percent, 5-shot")
    assert zero.columns == [*TABLE4_COLUMNS, "average"]
    assert [row.kind for row in zero.rows] == [
        *("value", "paper"),
        *("value", "baseline", "documents", "paper"),
        *("value", "baseline", "documents"),
    ]
    piqa = cell_of(report, DCPYTHIA, "piqa")
    assert zero.rows[2].cells[1] == ["75.0±3.1"]
    interval = f"[{100 * piqa.delta.low:.1f}, {100 * piqa.delta.high:.1f}]"
    assert zero.rows[3].cells[1] == ["+1.0", interval, "undecided"]
    assert zero.rows[4].cells[1] == ["2 : 0", "of 200", "p=0.500"]
    assert zero.rows[5].cells[1] == ["+0.2", "within", "2 stderr"]
    assert zero.rows[1].cells[1] == ["+0.1", "within", "±1.50"]  # a Pythia model's is the tolerance of the control
    samples = [
        (as_samples(hits(published.paper_accuracies(row, 0)["piqa"], shift=1).tolist(), name="piqa"))
        for row in ("DCPythia-2.8B", "Pythia-2.8B")
    ]
    assert piqa.delta == paired_difference(*samples, "acc", task="piqa", resamples=RESAMPLES)
    assert cell_of(report, PYTHIA, "piqa").delta is None
    average = cell_of(report, DCPYTHIA, "average")
    assert average.delta.value == pytest.approx(average.value - cell_of(report, PYTHIA, "average").value)


def test_verdict_on_the_papers_number(tmp_path):
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.748, count=1000)
    write_accuracy(tmp_path, DCPYTHIA, "sciq", 0.85, count=1000)
    write_accuracy(tmp_path, DCPYTHIA, "boolq", 1.0, count=2, documents=3270)  # no error of its own
    report = report_of(tmp_path)
    verdicts = {task: cell_of(report, DCPYTHIA, task).verdict for task in ("piqa", "sciq", "boolq")}
    assert verdicts == {"piqa": "within 2 stderr", "sciq": "outside 2 stderr", "boolq": "within 2 stderr"}
    report = report_of(tmp_path, paper_rows={DCPYTHIA: "none"})
    assert all(cell.paper is None and not cell.verdict for cell in report.cells.values())
    report = report_of(tmp_path, paper_rows={DCPYTHIA: "Pythia-12B"})
    assert cell_of(report, DCPYTHIA, "piqa").paper == 0.76


def test_the_authors_texts_over_all_shots(tmp_path):
    model, baseline = "models/DCPythia-6.9B", "EleutherAI/pythia-6.9b"
    log_likelihoods, tokens = write_authors(tmp_path, model, 0)
    others, _ = write_authors(tmp_path, baseline, 1)
    report = report_of(tmp_path, baseline=baseline)
    total = {
        metric: cell_of(report, model, "head_tasks_authors_all", 0, metric)
        for metric in ("acc", "token_perplexity", "answer_perplexity")
    }
    assert total["acc"].value == pytest.approx((log_likelihoods > -1).mean())
    assert total["token_perplexity"].value == pytest.approx(math.exp(-log_likelihoods.sum() / tokens.sum()))
    assert total["answer_perplexity"].value == pytest.approx(math.exp(-log_likelihoods.mean()))
    assert total["answer_perplexity"].delta.value == pytest.approx(others.mean() - log_likelihoods.mean())
    assert (total["acc"].paper, total["answer_perplexity"].paper) == (0.39, 7.36)
    # Texts are what is drawn, with their six answers.
    means = (log_likelihoods > -1).mean(axis=0)
    assert total["acc"].stderr == pytest.approx(means.std(ddof=1) / math.sqrt(len(means)))
    assert total["acc"].num_samples == 360
    (section,) = report.sections()
    assert section.columns == [*(f"K={shots}" for shots in range(2, 8)), "all K"]
    assert [row.label[1] for row in section.rows if row.kind == "value"] == 2 * [
        *("acc", "acc_first_token", "token_perplexity", "answer_perplexity")
    ]
    assert any("does not say" in note for note in report.notes)


def test_perplexities_are_compared_by_their_logarithm(tmp_path):
    pairs, others = write_perplexity(tmp_path, DCPYTHIA, 0), write_perplexity(tmp_path, PYTHIA, 1)
    report = report_of(tmp_path, baseline=PYTHIA)
    cell = cell_of(report, DCPYTHIA, "pile_ppl", 0, "token_perplexity")
    rate, other_rate = (-each[:, 0].sum() / each[:, 1].sum() for each in (pairs, others))
    assert cell.value == pytest.approx(math.exp(rate))
    assert cell.delta.value == pytest.approx(rate - other_rate)
    assert cell.delta.low < cell.delta.value < cell.delta.high
    assert cell.paper == 6.36
    bits = cell_of(report, DCPYTHIA, "pile_ppl", 0, "bits_per_byte")
    assert bits.value == pytest.approx(rate / 4 / math.log(2)) and bits.paper is None
    (section,) = report.sections()
    assert section.columns == ["pile_ppl token_perplexity", "pile_ppl bits_per_byte"]


def test_other_results_are_shown_too(tmp_path):
    samples = as_samples([-1.0, -2.0], "perplexity")
    metrics = {"perplexity": {"value": math.exp(1.5), "stderr": None}}
    write_record(tmp_path, Record("mine", "lambada_openai", 0, metrics, 2, 2, None, {}), samples)
    (section,) = report_of(tmp_path).sections()
    assert (section.title, section.columns) == ("Other results", ["lambada_openai perplexity"])
    assert section.rows[0].cells == [["4.482"]]
    assert section.rows[0].label == ["mine", "oov_policy: none"]


# What may not be compared


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "bfloat16"}, "dtype is bfloat16 for the former and float32 for the latter"),
        ({"oov_policy": "pad"}, "oov_policy is pad for the former and clamp for the latter"),
        ({"task_version": 2.0}, "task_version is 2.0 for the former and 1.0 for the latter"),
        (
            {"count": 20, "documents": 200},
            "limit is 20 (20 documents) for the former and none (200 documents) for the latter",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("baseline", (PYTHIA, None), ids=("baseline", "no-baseline"))
def test_different_settings_are_noted_instead_of_compared(tmp_path, options, reason, baseline):
    write_accuracy(tmp_path, PYTHIA, "piqa", 0.74)
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.75, **options)
    report = report_of(tmp_path, baseline=baseline)
    assert cell_of(report, DCPYTHIA, "piqa").delta is None
    expected = f"{DCPYTHIA} and {PYTHIA} are not compared on piqa (0-shot): {reason}"
    assert any(note.startswith(expected) for note in report.notes)
    assert expected in " ".join(terminal_text(report).split())


def test_different_documents_are_noted_instead_of_compared(tmp_path):
    write_accuracy(tmp_path, PYTHIA, "piqa", 0.74)
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.75, name="other data")
    report = report_of(tmp_path, baseline=PYTHIA)
    assert cell_of(report, DCPYTHIA, "piqa").delta is None
    expected = f"{DCPYTHIA} and {PYTHIA} are not compared on piqa (0-shot): they were scored on different documents"
    assert any(note.startswith(expected) for note in report.notes)


def test_a_model_without_policy_is_compared(tmp_path):
    write_accuracy(tmp_path, PYTHIA, "piqa", 0.74, oov_policy=None)
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.75)
    report = report_of(tmp_path, baseline=PYTHIA)
    assert cell_of(report, DCPYTHIA, "piqa").delta is not None
    assert report.policies == {PYTHIA: "none", DCPYTHIA: "clamp"}
    for text in (report.to_markdown(), report.to_html(), terminal_text(report)):
        assert "oov_policy: none" in text and "oov_policy: clamp" in text


def test_missing_samples_are_named(tmp_path):
    write_accuracy(tmp_path, PYTHIA, "piqa", 0.74)
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.75)
    samples_path(record_path(tmp_path, PYTHIA, "piqa", 0)).unlink()
    report = report_of(tmp_path, baseline=PYTHIA)
    assert cell_of(report, DCPYTHIA, "piqa").delta is None
    expected = (
        "the file 'EleutherAI__pythia-2.8b/piqa-0shot.samples.jsonl' with samples is missing; run the task again."
    )
    assert any(note.endswith(expected) for note in report.notes)
    assert str(tmp_path) not in report.to_html() + report.to_markdown()


def test_a_baseline_without_the_task_is_noted(tmp_path):
    write_accuracy(tmp_path, PYTHIA, "sciq", 0.88)
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.75)
    notes = report_of(tmp_path, baseline=PYTHIA).notes
    assert f"{DCPYTHIA} and {PYTHIA} are not compared on piqa (0-shot): the latter has no result." in notes


# Marks and warnings


def test_partial_results_are_marked_in_every_format(tmp_path):
    write_accuracy(tmp_path, PYTHIA, "piqa", 0.75, count=20, documents=1838)
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.8, count=20, documents=1838)
    write_accuracy(tmp_path, DCPYTHIA, "sciq", 0.9)
    report = report_of(tmp_path, baseline=PYTHIA)
    banner = f"PARTIAL: 20 of 1838 documents of piqa (0-shot; {PYTHIA}, {DCPYTHIA})"
    assert report.partial == [banner]
    assert report.to_markdown().startswith(f"> **{banner}**\n")
    text = terminal_text(report)
    assert banner in text[: text.index("Accuracy in percent")]
    page = Page(report.to_html())
    assert page.text.index(banner) < page.text.index("Accuracy in percent")
    assert page.tags.index("p") < page.tags.index("table")
    for rows in (markdown_tables(report.to_markdown()), page.rows):
        assert all(row[1].endswith("PARTIAL") and "PARTIAL" not in row[2] for row in rows[1:])
    assert [row["partial"] for row in csv_rows(report)] == 2 * ["PARTIAL: 20 of 1838 documents"] + [""]


def test_whole_results_have_no_mark_and_no_warning(tmp_path):
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.75)
    report = report_of(tmp_path)
    for text in (report.to_markdown(), report.to_html(), report.to_csv(), terminal_text(report)):
        assert "PARTIAL" not in text and "CONTROL" not in text


@pytest.mark.parametrize("baseline", (PYTHIA, DCPYTHIA, None))
def test_control_warns_of_a_pythia_model_that_misses_its_scores(tmp_path, baseline):
    write_accuracy(tmp_path, PYTHIA, "piqa", 0.60, count=1838)
    write_accuracy(tmp_path, PYTHIA, "sciq", 0.88, count=1000)
    write_accuracy(tmp_path, PYTHIA, "sciq", 0.88, count=1000, shots=5)
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.75, count=1838)
    report = report_of(tmp_path, baseline=baseline)
    (warning,) = report.warnings
    headline, *lines = warning.splitlines()
    assert headline.startswith(f"CONTROL FAILED: {PYTHIA} misses 2 of 3 accuracies published for Pythia-2.8B")
    assert [line.split(" that")[0] for line in lines] == [
        "piqa, 0-shot: 60.01 instead of the 73.88",
        "sciq, 5-shot: 88.00 instead of the 94.30",
    ]
    assert report.to_markdown().startswith(f"> **{headline}**<br>**piqa, 0-shot")
    page, text = Page(report.to_html()).text, terminal_text(report)
    for line in (headline, *lines):
        assert line in page and line in text[: text.index("Accuracy in percent")]


def test_control_is_silent_for_good_pythia_and_for_unknown_models(tmp_path):
    write_table4(tmp_path, PYTHIA, published.paper_accuracies("Pythia-2.8B", 0), count=1000)
    write_accuracy(tmp_path, "mine", "piqa", 0.1)
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.1)
    assert report_of(tmp_path, baseline=PYTHIA).warnings == []
    (warning,) = report_of(tmp_path, paper_rows={"mine": "Pythia-6.9B"}).warnings
    assert "mine misses" in warning and "10.00 instead of the 75.24" in warning


# Formats


def test_csv_holds_every_number_at_full_precision(tmp_path):
    write_accuracy(tmp_path, PYTHIA, "piqa", 0.7)
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.75)
    report = report_of(tmp_path, baseline=PYTHIA)
    rows = csv_rows(report)
    assert len(rows) == 2
    cell = cell_of(report, DCPYTHIA, "piqa")
    expected = {"value": cell.value, "stderr": cell.stderr, "paper": 0.748}
    expected |= {"delta": cell.delta.value, "low": cell.delta.low, "high": cell.delta.high, "p": cell.delta.p_value}
    assert {name: float(rows[1][name]) for name in expected} == expected
    names = ("model", "task", "shots", "metric", "n", "verdict", "partial", "only_here", "only_there", "undecided")
    assert {name: rows[1][name] for name in names} == {
        "model": DCPYTHIA,
        "task": "piqa",
        "shots": "0",
        "metric": "acc",
        "n": "200",
        "verdict": "within 2 stderr",
        "partial": "",
        "only_here": "10",
        "only_there": "0",
        "undecided": "",
    }
    assert rows[0]["delta"] == rows[0]["low"] == rows[0]["only_here"] == rows[0]["undecided"] == ""


def test_json_holds_the_numbers_of_csv_and_all_sentences(tmp_path):
    write_accuracy(tmp_path, PYTHIA, "piqa", 0.7, count=20, documents=1838)
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.75, count=20, documents=1838)
    write_accuracy(tmp_path, DCPYTHIA, "sciq", 0.9)
    report = report_of(tmp_path, baseline=PYTHIA)
    found = json.loads(report.to_json())
    for name in ("warnings", "partial", "control", "notes"):
        assert found[name] == getattr(report, name)
    assert (found["baseline"], found["correction"]) == (PYTHIA, "none")
    for row, number in zip(csv_rows(report), found["numbers"], strict=True):
        assert list(row) == list(number)
        assert {name: text for name, text in row.items() if text} == {
            name: str(value) for name, value in number.items() if value not in (None, "")
        }


def test_markdown_and_html_hold_the_same_cells(tmp_path):
    write_table4(tmp_path, PYTHIA, published.paper_accuracies("Pythia-2.8B", 0))
    write_table4(tmp_path, DCPYTHIA, published.paper_accuracies("DCPythia-2.8B", 0))
    write_authors(tmp_path, DCPYTHIA, 0)
    report = report_of(tmp_path, baseline=PYTHIA)
    expected = []
    for section in report.sections():
        expected.append(["model", *section.columns])
        expected += [[" ".join(lines) for lines in (row.label, *row.cells)] for row in section.rows]
    assert markdown_tables(report.to_markdown()) == expected
    page = Page(report.to_html())
    assert page.rows == expected and page.open == []
    assert not {"script", "link", "img"} & set(page.tags)


def test_names_are_escaped(tmp_path):
    name = "a|b_*<script>alert(1)</script>&amp;[x]`_c_"
    write_accuracy(tmp_path, name, "piqa", 0.7, count=20, documents=100)
    report = report_of(tmp_path)
    page = Page(report.to_html())
    assert "script" not in page.tags
    assert page.rows[1][0] == f"{name} oov_policy: clamp" and name in page.text.split("Accuracy")[0]
    assert markdown_tables(report.to_markdown())[1] == [f"{name} oov_policy: clamp", "70.0±10.5 PARTIAL"]
    assert re.search(r"(?<!\\)[<|*`&]", report.to_markdown().splitlines()[0][4:-2]) is None
    assert name in terminal_text(report)
    assert csv_rows(report)[0]["model"] == name


def test_brackets_in_names_are_no_markup_in_the_terminal(tmp_path):
    write_accuracy(tmp_path, "[bold]x[/bold]", "piqa", 0.7)
    assert "[bold]x[/bold]" in terminal_text(report_of(tmp_path))


def test_tables_are_split_to_fit_the_terminal(tmp_path):
    write_table4(tmp_path, PYTHIA, published.paper_accuracies("Pythia-2.8B", 0))
    write_table4(tmp_path, DCPYTHIA, published.paper_accuracies("DCPythia-2.8B", 0))
    report = report_of(tmp_path, baseline=PYTHIA)
    for width in (80, 120, 200):
        lines = terminal_text(report, width).splitlines()
        assert max(map(len, lines)) <= width
        text = "\n".join(lines)
        for cell in report.cells.values():
            assert f"{100 * cell.value:.1f}±" in text
    assert "continued" in terminal_text(report, 80) and "continued" not in terminal_text(report, 300)


def test_paths_are_shortened_as_far_as_they_differ(tmp_path):
    for model in ("/home/a/run/best", "/home/b/run/best", "/home/c/other", "best"):
        write_accuracy(tmp_path, model, "piqa", 0.7)
    report = report_of(tmp_path)
    assert report.names == {
        "/home/a/run/best": "a/run/best",
        "/home/b/run/best": "b/run/best",
        "/home/c/other": "other",
        "best": "best",
    }
    assert "/home" not in report.to_html() + report.to_markdown() + terminal_text(report)


# Faults


def test_a_folder_that_is_not_there_or_empty_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no result"):
        build_report(tmp_path)
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        build_report(tmp_path / "absent")


@pytest.mark.parametrize("damage", ("record", "samples", "missing line", "other lines"))
def test_damaged_files_are_named(tmp_path, damage):
    write_accuracy(tmp_path, PYTHIA, "piqa", 0.74)
    path = write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.75)
    damaged = path if damage == "record" else samples_path(path)
    text = damaged.read_text()
    damaged.write_text(
        {
            "record": text[:-20],
            "samples": text[:-20],
            "missing line": "".join(text.splitlines(keepends=True)[:-1]),
            "other lines": "{}\n" * 200,
        }[damage]
    )
    with pytest.raises(ValueError, match=damaged.name):
        build_report(tmp_path, baseline=PYTHIA)


def test_an_unknown_baseline_is_refused(tmp_path):
    write_accuracy(tmp_path, PYTHIA, "piqa", 0.74)
    with pytest.raises(ValueError, match=f"no results of 'pythia-3b'; there are of {PYTHIA}"):
        build_report(tmp_path, baseline="pythia-3b")
    with pytest.raises(ValueError, match="no results of 'runs/x'"):
        build_report(tmp_path, paper_rows={"runs/x": "Pythia-2.8B"})
    with pytest.raises(ValueError, match="resamples must be at least 1, got 0"):
        build_report(tmp_path, resamples=0)


def test_a_result_that_is_there_twice_is_refused(tmp_path):
    path = write_accuracy(tmp_path, PYTHIA, "piqa", 0.74)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=f"two results of {PYTHIA!r}, task 'piqa', 0-shot"):
        build_report(tmp_path)


# The plot


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A report of two models on Table 4."""
    folder = tmp_path_factory.mktemp("results")
    write_table4(folder, PYTHIA, published.paper_accuracies("Pythia-2.8B", 0))
    write_table4(folder, "/home/x/DCPythia-2.8B", published.paper_accuracies("DCPythia-2.8B", 0))
    return report_of(folder, baseline=PYTHIA)


@pytest.mark.parametrize("suffix", ("png", "svg", "pdf"))
def test_plot_is_written_and_the_same_each_time(tmp_path, compared, suffix):
    pytest.importorskip("matplotlib")
    from dcformer.eval.plot import plot_deltas

    report = compared
    first, second = (tmp_path / f"{name}.{suffix}" for name in ("first", "second"))
    plot_deltas(report, first)
    plot_deltas(report, str(second))
    content = first.read_bytes()
    assert content == second.read_bytes()
    assert content.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix])
    assert b"/home" not in content and str(tmp_path).encode() not in content
    if suffix == "svg":
        text = content.decode()
        assert all(f">{name}<" in text for name in (*TABLE4_COLUMNS, "average", "DCPythia-2.8B"))
        assert "CONTROL FAILED" not in text and "PARTIAL" not in text


def test_plot_carries_the_marks_of_the_tables(tmp_path):
    pytest.importorskip("matplotlib")
    from dcformer.eval.plot import plot_deltas

    write_accuracy(tmp_path, PYTHIA, "piqa", 0.2, documents=1838)
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.75, documents=1838)
    plot_deltas(report_of(tmp_path, baseline=PYTHIA), tmp_path / "deltas.svg")
    text = (tmp_path / "deltas.svg").read_text()
    assert "PARTIAL 200/1838" in text and "CONTROL FAILED" in text


def test_plot_shows_measured_and_published_differences(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from dcformer.eval.plot import _draw, _panels

    write_accuracy(tmp_path, PYTHIA, "piqa", 0.70)
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.75)
    report = report_of(tmp_path, baseline=PYTHIA)
    axis = Figure().subplots()
    ((_, shots, tasks),) = _panels(report)
    _draw(axis, report, [DCPYTHIA], shots, tasks)
    points = {line.get_markerfacecolor(): line.get_xdata() for line in axis.lines if line.get_marker() == "o"}
    assert points["none"] == pytest.approx([0.9])  # 74.8 - 73.9 of the paper
    assert points["black"] == pytest.approx([5.0])
    delta = cell_of(report, DCPYTHIA, "piqa").delta
    (interval,) = [line for line in axis.lines if np.allclose(line.get_xdata(), (100 * delta.low, 100 * delta.high))]
    assert interval.get_linestyle() == "-"


def test_plot_draws_undecided_intervals_dotted_and_says_so(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from dcformer.eval.plot import _draw, plot_deltas

    for accuracy, model in ((0.70, PYTHIA), (0.71, DCPYTHIA)):
        write_accuracy(tmp_path, model, "piqa", accuracy)
    report = report_of(tmp_path, baseline=PYTHIA)
    axis = Figure().subplots()
    _draw(axis, report, [DCPYTHIA], 0, ["piqa"])
    delta = cell_of(report, DCPYTHIA, "piqa").delta
    (interval,) = [line for line in axis.lines if np.allclose(line.get_xdata(), (100 * delta.low, 100 * delta.high))]
    assert interval.get_linestyle() == ":"
    plot_deltas(report, tmp_path / "deltas.svg")
    assert "undecided: the interval contains 0" in (tmp_path / "deltas.svg").read_text()


def test_plot_refuses_other_endings_and_a_report_without_baseline(tmp_path):
    from dcformer.eval.plot import plot_deltas

    write_accuracy(tmp_path, PYTHIA, "piqa", 0.70)
    report = report_of(tmp_path)
    with pytest.raises(ValueError, match=r"deltas\.gif': its name must end in \.png, \.svg, \.pdf"):
        plot_deltas(report, tmp_path / "deltas.gif")
    with pytest.raises(ValueError, match="no accuracy was compared with a baseline"):
        plot_deltas(report, tmp_path / "deltas.png")


@pytest.mark.parametrize("package", ("matplotlib", "rich"))
def test_missing_packages_are_named(tmp_path, monkeypatch, package):
    from dcformer.eval.plot import plot_deltas

    write_accuracy(tmp_path, PYTHIA, "piqa", 0.70)
    write_accuracy(tmp_path, DCPYTHIA, "piqa", 0.75)
    report = report_of(tmp_path, baseline=PYTHIA)
    monkeypatch.setitem(__import__("sys").modules, {"rich": "rich.console"}.get(package, package), None)
    with pytest.raises(ImportError, match=re.escape(f"{package}: pip install 'dcformer[eval]'")):
        plot_deltas(report, tmp_path / "x.png") if package == "matplotlib" else report.print()
