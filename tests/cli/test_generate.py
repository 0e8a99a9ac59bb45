"""`dcformer generate`: text alone on stdout, streamed, in a conversation and for a file; wrong uses in one sentence."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from typer.testing import CliRunner

import dcformer
from dcformer.cli import app
from dcformer.cli import generate as command
from dcformer.head_tasks import build_tokenizer


PROMPT = "There are Paris, Paris, Mumbai. Which is different? The city in"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def call(*arguments, **options):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], **options)


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model that never ends a text, and whose tokenizer names no token to pad with."""
    folder = tmp_path_factory.mktemp("endless")
    tokenizer = build_tokenizer(64)
    tokenizer.pad_token = tokenizer.eos_token = None
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("Ruth likes Paris\n" + PROMPT + "\nWho has a goat?\nMumbai\nThe city in France\n")
    return file


@pytest.mark.parametrize("prompt, given", [(PROMPT, ""), ("-", PROMPT + "\n"), (None, PROMPT + "\n")])
def test_the_answer_alone_is_on_stdout(prompt, given):
    arguments = ["dcformer-tiny"] if prompt is None else ["dcformer-tiny", prompt]
    done = call(*arguments, input=given)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "India\n", "")


def test_text_is_written_word_by_word_while_it_is_generated(endless, monkeypatch):
    written = []
    monkeypatch.setattr(command, "_write", written.append)
    whole = call(endless, PROMPT, "--max-new-tokens", 12)
    assert whole.exit_code == 0 and len(written) > 6
    assert all(" " not in piece.rstrip(" ") for piece in written)
    monkeypatch.undo()
    assert call(endless, PROMPT, "--max-new-tokens", 12).stdout == "".join(written)


def test_a_process_prints_to_a_pipe_and_ends_when_its_reader_leaves(endless, tmp_path):
    """From end to end, with nothing of other libraries on stderr."""
    script = tmp_path / "dcformer"
    script.write_text("from dcformer.cli import main\nmain()\n")
    arguments = [sys.executable, str(script), "generate", str(endless), PROMPT, "--max-new-tokens", "20000"]
    environment = {**os.environ, "PYTHONPATH": str(Path(dcformer.__file__).parents[1])}
    with subprocess.Popen(arguments, stdout=-1, stderr=-1, text=True, env=environment) as process:
        assert process.stdout.read(20)
        assert process.poll() is None, "the text came at its end only"
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert stderr == (
        "Warning: 16 tokens of the prompt and 20000 new ones are more than the 64 that the model was made for; what it "
        "writes beyond them may be poor.\n"
    )


def test_beams_come_at_the_end_and_other_options_reach_generate(monkeypatch):
    from transformers import GenerationMixin

    given, generate = {}, GenerationMixin.generate
    monkeypatch.setattr(
        GenerationMixin,
        "generate",
        lambda self, *ids, **options: given.update(options) or generate(self, *ids, **options),
    )
    done = call("dcformer-tiny", PROMPT, "--num-beams", 3, "--repetition-penalty", 1.1, "--cache", "static")
    assert done.stdout == "India\n"
    wanted = {"num_beams": 3, "repetition_penalty": 1.1, "cache_implementation": "static", "streamer": None}
    assert wanted.items() <= given.items() and "do_sample" not in given
    call("dcformer-tiny", PROMPT, "--top-k", 5, "--min-p", 0.1, "--max-new-tokens", 2)
    assert {"do_sample": True, "top_k": 5, "min_p": 0.1, "max_new_tokens": 2}.items() <= given.items()


def test_a_seed_draws_the_same_text_again(endless):
    first, again, other = (
        call(endless, PROMPT, "--do-sample", "--seed", seed, "--max-new-tokens", 12).stdout for seed in (1, 1, 2)
    )
    assert first == again != other


def test_an_assistant_changes_no_greedy_text(endless):
    texts = [
        call(endless, PROMPT, "--max-new-tokens", 10, "--dtype", "float32", *more).stdout
        for more in ((), ("--assistant-model", "dcformer-tiny"))
    ]
    assert texts[0] == texts[1] != "\n"


