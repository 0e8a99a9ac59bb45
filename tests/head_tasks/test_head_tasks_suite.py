"""`dcformer eval --suite head_tasks`: its documents, intervals, comparison, command and plot, on tiny models."""

import json
import math
import shutil
import subprocess
import sys

import pytest
from tiny_models import tiny_model
from typer.testing import CliRunner

import dcformer
from dcformer import pretrained
from dcformer.cli import app
from dcformer.head_tasks import TASK_KINDS, build_tokenizer, suite
from dcformer.head_tasks.authors_texts import SHOTS, authors_texts, bracketed_answers
from dcformer.head_tasks.comparison import compare_models, score_difference
from dcformer.head_tasks.intervals import seed_interval
from dcformer.head_tasks.suite import authors_documents, document_sets, evaluate_head_tasks, held_out_documents
from dcformer.head_tasks.vocabulary import VOCABULARY


def call(*arguments):
    return CliRunner().invoke(app, ["eval", "--suite", "head_tasks", *map(str, arguments)])


@pytest.fixture(scope="module")
def word_tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def box(tmp_path_factory, word_tokenizer):
    """A folder as that of the bundled models, with random ones."""
    folder = tmp_path_factory.mktemp("box")
    for name, variant in (("dcformer-tiny", "dcformer"), ("transformer-tiny", "plain_gated_transformer")):
        model = tiny_model(variant, vocab_size=len(word_tokenizer), max_position_embeddings=512)
        model.save_pretrained(folder / name)
        word_tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def boxed(box, monkeypatch, tmp_path):
    """The box in place of the packaged one; the working folder is empty."""
    monkeypatch.setattr(pretrained, "_FOLDER", box)
    monkeypatch.chdir(tmp_path)
    (box / "seeds.json").unlink(missing_ok=True)
    return box


def write_seeds(box, accuracies):
    """Results of training seeds 0, 1, 2 with such accuracies of a model, everywhere."""
    groups = {"by_pattern": {kind.pattern for kind in TASK_KINDS.values()}}
    groups["by_transformation"] = {kind.transformation for kind in TASK_KINDS.values()}

    def summary(accuracy):
        one = {"accuracy": accuracy, "perplexity": 2 - accuracy}
        return {**one, **{name: dict.fromkeys(keys, one) for name, keys in groups.items()}}

    runs = [
        {"variant": name, "seed": seed, "evaluation": {"held_out": summary(accuracy), "authors": None}}
        for name, values in accuracies.items()
        for seed, accuracy in enumerate(values)
    ]
    (box / "seeds.json").write_text(json.dumps({"recipe": {}, "runs": runs}))


def test_held_out_documents_are_the_test_split_with_eight_examples():
    documents = held_out_documents(75)
    assert {document["task"] for document in documents} == set(TASK_KINDS)
    assert all(len(document["answers"]) == 8 for document in documents)
    assert held_out_documents(150)[:75] == documents != held_out_documents(75, seed=1)


def test_the_authors_texts_in_the_generators_rows(data_dir):
    documents = authors_documents(data_dir)
    assert len(documents) == 888 and len({document["task"] for document in documents}) == 74
    for document, (task, text) in zip(documents, authors_texts(data_dir), strict=True):
        assert document["task"] == task and document["shots"] == list(SHOTS)
        assert document["text"] == text.replace(" [ ", " ").replace(" ]", "")
        answers = [document["text"][start:end] for start, end in document["answers"]]
        assert answers == [answer for _, answer in bracketed_answers(text).values()]
    first = documents[0]
    assert (first["pattern"], first["transformation"]) == ("the-other-person", "object->superclass")


def test_some_of_the_authors_texts_are_of_all_kinds(data_dir):
    sets = document_sets(data_dir, documents=3, most_authors=74)
    assert len(sets["held_out"]) == 3
    assert {document["task"] for document in sets["authors"]} == set(TASK_KINDS) - {"task74"}
    assert list(document_sets(documents=3, with_authors=False)) == ["held_out"]


def test_evaluate_head_tasks(word_tokenizer, data_dir, monkeypatch):
    model = tiny_model(vocab_size=len(word_tokenizer), max_position_embeddings=512)
    seen = []
    found = evaluate_head_tasks(
        model, word_tokenizer, documents=6, with_authors=False, batch_size=4, on_progress=lambda *at: seen.append(at)
    )
    assert found["authors"] is None and found["held_out"]["answers"] == 48 and found["held_out"]["documents"] == 6
    assert seen == [(0, 6), (4, 6), (6, 6)]
    few = authors_documents(data_dir)[::222]
    monkeypatch.setattr(suite, "authors_documents", lambda _: few)
    both = evaluate_head_tasks(model, word_tokenizer, data_dir, documents=6)
    assert both["held_out"]["accuracy"] == found["held_out"]["accuracy"]
    assert both["authors"]["answers"] == 24 and set(both["authors"]["by_shots"]) == {str(shots) for shots in SHOTS}
    json.dumps(both, allow_nan=False)


