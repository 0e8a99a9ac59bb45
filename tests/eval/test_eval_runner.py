"""The runner: records on disk, resuming, several processes, and what it says when something is wrong."""

import json
import multiprocessing
import os
import runpy
import shutil
import socket
import sys

import pytest
import torch


pytest.importorskip("lm_eval")
pytest.importorskip("typer")

from accelerate.state import AcceleratorState
from test_eval_scoring import by_hand, save_model, save_tokenizer
from typer.testing import CliRunner

from dcformer.cli import evaluate as command
from dcformer.eval import provenance, runner
from dcformer.eval.records import read_records, read_samples
from dcformer.eval.runner import evaluate
from dcformer.eval.sources import DOCUMENT_HASHES
from dcformer.eval.suites import SUITES, TASKS, find_tasks, shots_of


def call(function, *arguments):
    import typer

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(function)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def data_dir(fixtures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for column in ("piqa", "sciq", "winogrande", "race_middle"):
        shutil.copytree(fixtures / "benchdata" / column, folder / column)
    return folder


@pytest.fixture(scope="module")
def folders(fixtures, tmp_path_factory):
    made = {}
    for name, kind, rows in (
        ("ours", "dcformer", 50304),
        ("pythia", "gpt_neox", 50304),
        ("few_rows", "dcformer", 50257),
    ):
        made[name] = tmp_path_factory.mktemp(name)
        save_model(made[name], kind, rows)
        save_tokenizer(made[name], fixtures)
    return made


@pytest.fixture
def run(data_dir, folders, tmp_path):
    """`evaluate` on small models, float32, six documents."""

    def run(*names, output="results", baseline=None, **options):
        settings = {"limit": 6, "dtype": "float32", "device": "cpu", "data_dir": data_dir, **options}
        models = [str(folders[name]) for name in names]
        baseline = None if baseline is None else str(folders[baseline])
        return evaluate(models, output=tmp_path / output, baseline=baseline, **settings)

    return run


def contents(folder):
    """All files of a folder of results, without timings."""
    found = {}
    for path in sorted(folder.rglob("*.json*")):
        values = [json.loads(line) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else None
        if values is None:
            values = json.loads(path.read_text())
            values.pop("timings")
        found[path.relative_to(folder).as_posix()] = values
    return found


def test_every_model_task_and_number_of_shots_has_a_record(run, folders, tmp_path):
    seen = []
    records = run(
        "ours",
        baseline="pythia",
        tasks="piqa,sciq",
        num_fewshot=(0, 2),
        on_progress=lambda what, done, total: seen.append((what, done, total)),
    )
    keys = [(record.model, record.task, record.num_fewshot) for record in records]
    models = (str(folders["pythia"]), str(folders["ours"]))
    assert keys == [(model, task, shots) for model in models for task in ("piqa", "sciq") for shots in (0, 2)]
    assert {(r.num_samples, r.num_documents, r.is_partial) for r in records} == {(6, 1838, True), (6, 1000, True)}
    record = records[0]
    assert record.metrics["acc"]["value"] in [hits / 6 for hits in range(7)] and set(record.metrics) == {"acc"}
    assert record.settings["oov_policy"] is None and record.settings["observed"]["oov_documents"] == 0
    assert record.settings["versions"]["torch"] == torch.__version__ and record.settings["seeds"]["fewshot"] == 1234
    assert record.timings["requests"] == 12 and record.timings["seconds"] > 0
    assert (f"{models[0]}, piqa, 0-shot", 12, 12) in seen
    assert len(read_records(tmp_path / "results")) == 8


def test_a_limit_is_spread_over_the_documents_and_the_record_names_them(run, tmp_path):
    (record,) = run("ours", tasks="piqa", limit=4, num_fewshot=1)
    places = [sample["doc_id"] for sample in read_samples(tmp_path / "results", record)]
    assert places == [place * 1838 // 4 for place in range(4)]
    observed = record.settings["observed"]
    assert observed["documents"] == {
        "source": "files of --data-dir",
        "hash": DOCUMENT_HASHES["piqa"],
        "as_known": True,
    }
    assert observed["examples"] == observed["documents"]  # there is no train split
    assert record.settings["limited_to"] == "documents spread evenly"
    with pytest.raises(ValueError, match=rf"piqa, 0-shot, .* have the hash {DOCUMENT_HASHES['piqa']} instead of"):
        run("ours", tasks="piqa", limit=4, data_hash={"piqa": f"sha256:{'0' * 64}"})


@pytest.mark.parametrize(
    "given, message",
    [
        ({"boolq": "any"}, "A hash is given for 'boolq', which is not run; choose from piqa"),
        ({"piqa": "abc"}, "The hash of piqa must be sha256: and 64 digits .* got 'abc'"),
    ],
    ids=["another task", "no hash"],
)
def test_a_hash_must_be_one_of_a_task_that_is_run(run, given, message):
    with pytest.raises(ValueError, match=message):
        run("ours", tasks="piqa", data_hash=given)


def test_tasks_made_with_the_tokenizer_have_records_too(run, fixtures, folders, tmp_path):
    folders["long"] = shutil.copytree(folders["pythia"], tmp_path / "long")
    config = json.loads((tmp_path / "long" / "config.json").read_text())
    (tmp_path / "long" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    options = {"limit": 2, "data_dir": fixtures / "benchdata"}
    answers, pile, wikitext = run(
        "long", tasks="head_tasks_authors_k2,pile_ppl,wikitext2_ppl", num_fewshot=(5,), **options
    )
    assert (answers.num_samples, answers.num_documents, answers.num_fewshot) == (2, 888, 0)
    for record in (pile, wikitext):
        assert record.timings["input_tokens"] == 2 * 2048 and record.settings["max_length"] == 2048
        assert record.is_partial and record.metrics["token_perplexity"]["value"] > 1000
        assert record.settings["observed"]["artificial_ends"] == 1
    # One of each half of the 888 texts, whose tasks stand one after another.
    assert [sample["doc_id"] for sample in read_samples(tmp_path / "results", answers)] == [0, 444]
    hashes = [record.settings["observed"]["documents"]["hash"] for record in (answers, wikitext)]
    assert hashes == [DOCUMENT_HASHES["synthetic"], DOCUMENT_HASHES["wikitext2"]]
    assert len({record.settings["data"] for record in (answers, pile, wikitext)}) == 3


@pytest.mark.parametrize("name", ["ours", "pythia"])
def test_samples_hold_log_likelihoods_of_plain_forward_passes(name, run, folders, tmp_path):
    (record,) = run(name, tasks="winogrande", limit=3)
    samples = read_samples(tmp_path / "results", record)
    assert [sample["doc_id"] for sample in samples] == [0, 1267 // 3, 2 * 1267 // 3]
    for sample in samples:
        for request in sample["requests"]:
            expected, greedy = by_hand(folders[name], request["context"], request["continuation"])
            assert request["log_likelihood"] == pytest.approx(expected, abs=1e-4)
            assert request["is_greedy"] == greedy
    assert record.metrics["acc"]["value"] == sum(sample["metrics"]["acc"] for sample in samples) / 3


@pytest.mark.parametrize("name", ["ours", "pythia"])
def test_the_stock_scorer_of_the_harness_gives_the_same_scores(name, run, tmp_path):
    options = {"tasks": "piqa,winogrande", "limit": 4}
    ours, stock = run(name, output="ours", **options), run(name, output="stock", stock=True, **options)
    for first, second in zip(ours, stock, strict=True):
        assert (first.settings["scorer"], second.settings["scorer"]) == ("dcformer", "stock")
        assert first.metrics == second.metrics and second.timings["requests"] == 8
        samples, others = (
            read_samples(tmp_path / output, record) for output, record in (("ours", first), ("stock", second))
        )
        for sample, other in zip(samples, others, strict=True):
            for request, asked in zip(sample["requests"], other["requests"], strict=True):
                assert request.pop("log_likelihood") == pytest.approx(asked.pop("log_likelihood"), abs=1e-4)
            assert sample == other


def test_results_of_the_two_scorers_are_never_mixed(run):
    run("ours", tasks="piqa", limit=1, stock=True)
    with pytest.raises(ValueError, match=r"was scored by lm-eval's own HFLM .* this run scores by DCFormerLM; give an"):
        run("ours", tasks="piqa", limit=1)
    with pytest.raises(ValueError, match="no policy for unknown token ids, and oov_policy is 'clamp'"):
        run("ours", tasks="piqa", limit=1, stock=True, oov_policy="clamp")


def test_a_stopped_run_goes_on_to_the_same_files(run, tmp_path, monkeypatch):
    options = {"tasks": "piqa,sciq,winogrande", "num_fewshot": (0, 2)}
    run("ours", output="whole", **options)
    scored = []

    def stop_at_the_fourth(*arguments):
        scored.append(arguments[2].task)
        if len(scored) == 4:
            raise KeyboardInterrupt
        return original(*arguments)

    original = runner.score_task
    monkeypatch.setattr(runner, "score_task", stop_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        run("ours", output="stopped", **options)
    assert len(read_records(tmp_path / "stopped")) == 3
    run("ours", output="stopped", **options)
    assert len(scored) == 4 + 3
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")
    run("ours", output="stopped", **options)
    assert len(scored) == 7


def test_other_settings_are_run_again(run, tmp_path, monkeypatch):
    scored = []
    original = runner.score_task
    monkeypatch.setattr(runner, "score_task", lambda *arguments: scored.append(1) or original(*arguments))
    run("ours", tasks="piqa")
    run("ours", tasks="piqa", batch_size=16)  # what "auto" is on a CPU
    assert len(scored) == 1
    for options in ({"limit": 5}, {"seed": 7}, {"batch_size": 2}, {"dtype": "bfloat16"}):
        run("ours", tasks="piqa", **options)
    assert len(scored) == 5
    (tmp_path / "results" / next(iter(contents(tmp_path / "results")))).with_suffix("").with_suffix(
        ".samples.jsonl"
    ).unlink()
    run("ours", tasks="piqa", dtype="bfloat16")
    assert len(scored) == 6


def test_an_id_beyond_the_vocabulary_stops_the_run_and_keeps_what_is_finished(run, tmp_path):
    with pytest.raises(ValueError, match=r"race_middle, 0-shot, .* Token id 502\d\d .* has no row .* 50257") as error:
        run("few_rows", tasks="piqa,race_middle", limit=1)
    assert "\n" not in str(error.value)
    assert [record.task for record in read_records(tmp_path / "results")] == ["piqa"]
    records = run("few_rows", "pythia", tasks="race_middle", limit=2, oov_policy="pad")
    assert [record.settings["oov_policy"] for record in records] == ["pad", None]
    observed = records[0].settings["observed"]
    assert (observed["oov_documents"], observed["truncated_documents"]) == (1, 2)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"data_dir": "nowhere"}, FileNotFoundError, "There is no folder 'nowhere'"),
        ({"tasks": "boolq"}, FileNotFoundError, "There is no folder .*boolq"),
        ({"tasks": "piqqa"}, ValueError, "There is no task 'piqqa'; did you mean 'piqa'"),
        ({"suite": "table5"}, ValueError, "There is no suite 'table5'; did you mean 'table4'"),
        ({"dtype": "float8"}, ValueError, "got 'float8'"),
        ({"batch_size": "0"}, ValueError, "got '0'"),
        ({"limit": 0}, ValueError, "got 0"),
        ({"num_fewshot": (-1,)}, ValueError, "num_fewshot"),
        ({"oov_policy": "wrap"}, ValueError, "got 'wrap'"),
        ({"tokenizer": "/nowhere"}, FileNotFoundError, "no tokenizer in '/nowhere'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_one_sentence_before_anything_is_computed(options, error, words, run, monkeypatch):
    monkeypatch.setattr(runner, "build_scorer", None)
    with pytest.raises(error, match=words) as raised:
        run("ours", **{"tasks": None if "suite" in options else "piqa", **options})
    assert "\n" not in str(raised.value)


def test_a_missing_file_of_a_later_task_is_found_first(run, data_dir, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    shutil.copytree(data_dir, folder)
    (folder / "winogrande" / "validation.parquet").unlink()
    monkeypatch.setattr(runner, "build_scorer", None)
    with pytest.raises(FileNotFoundError, match=r"winogrande, 0-shot.*There is no file .*validation\.parquet"):
        run("ours", tasks="piqa,winogrande", data_dir=folder)


def test_unknown_models(run, folders, tmp_path, data_dir):
    for model, words in (
        ("/nowhere/at/all", "There is no model folder '/nowhere/at/all'"),
        (str(tmp_path), "has no config.json"),
    ):
        with pytest.raises(FileNotFoundError, match=words):
            evaluate([str(folders["ours"]), model], output=tmp_path / "results", tasks="piqa", data_dir=data_dir)
    (tmp_path / "config.json").write_text('{"model_type": "dcformer"}')
    with pytest.raises(FileNotFoundError, match="no weights"):
        provenance.find_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileNotFoundError, match="There is no tokenizer"):
        provenance.find_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ValueError, match="t5 model, which is no causal language model"):
        provenance.find_model(str(tmp_path))
    assert not (tmp_path / "results").exists()


def test_a_tokenizer_may_be_a_single_file(run, fixtures, folders):
    file = str(fixtures / "benchdata/tokenizer/20B_tokenizer.json")
    alone = provenance.find_model(str(folders["ours"]), tokenizer=file)
    assert (alone.tokenizer.eos_token_id, len(alone.tokenizer)) == (0, 50277)
    (record,) = run("ours", tasks="piqa", limit=1, tokenizer=file)
    assert record.num_samples == 1


def test_names_of_tasks_and_suites():
    assert len(find_tasks()) == 11 and len(TASKS) == 24
    assert find_tasks("all,lm_eval_0_4_13") == TASKS and len(find_tasks("all")) == 20
    assert find_tasks(tasks="piqa, dcformer_sciq,piqa") == ("piqa", "sciq")
    assert find_tasks(tasks="head_tasks_authors,pile_ppl") == (*SUITES["head_tasks_authors"], "pile_ppl")
    assert find_tasks("head_tasks_authors,wikitext2")[-1] == "wikitext2_ppl"
    assert shots_of("piqa", (0, 5, 5)) == (0, 5) and shots_of("head_tasks_authors_k2", (0, 5)) == (0,)
    with pytest.raises(ValueError, match="No task is named"):
        find_tasks(tasks=",")


def test_the_fingerprint_is_that_of_the_contents(folders, tmp_path):
    shutil.copytree(folders["ours"], tmp_path / "copy")
    first, copy = (provenance.find_model(str(folder)) for folder in (folders["ours"], tmp_path / "copy"))
    assert provenance.model_fingerprint(first) == provenance.model_fingerprint(copy)
    with (tmp_path / "copy" / "config.json").open("a") as file:
        file.write("\n")
    assert provenance.model_fingerprint(first) != provenance.model_fingerprint(copy)


def test_commands(data_dir, folders, tmp_path):
    arguments = (folders["ours"], "--tasks", "piqa", "--limit", 6, "--data-dir", data_dir, "--dtype", "float32")
    done = call(command.eval_command, *arguments, "--baseline", folders["pythia"], "--output", tmp_path / "results")
    assert done.exit_code == 0, done.output
    assert "PARTIAL" in done.stdout and "piqa, 0-shot: 12 requests" in done.stderr
    for layout, words in (("markdown", "| model "), ("csv", "model,task"), ("html", "<table ")):
        shown = call(command.report_command, tmp_path / "results", "--format", layout)
        assert shown.exit_code == 0 and words in shown.stdout
    failed = call(command.eval_command, tmp_path / "nothing", "--output", tmp_path / "results")
    assert failed.exit_code == 1 and failed.stderr.startswith("Error: ") and failed.stderr.count("\n") == 1
    failed = call(command.eval_command, folders["ours"], "--num-fewshot", "zero")
    assert failed.exit_code == 1 and "such as 0,5; got 'zero'" in failed.stderr
    assert call(command.tasks_command, "--folder").stdout.strip().endswith("tasks")


def test_an_interrupt_says_how_to_go_on(folders, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "evaluate", stop)
    stopped = call(command.eval_command, folders["ours"])
    assert stopped.exit_code == 130 and "run the same command to resume" in stopped.stderr


def evaluate_as_one_of_two(rank, port, arguments, told):
    """`python -m dcformer.eval` in a process that `torchrun` has started; what it says goes to a file."""
    AcceleratorState._reset_state(reset_partial_state=True)  # that of the process from which this one was forked
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    sys.argv = ["dcformer.eval", *map(str, arguments)]
    sys.stdout = sys.stderr = told.open("w", buffering=1)
    runpy.run_module("dcformer.eval", run_name="__main__")


def test_two_processes_write_what_one_does(run, data_dir, folders, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--tasks", "piqa,winogrande", "--limit", 5, "--data-dir", data_dir, "--dtype", "float32"]
    arguments = [folders["ours"], *arguments, "--device", "cpu", "--output", tmp_path / "two"]
    # Forked, so that they need not import all of it again.
    context = multiprocessing.get_context("fork")
    told = [tmp_path / f"{rank}.txt" for rank in range(2)]
    processes = [
        context.Process(target=evaluate_as_one_of_two, args=(rank, port, arguments, told[rank])) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0], [file.read_text() for file in told]
    said = "".join(file.read_text() for file in told)
    assert said.count("piqa, 0-shot: 6 requests") == 1  # three of the five documents
    run("ours", output="one", tasks="piqa,winogrande", limit=5)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one.keys() == two.keys()
    for path, expected in one.items():
        if not path.endswith(".jsonl"):
            # Log-likelihoods, compared below, differ in their last digits, and with them the hashes.
            for name in ("samples_sha256", "values_sha256"):
                assert two[path].pop(name) and expected.pop(name)
            assert two[path] == expected
            continue
        for sample, other in zip(expected, two[path], strict=True):
            likelihoods = [
                [request.pop("log_likelihood") for request in requests["requests"]] for requests in (sample, other)
            ]
            assert likelihoods[0] == pytest.approx(likelihoods[1], abs=1e-4)
            assert sample == other
    assert read_records(tmp_path / "two")[0].timings["processes"] == 2
