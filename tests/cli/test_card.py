"""`dcformer card`: measured scores in a model card; the cards of the published shapes."""

import functools
import json
import re
import runpy
from pathlib import Path

import command_line
import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub._eval_results import parse_eval_result_entries
from tiny_models import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from dcformer.cards.scores import PAPER_NAME, Score, _write_entries
from dcformer.eval import Record, Settings, model_fingerprint, write_record
from dcformer.eval.records import record_path


ROOT = Path(__file__).parents[2]
PAPER = "https://arxiv.org/abs/2405.08553"
call = functools.partial(command_line.call, "card")


def record(results: Path, folder: Path, task: str, metrics: dict, shots: int = 0, documents: int = 2, **settings):
    """A record as `dcformer eval` writes it."""
    name, observed = settings.pop("name", str(folder)), {"documents": settings.pop("documents_of", {})}
    made_with = Settings(**{"model": model_fingerprint(str(folder)), "dtype": "float32", **settings})
    samples = [{"doc_id": number, "doc_hash": str(number), "metrics": metrics} for number in range(2)]
    measured = {metric: {"value": value, "stderr": 0.0125} for metric, value in metrics.items()}
    write_record(results, Record(name, task, shots, measured, 2, documents, made_with, observed), samples)


@pytest.fixture
def model(tmp_path) -> Path:
    tiny_model().save_pretrained(tmp_path / "DCFormer-2.8B")
    return tmp_path / "DCFormer-2.8B"


@pytest.fixture
def results(tmp_path, model) -> Path:
    folder = tmp_path / "results"
    versions = {"dcformer": "0.1.0", "lm_eval": "0.4.13"}
    for shots in (0, 5):
        record(folder, model, "piqa", {"acc": 0.5 + shots / 100}, shots, versions=versions, git_revision="abc")
    record(folder, model, "logiqa", {"acc": 0.25})
    record(folder, model, "pile_ppl", {"token_perplexity": 12.3456})
    record(folder, model, "head_tasks_authors_k2", {"acc": 0.2, "acc_first_token": 0.75})
    return folder


def test_a_record_cannot_name_a_file_elsewhere(tmp_path):
    with pytest.raises(ValueError, match=r"name of a file, got 'piqa-/\.\./\.\./xshot-dcformer\.yaml'"):
        _write_entries(tmp_path / "entries", [Score("piqa", "/../../x", "acc", 1.0, None)])
    assert not (tmp_path / "entries").exists()


def results_in(folder: Path) -> list:
    return ModelCard.load(folder / "README.md").data.eval_results


def entry_in(model: Path, name: str):
    (entry,) = parse_eval_result_entries(yaml.safe_load((model / ".eval_results" / name).read_text()))
    return entry


def test_scores_come_into_a_new_card_and_the_files_for_leaderboards(model, results):
    ended = call(model, "--results", results, "--paper-row", "none")
    assert ended.exit_code == 0, ended.output
    scores = {result.metric_name: result for result in results_in(model)}
    assert {name: result.metric_value for name, result in scores.items()} == {
        "piqa acc, 0-shot": 50.0,
        "piqa acc, 5-shot": 55.0,
        "logiqa acc, 0-shot": 25.0,
        "pile_ppl token_perplexity, 0-shot": 12.3456,
        "head_tasks_authors_k2 acc, 0-shot": 20.0,
        "head_tasks_authors_k2 acc_first_token, 0-shot": 75.0,
    }
    piqa = scores["piqa acc, 5-shot"]
    assert (piqa.dataset_type, piqa.dataset_split, piqa.metric_type) == ("baber/piqa", "validation", "accuracy")
    assert piqa.metric_args["num_few_shot"] == 5 and piqa.metric_args["standard_error"] == 1.25
    assert piqa.source_url is None
    for part in ("float32", "dcformer 0.1.0", "lm_eval 0.4.13", "commit abc", "2 documents"):
        assert part in piqa.metric_args["details"]
    card = (model / "README.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (\d) \| acc \|", card, re.M)
    assert rows == [("piqa", "0"), ("logiqa", "0"), ("head_tasks_authors_k2", "0"), ("piqa", "5")]
    assert "import dcformer" in card and f"{tiny_model().num_parameters():,} parameters in float32" in card
    names = {file.name for file in (model / ".eval_results").iterdir()}
    # LogiQA and the authors' texts are no data sets of the Hub.
    assert names == {"piqa-0shot-dcformer.yaml", "piqa-5shot-dcformer.yaml", "pile_ppl-0shot-dcformer.yaml"}
    entry = entry_in(model, "piqa-5shot-dcformer.yaml")
    assert (entry.dataset_id, entry.task_id, entry.value, entry.source_url) == ("baber/piqa", "default", 55.0, None)
    assert entry.notes.startswith("5-shot, acc in percent, standard error 1.25")