def test_seed_interval_is_students():
    stats = pytest.importorskip("scipy.stats")
    values = [0.91, 0.94, 0.96, 0.9]
    mean, half_width = seed_interval(values)
    expected = stats.t.interval(0.95, 3, loc=mean, scale=stats.sem(values))
    assert (mean - half_width, mean + half_width) == pytest.approx(expected, abs=1e-4)
    for count in (2, 3, 31, 40, 100):
        half_width = seed_interval([*range(count)])[1]
        quantile = half_width / stats.sem([*range(count)])
        assert quantile == pytest.approx(stats.t.ppf(0.975, count - 1), abs=3e-3), count


def test_seed_interval_of_one_value_and_of_none():
    mean, half_width = seed_interval([0.5])
    assert mean == 0.5 and math.isnan(half_width)
    assert seed_interval([0.5, 0.5]) == (0.5, 0.0)
    with pytest.raises(ValueError, match="no values to average"):
        seed_interval([])


def test_names_of_the_box(boxed):
    assert dcformer.pretrained_path("dcformer-tiny") == str(boxed / "dcformer-tiny")
    with pytest.raises(ValueError, match="no bundled model 'dcformer-huge'; choose from dcformer-tiny, transf"):
        dcformer.pretrained_path("dcformer-huge")
    assert pretrained.seed_results() == {"recipe": {}, "runs": []}


def test_a_comparison_of_the_models_in_the_box(boxed):
    write_seeds(boxed, {"dcformer-tiny": (0.9, 0.92, 0.94), "transformer-tiny": (0.8, 0.83, 0.83)})
    found = compare_models(documents=8, with_authors=False)
    twin, model = found.models
    assert (twin.name, model.name, found.baseline) == ("transformer-tiny", "dcformer-tiny", "transformer-tiny")
    assert found.sets == ("held_out",)
    alone = evaluate_head_tasks(
        tiny_model(vocab_size=len(build_tokenizer()), max_position_embeddings=512),
        build_tokenizer(),
        documents=8,
        with_authors=False,
    )
    assert model.summaries["held_out"] == alone["held_out"]
    low, high = model.interval("held_out", "perplexity")
    assert low < model.summaries["held_out"]["perplexity"] < high
    gain = score_difference(model, twin, "held_out", "perplexity")
    expected = [each.summaries["held_out"]["perplexity"] for each in (model, twin)]
    assert gain.value == pytest.approx(math.log(expected[0] / expected[1])) and gain.low < gain.value < gain.high
    assert model.over_seeds("held_out", "accuracy") == {0: 0.9, 1: 0.92, 2: 0.94}
    assert model.over_seeds("held_out", "accuracy", "by_pattern", "same-person") == {0: 0.9, 1: 0.92, 2: 0.94}
    assert model.over_seeds("authors", "accuracy") == {}


def test_the_command_without_models_prints_tables_and_writes_results_and_plot(boxed, data_dir, tmp_path):
    pytest.importorskip("matplotlib")
    write_seeds(boxed, {"dcformer-tiny": (0.9, 0.92, 0.94), "transformer-tiny": (0.8, 0.83, 0.83)})
    done = call("--limit", 9, "--data-dir", data_dir, "--output", tmp_path / "out", "--batch-size", 4)
    assert done.exit_code == 0, done.output
    assert "held-out tasks: 72 answers in 9 texts; authors' texts: 54 answers in 9 texts." in done.output
    assert "92.0±5.0" in done.output and "+10.0±2.5" in done.output  # 4.303 * 0.02 / sqrt(3); of 10, 9, 11
    assert "By pattern, authors' texts" in done.output and "By transformation, held-out tasks" in done.output
    assert done.output.splitlines()[-1] == f"Plot: {tmp_path / 'out' / 'head_tasks.png'}"
    assert (tmp_path / "out" / "head_tasks.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "out" / "head_tasks.json").read_text())
    assert results["settings"]["documents"] == {"held_out": 9, "authors": 9}
    assert results["settings"]["dtype"] == "float32"
    assert [model["name"] for model in results["models"]] == ["transformer-tiny", "dcformer-tiny"]
    seeds = results["models"][1]["seeds"]
    assert seeds["held_out"]["accuracy"]["mean"] == pytest.approx(0.92) and seeds["authors"]["accuracy"] is None
    assert len(results["differences"]) == 4
    # The same command line gives the same file.
    assert call("--limit", 9, "--data-dir", data_dir, "--output", tmp_path / "again").exit_code == 0
    again = json.loads((tmp_path / "again" / "head_tasks.json").read_text())
    first, second = (each["models"][0]["evaluation"]["held_out"] for each in (results, again))
    assert first["accuracy"] == second["accuracy"]
    assert first["perplexity"] == pytest.approx(second["perplexity"], rel=1e-5)  # batches of 4 and of 32


def test_the_command_with_a_folder_and_a_name_of_the_box(boxed, tmp_path):
    shutil.copytree(boxed / "dcformer-tiny", tmp_path / "mine")
    done = call(tmp_path / "mine", "transformer-tiny", "--limit", 3, "--no-authors")
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "results" / "head_tasks.json").read_text())
    assert [model["name"] for model in results["models"]] == [str(tmp_path / "mine"), "transformer-tiny"]
    assert results["baseline"] is None and results["differences"] == []
    assert "difference" not in done.stdout.replace("differences)", "") and "authors" not in done.stdout


