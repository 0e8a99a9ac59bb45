"""`dcformer generate` and `chat`: only text on stdout, streamed, in a conversation and for a file that is resumed."""

import functools
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest import mock
from unittest.mock import create_autospec

import command_line
import pytest
import torch
from optimum.quanto.library.extensions.cpp import ext
from tiny_models import ANSWERS, tiny_model
from transformers import GenerationConfig, GenerationMixin

import dcformer
from dcformer.generation import Generated, TextGenerator
from dcformer.head_tasks import build_tokenizer
from dcformer.loading import load_model


PROMPT = "There are Paris, Paris, Mumbai. Which is different? The city in"
PROMPTS = ["Ruth likes Paris", PROMPT, "Who has a goat?", "Mumbai", "The city in France"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


call = functools.partial(command_line.call, "generate")


def records_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model that never ends a text, and whose tokenizer names no token to pad with."""
    folder = tmp_path_factory.mktemp("endless")
    tokenizer = build_tokenizer(64)
    tokenizer.pad_token = tokenizer.eos_token = None
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    return file


@pytest.mark.parametrize("prompt, given", [(PROMPT, ""), ("-", PROMPT + "\n"), (None, PROMPT + "\n")])
def test_the_answer_alone_is_on_stdout(prompt, given):
    done = call(ANSWERS, *([] if prompt is None else [prompt]), input=given)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "India\n", "")


def test_bytes_beyond_ascii_are_utf8_in_every_locale_and_a_byte_order_mark_is_no_text():
    texts = "/* é東 */ int", "/* é東 */ int".encode().decode("ascii", "surrogateescape")
    options = ("--max-new-tokens", 6, "--stop", texts[1][:3])
    answers = {call("dcformer-tiny", *options, text).stdout for text in texts}
    for start in ("\ufeff", ""):
        answers.add(call("dcformer-tiny", *options, input=f"{start}{texts[0]}\r\n".encode()).stdout)
    assert len(answers) == 1 and answers != {"\n"}


def test_a_process_streams_to_a_pipe_and_ends_when_its_reader_leaves(endless):
    """Started as by pip's script: models are registered late, and libraries print nothing."""
    command = [sys.executable, "-c", "from dcformer_command import main; main()"]
    environment = {**os.environ, "PYTHONPATH": str(Path(dcformer.__file__).parents[1])}
    command += ["generate", endless, PROMPT, "--max-new-tokens", "20000"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) as process:
        assert process.stdout.read(20)
        assert process.poll() is None, "the text came at its end only"
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert stderr == "Warning: 16 tokens and 20000 new ones exceed the 64 that the model was made for.\n"


def test_options_reach_generate_and_the_models(monkeypatch):
    generate = create_autospec(GenerationMixin.generate, side_effect=GenerationMixin.generate)
    load = create_autospec(load_model, side_effect=load_model)
    monkeypatch.setattr(GenerationMixin, "generate", generate)
    monkeypatch.setattr("dcformer.loading.load_model", load)
    done = call(ANSWERS, PROMPT, "--num-beams", 3, "--repetition-penalty", 1.1, "--cache", "static")
    given = generate.call_args.kwargs
    assert done.stdout == "India\n" and "do_sample" not in given
    assert {"num_beams": 3, "repetition_penalty": 1.1, "cache_implementation": "static"}.items() <= given.items()
    sampling = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "max_new_tokens": 2}
    source = {"dtype": "float32", "device": "cpu", "attn_implementation": "eager", "oov_policy": "clamp"}
    source |= {"tokenizer": str(ANSWERS), "revision": "main"}
    words = [word for name, value in (sampling | source).items() for word in (f"--{name.replace('_', '-')}", value)]
    call(ANSWERS, PROMPT, *words, "--assistant-model", ANSWERS)
    assert (sampling | {"do_sample": True}).items() <= generate.call_args_list[1].kwargs.items()
    loads = [mock.call(str(ANSWERS), **source), mock.call(str(ANSWERS), dtype="float32", device="cpu")]
    assert load.call_args_list[1:] == loads


def test_temperature_0_is_greedy_whatever_else_is_asked_for_and_a_seed_repeats_samples(endless):
    options = (endless, PROMPT, "--max-new-tokens", 12)
    greedy = call(*options, "--greedy").stdout
    others = ((), ("--do-sample",), ("--greedy",), ("--top-k", 5, "--top-p", 0.9, "--min-p", 0.1))
    assert {call(*options, "--temperature", 0, *more).stdout for more in others} == {greedy}
    first, again, other = (call(*options, "--temperature", 9, "--seed", seed).stdout for seed in (0, 0, 1))
    assert first == again and len({first, other, greedy}) == 3