def test_the_papers_figures_name_the_paper_and_a_second_run_changes_nothing(model, results):
    assert call(model, "--results", results).exit_code == 0  # the folder is called DCFormer-2.8B
    papers = [result for result in results_in(model) if result.source_name == PAPER_NAME]
    stated = {result.metric_name: result.metric_value for result in papers}
    assert len(papers) == 2 * 11 + 1 and {result.source_url for result in papers} == {PAPER}
    assert (stated["piqa acc, 0-shot"], stated["piqa acc, 5-shot"]) == (73.9, 74.8)
    assert stated["pile_ppl token_perplexity, 0-shot"] == 6.11
    entry = entry_in(model, "piqa-0shot-paper.yaml")
    assert (entry.value, entry.source_url, entry.source_name) == (73.9, PAPER, PAPER_NAME)
    assert "| piqa | 0 | acc | 50 ± 1.25 | 73.9 |" in (model / "README.md").read_text()
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    assert call(model, "--results", results).exit_code == 0
    assert {path: path.read_bytes() for path in model.rglob("*") if path.is_file()} == before


def test_other_text_and_files_stay_and_old_scores_are_removed(model, results):
    mine = {"task": {"type": "text-generation"}, "dataset": {"name": "Mine", "type": "me/mine"}}
    mine["metrics"] = [{"type": "accuracy", "value": 1.0}]
    metadata = {"license": "mit", "tags": ["mine"], "model-index": [{"name": "My model", "results": [mine]}]}
    (model / "README.md").write_text(f"---\n{yaml.safe_dump(metadata)}---\n# Mine\n\nWhat I measured.\n")
    (model / ".eval_results").mkdir()
    (model / ".eval_results" / "mine-0shot-me.yaml").write_text("[]\n")
    call(model, "--results", results)
    record_path(results, str(model), "piqa", 0).unlink()
    call(model, "--results", results)
    card = ModelCard.load(model / "README.md")
    assert (card.data.license, card.data.tags, card.data.model_name) == ("mit", ["mine"], "My model")
    assert card.text.lstrip().startswith("# Mine\n\nWhat I measured.") and card.text.count("dcformer results:") == 1
    names = [result.metric_name for result in results_in(model) if result.source_name is None]
    assert names.count(None) == 1 and "piqa acc, 0-shot" not in names and "piqa acc, 5-shot" in names
    files = {file.name for file in (model / ".eval_results").glob("*")}
    assert {"mine-0shot-me.yaml", "piqa-5shot-dcformer.yaml"} <= files and "piqa-0shot-dcformer.yaml" not in files


def test_results_of_other_weights_are_used_only_by_name(model, tmp_path):
    hub = tmp_path / "hub"
    record(hub, model, "piqa", {"acc": 0.5}, model="commit:1", name="Caiyun-AI/DCFormer-2.8B")
    ended = call(model, "--results", hub)
    assert ended.exit_code == 1 and "Caiyun-AI/DCFormer-2.8B" in ended.output
    assert call(model, "--results", hub, "--evaluated-as", "x/y").exit_code == 1
    assert not (model / "README.md").exists() and not (model / ".eval_results").exists()
    ended = call(model, "--results", hub, "--evaluated-as", "Caiyun-AI/DCFormer-2.8B")
    assert ended.exit_code == 0 and "1 measured scores and 23 figures of the paper" in ended.output


def test_a_model_of_another_family_gets_scores_into_its_own_card_alone(tmp_path):
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(folder := tmp_path / "llama")
    record(tmp_path / "results", folder, "piqa", {"acc": 0.5})
    ended = call(folder, "--results", tmp_path / "results")
    assert ended.exit_code == 1 and "is a llama model without README.md" in ended.output
    (folder / "README.md").write_text("# Mine\n")
    assert call(folder, "--results", tmp_path / "results").exit_code == 0
    assert [result.metric_name for result in results_in(folder)] == ["piqa acc, 0-shot"]


