"""What computes an evaluation, where vLLM is not installed: what is refused, and which inputs may read its cache."""

import sys

import pytest


pytest.importorskip("lm_eval")

from typer.testing import CliRunner

from dcformer.cli import app
from dcformer.eval import provenance
from dcformer.eval.runner import evaluate
from dcformer.eval.scoring import ScoredInput, Target
from dcformer.eval.vllm_model import _which_may_read


def without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)


def test_without_vllm_the_command_names_the_extra_in_one_line_and_reads_nothing(monkeypatch, tmp_path):
    without_vllm(monkeypatch)
    monkeypatch.setattr(provenance, "find_model", None)
    arguments = ["eval", "somebody/model", "--engine", "vllm", "--output", str(tmp_path / "out")]
    failed = CliRunner().invoke(app, arguments)
    assert failed.exit_code == 1
    assert failed.stderr == "Error: --engine vllm (engine='vllm') needs vLLM: pip install 'dcformer[vllm]'.\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        ({"engine": "sglang"}, {}, "engine must be one of transformers, vllm, got 'sglang'"),
        ({"engine": "vllm", "stock": True}, {}, "computes with Transformers, and engine is 'vllm'; leave one"),
        ({"engine": "vllm"}, {"WORLD_SIZE": "2"}, r"--engine vllm .* scores in one process, and there are 2; start"),
        ({"stock": True}, {"WORLD_SIZE": "2"}, r"--stock .* scores in one process, and there are 2; start one"),
    ],
    ids=["unknown", "stock", "processes", "stock and processes"],
)
def test_an_engine_is_refused_before_anything_is_read(options, environment, words, monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "find_model", None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words) as raised:
        evaluate("somebody/model", output=tmp_path / "out", device="cpu", **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "sglang"), "'sglang' is not one of"),
        (("--suite", "head_tasks", "--engine", "vllm"), "--engine has no meaning for --suite head_tasks"),
    ],
    ids=["unknown", "head tasks"],
)
def test_the_command_refuses_an_engine(arguments, words):
    failed = CliRunner().invoke(app, ["eval", "dcformer-tiny", *arguments])
    assert failed.exit_code in (1, 2) and words in failed.stderr


def inputs(*asked):
    """Inputs of ids, each with one target of so many tokens."""
    return [ScoredInput(ids, [Target(range(len(ids) - count, len(ids)), [0] * count)]) for ids, count in sorted(asked)]


@pytest.mark.parametrize(
    ("asked", "may_read"),
    [
        # Whole blocks of four tokens. The last of a target's tokens is predicted by the last of its input.
        ([((1, 2, 3, 4, 5, 6), 2), ((1, 2, 3, 4, 5, 7), 2)], [True, True]),
        ([((1, 2, 3, 4, 5, 6), 3), ((1, 2, 3, 4, 7, 8), 3)], [False, False]),
        ([((1, 2, 3, 4, 5, 6), 1), ((1, 2, 3, 4, 7, 8), 3)], [True, False]),
        ([((1, 2, 3, 4), 3), ((1, 2, 3, 4), 3)], [True, True]),
        ([((1, 2, 3, 4, 5), 3), ((1, 2, 3, 4, 5, 6, 7, 8, 9), 2)], [False, True]),
        ([((1, 2, 3), 2), ((5, 6, 7), 2)], [True, True]),
    ],
    ids=["context", "beyond the context", "one token", "never the last token", "one begins the other", "nothing"],
)
def test_an_input_reads_of_the_cache_only_where_nothing_is_scored(asked, may_read):
    assert _which_may_read(inputs(*asked), 4) == may_read