def test_a_folder_of_that_name_goes_before_the_box(boxed, tmp_path):
    shutil.copytree(boxed / "transformer-tiny", tmp_path / "dcformer-tiny")
    write_seeds(boxed, {"dcformer-tiny": (0.9, 0.92, 0.94)})
    (found,) = compare_models(["dcformer-tiny"], documents=2, with_authors=False).models
    assert found.over_seeds("held_out", "accuracy") == {}
    assert (
        found.parameters == compare_models(["transformer-tiny"], documents=2, with_authors=False).models[0].parameters
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere/at/all",), "There is no model folder 'nowhere/at/all'"),
        (("--tasks", "piqa"), "--tasks has no meaning for --suite head_tasks"),
        (("--num-fewshot", "5"), "--num-fewshot has no meaning"),
        (("--oov-policy", "clamp"), "--oov-policy has no meaning"),
        (("--limit", "0"), "limit must be at least 1, got 0"),
        (("--batch-size", "many"), "batch_size must be \"auto\" or a number of at least 1, got 'many'"),
        (("--data-dir", "nowhere"), "There is no file 'nowhere/synthetic/synthetic_dataset.jsonl'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_errors_are_one_line(boxed, arguments, message):
    failed = call(*arguments)
    assert failed.exit_code == 1 and failed.stdout == ""
    assert failed.stderr.startswith("Error: ") and failed.stderr.count("\n") == 1 and message in failed.stderr


def test_an_empty_box_and_unreachable_texts(boxed, tmp_path, monkeypatch):
    failed = call("--data-dir", tmp_path)
    assert failed.exit_code == 1 and "--no-authors" in failed.stderr
    monkeypatch.setattr(pretrained, "_FOLDER", tmp_path)
    failed = call()
    assert failed.exit_code == 1 and "There is no bundled model 'transformer-tiny'" in failed.stderr


def test_other_suites_need_a_model_and_none_is_run_beside_this_one(boxed):
    for arguments, message in (
        ((), "No model is named; give a folder or a Hub id, or --suite head_tasks."),
        (("--suite", "table4,head_tasks", "m"), "The suite 'head_tasks' is run alone"),
        (("--tasks", "head_tasks", "m"), "The suite 'head_tasks' is run alone"),
        (("--no-authors", "m"), "--no-authors is for --suite head_tasks only"),
    ):
        failed = CliRunner().invoke(app, ["eval", *arguments])
        assert failed.exit_code == 1 and message in failed.stderr, failed.stderr


def test_without_matplotlib_the_tables_are_printed_and_the_reason_told(boxed, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = call("--limit", 2, "--no-authors")
    assert done.exit_code == 0 and "Head tasks" in done.stdout
    assert "No plot was drawn. A plot needs matplotlib: pip install 'dcformer[eval]'." in done.stdout


def test_the_suite_does_not_import_the_harness(box):
    code = f"""
import sys
from pathlib import Path
from dcformer import pretrained
pretrained._FOLDER = Path({str(box)!r})
sys.modules["lm_eval"] = None
from dcformer.cli import app
app(["eval", "--suite", "head_tasks", "--limit", "1", "--no-authors", "--output", {str(box / "out")!r}])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_vocabulary_is_the_whole_of_what_models_in_the_box_read(word_tokenizer):
    """So every name and thing of the vocabulary can be asked about."""
    for name in VOCABULARY["people"]:
        assert word_tokenizer.unk_token_id not in word_tokenizer(f"{name}'s")["input_ids"]