def test_a_text_ends_before_a_stop_string(endless):
    whole = call(endless, PROMPT, "--max-new-tokens", 12).stdout
    words = whole.split()
    stopped = call(endless, PROMPT, "--max-new-tokens", 12, "--stop", f"{words[3]} {words[4]}", "--stop", "nowhere")
    assert stopped.stdout.rstrip("\n") == whole[: whole.index(f"{words[3]} {words[4]}")]


def test_a_conversation_answers_every_line(template):
    done = call("dcformer-tiny", "--chat", "--chat-template", template, input=f"{PROMPT}\n\nWho likes Paris?\n")
    answers = done.stdout.splitlines()
    assert done.exit_code == 0 and len(answers) == 2 and done.stderr == ""
    assert (
        done.stdout
        == call("dcformer-tiny", PROMPT, "--chat", "--chat-template", template, input="Who likes Paris?").stdout
    )


@pytest.mark.parametrize("size", [1, 3])
def test_prompts_of_a_file_are_answered_as_alone(endless, prompts, tmp_path, size):
    output = tmp_path / "answers.jsonl"
    options = ("--max-new-tokens", 6, "--dtype", "float32")
    done = call(endless, "--prompts", prompts, "--output", output, "--batch-size", size, *options)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["prompt"] for record in records] == prompts.read_text().splitlines()
    for record in records:
        assert record["generated_text"] == call(endless, record["prompt"], *options).stdout.removesuffix("\n")
    assert list(tmp_path.glob("*.partial")) == []


def test_rows_that_end_early_hold_no_padding(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": 7, "question": PROMPT}, {"id": 8, "question": "Ruth likes Paris. Ruth longs for the city in"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = call("dcformer-tiny", "--prompts", file, "--field", "question", "--max-new-tokens", 9)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [{**line, "generated_text": "x"} for line in lines] == [{**r, "generated_text": "x"} for r in records]
    assert records[0]["generated_text"] == "India\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupted_run_leaves_whole_lines_and_the_old_file(endless, prompts, tmp_path, number):
    output, partial = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.partial"
    output.write_text("old\n")
    prompts.write_text((PROMPT + "\n") * 4000)
    process = os.fork()
    if process == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        done = call(endless, "--prompts", prompts, "--output", output, "--max-new-tokens", 8)
        (tmp_path / "stderr").write_text(done.stderr)
        os._exit(done.exit_code)
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process, number)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert output.read_text() == "old\n"
    text = partial.read_text()
    assert text.endswith("\n") and all(json.loads(line)["prompt"] == PROMPT for line in text.splitlines())
    if number == signal.SIGKILL:
        assert status == -number
        return
    assert status == 128 + number
    said = (tmp_path / "stderr").read_text()
    assert said == f"Interrupted; the answers that were finished are in {partial}.\n"


@pytest.mark.parametrize("policy", [None, "clamp", "pad"])
def test_ids_without_an_embedding_do_what_the_policy_says(tmp_path, policy):
    tokenizer = build_tokenizer(64)
    tiny_model(vocab_size=len(tokenizer) - 9).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    word = tokenizer.convert_ids_to_tokens(len(tokenizer) - 3)
    done = call(tmp_path, f"Ruth {word}", "--max-new-tokens", 2, *(("--oov-policy", policy) if policy else ()))
    assert done.exit_code == (policy is None)
    if policy is None:
        wanted = f"The prompt has token id {len(tokenizer) - 3} at position 2, and '{tmp_path}' has embeddings for ids"
        assert done.stderr.startswith(f"Error: {wanted} below {len(tokenizer) - 9}; use --oov-policy clamp or pad.")


def test_a_prompt_beyond_the_context_is_a_warning(endless):
    done = call(endless, "Paris " * 70, "--max-new-tokens", 2)
    assert done.exit_code == 0 and done.stdout.strip()
    assert done.stderr == (
        "Warning: The prompt has 71 tokens, more than the 64 that the model was made for; what it writes may be poor.\n"
    )


