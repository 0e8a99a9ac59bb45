"""Scores of vLLM against those of Transformers: every request, and with prefixes read from the cache."""

import contextlib
import json
import shutil

import pytest


pytest.importorskip("vllm", reason="vLLM needs a separate environment: make test-serving")
pytest.importorskip("lm_eval")

import torch
from lm_eval.api.instance import Instance
from tiny_models import ANSWERS, tiny_model

from dcformer.eval import DCFormerLM, evaluate, read_samples, vllm_model
from dcformer.eval.vllm_model import VLLMLM, check_device_of_vllm


# Both compute in float32, in another order, and sums of up to 512 tokens are near -3,000.
CLOSE = 3e-4
POSITIONS = 64


def quiet(*_):
    """No bar."""


@contextlib.contextmanager
def engine(folder, **options):
    with contextlib.closing(VLLMLM(str(folder), **{"dtype": "float32", "on_progress": quiet, **options})) as model:
        yield model


def transformers(folder, **options):
    return DCFormerLM(str(folder), dtype="float32", device="cpu", on_progress=quiet, **options)


@pytest.fixture(scope="module")
def tiny():
    """A model of 512 positions, in vLLM and in Transformers."""
    with engine(ANSWERS) as ours:
        yield ours, transformers(ANSWERS)


def words(model, count, generator):
    return torch.randint(2, model.embedding_rows, (count,), generator=generator).tolist()


def five_shot(model, questions, generator):
    """Questions of four choices of 1 to 7 tokens, after different examples for every question."""
    requests = []
    for question in range(questions):
        context = words(model, 330 + 11 * question, generator)
        requests += [(None, context, words(model, count, generator)) for count in (1, 1, 4, 7)]
    return requests


def assert_same(answers, expected):
    assert [score for score, _ in answers] == pytest.approx([score for score, _ in expected], abs=CLOSE)
    assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in expected]


def instances(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=given, idx=0, metadata=("question", index, 1))
        for index, given in enumerate(arguments)
    ]


def test_every_request_has_the_score_that_transformers_gives(tiny):
    """Contexts of one token, of all positions and of more; continuations of one token and of all positions."""
    ours, theirs = tiny
    generator = torch.Generator().manual_seed(0)
    requests = [(None, words(ours, 3, generator), words(ours, ours.max_length, generator))]
    for length in (1, 33, 511, 540):
        context = words(ours, length, generator)
        requests += [(None, context, words(ours, count, generator)) for count in (1, 2, 30)]
    # More choices than vLLM takes at once, one of which is greedy.
    requests += [(None, words(ours, 20, generator), [token]) for token in range(2, 302)]
    # Continuations that begin alike: the cache would hold tokens that are to be scored.
    context, prefix = words(ours, 90, generator), words(ours, 40, generator)
    requests += [(None, context, prefix + words(ours, count, generator)) for count in (0, 1, 3)]
    requests += [(None, context + prefix, words(ours, 2, generator))]
    assert_same(*(model._loglikelihood_tokens(requests) for model in (ours, theirs)))


def test_what_prompts_share_is_read_from_the_cache_and_changes_no_score(tiny, monkeypatch):
    ours, theirs = tiny
    requests = five_shot(ours, 4, torch.Generator().manual_seed(1))
    ours.start_counting(quiet)
    answers = ours._loglikelihood_tokens(requests)
    assert ours.cached_tokens > 0.4 * ours.input_tokens
    assert_same(answers, theirs._loglikelihood_tokens(requests))
    monkeypatch.setattr(vllm_model, "which_may_read", lambda inputs, block_size: [False] * len(inputs))
    ours.start_counting(quiet)
    assert_same(ours._loglikelihood_tokens(requests), answers)
    assert ours.cached_tokens == 0


def test_long_texts_are_scored_in_the_same_windows(tiny):
    texts = [(text,) for text in ("Anna has a red car . " * 90, "Bob", "the box of Carl is big . " * 30)]
    answers, expected = (model.loglikelihood_rolling(instances("loglikelihood_rolling", texts)) for model in tiny)
    assert answers == pytest.approx(expected, abs=CLOSE)


@pytest.fixture(scope="module")
def folders(fixtures, tmp_path_factory):
    """Random models of 64 learned positions, with and without a row for every id of the tokenizer."""
    made = {}
    for rows in (50304, 50257):
        folder = made[rows] = tmp_path_factory.mktemp(f"rows_{rows}")
        tiny_model("dcformer", vocab_size=rows, position_embedding_type="learned").save_pretrained(folder)
        shutil.copy(fixtures / "benchdata" / "tokenizer" / "20B_tokenizer.json", folder / "tokenizer.json")
        special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return made


def test_tasks_have_the_records_of_transformers(folders, fixtures, tmp_path):
    """With five examples every prompt is cut to all positions, behind which there is no row."""
    options = {"tasks": "piqa,wikitext2_ppl", "num_fewshot": 5, "limit": 3, "dtype": "float32", "device": "cpu"}
    options |= {"data_dir": fixtures / "benchdata", "max_length": POSITIONS}
    ours, theirs = (
        evaluate(str(folders[50304]), output=tmp_path / engine, engine=engine, **options)
        for engine in ("vllm", "transformers")
    )
    assert len(ours) == len(theirs) == 2
    for record, other in zip(ours, theirs, strict=True):
        assert (record.task, record.num_samples, record.observed) == (other.task, other.num_samples, other.observed)
        for name, measured in record.metrics.items():
            assert measured["value"] == pytest.approx(other.metrics[name]["value"], rel=1e-5)
        samples = read_samples(tmp_path / "vllm", record), read_samples(tmp_path / "transformers", other)
        assert [sample["doc_hash"] for sample in samples[0]] == [sample["doc_hash"] for sample in samples[1]]


def test_ids_without_a_row_follow_the_policy(folders):
    asked = [("One", " two"), ("a  b", " c"), ("a", "  b c"), ("a  b  ", "c d")]  # two spaces are id 50,276
    with (
        engine(folders[50257], oov_policy="error", max_length=POSITIONS) as ours,
        pytest.raises(ValueError, match="50276"),
    ):
        ours.loglikelihood(instances("loglikelihood", asked))
    theirs = transformers(folders[50257], oov_policy="clamp", max_length=POSITIONS)
    with engine(folders[50257], oov_policy="clamp", max_length=POSITIONS) as ours:
        assert_same(*(model.loglikelihood(instances("loglikelihood", asked)) for model in (ours, theirs)))


def test_another_device_than_the_engines_is_refused():
    with pytest.raises(ValueError, match="cuda:1"):
        check_device_of_vllm(torch.device("cuda:1"))