@pytest.mark.parametrize("asked", [{}, {"q_group_size": 9}, {"q_group_size": 9, "axis_key": -1, "axis_value": -1}])
def test_a_group_of_a_quantised_cache_that_does_not_fit_names_one_that_does(tmp_path, monkeypatch, asked):
    """Of keys and values of 4 heads of 20 channels and 8 more, 5 tokens are 560 numbers."""
    unpack = types.SimpleNamespace(unpack=lambda packed, bits: torch.cat([packed & 15, packed >> 4]))
    monkeypatch.setattr(ext, "_lib", unpack)  # quanto's own is compiled for two minutes
    tokenizer = build_tokenizer(64)
    model = tiny_model("all_global", vocab_size=len(tokenizer), hidden_size=32, num_attention_heads=4, head_dim=20)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(config | ({"cache_config": asked} if asked else {})))
    prompts = [" ".join(PROMPT.split()[:count]) for count in (1, 2, 3, 5)]
    refused = [call(tmp_path, prompt, "--cache", "quantized", "--max-new-tokens", 4) for prompt in prompts]
    (size,) = {re.search(r"q_group_size=(\d+)", done.stderr).group(1) for done in refused if done.exit_code}
    most = asked.get("q_group_size", 64)
    words = f"Group size ({most}) must be a divisor of ("
    assert all(words in done.stderr for done in refused if done.exit_code) and int(size) <= most
    config |= {"cache_config": asked | {"q_group_size": int(size)}}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    for prompt in prompts:
        assert call(tmp_path, prompt, "--cache", "quantized", "--max-new-tokens", 4).exit_code == 0


def test_an_assistant_changes_no_greedy_text_and_is_refused_for_beams_of_the_configuration(endless, tmp_path):
    options = (endless, PROMPT, "--max-new-tokens", 10, "--dtype", "float32")
    assert call(*options).stdout == call(*options, "--assistant-model", ANSWERS).stdout != "\n"
    shutil.copytree(ANSWERS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"num_beams": 2}')
    options = (tmp_path, PROMPT, "--max-new-tokens", 2, "--assistant-model", ANSWERS)
    refused = call(*options)
    assert refused.exit_code == 1 and "drafts for num_beams=1, got 2" in refused.stderr
    assert call(*options, "--num-beams", 1).exit_code == 0


CONVERSATIONS = {"kept": {}, "changed": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}
CONVERSATIONS |= {"drafts": {"prompt_lookup_num_tokens": 2}, "beams": {"num_beams": 2}}


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_a_conversation_continues_from_its_cache_with_the_same_answers(endless, kind, tmp_path, monkeypatch):
    """The changed template changes answers, so that the cache is of another text."""
    template = TEMPLATE.replace("['content']", "['content'].split()[0]") if kind == "changed" else TEMPLATE
    (tmp_path / "chat.jinja").write_text(template)
    model = shutil.copytree(endless, tmp_path / "model")
    GenerationConfig(**CONVERSATIONS[kind]).save_pretrained(model)
    chat = functools.partial(command_line.call, "chat", model)
    options = ("--chat-template", tmp_path / "chat.jinja", "--max-new-tokens", 5)
    kept = chat("-", *options, input="Ruth likes Paris\n\nWho has Mumbai\nWhich is different\n")
    assert kept.exit_code == 0 and len(kept.stdout.split("\n")) >= 4
    stream, asked = TextGenerator.stream, []
    monkeypatch.setattr(TextGenerator, "stream", lambda self, ids, **_: asked.append(ids) or stream(self, ids))
    assert chat("Ruth likes Paris", *options, input="Who has Mumbai\nWhich is different\n").stdout == kept.stdout
    # Messages and answers end with the template's line, and the template says what texts begin with.
    assert [ids.count(ids[-1]) for ids in asked] == [1, 3, 5] and asked[0][0] != 0


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_prompts_of_a_file_are_answered_as_alone_and_records_keep_their_fields(endless, prompts, tmp_path, ending):
    """Three at a time, of five; a record may hold token ids."""
    options = ("--max-new-tokens", 6, "--dtype", "float32")
    file, output, field = prompts, tmp_path / "out.jsonl", "prompt"
    lines = [{"prompt": prompt} for prompt in PROMPTS]
    if ending == "jsonl":
        ids = TextGenerator(load_model(endless)).encode(PROMPT)
        file, field = tmp_path / "prompts.jsonl", "question"
        lines = [{"id": number, field: prompt} for number, prompt in enumerate([*PROMPTS[:4], ids])]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options = (*options, "--field", field)
    done = call(endless, "--prompts", file, "--output", output, "--batch-size", 3, *options)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    for record, line in zip(records_of(output), lines, strict=True):
        prompt = line[field] if isinstance(line[field], str) else PROMPT
        alone = call(endless, prompt, *options[:4]).stdout.removesuffix("\n")
        assert record == {**line, "generated_text": alone}
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.txt", file.name, "out.jsonl"}


