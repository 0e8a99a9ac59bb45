"""The runner: records on disk, resuming after an interruption, several processes, and what is refused."""

import dataclasses
import functools
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest


pytest.importorskip("lm_eval")

import datasets
import killable
from command_line import call
from test_eval_model import by_hand
from tiny_models import ANSWERS, tiny_model
from transformers import AutoTokenizer

from dcformer.common.files import file_lock, json_digest
from dcformer.eval import evaluate, evaluator, prefixes, read_records, read_samples, records, tasks_folder
from dcformer.head_tasks import build_tokenizer
from dcformer.loading import fingerprint_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Without ids beyond its embedding, and with a tokenizer that is quick to read."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    tiny_model("dcformer", seed=0, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Eight documents of two tasks."""
    folder = tmp_path_factory.mktemp("data")
    goals = [{"goal": f"Goal {n}", "sol1": "one way", "sol2": "another", "label": n % 2} for n in range(8)]
    names = ("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer")
    questions = [{name: f"{name} {n}" for name in names} for n in range(8)]
    for task, split, rows in (("piqa", "validation", goals), ("sciq", "test", questions)):
        (folder / task).mkdir()
        datasets.Dataset.from_list(rows).to_parquet(folder / task / f"{split}.parquet")
    return str(folder)


@pytest.fixture(scope="module")
def start_in(model, data):
    def start_in(output, *models, **options):
        settings = {"tasks": "piqa,sciq", "dtype": "float32", "device": "cpu", "data_dir": data}
        return evaluate(**{"models": list(models) or model, "output": output, **settings, **options})

    return start_in


@pytest.fixture
def start(start_in, tmp_path):
    return lambda *models, output="out", **options: start_in(tmp_path / output, *models, **options)


def contents(folder):
    """Every file of results, without timings."""
    files = {path.name: path.read_text() for path in sorted(folder.rglob("*shot*"))}
    return {n: {**json.loads(text), "timings": None} if n.endswith(".json") else text for n, text in files.items()}


def test_every_task_and_number_of_shots_has_a_record_in_the_layout_of_lm_eval(start, model, tmp_path):
    seen = []
    made = start(num_fewshot=(0, 2), limit=6, on_progress=lambda *progress: seen.append(progress))
    assert [(r.task, r.num_fewshot) for r in made] == [("piqa", 0), ("piqa", 2), ("sciq", 0), ("sciq", 2)]
    assert {(r.num_samples, r.num_documents, r.is_partial) for r in made} == {(6, 8, True)}
    assert read_records(tmp_path / "out") == made
    (path,) = (tmp_path / "out").rglob("piqa-0shot.json")
    content = json.loads(path.read_text())
    assert content["results"]["dcformer_piqa"]["acc,none"] == made[0].metrics["acc"]["value"]
    assert content["n-samples"]["dcformer_piqa"] == {"original": 8, "effective": 6}
    samples = read_samples(tmp_path / "out", made[0])
    assert [sample["doc_id"] for sample in samples] == [0, 1, 2, 4, 5, 6]  # spread evenly
    for request in samples[3]["requests"]:
        expected = by_hand(model, request["context"], request["continuation"])
        assert request["log_likelihood"] == pytest.approx(expected[0], abs=1e-4)
    assert (f"{model}, piqa, 0-shot", 12, 12) in seen
    assert made[0].observed["documents"]["as_known"] is False and made[0].observed["truncated_documents"] == 0


def test_results_are_reused_if_they_are_complete_and_their_settings_are_the_same(start, monkeypatch, tmp_path):
    start(tasks="piqa")
    scored, score = [], evaluator._score
    monkeypatch.setattr(evaluator, "_score", lambda *given: scored.append(given[2].task) or score(*given))
    monkeypatch.setattr(records, "git_revision", lambda: "another")
    start()
    assert scored == ["sciq"]
    start(seed=1)
    assert scored == ["sciq", "piqa", "sciq"]
    next((tmp_path / "out").rglob("piqa*.jsonl")).unlink()
    (record, _) = start(seed=1)
    assert scored == ["sciq", "piqa", "sciq", "piqa"]
    libraries = {"dcformer", "torch", "transformers", "lm_eval", "datasets", "tokenizers"}
    assert record.settings.versions.keys() == libraries
    for name in vars(record.settings):  # whatever else differs, the result is another one
        changed = {**record.settings.versions, "torch": "1"} if name == "versions" else "another"
        other = dataclasses.replace(record.settings, **{name: changed})
        assert (other == record.settings) == (name == "git_revision")


