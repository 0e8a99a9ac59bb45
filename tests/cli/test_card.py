"""`dcformer card`: measured scores in a model card; the cards of the published shapes."""

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub._eval_results import parse_eval_result_entries
from huggingface_hub.repocard_data import model_index_to_eval_results
from tiny_models import tiny_model
from typer.testing import CliRunner

from dcformer.cards.catalogue import published_cards
from dcformer.cards.scores import PAPER_NAME
from dcformer.cli.main import app
from dcformer.eval import published
from dcformer.eval.provenance import Model, model_fingerprint
from dcformer.eval.records import Record, write_record
from dcformer.presets_dcformer import PRESETS


ROOT = Path(__file__).parents[2]
PAPER = "https://arxiv.org/abs/2405.08553"


def call(*words: str):
    return CliRunner().invoke(app, ["card", *map(str, words)])


def record(results: Path, folder: Path, task: str, metrics: dict, shots: int = 0, documents: int = 2, **settings):
    """A record as `dcformer eval` writes it."""
    settings = {"model": model_fingerprint(Model(str(folder), None, None)), "dtype": "float32", **settings}
    name = settings.pop("name", str(folder))
    samples = [{"doc_id": number, "doc_hash": str(number), "metrics": metrics} for number in range(2)]
    measured = {metric: {"value": value, "stderr": 0.0125} for metric, value in metrics.items()}
    write_record(results, Record(name, task, shots, measured, 2, documents, None, settings), samples)


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "DCFormer-2.8B"
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture
def results(tmp_path, model) -> Path:
    folder = tmp_path / "results"
    versions = {"dcformer": "0.1.0", "lm_eval": "0.4.13"}
    for shots in (0, 5):
        record(folder, model, "piqa", {"acc": 0.5 + shots / 100}, shots, versions=versions, git_revision="abc")
    record(folder, model, "logiqa", {"acc": 0.25})
    record(folder, model, "pile_ppl", {"token_perplexity": 12.3456, "bits_per_byte": 1.5})
    for place in (2, 3):
        name = f"head_tasks_authors_k{place}"
        record(folder, model, name, {"acc": place / 10, "acc_first_token": 0.75})
    return folder


def results_in(folder: Path) -> list:
    return ModelCard.load(folder / "README.md").data.eval_results


def entries_in(file: Path) -> list:
    return parse_eval_result_entries(yaml.safe_load(file.read_text()))


def test_scores_come_into_the_model_index(model, results):
    ended = call(model, "--results", results, "--paper-row", "none")
    assert ended.exit_code == 0, ended.output
    found = {result.metric_name: result for result in results_in(model)}
    assert {name: result.metric_value for name, result in found.items()} == {
        "piqa acc, 0-shot": 50.0,
        "piqa acc, 5-shot": 55.0,
        "logiqa acc, 0-shot": 25.0,
        "pile_ppl token_perplexity, 0-shot": 12.3456,
        "pile_ppl bits_per_byte, 0-shot": 1.5,
        "head_tasks_authors_k2 acc, 0-shot": 20.0,
        "head_tasks_authors_k2 acc_first_token, 0-shot": 75.0,
        "head_tasks_authors_k3 acc, 0-shot": 30.0,
        "head_tasks_authors_k3 acc_first_token, 0-shot": 75.0,
    }
    piqa = found["piqa acc, 5-shot"]
    assert (piqa.dataset_type, piqa.dataset_split, piqa.metric_type) == ("baber/piqa", "validation", "accuracy")
    assert piqa.metric_args["num_few_shot"] == 5 and piqa.metric_args["standard_error"] == 1.25
    assert piqa.source_url is None
    for part in ("float32", "dcformer 0.1.0", "lm_eval 0.4.13", "commit abc", "2 documents"):
        assert part in piqa.metric_args["details"]


def test_scores_come_into_the_files_for_leaderboards(model, results):
    assert call(model, "--results", results, "--paper-row", "none").exit_code == 0
    names = {file.name for file in (model / ".eval_results").iterdir()}
    # LogiQA and the authors' texts are no data sets of the Hub.
    assert names == {"piqa-0shot-dcformer.yaml", "piqa-5shot-dcformer.yaml", "pile_ppl-0shot-dcformer.yaml"}
    (entry,) = entries_in(model / ".eval_results" / "piqa-5shot-dcformer.yaml")
    assert (entry.dataset_id, entry.task_id, entry.value, entry.source_url) == ("baber/piqa", "default", 55.0, None)
    assert entry.notes.startswith("5-shot, acc in percent, standard error 1.25")


