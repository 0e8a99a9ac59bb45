"""Texts and tasks of one's own: against plain loops and lm-eval's class, in records and reports."""

import functools
import gzip
import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch


pytest.importorskip("lm_eval")

import datasets
import lm_eval.evaluator
import lm_eval.tasks
from command_line import call
from lm_eval.models.huggingface import HFLM
from test_eval_model import build_model, template, word_tokenizer
from tiny_models import strengthened
from tokenizers import Regex, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from dcformer.eval import build_report, evaluate, find_tasks, read_records, read_samples, suites


WINDOW = 16
# One that is cut before spaces, one without a space, one of a single token, one of one window, and one of two.
DOCUMENTS = ["w3 w4 é w6 w7\nw20 w9 " * 60, "w3" + "w4" * 700, "w7", "w8 " * 15 + "w9", "w5 w6 " * 16]


def save(folder, kind="dcformer", makes_characters=False, processor=None, seed=0):
    strengthened(build_model(kind), seed).save_pretrained(folder)
    tokenizer = word_tokenizer(processor, bos_token="w0")
    if makes_characters:
        tokenizer.backend_tokenizer.model = models.WordLevel({c: n for n, c in enumerate("?w36789 \n")}, unk_token="?")
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.save_pretrained(folder)
    return str(folder)