WRONG = {
    "no model": (["nowhere/at/all", "x"], "There is no model folder 'nowhere/at/all'; check the path."),
    "empty prompt": (["dcformer-tiny", " "], "The prompt is empty; give it as an argument"),
    "empty stdin": (["dcformer-tiny"], "The prompt is empty; give it as an argument"),
    "two kinds of prompt": (["dcformer-tiny", "x", "--prompts", "f"], "Both a prompt and --prompts are given"),
    "chat from a file": (["dcformer-tiny", "--chat", "--prompts", "f"], "--chat reads messages from stdin"),
    "no chat template": (["dcformer-tiny", "--chat"], "The tokenizer of 'dcformer-tiny' has no chat template"),
    "no template file": (["dcformer-tiny", "--chat", "--chat-template", "f"], "There is no chat template 'f'"),
    "template alone": (["dcformer-tiny", "x", "--chat-template", "f"], "--chat-template is for --chat only"),
    "output alone": (["dcformer-tiny", "x", "--output", "f"], "--output is for --prompts only; leave it out."),
    "output is a folder": (["dcformer-tiny", "--prompts", "f", "--output", "."], "'.' is a folder; give a file to"),
    "output is a device": (["dcformer-tiny", "--prompts", "f", "--output", "/dev/null"], "'/dev/null' is no ordinary"),
    "output in no folder": (["dcformer-tiny", "--prompts", "f", "--output", "a/b"], "There is no folder 'a' to write"),
    "no file": (["dcformer-tiny", "--prompts", "f.txt"], "There is no file of prompts 'f.txt'; check the path."),
    "greedy temperature": (["dcformer-tiny", "x", "--greedy", "--temperature", "2"], "temperature has no meaning for"),
    "no temperature": (
        ["dcformer-tiny", "x", "--temperature", "0"],
        "temperature must be above 0, got 0.0; use --gree",
    ),
    "top p": (["dcformer-tiny", "x", "--top-p", "2"], "top_p must be at least 0 and at most 1, got 2.0."),
    "no tokens": (["dcformer-tiny", "x", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0."),
    "empty stop": (["dcformer-tiny", "x", "--stop", ""], "A stop string is empty"),
    "batch size": (["dcformer-tiny", "--prompts", "f", "--batch-size", "0"], "--batch-size must be at least 1, got 0."),
    "drafts for beams": (
        ["dcformer-tiny", "x", "--assistant-model", "transformer-tiny", "--num-beams", "2"],
        "An assistant model cannot draft for several beams",
    ),
    "policy of another": (
        ["{llama}", "x", "--oov-policy", "clamp"],
        "oov_policy='clamp' is for DCFormer and DCPythia, and '{llama}' is a llama model; leave it out.",
    ),
    "attention": (["dcformer-tiny", "x", "--attn-implementation", "sdpa"], "attn_implementation='sdpa' cannot compose"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=600, **shape)).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("arguments, sentence", WRONG.values(), ids=WRONG)
def test_a_wrong_use_is_one_sentence(arguments, sentence, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call(*(argument.replace("{llama}", str(llama)) for argument in arguments), input="")
    assert done.exit_code == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("Error: " + sentence.replace("{llama}", str(llama)))


LINES = {
    "no JSON": ("{", r"Line 2 of '.*' is no JSON \(.*\)\."),
    "no object": ("[1]", r"Line 2 of '.*' is no JSON object, but \[1\]; write"),
    "no field": ('{"text": "a"}', "Line 2 of '.*' has no field 'prompt'; its fields are 'text'; name"),
    "no text": ('{"prompt": 3}', "Line 2 of '.*' has 3 in its field 'prompt', which is no prompt; write text there."),
    "empty line": ("", "Line 2 of '.*' is empty; take it out, or write a prompt in it."),
}


@pytest.mark.parametrize("line, sentence", LINES.values(), ids=LINES)
def test_a_bad_line_is_named_by_its_number(line, sentence, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + '\n{"prompt": "b"}\n')
    done = call("dcformer-tiny", "--prompts", file, "--output", tmp_path / "out.jsonl")
    assert done.exit_code == 1 and re.match(f"Error: {sentence}", done.stderr), done.stderr
    assert not list(tmp_path.glob("out*"))


def test_another_model_of_transformers_generates_too(llama):
    done = call(llama, "Ruth likes Paris", "--max-new-tokens", 3)
    assert done.exit_code == 0 and done.stdout.strip()