def test_a_killed_run_is_resumed_and_no_answer_is_lost_or_doubled(endless, prompts, tmp_path):
    output, unfinished = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.unfinished"
    output.write_text("old\n")
    prompts.write_text("".join(f"{PROMPTS[number % 5]}\n" for number in range(60)))
    options = ["--prompts", prompts, "--max-new-tokens", 8, "--batch-size", 4, "--do-sample", "--seed", 3]
    process = multiprocessing.get_context("fork").Process(target=call, args=(endless, *options, "--output", output))
    process.start()
    while not unfinished.exists() or unfinished.read_bytes().count(b"\n") < 9:
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and output.read_text() == "old\n"
    with unfinished.open("a") as file:
        file.write('{"prompt": "half')
    refused = call(endless, *options[:-1], 4, "--output", output)
    assert refused.exit_code == 1 and "seed: 3" in refused.stderr
    for name in ("answers.jsonl", "whole.jsonl"):
        assert call(endless, *options, "--output", tmp_path / name).exit_code == 0
    texts = [record["generated_text"] for record in records_of(output)]
    assert output.read_text() == (tmp_path / "whole.jsonl").read_text() and len(texts) == 60
    assert texts[:4] != texts[20:24]  # of the same prompts


CHANGED = {
    None: "",
    "model/generation_config.json": "/generation_config.json:",
    "tokenizer/tokenizer.json": "tokenizer:",
}


@pytest.mark.parametrize("changed", CHANGED)
def test_a_run_is_resumed_only_with_the_same_model_and_tokenizer(endless, prompts, tmp_path, monkeypatch, changed):
    for name in ("model", "tokenizer"):
        shutil.copytree(endless, tmp_path / name)
    command = [tmp_path / "model", "--tokenizer", tmp_path / "tokenizer", "--prompts", prompts, "--batch-size", 2]
    command += ["--output", tmp_path / "model" / "answers.jsonl", "--max-new-tokens", 2]
    answers = [[Generated([], "text", [])] * 2, KeyboardInterrupt]
    with monkeypatch.context() as interrupted:
        interrupted.setattr(TextGenerator, "generate", create_autospec(TextGenerator.generate, side_effect=answers))
        assert call(*command).exit_code != 0
    if changed is not None:
        (tmp_path / changed).write_bytes((tmp_path / changed).read_bytes().replace(b"Mark", b"Kram") + b" ")
    again = call(*command, "--device", "cpu")
    assert again.exit_code == (changed is not None)
    assert CHANGED[changed] in again.stderr and bool(again.stderr) == (changed is not None)


@pytest.mark.parametrize("policy", [None, "clamp"])
def test_ids_without_an_embedding_follow_the_policy(tmp_path, policy):
    tokenizer = build_tokenizer(64)
    tiny_model(vocab_size=len(tokenizer) - 9).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    word = tokenizer.convert_ids_to_tokens(len(tokenizer) - 9)
    done = call(tmp_path, f"Ruth {word}", "--max-new-tokens", 2, *(("--oov-policy", policy) if policy else ()))
    assert done.exit_code == (policy is None)
    assert policy or f"token id {len(tokenizer) - 9} at position 2" in done.stderr


WRONG = {
    "no model": ("generate nowhere/at/all x", "nowhere/at/all"),
    "empty prompt": ("generate dcformer-tiny", "text to continue, got ''"),
    "two kinds of prompt": ("generate dcformer-tiny x --prompts f --output o", "without PROMPT"),
    "no chat template": ("chat dcformer-tiny hello", "by --chat-template"),
    "output alone": ("generate dcformer-tiny x --output f", "--output f goes only with --prompts"),
    "no output": ("generate dcformer-tiny --prompts f", "--prompts f goes only with --output"),
    "batches of one": ("generate dcformer-tiny x --batch-size 3", "--batch-size 3 goes only with --prompts"),
    "field of no file": ("generate dcformer-tiny --field text", "--field text goes only with --prompts"),
    "beams of a draft": ("generate dcformer-tiny x --num-beams 2 --assistant-model dcformer-tiny", "got 2"),
    "greedy temperature": ("generate dcformer-tiny x --greedy --temperature 2", "temperature=2.0"),
    "attention": ("generate dcformer-tiny x --attn-implementation sdpa", "sdpa"),
    "not UTF-8": ("generate dcformer-tiny caf\udce9", r"The prompt must be UTF-8, got 'caf\udce9'."),
    "input not UTF-8": ("generate dcformer-tiny", r"input must be UTF-8, got 'a\nb\udce9' in line 2.", b"a\nb\xe9\n"),
    "message not UTF-8": ("chat dcformer-tiny", r"A message must be UTF-8, got '\udcff'", b"\n\xff"),
    "no file": ("generate dcformer-tiny --prompts none.txt --output o", "Error: 'none.txt': No such file"),
    "empty file": ("generate dcformer-tiny --prompts empty.txt --output o", "'empty.txt' is empty"),
    "empty line": ("generate dcformer-tiny --prompts blank.txt --output o", "Line 2 of "),
    "a folder": ("generate dcformer-tiny --prompts one.txt --output folder", "directory"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_use_is_one_line(case, tmp_path, monkeypatch):
    line, words, *given = WRONG[case]
    monkeypatch.chdir(tmp_path)
    Path("blank.txt").write_text("a\n \n")
    Path("empty.txt").touch()
    Path("one.txt").write_text("a")
    Path("folder").mkdir()
    done = command_line.call(*line.split(), input=given[0] if given else "")
    assert done.exit_code == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("Error: ") and words in done.stderr