def test_the_papers_figures_name_the_paper_as_their_source(model, results):
    assert call(model, "--results", results).exit_code == 0  # the folder is called DCFormer-2.8B
    papers = [result for result in results_in(model) if result.source_name == PAPER_NAME]
    measured = [result for result in results_in(model) if result.source_name is None]
    stated = {result.metric_name: result.metric_value for result in papers}
    assert len(measured) == 9 and len(papers) == 2 * 11 + 1 and {result.source_url for result in papers} == {PAPER}
    assert (stated["piqa acc, 0-shot"], stated["piqa acc, 5-shot"]) == (73.9, 74.8)
    assert stated["pile_ppl token_perplexity, 0-shot"] == 6.11
    (entry,) = entries_in(model / ".eval_results" / "piqa-0shot-paper.yaml")
    assert (entry.value, entry.source_url, entry.source_name) == (73.9, PAPER, PAPER_NAME)
    assert "| piqa | 0 | acc | 50 ± 1.25 | 73.9 |" in (model / "README.md").read_text()


def test_it_changes_nothing_the_second_time(model, results):
    call(model, "--results", results)
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    assert call(model, "--results", results).exit_code == 0
    assert {path: path.read_bytes() for path in model.rglob("*") if path.is_file()} == before


def test_what_others_wrote_stays_and_old_scores_go(model, results):
    own = {
        "task": {"type": "text-generation"},
        "dataset": {"name": "Mine", "type": "me/mine"},
        "metrics": [{"type": "accuracy", "value": 1.0}],
    }
    metadata = {"license": "mit", "tags": ["mine"], "model-index": [{"name": "My model", "results": [own]}]}
    text = f"---\n{yaml.safe_dump(metadata)}---\n# Mine\n\nWhat I found.\n"
    (model / "README.md").write_text(text)
    (model / ".eval_results").mkdir()
    (model / ".eval_results" / "mine.yaml").write_text("[]\n")
    call(model, "--results", results)
    (results / model.as_posix().strip("/").replace("/", "__") / "piqa-0shot.json").unlink()
    call(model, "--results", results)
    card = ModelCard.load(model / "README.md")
    assert (card.data.license, card.data.tags, card.data.model_name) == ("mit", ["mine"], "My model")
    assert card.text.lstrip().startswith("# Mine\n\nWhat I found.") and card.text.count("dcformer results:") == 1
    names = [result.metric_name for result in results_in(model) if result.source_name is None]
    assert names.count(None) == 1 and "piqa acc, 0-shot" not in names and "piqa acc, 5-shot" in names
    files = {file.name for file in (model / ".eval_results").glob("*")}
    assert "mine.yaml" in files and "piqa-0shot-dcformer.yaml" not in files and "piqa-5shot-dcformer.yaml" in files


def test_a_card_with_scores_is_not_replaced_by_the_next_save(model, results):
    call(model, "--results", results)
    before = (model / "README.md").read_text()
    tiny_model().save_pretrained(model)
    assert (model / "README.md").read_text() == before


def test_a_folder_without_a_card_gets_one(model, results):
    (model / "README.md").unlink()
    assert call(model, "--results", results).exit_code == 0
    text = (model / "README.md").read_text()
    assert "import dcformer" in text and f"{tiny_model().num_parameters():,} parameters in float32" in text


@pytest.mark.parametrize(
    "given, sentence", [("other", "evaluated with other weights"), ("named", "no results of 'x/y'")]
)
def test_results_of_another_model_are_refused(given, sentence, model, results):
    if given == "other":
        tiny_model(seed=1).save_pretrained(model)
    before = (model / "README.md").read_bytes()
    ended = call(model, "--results", results, *(["--evaluated-as", "x/y"] if given == "named" else []))
    assert ended.exit_code != 0 and sentence in ended.output and "Traceback" not in ended.output
    assert (model / "README.md").read_bytes() == before and not (model / ".eval_results").exists()


def test_a_model_that_was_evaluated_on_the_hub_is_taken_by_its_name(model, tmp_path):
    record(tmp_path / "hub", model, "piqa", {"acc": 0.5}, model="commit:1", name="Caiyun-AI/DCFormer-2.8B")
    assert call(model, "--results", tmp_path / "hub").exit_code != 0
    ended = call(model, "--results", tmp_path / "hub", "--evaluated-as", "Caiyun-AI/DCFormer-2.8B")
    assert ended.exit_code == 0 and "1 measured scores and 23 figures of the paper" in ended.output


def test_partial_results_are_left_out_or_refused(model, tmp_path):
    record(tmp_path / "part", model, "piqa", {"acc": 0.5}, documents=1838)
    ended = call(model, "--results", tmp_path / "part")
    assert ended.exit_code != 0 and "are of a part of the documents (--limit)" in ended.output
    record(tmp_path / "part", model, "sciq", {"acc": 0.5})
    ended = call(model, "--results", tmp_path / "part", "--paper-row", "none")
    assert "piqa, 0-shot, was left out: 2 of 1838 documents" in ended.output
    assert [result.metric_name for result in results_in(model)] == ["sciq acc, 0-shot"]