def test_a_fingerprint_is_of_the_configuration_and_all_weights(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    tiny_model().save_pretrained(folder, max_shard_size="20KB")
    for name in ("extra-00001.bin", "extra-00002.bin", "extra-00003.bin"):
        (folder / name).write_bytes(b"weights")
    read = {"config.json", *(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))}
    assert len(read) > 6
    before = records.model_fingerprint(folder)
    for path in folder.iterdir():
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        assert (records.model_fingerprint(folder) == before) == (path.name not in read), path
        path.write_bytes(content)


DAMAGES = {
    "empty": lambda content, other: b"",
    "cut": lambda content, other: content[: len(content) // 2],
    "of zeros": lambda content, other: bytes(len(content)),
    "with another score": lambda content, other: re.sub(rb'("acc[^"]*": )[01]', rb"\g<1>3", content),
    "with another name": lambda content, other: content.replace(b"doc", b"dog").replace(b'"settings"', b'"settinga"'),
    "of another task": lambda content, other: other,
}


def test_damaged_results_are_named_and_their_tasks_run_again(start, tmp_path, caplog):
    """Every damage, to the samples of a record of SciQ and to a record of PIQA itself."""
    given = {"num_fewshot": range(6), "limit": 4}
    made, damaged = start(**given), []
    whole = contents(tmp_path / "out")
    for name, task in (("samples.jsonl", "sciq"), ("json", "piqa")):
        files = [next((tmp_path / "out").rglob(f"{task}-{shots}shot.{name}")) for shots in range(6)]
        before = [path.read_bytes() for path in files]
        for number, (path, damage) in enumerate(zip(files, DAMAGES.values(), strict=True)):
            path.write_bytes(damage(before[number], before[number - 1]))
            assert path.read_bytes() != before[number]
            (record,) = (r for r in made if (r.task, r.num_fewshot) == (task, number))
            with pytest.raises(ValueError, match=re.escape(str(path))):
                read_samples(tmp_path / "out", record) if task == "sciq" else records.read_record(path)
        damaged += files
    with pytest.raises(ValueError, match="piqa-0shot"):
        read_records(tmp_path / "out")
    start(**given)
    assert contents(tmp_path / "out") == whole
    messages = [record.getMessage() for record in caplog.records if record.name == evaluator.__name__]
    assert len(messages) == 12 and all("has to run again" in message for message in messages)
    assert all(any(str(path) in message for message in messages) for path in damaged)


def test_a_record_names_no_other_file(start, tmp_path):
    """With the right SHA-256, as an attacker would write it to have another file read."""
    start(tasks="piqa")
    (path,) = (tmp_path / "out").rglob("piqa-0shot.json")
    text = path.read_text()
    for task in ("sciq", "/evil", "..", "../evil"):
        content = json.loads(text.replace("dcformer_piqa", f"dcformer_{task}"))
        del content["sha256"]
        if task == "../evil":
            path = path.rename(path.with_name("evil-0shot.json"))
        path.write_text(json.dumps({**content, "sha256": json_digest({**content, "timings": None})}))
        with pytest.raises(ValueError, match=rf"{path.name}' is a copy of '{task}"):
            read_records(tmp_path / "out")


def test_every_model_has_a_folder_of_its_own_below_the_results(tmp_path):
    names = ["..", ".", "../..", "", "a/../../b", "C:\\models", "x", "X", "~/x", "./x", "x y", "x/y", "x__y", "x@y"]
    names += [f"{kind * 200}/{kind * 55}{end}" for kind in "aé語" for end in "12"]
    folders = list(map(records.model_folder, names))
    assert len({*folders}) == len(names) and folders[-1].startswith("語" * 40)
    assert all(folder.strip(".") and not set(folder) & set("/\\:") for folder in folders)
    for folder in folders:
        (tmp_path / folder).mkdir()
    assert [records.model_folder(name) for name in ("a/b", "/a/b", "a/b/")] == ["a__b"] * 3  # for the last, see below


MOMENTS = {
    "while data are read": (evaluator, "_load_task", 2),
    "in the second task": (prefixes.Scorer, "score", 2),
    "while the samples are written": (os, "fsync", 1),
    "between the samples and the record": (records, "write_atomically", 2),
    "after the first record": (evaluator, "_score", 2),
}


@pytest.fixture(scope="module")
def whole(start_in, tmp_path_factory):
    """What a run leaves that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    start_in(folder)
    return contents(folder)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_continues_to_the_same_files_after_an_interruption(moment, start, whole, tmp_path, monkeypatch):
    owner, name, which = MOMENTS[moment]
    original, calls = getattr(owner, name), []

    def stop(*given, **options):
        calls.append(name)
        if len(calls) == which:
            raise KeyboardInterrupt
        return original(*given, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, stop)
        start()
    assert not list((tmp_path / "out").rglob("*.partial"))
    start()
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize("token, policy", [(" " * 30, "clamp"), ("word", "error"), (None, None)])
def test_the_default_clamps_ids_without_a_row_if_all_are_runs_of_spaces(token, policy, model, tmp_path, start):
    """With a row for every id the record names no policy, whatever the option."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if token is not None:
        assert tokenizer.add_tokens([" " * 31, token]) == 2
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    option = "clamp" if token is None else None
    (record,) = start(tasks="piqa", tokenizer=str(tmp_path / "tokenizer"), oov_policy=option)
    assert record.settings.oov_policy == policy
    assert record.settings.tokenizer == fingerprint_tokenizer(tokenizer)


def test_an_id_without_a_row_stops_the_run_or_its_documents_are_counted(model, tmp_path, start):
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.add_tokens("another") == 1
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    given = {"tasks": "sciq,piqa", "tokenizer": str(tmp_path / "tokenizer")}
    with pytest.raises(ValueError, match=f"{len(tokenizer) - 1} in document 0 of dcformer_piqa"):
        start(**given)
    assert [record.task for record in read_records(tmp_path / "out")] == ["sciq"]
    assert [record.observed["oov_documents"] for record in start(**given, oov_policy="clamp")] == [0, 8]


WRONG = {
    "got 0": {"limit": 0},
    "got 65": {"max_length": 65},
    "--max-length 64": {"tasks": "pile_ppl"},
    "got 8": {"num_fewshot": 8},
    "got '-1'": {"batch_size": "-1"},
    "got 'many'": {"batch_size": "many"},
    "'jax'": {"engine": "jax"},
    "boolq": {"data_hash": {"boolq": "any"}},
    "sha256:0000": {"data_hash": {"piqa": "sha256:" + 64 * "0"}},
    "'wrap'": {"oov_policy": "wrap"},
    "models": {"models": []},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_would_be_silently_wrong_is_refused_before_anything_is_computed(words, start, monkeypatch):
    monkeypatch.setattr(evaluator, "_run_jobs", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=words):
        start(**WRONG[words])


def test_files_of_others_and_a_running_evaluation_are_not_overwritten(start, model, tmp_path):
    start(tasks="piqa")
    path = records.record_path(tmp_path / "out", model, "piqa", 0)
    with file_lock(path.parent / ".lock"), pytest.raises(ValueError, match=r"\.lock"):
        start(tasks="piqa")
    (record,) = read_records(tmp_path / "out")
    others = {"not a result": '{"mine": 1}'}
    for another in (model.strip("/").replace("/", "__"), "another"):
        other = records.write_record(tmp_path / "others", dataclasses.replace(record, model=another), [])
        others[f"'{re.escape(another)}'.*give another output"] = other.read_text()
    records.samples_path(path).write_text("")
    for words, content in others.items():
        path.write_text(content)
        with pytest.raises(ValueError, match=words):
            start(tasks="piqa")
        assert path.read_text() == content
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="file"):
        start(tasks="piqa", output="file")


def test_models_with_similar_names_have_results_of_their_own(start, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative, twin = f"x{model}", f"x{model}".replace("/", "__")
    long = "/".join(["n" * 99] * 3)
    for name in (relative, twin, long):
        shutil.copytree(model, name)
    made = start(f"{relative}/", twin, relative, long, f"./{twin}", tasks="piqa")
    assert [record.model for record in made] == [relative, twin, long, f"./{twin}"]
    assert sorted(record.model for record in read_records("out")) == sorted(record.model for record in made)
    shutil.copytree(model, model[1:])
    with pytest.raises(ValueError, match="would have one folder"):
        start(model, model[1:], tasks="piqa", output="clash")
    assert not (tmp_path / "clash").exists()


def test_two_models_are_compared_on_head_tasks(tmp_path, data_dir):
    baseline = ANSWERS.replace("models/dcformer", "models/transformer")
    command = ["eval", ANSWERS, "--baseline", baseline, "--data-dir", data_dir]
    command += ["--suite", "head_tasks", "--limit", "2", "--device", "cpu"]
    result = call(*command, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    made = read_records(tmp_path)
    assert {record.model for record in made} == {ANSWERS, baseline} and len(made) == 14
    assert {record.settings.dtype for record in made} == {"float32"}
    for words in ("Δ to transformer", "K=7", "all K", "pattern", "transformation", "blind choice"):
        assert words in result.output
    assert made[0].timings["cached_tokens"] > 0.7 * made[0].timings["input_tokens"]
    generated = call(*command, "--no-authors", "--output", tmp_path / "generated")
    assert generated.exit_code == 0 and len(read_records(tmp_path / "generated")) == 2, generated.output
    told = call("report", tmp_path, "--format", "json")
    assert told.exit_code == 0 and json.loads(told.output)["numbers"]


def test_commands(data, model, tmp_path):
    base = ["eval", model, "--tasks", "piqa", "--data-dir", data, "--dtype", "float32", "--device", "cpu"]
    result = call(*base, "--num-fewshot", "0,2", "--output", tmp_path)
    assert result.exit_code == 0 and "2-shot" in result.output
    wrong = call(*base, "--num-fewshot", "0,a")
    assert wrong.exit_code == 1 and "must be numbers such as 0,5, got '0,a'" in wrong.output
    wrong = call(*base, "--data-hash", "piqa", "--output", tmp_path)
    assert wrong.exit_code == 1 and "--data-hash" in wrong.output
    listed = call("tasks")
    assert listed.exit_code == 0 and "head_tasks_authors_k7" in listed.output
    assert os.path.isfile(f"{call('tasks', '--folder').output.strip()}/dcformer_piqa.yaml")


def test_a_task_is_added_by_its_file_alone(start, data, tmp_path, monkeypatch):
    folder = shutil.copytree(tasks_folder(), tmp_path / "tasks")
    monkeypatch.setattr("dcformer.eval.task_data.TASKS_FOLDER", folder)
    file, ways = folder / "dcformer_ways.yaml", "doc_to_choice: '{{[sol1, sol2]}}'\ndoc_to_target: label\n"
    rows = shutil.copy(f"{data}/piqa/validation.parquet", tmp_path)
    read = f"dataset_path: parquet\ndataset_kwargs: {{data_files: {rows}}}\ntest_split: train\n"
    file.write_text(
        f"# which way is better\ntask: dcformer_ways\n{read}output_type: multiple_choice\n{ways}doc_to_text: goal"
    )
    listed = call("tasks").output
    assert "ways" in listed and "which way is better" in listed
    (first, second) = start(tasks="ways", num_fewshot=(0, 2))
    assert (first.num_documents, second.num_fewshot) == (8, 2)
    assert call("report", tmp_path / "out").exit_code == 0
    file.write_text(file.read_text().replace("text: goal", "text: 'Goal: {{goal}}'"))
    assert start(tasks="ways")[0].settings.data != first.settings.data  # and not reused
    datasets.Dataset.from_parquet(rows).select(range(5)).to_parquet(rows)
    assert start(tasks="ways")[0].num_documents == 5
    file.write_text("include: column.yaml\ntask: dcformer_ways\ndataset_kwargs: {column: ways}\n")
    with pytest.raises(ValueError, match="where the documents of 'ways' are published"):
        start(tasks="ways")


def test_lm_evals_own_command_reads_our_models(model, tmp_path, monkeypatch):
    """With a task of the user's own."""
    import lm_eval.evaluator
    import lm_eval.tasks

    monkeypatch.setattr(sys, "argv", sys.argv)
    # To index lm-eval's own tasks, and to describe the machine, takes seconds.
    own = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", own)
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda _: None)
    task = {"task": "own", "output_type": "multiple_choice", "dataset_path": "json", "test_split": "test"}
    task["dataset_kwargs"] = {"data_files": {"test": f"{tmp_path}/own.jsonl"}, "cache_dir": str(tmp_path)}
    task |= {f"doc_to_{part}": f"{{{{{part}}}}}" for part in ("text", "choice", "target")}
    (tmp_path / "own.yaml").write_text(json.dumps(task))
    questions = [{"text": f"Question {n}", "choice": [" one", " two"], "target": n % 2} for n in range(5)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    tokenizer, answers = AutoTokenizer.from_pretrained(model), []
    options = ["--tasks", "own", "--include_path", tmp_path, "--device", "cpu", "--log_samples", "--output_path"]
    for kind, name, start in (("dcpythia", "hf", []), ("dcformer", "hf", ["run"]), ("dcformer", "dcformer", ["run"])):
        folder, output = tmp_path / kind, tmp_path / kind / name
        # The authors' names of parameters, as in their files.
        tiny_model(kind, seed=0, vocab_size=len(tokenizer)).save_pretrained(folder, save_original_format=True)
        tokenizer.save_pretrained(folder)
        result = call("lm-eval", *start, "--model", name, "--model_args", f"pretrained={folder}", *options, output)
        assert result.exit_code == 0 and "|own" in result.output, result.output
        (samples,) = output.rglob("samples_own_*.jsonl")
        lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda line: line["doc_id"])
        answers.append([float(answer) for line in lines for ((answer, _),) in line["resps"]])
    assert len(answers[0]) == 10 and answers[2] == pytest.approx(answers[1], rel=1e-5) != answers[0]
    wrong = call("lm-eval", "--model", "dcformer", "--model_args", f"pretrained={tmp_path}", *options, "x")
    assert wrong.exit_code == 1 and "Error: " in wrong.output.splitlines()[-1] and "config.json" in wrong.output


# In the order in which the commands import them.
REPORTING, SCORING = ["scipy", "pandas", "tabulate", "matplotlib"], ["lm_eval", "datasets", "accelerate"]


def call_without(model, data, output):
    """Write what the commands say without a package each, which they can import once they have asked for it."""
    report = ["report", output, "--baseline", model, "--plot", f"{output}/plot.png", "--format", "markdown"]
    score = ["eval", model, "--tasks", "piqa", "--data-dir", data, "--output", f"{output}/new", "--device", "cpu"]
    for name in [name for name in sys.modules if re.match("lm_eval|dcformer.eval", name)]:
        del sys.modules[name]  # read anew
    names, told = [*REPORTING, *SCORING, "sklearn"], []  # accelerate asks for scipy, older Transformers for the last
    loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
    sys.modules.update(dict.fromkeys([*names, *loaded]))
    for name in [*REPORTING, *SCORING]:
        result = call(*(report if name in REPORTING else ["lm-eval", "ls", "tasks"] if name == "lm_eval" else score))
        told.append(f"{name} {result.exit_code} {result.stderr.strip().splitlines()[-1]}")
        del sys.modules[name]
        sys.modules.update({each: module for each, module in loaded.items() if each.partition(".")[0] == name})
    Path(output, "told").write_text("\n".join(told))


def test_without_a_package_of_its_extra_a_command_names_the_extra(start, model, data, tmp_path):
    (record,) = start(tasks="piqa")
    samples = read_samples(tmp_path / "out", record)
    other = [{**sample, "metrics": {"acc": 1 - sample["metrics"]["acc"]}} for sample in samples]
    records.write_record(tmp_path / "out", dataclasses.replace(record, model="other"), other)
    process = killable.Process(call_without, model, data, str(tmp_path / "out"))
    process.join(300)
    told = (tmp_path / "out" / "told").read_text().splitlines()
    for name, line in zip([*REPORTING, *SCORING], told, strict=True):
        assert line.startswith(f"{name} 1 Error: ") and f"needs {name}: pip install" in line and "[eval]" in line


def evaluate_as_one_of_two(rank, options):
    assert len(evaluate(**options)) == (0 if rank else 4)


def test_two_processes_write_what_one_does(start, model, data, tmp_path):
    from accelerate.state import AcceleratorState, PartialState

    both = shutil.copytree(data, tmp_path / "both")
    (both / "wikitext2").mkdir()
    articles = [f" \n = Ruth {number} = \n \n {'Anna has a red car . ' * 60} \n" for number in range(3)]
    (both / "wikitext2" / "wikitext2_test.txt").write_text("".join(articles))
    options = {"models": model, "tasks": "piqa,head_tasks,wikitext2_ppl", "limit": 3, "dtype": "float32"}
    options |= {"device": "cpu", "data_dir": str(both), "max_length": 64, "stride": 16, "text": str(both / "wikitext2")}
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    given = {**options, "output": str(tmp_path / "two")}
    assert killable.run_two(evaluate_as_one_of_two, given, seconds=300) == [0, 0]
    start(output="one", **options)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one.keys() == two.keys()
    for path in filter(lambda path: path.endswith(".json"), one):
        ours, theirs = (next(iter(contents[path]["results"].values())) for contents in (one, two))
        assert [name for name in ours if ours[name] is None] == [name for name in theirs if theirs[name] is None]
        numbers = [name for name, value in ours.items() if isinstance(value, float)]
        assert [ours[name] for name in numbers] == pytest.approx([theirs[name] for name in numbers], rel=1e-5)
        assert one[path]["settings"] == two[path]["settings"]
    assert read_records(tmp_path / "two")[0].timings["processes"] == 2