def write(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rows = [*({"text": text, "other": None} for text in DOCUMENTS), {"text": ""}, {"text": None}]
    return write(tmp_path_factory.mktemp("text") / "own.jsonl", rows)


def scored(model, text, output, stride=5, **options):
    (record,) = evaluate(model, text=text, output=output, stride=stride, max_length=WINDOW, device="cpu", **options)
    return record, read_samples(output, record)


def by_hand(folder, before, stride, places):
    """Log-likelihood, tokens and bytes of pieces of all documents that begin at certain places."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for document in DOCUMENTS:
        encoding = tokenizer(document, add_special_tokens=False, return_offsets_mapping=True)
        lead = [*before, tokenizer.bos_token_id]
        ids, starts = [*lead, *encoding["input_ids"]], [begin for begin, _ in encoding["offset_mapping"]]
        values, logits = [], {}
        for last in range(len(ids) - 1):  # the last token before the one that is scored
            # Windows end after the first 16, and then every few tokens.
            end = min(len(ids) - 1, WINDOW + max(0, math.ceil((last + 1 - WINDOW) / stride)) * stride)
            if end not in logits:
                with torch.no_grad():
                    logits[end] = model(torch.tensor([ids[max(0, end - WINDOW) : end]])).logits[0].log_softmax(-1)
            values.append(float(logits[end][last - end, ids[last + 1]]))
        values = values[len(lead) - 1 :]
        for start, end in itertools.pairwise([*places[document], len(document)]):
            chosen = [value for value, begin in zip(values, starts, strict=True) if start <= begin < end]
            yield math.fsum(chosen), len(chosen), len(document[start:end].encode())


@pytest.mark.parametrize(
    ("kind", "stride"), [("words", 16), ("words", 5), ("characters", 11), ("two before", 7), ("opt", 7)]
)
def test_every_token_of_a_text_counts_once_with_the_context_that_a_stride_leaves(kind, stride, text, tmp_path):
    options = {"two before": {"processor": template("w2 w0 $A w1")}, "opt": {"kind": "opt"}}
    folder = save(tmp_path / "model", makes_characters=kind == "characters", **options.get(kind, {}))
    record, samples = scored(folder, text, tmp_path, stride)
    pieces = [sample["requests"][0]["continuation"] for sample in samples]
    places, rest = {}, iter(pieces)
    for document in DOCUMENTS:
        places[document] = [0]
        while len(piece := next(rest)) + places[document][-1] < len(document):
            places[document].append(places[document][-1] + len(piece))
    assert "".join(pieces) == "".join(DOCUMENTS) and max(map(len, pieces)) < 1024
    assert [len(starts) for starts in places.values()] == [2, 2, 1, 1, 1] and pieces[1].startswith((" ", "\n"))
    expected = list(by_hand(folder, [2] if kind == "two before" else [], stride, places))
    for sample, (value, tokens, n_bytes) in zip(samples, expected, strict=True):
        metrics = sample["metrics"]
        assert metrics["nats_per_token"] == metrics["token_perplexity"] == [pytest.approx(value, abs=1e-3), tokens]
        assert metrics["bits_per_byte"] == [metrics["nats_per_token"][0], n_bytes]
    total, tokens, n_bytes = map(sum, zip(*expected))
    values = {metric: measured["value"] for metric, measured in record.metrics.items()}
    assert values["nats_per_token"] == pytest.approx(-total / tokens, rel=1e-5)
    assert values["token_perplexity"] == pytest.approx(math.exp(-total / tokens), rel=1e-4)
    assert values["bits_per_byte"] == pytest.approx(-total / n_bytes / math.log(2), rel=1e-5)
    assert record.settings.dtype == "float32"


def test_texts_may_be_of_any_form_and_several_and_a_part_is_spread(model, text, tmp_path, monkeypatch):
    rows = [{"text": document} for document in DOCUMENTS]
    write(tmp_path / "all" / "a" / "0.jsonl", rows[:2])
    (tmp_path / "all" / "a" / "1.TXT").write_text("\ufeff" + DOCUMENTS[2])
    (tmp_path / "all" / "b.json.gz").write_bytes(gzip.compress(json.dumps(rows[3:4]).encode()))
    datasets.Dataset.from_list(rows[4:]).to_parquet(tmp_path / "all" / "c.parquet")
    (tmp_path / "all" / "notes.md").write_text("# not read")
    whole, samples = scored(model, text, tmp_path / "out")
    assert whole.task == f"text/{text}" and whole.num_samples == whole.num_documents == 7
    folder, others = scored(model, tmp_path / "all", tmp_path / "out")
    assert folder.metrics == whole.metrics and others == samples
    part, some = scored(model, text, tmp_path / "part", limit=3)
    assert some == [samples[number] for number in (0, 2, 4)] and part.is_partial
    (tmp_path / "all" / "c.parquet").unlink()
    changed, _ = scored(model, tmp_path / "all", tmp_path / "out")
    assert changed.num_samples == 6 and changed.settings.data != folder.settings.data
    for longest, window in ((2048, 64), (32, 32)):  # the model has 64 positions
        monkeypatch.setattr("dcformer.eval.evaluator.WINDOW", longest)
        both = evaluate(model, text=[tmp_path / "all", tmp_path / "all" / "a"], output=tmp_path / "2")
        assert [record.settings.stride for record in both] == [window, window]


QUESTIONS = [{"q": f"w{n} w9", "a": ["w3", "w4 w5"], "gold": n % 2, "answer": f"w{n % 5}"} for n in range(3, 12)]
OWN = {
    "own_choice": "output_type: multiple_choice\ndoc_to_choice: a\ndoc_to_target: gold\nnum_fewshot: 2\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}, {metric: f1}]\n",
    "own_text": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{q}} w20 w21'\n"
    "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n",
    "own_answer": """output_type: generate_until
doc_to_target: answer
generation_kwargs: {until: [w1], max_gen_toks: 4}
metric_list: [{metric: exact_match}, {metric: !function scores.length, aggregation: mean, higher_is_better: true}]
filter_list:
  - {name: first, filter: [{function: regex, regex_pattern: '(w\\d+)'}, {function: take_first}]}
  - {name: all, filter: [{function: take_first}]}
""",
}


@pytest.fixture
def folder(tmp_path):
    folder, file = tmp_path / "tasks", write(tmp_path / "tasks" / "own.jsonl", QUESTIONS)
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
    (folder / "common").write_text(f"{common}doc_to_text: q\nmetadata: {{version: 3}}\n")
    for name, rest in OWN.items():
        (folder / f"{name}.yaml").write_text(f"include: common\ntask: {name}\ntag: owns\n{rest}")
    (folder / "group.yaml").write_text("group: group\ntask: [own_choice, owns]\n")
    (folder / "scores.py").write_text("def length(references, predictions):\n    return len(predictions[0])\n")
    (folder / "helpers.py").write_text("")
    return folder


@pytest.fixture(autouse=True)
def without_an_index(monkeypatch):
    """Without lm-eval's own tasks, whose index takes many seconds."""
    monkeypatch.setattr(suites, "_of_lm_eval", dict)


def test_models_are_compared_per_byte_and_with_one_tokenizer_per_token(model, text, folder, tmp_path):
    same, other = save(tmp_path / "same", seed=1), save(tmp_path / "other", makes_characters=True)
    out, options = tmp_path / "out", ["--text", text, "--max-length", WINDOW, "--device", "cpu"]
    command = ["eval", same, "--baseline", model, *options, "--tasks", "own_text", "--include-path", folder]
    assert call(*command, "--stride", 8, "--output", out).exit_code == 0
    result = call("eval", other, "--baseline", model, *options, "--stride", 8, "--output", out)
    assert result.exit_code == 0 and result.stderr.count("requests") == 1  # of the baseline none again
    assert f"1 of 2 results are of an earlier run, in {out}.\n" in result.stderr
    report = build_report(out, baseline=model)
    frame = report.frame[report.frame.task == f"text/{text}"].set_index(["model", "metric"])
    columns = ("nats_per_token", "token_perplexity", "bits_per_byte")
    for name, metrics in ((same, columns), (other, columns[2:])):
        deltas, row = frame.loc[name].delta.dropna(), frame.loc[name, "bits_per_byte"]
        assert tuple(deltas.index) == metrics
        assert deltas["bits_per_byte"] == pytest.approx(row.value - frame.loc[model, "bits_per_byte"].value)
        assert row.low < row.delta < row.high
    for words in (
        f"other and {Path(model).name} are compared on text/{text} per byte alone",
        "16 tokens that advance by 8: text/",
    ):
        assert words in "\n".join(report.notes)
    assert not any(f"same and {Path(model).name}" in note for note in report.notes)
    (*_, table) = report.tables().values()
    assert [*table.columns[1:]] == [f"own.jsonl {column.replace('_', ' ')}" for column in columns]
    assert not any("different documents" in note for note in build_report(out).notes)  # of one text
    call(*command, "--stride", 4, "--output", tmp_path / "out")
    evaluate(same, text=text, stride=2, max_length=WINDOW, output=out)
    assert "stride is 2 for the former and 4" in "\n".join(build_report(out, baseline=model).notes)


def test_tasks_in_yaml_are_scored_as_by_lm_evals_own_class(model, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda _: None)  # takes seconds
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # JAX is imported here, whose threads a fork could wait for
    progress, given = [], {"include_path": folder, "output": tmp_path / "out", "device": "cpu"}
    made = evaluate(model, tasks=[*OWN], on_progress=lambda *done: progress.append(done), **given)
    harness = HFLM(model, backend="causal", batch_size=4, dtype="float32", device="cpu")
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    expected = lm_eval.simple_evaluate(model=harness, tasks=[*OWN], task_manager=manager, bootstrap_iters=2)
    assert [(record.task, record.num_fewshot) for record in made] == [*zip(OWN, (2, 0, 0))]
    for record in made:
        results = {key.removesuffix(",none"): value for key, value in expected["results"][record.task].items()}
        for metric, measured in record.metrics.items():
            assert measured["value"] == pytest.approx(results[metric], rel=1e-5)
            name, _, filtered = metric.partition(",")
            stderr = results[f"{name}_stderr{filtered and f',{filtered}'}"]
            if name in ("acc", "length"):
                assert measured["stderr"] == pytest.approx(stderr)
        assert record.settings.task_version == 3 and len(record.metrics) > 1
    assert {*read_samples(given["output"], made[0])[0]["metrics"]} == {"acc", "acc_norm"}  # an F-score has none
    texts = [sample["resps"][0] for sample in expected["samples"]["own_answer"] if sample["filter"] == "all"]
    assert [sample["requests"][0]["generated"] for sample in read_samples(given["output"], made[2])] == texts
    assert len(set(map(tuple, texts))) > 1 and (f"{model}, own_answer, 0-shot", 9, 9) in progress
    assert {*made[2].metrics} == {f"{name},{kind}" for name in ("exact_match", "length") for kind in ("first", "all")}
    assert read_records(given["output"]) == sorted(made, key=lambda record: record.task)


@pytest.mark.parametrize("name", ["own_answer.yaml", "common", "scores.py", "helpers.py", "own.jsonl"])
def test_a_task_runs_again_if_one_of_its_files_changes(name, model, folder, tmp_path, monkeypatch):
    run = functools.partial(evaluate, model, tasks="own_answer", include_path=folder, output=tmp_path / "out")
    (first,) = run()
    monkeypatch.setattr("dcformer.eval.evaluator._run_jobs", lambda jobs, *_: pytest.fail(str(jobs)))
    assert run() == [first]
    (folder / name).write_text((folder / name).read_text() + "\n")
    with pytest.raises(pytest.fail.Exception, match="own_answer"):
        run()


def test_names_are_of_tasks_groups_and_tags_and_never_taken_for_the_papers(model, folder, tmp_path):
    assert find_tasks(tasks="group", include_path=folder) == ("own_choice", "own_answer", "own_text")
    assert find_tasks(tasks="owns,dcformer_piqa", include_path=folder)[-1] == "piqa"
    definition = (folder / "own_choice.yaml").read_text()
    for name in ("piqa", "average", "dcformer_mine", "a/b é"):
        (folder / f"{len(name)}.yaml").write_text(definition.replace("task: own_choice", f"task: {name}"))
    with pytest.raises(ValueError, match=r"two tasks 'piqa': dcformer_piqa is of this package, lm_eval_piqa in '"):
        find_tasks(tasks="piqa", include_path=str(folder))
    names, row = ["lm_eval_piqa", "average", "dcformer_mine", "a/b é"], tmp_path / "pythia-2.8b"
    row.symlink_to(model)
    made = evaluate(row, tasks=names, include_path=folder, output=tmp_path / "out", num_fewshot=0, device="cpu")
    assert [record.task for record in made] == ["lm_eval_piqa", "lm_eval_average", *names[2:]]
    assert {record.num_samples for record in read_records(tmp_path / "out")} == {9}
    report = build_report(tmp_path / "out")
    assert not report.banners and report.frame.paper.isna().all()
    assert {*report.tables()} == {"Other results, 0-shot; acc in percent"}


WRONG = {
    "no task 'other'": ["--tasks", "other"],
    "no task 'gone', which 'half' names": ["--tasks", "half"],
    "'changed' has settings for its tasks": ["--tasks", "changed"],
    "no folder 'none'": ["--tasks", "own_text", "--include-path", "none"],
    r"bad\.yaml' cannot be read: .*line 2": ["--tasks", "bad"],
    "own_data .*FileNotFoundError: .*none.jsonl": ["--tasks", "own_data"],
    r"to generate \(64\) must be less than model's maximum sequence length \(64\)": ["--tasks", "own_long"],
    "no 'none.txt'; --text names": ["--text", "none.txt"],
    r"'notes\.md' does not end in \.jsonl": ["--text", "notes.md"],
    "'empty' has no file that ends": ["--text", "empty"],
    "no text in 'empty.txt'": ["--text", "empty.txt"],
    "no text in 'empty.jsonl'": ["--text", "empty.jsonl"],
    "no token of what is scored of 'blank.txt'": ["--text", "blank.txt"],
    r"latin\.txt', document 1: 'utf-8' codec": ["--text", "latin.txt"],
    r"junk\.jsonl' is not JSON in line 1": ["--text", "junk.jsonl"],
    r"own\.jsonl', line 1: there is no 'body'; the columns are text": ["--text", "own.jsonl", "--text-column", "body"],
    "stride must be from 1 to 64, .* got 65": ["--text", "own.jsonl", "--stride", 65],
    "stride must be from 1 to 16, .* got 0": ["--text", "own.jsonl", "--stride", 0, "--max-length", 16],
    "stride is of a text": ["--tasks", "own_text", "--stride", 1],
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_measured_is_refused_in_one_sentence(words, model, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "bad.yaml").write_text("task: bad\n  doc: [")
    rest = (folder / "own_text.yaml").read_text()
    (folder / "data.yaml").write_text(rest.replace("own_text", "own_data") + "dataset_kwargs: {data_files: none.jsonl}")
    answer = (folder / "own_answer.yaml").read_text().replace("own_answer", "own_long")
    (folder / "long.yaml").write_text(answer.replace("max_gen_toks: 4", "max_gen_toks: 64"))
    (folder / "half.yaml").write_text("group: half\ntask: [own_text, gone]\n")
    (folder / "changed.yaml").write_text("group: changed\ntask: [{task: own_text, num_fewshot: 1}]\n")
    files = {"notes.md": b"w3", "empty.txt": b"", "blank.txt": b" ", "latin.txt": b"\xe9", "empty/x.md": b""}
    files |= {"junk.jsonl": b"{", "own.jsonl": b'{"text": "w3"}', "empty.jsonl": b'{"text": ""}'}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    options = ["--include-path", folder, *WRONG[words], "--device", "cpu", "--output", "out"]
    result = call("eval", model, *options)
    (line,) = result.stderr.splitlines()[-1:]
    assert result.exit_code == 1 and re.search(f"^Error: .*{words}", line) and not [*tmp_path.glob("out/*/*shot*")]