@pytest.mark.parametrize(
    "broken, sentence",
    [
        ("no model", "There is no folder"),
        ("no config", "holds no config.json"),
        ("no results", "There is no folder"),
        ("empty results", "holds no result of `dcformer eval`"),
        ("metadata", "cannot be read"),
        ("row", "The paper has no row 'X'"),
    ],
)
def test_an_error_is_one_line(broken, sentence, model, results, tmp_path):
    words = [model, "--results", results]
    if broken == "no model":
        words[0] = tmp_path / "nowhere"
    elif broken == "no config":
        (model / "config.json").unlink()
    elif broken == "no results":
        words[2] = tmp_path / "nowhere"
    elif broken == "empty results":
        words[2] = tmp_path
    elif broken == "metadata":
        (model / "README.md").write_text("---\na: [\n---\n# Mine\n")
    else:
        words += ["--paper-row", "X"]
    ended = call(*words)
    assert ended.exit_code != 0 and sentence in ended.output
    assert len(ended.output.strip().splitlines()) == 1, ended.output


@pytest.fixture(scope="module")
def cards() -> dict[str, str]:
    return published_cards()


def test_the_published_cards_are_what_the_script_writes(cards):
    there = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "model_cards").iterdir()}
    assert there == cards, "run python scripts/write_model_cards.py"
    assert set(there) == {"README.md", *(f"{name}.md" for name in PRESETS)}


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_card_has_whole_metadata(name, cards):
    text = cards[f"{name}.md"]
    data = ModelCard(text).data
    assert isinstance(data, ModelCardData)
    assert (data.library_name, data.pipeline_tag, data.language) == ("transformers", "text-generation", "en")
    assert {"dcformer", "dcpythia"} & set(data.tags) and "dcmha" in data.tags
    assert data.license == ("mit" if "huggingface.co" in text or "Caiyun-AI" in text else "apache-2.0")
    assert "[More Information" not in text and PAPER in text
    for heading in ("How to load", "Intended use", "Memory", "Training data", "The paper's numbers", "Limits"):
        assert f"\n## {heading}\n" in text


@pytest.mark.parametrize("name, row", [("dcformer-2.8b", "DCFormer++2.8B"), ("dcpythia-6.9b", "DCPythia-6.9B")])
def test_a_published_checkpoint_has_the_papers_scores_as_the_papers(name, row, cards):
    data = ModelCard(cards[f"{name}.md"]).data
    _, found = model_index_to_eval_results(data.to_dict()["model-index"])
    assert {result.source_url for result in found} == {PAPER}
    values = {result.metric_name: result.metric_value for result in found}
    for shots in (0, 5):
        for task, value in published.paper_accuracies(row, shots).items():
            if task != "average":
                assert values[f"{task} acc, {shots}-shot"] == pytest.approx(100 * value)


def test_the_catalogue_copies_the_papers_tables(fixtures):
    """What is in no table of the evaluation: the figures of Tables 3, 6, 9 and 10."""
    paper = {}
    for file in ("tables.json", "table4.json"):
        paper |= json.loads((fixtures / "paper" / file).read_text())
    cards = json.loads((ROOT / "dcformer" / "cards" / "catalogue.json").read_text())["cards"]
    for name, size in {"dcformer-2.8b": "2.8B", "dcformer-6.9b": "6.9B", "dcformer-13b": "13B"}.items():
        (speed,) = (each for each in cards[name]["tables"] if each["title"].startswith("Table 6"))
        stated = paper["table6_speed"][size]
        assert [row[1:3] for row in speed["rows"]] == [
            [stated["train_tfm"], stated["train_dcfm"]],
            [stated["infer_tfm"], stated["infer_dcfm"]],
            [stated["infer_tfm_window"], stated["infer_dcfm"]],
        ]
    ablation, windows = cards["dcformer-405m"]["tables"]
    assert sorted(row[1] for row in ablation["rows"]) == sorted(
        value for name, value in paper["table9_ablation_ppl_405M"].items() if name != "R=2"
    )
    assert windows["rows"] == [paper["table10_tradeoffs"]["DCFM++405M_ppl"]]
    for model in paper["table3_scaling_models"]:
        text = cards[f"dcformer-{model['params'].lower()}"]["training"]
        assert (
            f"on {model['tokens']} tokens" in text
            and f"{model['lr']:.1e}".replace(".0e-0", "e-").replace("e-0", "e-") in text
        )
