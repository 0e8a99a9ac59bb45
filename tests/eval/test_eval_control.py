"""The control of the protocol: right results of Pythia pass it, wrong ones made from published numbers do not.

Records hold accuracies over as many documents as the tasks have, without samples, which the control does not read.
"""

import csv
import io
import json
import math
import re

import pytest

from dcformer.eval import published
from dcformer.eval.bootstrap import accuracy_stderr
from dcformer.eval.control import check_column
from dcformer.eval.records import Record, write_record
from dcformer.eval.report import build_report
from dcformer.eval.report_control import control_statements, control_warnings
from dcformer.eval.report_tables import Cell, Report
from dcformer.eval.table4_tasks import DOCUMENT_COUNTS, TABLE4_COLUMNS


MODELS = {
    "Pythia-2.8B": "EleutherAI/pythia-2.8b",
    "Pythia-6.9B": "EleutherAI/pythia-6.9b",
    "Pythia-12B": "models/pythia-12b",
}
ROW, MODEL = "Pythia-2.8B", MODELS["Pythia-2.8B"]
ELEUTHER_COLUMNS = TABLE4_COLUMNS[:7]
PAPER_COLUMNS = TABLE4_COLUMNS[7:]
SETTINGS = {"dtype": "bfloat16", "task_version": 1.0}


def published_of(row, shots=0):
    cells = published.control_accuracies(row, shots)
    return {task: cells[task].value for task in TABLE4_COLUMNS}


def write_column(output, task, accuracy, model=MODEL, shots=0, count=None, documents=None, flipped=0):
    """A record of the nearest number of right documents, and `flipped` more; of some documents with `count`."""
    documents = documents or DOCUMENT_COUNTS[task]
    count = count or documents
    value = (round(accuracy * count) + flipped) / count
    metrics = {"acc": {"value": value, "stderr": accuracy_stderr(value, count) if count > 1 else None}}
    limit = count if count < documents else None
    write_record(output, Record(model, task, shots, metrics, count, documents, limit, SETTINGS), [])


def write_columns(output, accuracies, **options):
    for task, accuracy in accuracies.items():
        write_column(output, task, accuracy, **options)


def warnings_of(row, accuracies, shots=0):
    """As of records, but without files."""
    cells = {}
    for task, value in accuracies.items():
        count = DOCUMENT_COUNTS[task]
        check = check_column(row, task, shots, value, count, count)
        cells[MODEL, task, shots, "acc"] = Cell(MODEL, task, shots, "acc", value, None, count, count, control=check)
    return control_warnings(Report(cells, [MODEL], {MODEL: MODEL}, {MODEL: "none"}, {MODEL: row}, None))


def lines_of(warning):
    """Column -> what the warning says of it."""
    cells = {}
    for line in warning.splitlines():
        match = re.match(r"(\w+), \d-shot: ", line)
        if match:
            cells[match[1]] = line
    return cells


def only_warning(output):
    (warning,) = build_report(output).warnings
    assert warning.startswith("CONTROL FAILED: ")
    return warning


# What is right passes


@pytest.mark.parametrize("row", MODELS)
def test_published_accuracies_pass(tmp_path, row):
    for shots in (0, 5):
        write_columns(tmp_path, published_of(row, shots), model=MODELS[row], shots=shots)
    report = build_report(tmp_path)
    assert report.warnings == []
    zero, five = report.control
    assert zero == (
        f"CONTROL PASSED: {MODELS[row]}, 0-shot, agrees with all 12 accuracies published for {row} to 0.3 points or "
        "3 documents."
    )
    assert five.startswith(f"CONTROL PASSED: {MODELS[row]}, 5-shot, agrees with all 12") and "two standard" in five


@pytest.mark.parametrize("flipped", (-3, 3))
def test_three_flipped_documents_in_every_column_pass(tmp_path, flipped):
    write_columns(tmp_path, published_of(ROW), flipped=flipped)
    assert build_report(tmp_path).warnings == []


