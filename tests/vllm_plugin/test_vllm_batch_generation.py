"""examples/batch_generation.py with vLLM's engine: the text of Transformers, and runs that are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from dcformer import pretrained_path


pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")

from examples import batch_generation


ROOT = Path(__file__).parents[2]
QUESTION = "There are Paris, Paris, Mumbai. Which is different? The city in"
RECORDS = [
    {"id": "question", "prompt": QUESTION},
    {"prompt_token_ids": [9, 7, 9, 20]},
    {"id": "long", "prompt": "Ruth likes Paris. " * 12},
    *({"id": number, "prompt_token_ids": [11 + number, 12, 13]} for number in range(9)),
]
# In float32 and greedy, as rounding and draws would let texts part.
OPTIONS = ["--max-new-tokens", "100", "--dtype", "float32"]
# Few at once, so that there is something left when the first answers are there.
OF_VLLM = ["--engine", "vllm", "--engine-option", "enforce_eager=true", "--engine-option", "max_num_seqs=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts, and the bundled model, whose texts only an answer of "India" ends here, so that others grow long."""
    folder = tmp_path_factory.mktemp("batch")
    model = AutoModelForCausalLM.from_pretrained(pretrained_path("dcformer-tiny"))
    tokenizer = AutoTokenizer.from_pretrained(pretrained_path("dcformer-tiny"))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("India")]
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """What Transformers answers."""
    done = call(folder, "transformers.jsonl", "--engine", "transformers", *OPTIONS)
    assert done.exit_code == 0, done.stderr
    return (folder / "transformers.jsonl").read_bytes()


def arguments(folder, output, *options):
    return [str(folder / "model"), str(folder / "prompts.jsonl"), str(folder / output), *options]


def call(folder, output, *options):
    return CliRunner().invoke(batch_generation.app, arguments(folder, output, *options))


def test_a_killed_run_goes_on_and_writes_the_text_of_transformers(folder, expected):
    command = [sys.executable, ROOT / "examples" / "batch_generation.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*map(str, command), *arguments(folder, "answers.jsonl", *OF_VLLM, *OPTIONS)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    unfinished = folder / "answers.jsonl.unfinished"
    deadline = time.monotonic() + 300
    while not (unfinished.exists() and unfinished.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = unfinished.read_bytes()
    assert 2 <= kept.count(b"\n") < len(RECORDS)

    done = call(folder, "answers.jsonl", *OF_VLLM, *OPTIONS)

    assert done.exit_code == 0, done.stderr
    assert f"{kept.count(bytes([10]))} of {len(RECORDS)} answers are there" in done.stderr
    assert (folder / "answers.jsonl").read_bytes() == expected
    assert {json.loads(line)["finish_reason"] for line in expected.splitlines()} == {"stop", "length"}


def test_answers_of_the_other_engine_are_not_mixed_in(folder, expected):
    done = call(folder, "transformers.jsonl", *OF_VLLM, *OPTIONS)
    assert done.exit_code == 1
    assert "with engine 'transformers', which is 'vllm' now" in done.stderr


def test_stop_strings_and_seeds_reach_the_engine(folder):
    options = ["--engine-option", "enforce_eager=true", "--max-new-tokens", "20", "--dtype", "float32"]
    options += ["--temperature", "1.5", "--seed", "4", "--stop", "a"]
    for name in ("one.jsonl", "two.jsonl"):
        done = call(folder, name, "--engine", "vllm", *options)
        assert done.exit_code == 0, done.stderr
    answers = [json.loads(line) for line in (folder / "one.jsonl").read_text().splitlines()]
    assert (folder / "one.jsonl").read_bytes() == (folder / "two.jsonl").read_bytes()
    assert not any("a" in answer["generated_text"] for answer in answers)
    assert len({answer["generated_text"] for answer in answers}) > 3
