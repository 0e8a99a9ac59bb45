"""examples/batch_generation.py with Transformers: answers in order, runs that are cut, and what is refused."""

import json
import re
import time

import pytest
import torch
from killable import start
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import dcformer
from examples import batch_generation


QUESTION = "There are Paris, Paris, Mumbai. Which is different? The city in"
PERSONS = "< Ruth has a violin. Carol has a beetle. Ronald has blueberries. >. Ruth has a kind of"
# Answers of none, one and two words before they end.
RECORDS = [
    {"id": "question", "prompt": QUESTION},
    {"prompt_token_ids": [9, 7, 9, 20], "note": "kept"},
    {"id": "short", "prompt": PERSONS},
    {"id": 7, "prompt": "Ruth likes Paris. " * 4},
    {"prompt_token_ids": [11, 12, 13]},
]


def write_lines(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def read_lines(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    write_lines(file, RECORDS)
    return file


@pytest.fixture
def output(tmp_path):
    return tmp_path / "answers.jsonl"


def call(prompts, output, *options):
    values = ["dcformer-tiny", prompts, output, "--engine", "transformers", "--max-new-tokens", 8, *options]
    return CliRunner().invoke(batch_generation.app, [*map(str, values)])


def error_of(done):
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return line


def cut_after(count, monkeypatch):
    """Let Ctrl-C end a run after so many answers."""
    answer, answers = batch_generation.Job.answer, []

    def answer_or_end(*arguments):
        if len(answers) == count:
            raise KeyboardInterrupt
        answers.append(None)
        return answer(*arguments)

    monkeypatch.setattr(batch_generation.Job, "answer", answer_or_end)


def begin_and_cut(count, prompts, output, *options):
    with pytest.MonkeyPatch.context() as patched:
        cut_after(count, patched)
        done = call(prompts, output, *options)
    assert done.exit_code == 130 and done.stderr.startswith("Interrupted; the answers so far are in")
    assert not output.exists()
    return output.with_name(f"{output.name}.unfinished")


def test_answers_stand_in_the_order_of_the_prompts_and_are_those_of_generate(prompts, output):
    assert call(prompts, output, "--batch-size", 2, "--max-new-tokens", 2).exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(dcformer.pretrained_path("dcformer-tiny"))
    tokenizer = AutoTokenizer.from_pretrained(dcformer.pretrained_path("dcformer-tiny"))
    answers = read_lines(output)
    assert len(answers) == len(RECORDS)
    for record, answer in zip(RECORDS, answers):
        ids = record["prompt_token_ids"] if "prompt_token_ids" in record else tokenizer(record["prompt"])["input_ids"]
        new = model.generate(torch.tensor([ids]), max_new_tokens=2, do_sample=False)[0, len(ids) :].tolist()
        expected = {**record, "generated_text": tokenizer.decode(new, skip_special_tokens=True)}
        expected["finish_reason"] = "stop" if new[-1] in model.generation_config.eos_token_id else "length"
        if "prompt_token_ids" in record:
            expected["generated_token_ids"] = new
        assert answer == expected
    assert {answer["finish_reason"] for answer in answers} == {"stop", "length"}


def test_a_killed_run_goes_on_where_it_stopped(prompts, output, tmp_path):
    write_lines(prompts, [{"prompt_token_ids": [9, 7, 9, 20 + number]} for number in range(8)])
    options = {"engine": "transformers", "max_new_tokens": 24, "batch_size": 1}
    process = start(batch_generation.main, "dcformer-tiny", prompts, output, **options)
    unfinished = output.with_name("answers.jsonl.unfinished")
    deadline = time.monotonic() + 300
    while not (unfinished.exists() and unfinished.read_bytes().count(b"\n") >= 1):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    kept = unfinished.read_bytes().count(b"\n")
    assert not output.exists()

    done = call(prompts, output, "--max-new-tokens", 24)

    whole = tmp_path / "whole.jsonl"
    call(prompts, whole, "--max-new-tokens", 24)
    assert f"{kept} of 8 answers are there" in done.stderr
    assert output.read_bytes() == whole.read_bytes()
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith("answers")}
    assert left == {"answers.jsonl", "answers.jsonl.settings.json"}


def test_a_half_written_line_is_answered_again(prompts, output, tmp_path):
    unfinished = begin_and_cut(3, prompts, output)
    content = unfinished.read_bytes()
    unfinished.write_bytes(content[:-9])

    done = call(prompts, output)

    assert "The last line of" in done.stderr and "2 of 5 answers are there" in done.stderr
    call(prompts, tmp_path / "whole.jsonl")
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_what_is_drawn_does_not_depend_on_where_a_run_was_cut(prompts, output, tmp_path):
    options = ("--temperature", 4, "--seed", 3, "--batch-size", 2)
    begin_and_cut(3, prompts, output, *options)
    assert call(prompts, output, *options).exit_code == 0
    call(prompts, tmp_path / "whole.jsonl", *options)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    call(prompts, tmp_path / "greedy.jsonl")
    assert output.read_bytes() != (tmp_path / "greedy.jsonl").read_bytes()


def test_a_finished_run_is_not_run_again(prompts, output, monkeypatch):
    call(prompts, output)
    before = output.stat().st_mtime_ns
    cut_after(0, monkeypatch)
    done = call(prompts, output)
    assert done.exit_code == 0 and done.stderr.startswith("All 5 answers are in")
    assert output.stat().st_mtime_ns == before


@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "cut"])
def test_other_settings_and_other_prompts_are_not_mixed_in(prompts, output, is_finished):
    if is_finished:
        call(prompts, output)
    else:
        begin_and_cut(2, prompts, output)
    assert "with max_new_tokens 8, which is 9 now;" in error_of(call(prompts, output, "--max-new-tokens", 9))
    write_lines(prompts, RECORDS[::-1])
    assert "from other prompts than the file holds now;" in error_of(call(prompts, output))