@pytest.mark.parametrize("task", TABLE4_COLUMNS)
def test_more_than_the_tolerance_in_one_column_does_not_pass(tmp_path, task):
    count = DOCUMENT_COUNTS[task]
    few = max(3, math.floor(0.003 * count))
    # Half a unit of the paper's last digit on either side: which number of documents it rounded is not known.
    few += math.ceil(2 * 0.0005 * count) if task in PAPER_COLUMNS else 0
    write_columns(tmp_path, published_of(ROW) | {task: 0.5})
    write_column(tmp_path, task, published_of(ROW)[task], flipped=few + 1)
    assert list(lines_of(only_warning(tmp_path))) == [task]


def test_columns_that_all_deviate_to_one_side_fail_by_their_average(tmp_path):
    # Each is off by a little less than it may be, whatever number of documents that is.
    for task in TABLE4_COLUMNS:
        cell = published.control_accuracies(ROW, 0)[task]
        check = check_column(ROW, task, 0, cell.value, DOCUMENT_COUNTS[task], DOCUMENT_COUNTS[task])
        metrics = {"acc": {"value": cell.value + check.tolerance - 1e-6, "stderr": 0.01}}
        count = DOCUMENT_COUNTS[task]
        write_record(tmp_path, Record(MODEL, task, 0, metrics, count, count, None, SETTINGS), [])
    assert list(lines_of(only_warning(tmp_path))) == ["average"]


# What is wrong does not


@pytest.mark.parametrize("row", MODELS)
def test_accuracy_divided_by_length_is_caught_in_every_column_that_has_it(tmp_path, row):
    normalised = published.eleuther_length_normalised(row, 0)
    assert list(normalised) == ["piqa", "arc_easy", "arc_challenge", "sciq", "logiqa"]
    write_columns(tmp_path, normalised, model=MODELS[row])
    found = lines_of(only_warning(tmp_path))
    assert list(found) == list(normalised)
    for task, accuracy in normalised.items():
        assert f"it agrees with the published acc_norm ({100 * accuracy:.2f}); score by acc" in found[task]


@pytest.mark.parametrize("row", MODELS)
def test_other_weights_are_caught_and_named(row):
    others = published.other_zero_shot_accuracies(row)
    assert len(others) == 16  # five examples, two sizes of the paper, and 13 neighbours
    for name, accuracies in others.items():
        (warning,) = warnings_of(row, {task: accuracies[task] for task in TABLE4_COLUMNS if task in accuracies})
        assert f"All columns agree of which anything is published for {name}: check what was run." in warning
        assert "acc_norm" not in warning  # which is the same by chance
        # The nearest are the steps before the last, which differ in two columns of three.
        assert len(lines_of(warning)) >= 3


def test_another_sizes_weights_are_caught_by_a_single_column():
    caught, tried = 0, 0
    for row in MODELS:
        for other in MODELS:
            for task, value in published_of(other).items():
                if other != row:
                    count = DOCUMENT_COUNTS[task]
                    check = check_column(row, task, 0, value, count, count)
                    caught, tried = caught + (not check.agrees), tried + 1
    # RACE-middle of 6.9B and 12B is the same to a digit. A tolerance of two standard errors caught 32.
    assert (caught, tried) == (64, 66)


@pytest.mark.parametrize("row", MODELS)
def test_with_examples_another_size_is_caught(row):
    for other in set(MODELS) - {row}:
        (warning,) = warnings_of(row, published_of(other, 5), shots=5)
        assert len(lines_of(warning)) >= 4


@pytest.mark.parametrize("row", MODELS)
def test_with_examples_an_earlier_step_is_not_caught_by_most_columns(row):
    # What the control cannot do, and says: see the next test.
    steps = [f"{row.lower()} at step {step}" for step in ("113,000", "123,000", "133,000")]
    missed = [warnings_of(row, published.neighbour_accuracies(5)[name], shots=5) == [] for name in steps]
    assert sum(missed) >= 2