def test_partial_results_are_left_out_or_refused(model, tmp_path):
    record(tmp_path / "part", model, "piqa", {"acc": 0.5}, documents=3)
    ended = call(model, "--results", tmp_path / "part")
    assert ended.exit_code == 1 and "--limit" in ended.output
    record(tmp_path / "part", model, "sciq", {"acc": 0.5})
    ended = call(model, "--results", tmp_path / "part", "--paper-row", "none")
    assert "2 of 3 documents" in ended.output
    assert [result.metric_name for result in results_in(model)] == ["sciq acc, 0-shot"]


def test_results_of_other_documents_or_windows_are_in_the_text_alone(model, tmp_path):
    known, other = ({"as_known": value, "source": "files of --data-dir"} for value in (True, False))
    results = tmp_path / "results"
    record(results, model, "piqa", {"acc": 0.5}, documents_of=known, max_length=64)
    record(results, model, "sciq", {"acc": 0.5}, 5, documents_of={**known, "examples": "train"}, seed=7)
    marked = [("wikitext2_ppl", known, 128), ("wikitext2_ppl", other, 2048), ("logiqa", other, 64)]
    for task, documents, window in marked:
        metric = {"acc": 0.25} if task == "logiqa" else {"token_perplexity": 12.5}
        record(results, model, task, metric, documents_of=documents, max_length=window)
        ended = call(model, "--results", results, "--paper-row", "none")
        assert ended.exit_code == 0 and f"{task}, 0-shot, is in the text alone: " in ended.output
        piqa, sciq = results_in(model)
        assert (piqa.metric_name, sciq.metric_name) == ("piqa acc, 0-shot", "sciq acc, 5-shot")
        assert "max_length 64" in piqa.metric_args["details"]
        assert "seed 7, examples from train" in sciq.metric_args["details"]
        assert f"| {task} (" in (model / "README.md").read_text()
        assert len(list((model / ".eval_results").iterdir())) == 2
    for task in ("piqa", "sciq"):
        next(results.rglob(f"{task}-*shot.json")).unlink()
    assert call(model, "--results", results, "--paper-row", "none").exit_code == 0 and not results_in(model)


def test_the_published_cards_are_what_the_script_writes():
    there = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "model_cards").iterdir()}
    script = runpy.run_path(str(ROOT / "scripts" / "write_model_cards.py"))
    assert there == script["published_cards"](), "run python scripts/write_model_cards.py"


def test_the_catalogue_copies_the_papers_tables(fixtures):
    """The figures of Tables 3, 6, 9 and 10, which are in no table of the evaluation."""
    paper = json.loads((fixtures / "paper" / "tables.json").read_text())
    cards = json.loads((ROOT / "scripts" / "model_cards" / "catalogue.json").read_text())["cards"]
    for name, size in {"dcformer-2.8b": "2.8B", "dcformer-6.9b": "6.9B", "dcformer-13b": "13B"}.items():
        (speed,) = (table for table in cards[name]["tables"] if table["title"].startswith("Table 6"))
        pairs = [("train_tfm", "train_dcfm"), ("infer_tfm", "infer_dcfm"), ("infer_tfm_window", "infer_dcfm")]
        stated = [[paper["table6_speed"][size][name] for name in pair] for pair in pairs]
        assert [row[1:3] for row in speed["rows"]] == stated
    ablation, windows = cards["dcformer-405m"]["tables"]
    perplexities = [value for name, value in paper["table9_ablation_ppl_405M"].items() if name != "R=2"]
    assert sorted(row[1] for row in ablation["rows"]) == sorted(perplexities)
    assert windows["rows"] == [paper["table10_tradeoffs"]["DCFM++405M_ppl"]]
    for model in paper["table3_scaling_models"]:
        text = cards[f"dcformer-{model['params'].lower()}"]["training"]
        rate = f"{model['lr']:.1e}".replace(".0e-0", "e-").replace("e-0", "e-")
        assert f"on {model['tokens']} tokens" in text and rate in text
