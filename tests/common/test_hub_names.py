"""Models and data sets by their names on the Hub, read from a cache of it without a network."""

import json
import shutil
import signal
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import command_line
import pytest
import torch
from hub_cache import add_to_cache
from huggingface_hub.utils import filter_repo_objects
from test_loading import write_authors_folder
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

from dcformer.common.files import json_digest
from dcformer.common.hub import load_from_hub
from dcformer.conversion import authors_torch
from dcformer.generation import TextGenerator
from dcformer.head_tasks import build_tokenizer
from dcformer.loading import find_model
from dcformer.training import load_recipe
from dcformer.training.data import build_datasets
from dcformer.training.run import fingerprint_inputs


datasets = pytest.importorskip("datasets")
NAMES = ("acme/ours-1.0", "acme/theirs", "acme/sharded")
PROMPT = "< Ann has a dog. >. Ann has a"


def make_model(seed: int = 0):
    return tiny_model(vocab_size=len(build_tokenizer()), max_position_embeddings=512, seed=seed)


def save(folder: Path, seed: int = 0) -> Path:
    make_model(seed).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def save_as_the_authors_do(folder: Path, shards: int) -> Path:
    """Their keys and names of parameters, in one torch file or several."""
    weights = write_authors_folder(folder, make_model())
    build_tokenizer().save_pretrained(folder)
    if shards == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return folder
    files = {name: f"pytorch_model-{n % shards + 1:05}-of-{shards:05}.bin" for n, name in enumerate(weights)}
    for file in set(files.values()):
        torch.save({name: weights[name] for name in weights if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder, cache = tmp_path_factory.mktemp("folders"), tmp_path_factory.mktemp("hub")
    longer = AutoTokenizer.from_pretrained(save(folder / "other", seed=1))
    longer.add_tokens(["many words"])
    longer.save_pretrained(folder / "other")
    add_to_cache(cache, "acme/steps", folder / "other", refs=["main"])
    add_to_cache(cache, "acme/steps", save(folder / "ours"), refs=["step/10", "v1"])
    add_to_cache(cache, "acme/ours-1.0", folder / "ours")
    add_to_cache(cache, "acme/theirs", save_as_the_authors_do(folder / "theirs", 1))
    add_to_cache(cache, "acme/sharded", save_as_the_authors_do(folder / "sharded", 3))
    for split in ("train", "validation"):
        rows = [{"text": f"Ann has {n} dogs. " * 9} for n in range(9)]
        datasets.Dataset.from_list(rows).to_parquet(folder / "text" / "data" / f"{split}-00000-of-00001.parquet")
    add_to_cache(cache, "acme/text", folder / "text", kind="datasets")
    return cache


@pytest.fixture
def hub(cache, tmp_path, monkeypatch):
    """The cache of this process, whose working directory is an empty folder."""
    shutil.copytree(cache, tmp_path / "hub", symlinks=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # seconds after a stream
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "hub"


def call(line: str, *words: str):
    return command_line.call(*line.split(), *words)


def commit_of(hub: Path, name: str, ref: str = "main") -> str:
    return (hub / f"models--{name.replace('/', '--')}" / "refs" / ref).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_every_command_takes_a_model_of_the_hub(name, hub, monkeypatch):
    served = []
    monkeypatch.setattr("os.execve", lambda *command: served.append(command))
    monkeypatch.setattr("dcformer.serving.engines._SERVER_PACKAGES", ())  # which the tests do without
    monkeypatch.setattr("dcformer.analysis.analyse", lambda model, *_, **__: model.name_or_path)  # drawing takes long
    generate, other = "generate {} x --greedy --max-new-tokens 9", "verify {} acme/steps"
    commands = [generate, other, "verify {} acme/ours-1.0", "inspect {}", "analyse {} --text abc"]
    commands += ["serve {} --engine transformers"]
    commands += ["convert to-maxtext {} jax --approximate"] if find_spec("tensorstore") else []
    commands += ["convert torch {} acme", "verify {} acme", "convert torch acme {}"]  # in the end a folder of its name
    done = {command: call(command.format(name)) for command in commands}
    assert {command: ended.stderr for command, ended in done.items() if ended.exit_code} == {other: ""}
    assert served[0][1][-6:-4] == ["serve", name]
    assert done[generate].stdout == call(generate.format("acme/ours-1.0")).stdout != "\n"


@pytest.mark.parametrize("name", NAMES)
def test_transformers_and_lm_eval_load_models_of_the_hub(name, hub):
    expected = find_model("acme/ours-1.0").load(device="cpu")
    tokens = torch.tensor([AutoTokenizer.from_pretrained(name)(PROMPT)["input_ids"]])
    for load in (AutoModelForCausalLM, type(expected)):
        assert torch.equal(load.from_pretrained(name)(tokens).logits, expected(tokens).logits)
    assert AutoModel.from_pretrained(name)(tokens).last_hidden_state.isfinite().all()
    assert pipeline("text-generation", name, device="cpu")(PROMPT, max_new_tokens=2)[0]["generated_text"]
    pytest.importorskip("lm_eval")
    from dcformer.eval import DCFormerLM

    scorer = DCFormerLM("acme/steps", revision="v1", dtype="float32", device="cpu")
    assert torch.equal(scorer.model(tokens).logits, expected(tokens).logits)


def test_all_files_are_of_one_commit(hub, monkeypatch):
    expected, read = find_model("acme/steps", revision="v1"), AutoConfig.from_pretrained

    def read_after_a_push(*arguments, **options):
        (hub / "models--acme--steps" / "refs" / "v1").write_text(commit_of(hub, "acme/steps"))
        return read(*arguments, **options)

    monkeypatch.setattr(AutoConfig, "from_pretrained", read_after_a_push)
    model = find_model("acme/steps", revision="v1")
    assert model.commit == expected.commit and len(model.tokenizer) == len(build_tokenizer())
    assert torch.equal(model.load(device="cpu").lm_head.weight, expected.load(device="cpu").lm_head.weight)


def test_results_are_of_a_commit(hub):
    pytest.importorskip("lm_eval")
    from dcformer.eval import read_records

    line, commit = "eval --tasks head_tasks --limit 1 --device cpu --output out", commit_of(hub, "acme/steps", "v1")
    assert call(f"{line} acme/ours-1.0 acme/theirs --baseline acme/steps").exit_code == 0
    for revision in ("step/10", "v1", commit, "main"):
        ended = call(f"{line} acme/steps --revision", revision)
        assert ended.exit_code == 0, ended.output
        assert (" requests" in ended.stderr) == (revision != "main")
    named = {record.model: record for record in read_records("out")}
    of_v1 = [f"acme/steps@{revision}" for revision in ("step/10", "v1", commit)]
    assert named.keys() == {*NAMES[:2], "acme/steps", *of_v1}
    assert {named[name].settings.model for name in of_v1} == {f"commit:{commit}"}
    assert len({named[name].metrics["token_perplexity"]["value"] for name in (*NAMES[:2], *of_v1)}) == 1
    before = named["acme/steps"]
    assert before.settings.model == f"commit:{commit_of(hub, 'acme/steps')}"
    (hub / "models--acme--steps" / "refs" / "main").write_text(commit)  # as somebody's push
    assert call(f"{line} acme/steps --baseline acme/theirs").exit_code == 0
    (after,) = (record for record in read_records("out") if record.model == "acme/steps")
    assert after.settings.model == f"commit:{commit}" and after.metrics != before.metrics
    assert call("report out --baseline acme/steps@v1").exit_code == 0


def test_data_sets_are_read_from_the_cache_too(hub, tmp_path):
    pytest.importorskip("lm_eval")
    rows = [{"goal": f"Goal {n}", "sol1": "one way", "sol2": "another", "label": n % 2} for n in range(3)]
    for split in ("train", "validation"):
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "piqa" / "data" / f"{split}-00000-of-00001.parquet")
    add_to_cache(hub, "baber/piqa", tmp_path / "piqa", kind="datasets")
    with pytest.raises(FileNotFoundError, match="no file or folder 'baber/piqa'"):
        load_from_hub(datasets.load_dataset, "baber/piqa", revision="v1")
    line = "eval acme/ours-1.0 --data-hash piqa=any --device cpu --tasks"
    assert call(f"{line} piqa").exit_code == 0
    unreachable = {"boolq": "aps/super_glue", "pile_ppl --max-length 64": "mit-han-lab/pile-val-backup"}
    unreachable |= {"logiqa": "give --data-dir", "head_tasks_authors_k3": "--no-authors"}
    for task, name in unreachable.items():
        failed = call(line.replace("--data-hash piqa=any", ""), *task.split())
        assert failed.exit_code == 1 and name in failed.stderr and failed.stderr.count("\n") == 1


def test_a_run_and_its_answers_are_of_a_commit(hub, monkeypatch):
    Path("run.yaml").write_text(
        "{output: run, tokenizer: acme/ours-1.0, model: {pretrained: acme/steps}, data: {source: acme/text, "
        "sequence_length: 16}, training: {max_steps: 4, save_steps: 1, batch_tokens: 16, tensorboard: false}}"
    )
    Path("prompts").write_text(f"{PROMPT}\n" * 3)
    answer = "generate acme/steps --prompts prompts --output out.jsonl --greedy --max-new-tokens 2 --batch-size 1"
    assert call("train run.yaml").exit_code == 0
    recipe = load_recipe("run.yaml")
    (streamed, _) = build_datasets(replace(recipe.data, streaming=True), build_tokenizer())
    assert len(next(iter(streamed))["input_ids"]) == 16
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # by what a shell starts in the background
    with monkeypatch.context() as patch:
        generate = TextGenerator.generate
        interrupted = iter((generate, lambda *_: signal.raise_signal(signal.SIGINT)))
        patch.setattr(TextGenerator, "generate", lambda *given: next(interrupted)(*given))
        assert call(answer).exit_code == 130
    signal.signal(signal.SIGINT, ignored)
    read = fingerprint_inputs(recipe)
    assert read["model.pretrained"] == commit_of(hub, "acme/steps")
    assert read["data.source"] == json_digest([None, "train", (hub / "datasets--acme--text/refs/main").read_text()])
    shutil.rmtree("run/checkpoint-4")  # as if the run had been killed
    (hub / "models--acme--steps" / "refs" / "main").write_text(commit_of(hub, "acme/steps", "v1"))
    assert "model.pretrained 'acme/steps' has other content" in call("train run.yaml").stderr
    changed = call(answer)
    assert changed.exit_code == 1 and "out.jsonl" in changed.stderr
    (hub / "models--acme--steps" / "refs" / "main").write_text(read["model.pretrained"])
    assert call(answer).exit_code == 0 and len(Path("out.jsonl").read_text().splitlines()) == 3


def test_a_converted_model_of_the_hub_is_verified_with_all_of_its_files(hub, monkeypatch):
    assert call("convert torch acme/theirs converted --with-code").exit_code == 0
    files = [path.name for path in Path("converted").iterdir()]
    patterns = []
    monkeypatch.setattr(authors_torch, "snapshot_download", lambda _, **given: patterns.extend(given["allow_patterns"]))
    with pytest.raises(TypeError):
        authors_torch.local_folder("acme/converted")
    monkeypatch.undo()
    assert [*filter_repo_objects(files, allow_patterns=patterns)] == files and len(files) > 10


def test_a_revision_of_the_hub_is_converted_and_inspected(hub):
    for kind, folder in (("torch", "ours"), ("to-maxtext --approximate", "jax")):
        for name in ("acme/steps old --revision v1", "acme/ours-1.0 same", "acme/steps other"):
            assert call(f"convert {kind} {name.replace(' ', f' {folder}-', 1)}").exit_code == 0
        assert [call(f"verify {folder}-old {folder}-{name}").exit_code for name in ("same", "other")] == [0, 1]
    assert commit_of(hub, "acme/steps", "v1") in call("inspect acme/steps --json --revision v1").stdout
    for command in ("inspect {} --revision v1", "convert torch {} new --revision v1"):
        assert "revision='v1' is of a name on the Hub, not of 'ours-old'" in call(command.format("ours-old")).stderr
        assert "in its revision 'v1' is not in the cache" in call(command.format("acme/theirs")).stderr


@pytest.mark.parametrize(
    "command",
    ["generate {} x", "chat {}", "demo {}", "inspect {}", "verify {}", "verify acme/theirs {}", "convert torch {} out"]
    + ["convert upcycle {} out", "convert upcycle {}/x.gguf out", "convert to-maxtext {} out", "analyse {} --text x"]
    + ["analyse acme/theirs --text x --tokenizer {}", "generate acme/theirs x --assistant-model {}", "serve {}"]
    + ["eval {}", "eval acme/theirs --baseline {}", "generate acme/theirs x --tokenizer {}", "card {}"]
    + ["eval acme/theirs --revision {}", "convert torch acme/theirs out --tokenizer {}"]
    + ["train dcformer++-405m --set tokenizer=dcformer-tiny --set data.streaming=false --set data.source={}"],
)
def test_a_name_that_is_not_there_is_named_in_one_sentence(command, hub, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the Hub was asked"))
    monkeypatch.setattr("dcformer.demo.page.import_gradio", object)  # takes seconds
    is_model = not any(word in command for word in ("--revision", "card", ".gguf", "train"))
    for name in ("acme/absent", "absent", "Dcformer-tny"):  # the second may be a misspelt folder
        failed = call(command.format(name))
        assert failed.exit_code == 1 and failed.stdout == ""
        *before, sentence = failed.stderr.splitlines()  # training says what it reads
        assert name in sentence and len(before) == command.startswith("train")
        missing = "not in the cache of the Hub" if "/" in name or "--revision" in command else "There is no f"
        assert missing in failed.stderr or command.startswith("card")
        assert name != "Dcformer-tny" or not is_model or "dcformer-tiny and transformer-tiny" in sentence