def test_with_examples_alone_the_control_is_incomplete(tmp_path):
    write_columns(tmp_path, published_of(ROW, 5), shots=5)
    report = build_report(tmp_path)
    (statement,) = report.control
    assert report.warnings == [] and statement.startswith("CONTROL INCOMPLETE: ")
    assert "neither neighbouring checkpoints nor, in most columns, acc_norm" in statement


@pytest.mark.parametrize("shots", (0, 5))
def test_results_with_the_other_number_of_examples_are_caught(tmp_path, shots):
    write_columns(tmp_path, published_of(ROW, 5 - shots), shots=shots)
    assert len(lines_of(only_warning(tmp_path))) >= 4


def test_all_questions_of_race_are_other_documents(tmp_path):
    write_columns(tmp_path, published_of(ROW))
    write_column(tmp_path, "race_middle", published_of(ROW)["race_middle"], documents=1436)
    report = build_report(tmp_path)
    (statement,) = report.control
    assert report.warnings == [] and statement.startswith("CONTROL INCOMPLETE: ")
    assert "not the documents that the published accuracies are of: race_middle (1,436 instead of 362)" in statement
    write_column(tmp_path, "race_middle", published_of(ROW)["race_middle"] + 0.01, documents=1436)
    line = lines_of(only_warning(tmp_path))["race_middle"]
    assert "tolerance 0.35 points, 1,436 of 362 documents: run it on the 362 documents" in line


@pytest.mark.parametrize("task", ("race_middle", "race_high"))
def test_another_prompt_of_race_is_caught(tmp_path, task):
    # A prompt that costs two points, and the other half of RACE under this name.
    other = {"race_middle": "race_high", "race_high": "race_middle"}[task]
    for number, accuracy in enumerate((published_of(ROW)[task] - 0.02, published_of(ROW)[other])):
        output = tmp_path / str(number)
        write_column(output, task, accuracy)
        line = lines_of(only_warning(output))[task]
        assert "that the paper published" in line and "before version 3.0 of its task" in line


def test_a_failed_control_says_everything_in_a_line_for_each_cell(tmp_path):
    write_column(tmp_path, "piqa", 0.60)
    write_column(tmp_path, "sciq", 0.878)
    write_column(tmp_path, "sciq", 0.88, shots=5)
    write_column(tmp_path, "lambada_openai", published_of(ROW)["lambada_openai"])
    assert only_warning(tmp_path).splitlines() == [
        "CONTROL FAILED: EleutherAI/pythia-2.8b misses 3 of 4 accuracies published for Pythia-2.8B (step 143,000, "
        "trained without deduplication). No other number in these tables can be trusted until this is explained.",
        "piqa, 0-shot: 60.01 instead of the 73.88 that EleutherAI published, tolerance 0.30 points, 1,838 documents: "
        "check weights, prompt and data of this task.",
        "sciq, 0-shot: 87.80 instead of the 88.20 that EleutherAI published, tolerance 0.30 points, 1,000 documents: "
        "run it with --dtype float32 to see whether rounding decides; if not, check weights, prompt and data of this "
        "task.",
        "sciq, 5-shot: 88.00 instead of the 94.30 that EleutherAI published, tolerance 1.47 points, 1,000 documents: "
        "check weights, prompt and data of this task.",
    ]


# What cannot be controlled as strictly never passes


def test_a_limited_run_does_not_pass_and_says_how_little_it_tells(tmp_path):
    write_columns(tmp_path, published_of(ROW), count=100)
    report = build_report(tmp_path)
    (statement,) = report.control
    assert report.warnings == [] and statement.startswith("CONTROL INCOMPLETE: ")
    assert "a limited run cannot be controlled as strictly: lambada_openai (100 of 5,153 documents, ±14." in statement