def test_a_damaged_line_among_the_answers_is_named(prompts, output):
    unfinished = begin_and_cut(3, prompts, output)
    lines = unfinished.read_text().splitlines()
    unfinished.write_text("\n".join([lines[0], lines[1][:5], lines[2]]) + "\n")
    assert "Line 2 of" in error_of(call(prompts, output)) and len(unfinished.read_text().splitlines()) == 3


def test_a_file_of_another_origin_is_not_overwritten(prompts, output):
    output.write_text("mine\n")
    assert "without 'answers.jsonl.settings.json'" in error_of(call(prompts, output))
    assert output.read_text() == "mine\n"


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "Line 2 of .* is no JSON"),
        ("\xff", "Line 2 of .* is no JSON"),
        ("", "Line 2 of .* is no JSON"),
        ("3", 'Line 2 of .* needs one of "prompt" and "prompt_token_ids", and is 3'),
        ('{"text": "a"}', "Line 2 of .* needs one of"),
        ('{"prompt": "a", "prompt_token_ids": [5]}', "Line 2 of .* needs one of"),
        ('{"prompt": " "}', "Line 2 of .* has ' ' as its \"prompt\""),
        ('{"prompt_token_ids": [5, -1]}', r"Line 2 of .* has \[5, -1\]"),
        ('{"prompt_token_ids": []}', r"Line 2 of .* has \[\]"),
        ('{"prompt_token_ids": [true]}', r"Line 2 of .* has \[True\]"),
        (
            '{"prompt_token_ids": [99999]}',
            "Line 2 of .* has token id 99999, and the model has embeddings for ids below",
        ),
        ('{"id": "a", "prompt": "b"}', "Line 2 of .* has the same id as line 1, 'a'"),
        (json.dumps({"prompt_token_ids": [5] * 600}), "Line 2 has a prompt of 600 tokens, which leaves 0 of the 512"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_generated(line, message, prompts, output):
    prompts.write_bytes(b'{"id": "a", "prompt": "b"}\n' + line.encode("latin-1") + b'\n{"prompt": "c"}\n')
    found = error_of(call(prompts, output))
    assert re.search(message, found)
    assert [path.name for path in output.parent.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--temperature", 0), "temperature must be above 0"),
        (("--engine-option", "seed=1"), "--engine-option is for --engine vllm"),
        (("--engine", "vllm", "--batch-size", 2), "--batch-size is for --engine transformers"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, prompts, output, monkeypatch):
    monkeypatch.setattr(batch_generation.importlib.util, "find_spec", lambda name: object())
    assert message in error_of(call(prompts, output, *options))


def test_an_empty_file_and_the_file_of_the_prompts_itself_are_refused(prompts, output):
    assert "holds the prompts" in error_of(call(prompts, prompts))
    prompts.write_text("")
    assert "is empty" in error_of(call(prompts, output))