def test_one_limited_column_keeps_the_others_from_passing(tmp_path):
    write_columns(tmp_path, published_of(ROW))
    write_column(tmp_path, "piqa", 0.74, count=1837, documents=1838)
    (statement,) = build_report(tmp_path).control
    assert statement.startswith("CONTROL INCOMPLETE: ") and "piqa (1,837 of 1,838 documents" in statement


def test_a_limited_run_far_from_the_published_accuracy_fails(tmp_path):
    write_columns(tmp_path, dict.fromkeys(("piqa", "sciq"), 0.4), count=100)
    found = lines_of(only_warning(tmp_path))
    assert list(found) == ["piqa", "sciq"]
    assert "100 of 1,838 documents: run it without --limit, and check weights" in found["piqa"]


def test_a_single_document_controls_nothing(tmp_path):
    write_column(tmp_path, "piqa", 1.0, count=1)
    report = build_report(tmp_path)
    assert report.warnings == [] and "(1 of 1,838 documents, anything passes)" in report.control[0]


def test_half_of_the_columns_do_not_pass(tmp_path):
    write_columns(tmp_path, {task: published_of(ROW)[task] for task in ELEUTHER_COLUMNS})
    report = build_report(tmp_path)
    (statement,) = report.control
    assert report.warnings == [] and statement.startswith("CONTROL INCOMPLETE: ")
    assert f"nothing is known of {', '.join(PAPER_COLUMNS)}" in statement


def test_columns_of_different_precision_have_no_average_and_do_not_pass(tmp_path):
    write_columns(tmp_path, published_of(ROW))
    count = DOCUMENT_COUNTS["piqa"]
    metrics = {"acc": {"value": published_of(ROW)["piqa"], "stderr": 0.01}}
    write_record(tmp_path, Record(MODEL, "piqa", 0, metrics, count, count, None, {"dtype": "float32"}), [])
    (statement,) = build_report(tmp_path).control
    assert statement.startswith("CONTROL INCOMPLETE: ") and "there is no average" in statement


def test_documents_without_the_hash_that_is_known_are_other_ones(tmp_path):
    write_columns(tmp_path, published_of(ROW))
    other = {**SETTINGS, "observed": {"documents": {"as_known": False}}}
    count = DOCUMENT_COUNTS["piqa"]
    for value, is_right in ((published_of(ROW)["piqa"], True), (0.6, False)):
        metrics = {"acc": {"value": value, "stderr": 0.01}}
        write_record(tmp_path, Record(MODEL, "piqa", 0, metrics, count, count, None, other), [])
        if is_right:
            report = build_report(tmp_path)
            (statement,) = report.control
            assert report.warnings == [] and statement.startswith("CONTROL INCOMPLETE: ")
            assert "by their hash the documents of piqa are other ones" in statement
        else:
            assert "run it on the published ones" in lines_of(only_warning(tmp_path))["piqa"]


@pytest.mark.parametrize("task, shots", [("sciq", 0), ("piqa", 3)])
def test_pythia_without_anything_to_hold_it_against_is_not_controlled(tmp_path, task, shots):
    count = DOCUMENT_COUNTS[task]
    metrics = {"acc": {"value": 0.3, "stderr": 0.01}}
    stand_in = {**SETTINGS, "observed": {"documents": {"stands_in_for": "test"}}} if task == "sciq" else SETTINGS
    write_record(tmp_path, Record(MODEL, task, shots, metrics, count, count, None, stand_in), [])
    report = build_report(tmp_path)
    (statement,) = report.control
    assert report.warnings == [] and statement.startswith(f"CONTROL INCOMPLETE: of {MODEL} there is no result")


def test_a_model_that_fails_anywhere_is_nowhere_said_to_pass(tmp_path):
    write_columns(tmp_path, published_of("Pythia-12B"))
    write_columns(tmp_path, published_of(ROW, 5), shots=5)
    report = build_report(tmp_path)
    assert len(report.warnings) == 1 and report.control == []


def test_results_without_pythia_are_said_to_be_uncontrolled(tmp_path):
    write_column(tmp_path, "piqa", 0.75, model="Caiyun-AI/DCPythia-6.9B")
    report = build_report(tmp_path)
    assert report.warnings == [] and report.control[0].startswith("Not controlled: ")
    write_column(tmp_path / "other", "piqa", 0.75, model="mine")
    assert build_report(tmp_path / "other").control == []


# Formats


def test_every_format_holds_the_control(tmp_path):
    write_columns(tmp_path, {"piqa": 0.60, "boolq": published_of(ROW)["boolq"]})
    write_columns(tmp_path, published_of("Pythia-12B"), model=MODELS["Pythia-12B"])
    report = build_report(tmp_path)
    numbers = json.loads(report.to_json())
    assert numbers["warnings"] == report.warnings and numbers["control"] == report.control
    rows = list(csv.DictReader(io.StringIO(report.to_csv())))
    for row, number in zip(rows, numbers["numbers"]):
        assert (row["task"], row["control"]) == (number["task"], number["control"])
        assert float(row["tolerance"]) == number["tolerance"]
    by_task = {row["task"]: row for row in rows if row["model"] == MODEL}
    assert (by_task["piqa"]["control"], by_task["boolq"]["control"]) == ("outside tolerance", "within tolerance")
    assert float(by_task["boolq"]["tolerance"]) == pytest.approx(0.0035)
    assert float(by_task["piqa"]["published"]) == pytest.approx(0.7388465723612623)
    markdown = report.to_markdown()
    assert "-13.9 outside ±0.30" in markdown and "+0.0 within ±0.35" in markdown
    assert markdown.index("CONTROL FAILED") < markdown.index("CONTROL PASSED") < markdown.index("### Accuracy")
    page = report.to_html()
    assert "<strong>piqa, 0-shot: 60.01 instead" in page and "CONTROL PASSED" in page


# The numbers themselves


@pytest.mark.parametrize("row", MODELS)
def test_published_standard_errors_are_of_as_many_documents_as_the_tasks_have(row):
    for shots in (0, 5):
        for task, cell in published.eleuther_accuracies(row, shots).items():
            count = cell.value * (1 - cell.value) / cell.stderr**2 + 1
            assert round(count) == DOCUMENT_COUNTS[task]


def test_published_accuracies_are_whole_numbers_of_documents():
    for row in MODELS:
        for accuracies in published.other_zero_shot_accuracies(row).values():
            for task in ELEUTHER_COLUMNS:
                right = accuracies[task] * DOCUMENT_COUNTS[task]
                assert right == pytest.approx(round(right), abs=1e-6)


def test_length_normalised_accuracies_are_those_of_the_source(fixtures):
    path = fixtures / "benchdata" / "pythia_published" / "pythia_v1_evals.json"
    for name, scores in json.loads(path.read_text())["eleuther"].items():
        model, shots = name.split("|")
        expected = {task: cell["acc_norm"] for task, cell in scores.items() if "acc_norm" in cell}
        assert published.eleuther_length_normalised(published.paper_row(model), int(shots)) == expected


def test_another_split_is_not_held_against_the_published_one(tmp_path):
    """Offline, SciQ's validation split may stand in for its test split, of as many documents."""
    write_columns(tmp_path, {task: value for task, value in published_of(ROW).items() if task != "sciq"})
    observed = {"documents": {"stands_in_for": "test"}}
    count = DOCUMENT_COUNTS["sciq"]
    metrics = {"acc": {"value": 0.5, "stderr": 0.016}}
    write_record(
        tmp_path, Record(MODEL, "sciq", 0, metrics, count, count, None, {**SETTINGS, "observed": observed}), []
    )
    report = build_report(tmp_path)
    assert control_warnings(report) == []
    (statement,) = control_statements(report)
    assert statement.startswith("CONTROL INCOMPLETE") and "nothing is known of sciq" in statement
