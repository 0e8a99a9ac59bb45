"""Scores of vLLM against those of Transformers: every request, every policy, and with prefixes read from the cache."""

import contextlib
import json
import shutil

import pytest


pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")
pytest.importorskip("lm_eval")

import torch
from lm_eval.api.instance import Instance
from tiny_models import tiny_model

from dcformer import pretrained_path
from dcformer.eval import DCFormerLM, evaluate, read_samples, run, vllm_model
from dcformer.eval.vllm_model import VLLMLM, check_device_of_vllm


# One process has the engine that these tests share.
pytestmark = pytest.mark.xdist_group("eval")


# Both compute in float32, in another order, and sums of up to 512 tokens are near -3,000; asked for was 1e-3.
CLOSE = 3e-4
POSITIONS = 64


def quiet(*_):
    """No bar."""


@contextlib.contextmanager
def engine(folder, **options):
    with contextlib.closing(VLLMLM(str(folder), **{"dtype": "float32", "on_progress": quiet, **options})) as model:
        yield model


@pytest.fixture(scope="module")
def tiny():
    """The bundled model of 512 positions, in vLLM and in Transformers."""
    folder = str(pretrained_path("dcformer-tiny"))
    with engine(folder) as ours:
        yield ours, DCFormerLM(folder, dtype="float32", device="cpu", on_progress=quiet)


def words(model, count, generator):
    return torch.randint(2, model.embedding_rows, (count,), generator=generator).tolist()


def greedy(model, context, count):
    """What the Transformers model would go on with."""
    ids = torch.tensor([context[-(model.max_length - count) :]])
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, -count:].tolist()


def five_shot(model, questions, generator, same_examples=False):
    """Questions of four choices of 1 to 7 tokens, after examples of their own or after the same."""
    requests, examples = [], words(model, 300, generator)
    for question in range(questions):
        examples = examples if same_examples else words(model, 300, generator)
        context = examples + words(model, 30 + 11 * question, generator)
        requests += [(None, context, words(model, count, generator)) for count in (1, 1, 4, 7)]
    return requests


def assert_same(answers, expected):
    assert [log_likelihood for log_likelihood, _ in answers] == pytest.approx(
        [log_likelihood for log_likelihood, _ in expected], abs=CLOSE
    )
    assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in expected]


def test_every_request_has_the_score_that_transformers_gives(tiny):
    """Contexts of one token, of all positions and of more; continuations of one token and of all positions."""
    ours, theirs = tiny
    generator = torch.Generator().manual_seed(0)
    requests = [(None, words(ours, 3, generator), words(ours, ours.max_length, generator))]
    for length in (1, 33, 300, 511, 512, 540):
        context = words(ours, length, generator)
        requests += [(None, context, words(ours, count, generator)) for count in (1, 1, 2, 30)]
        requests += [(None, context, greedy(theirs, context, count)) for count in (1, 5)]
    answers, expected = (model._loglikelihood_tokens(requests) for model in (ours, theirs))
    assert_same(answers, expected)
    assert sum(is_greedy for _, is_greedy in answers) >= 12
    assert ours.input_tokens == theirs.input_tokens


@pytest.mark.parametrize(("same_examples", "least"), [(True, 0.65), (False, 0.4)], ids=["same", "own"])
def test_what_prompts_share_is_read_from_the_cache_and_changes_no_score(same_examples, least, tiny, monkeypatch):
    ours, theirs = tiny
    requests = five_shot(ours, 6, torch.Generator().manual_seed(1), same_examples)
    ours.start_counting(quiet)
    answers = ours._loglikelihood_tokens(requests)
    assert ours.cached_tokens > least * ours.input_tokens
    assert_same(answers, theirs._loglikelihood_tokens(requests))
    monkeypatch.setattr(vllm_model, "which_may_read", lambda inputs, block_size: [False] * len(inputs))
    ours.start_counting(quiet)
    assert_same(ours._loglikelihood_tokens(requests), answers)
    assert ours.cached_tokens == 0


def test_continuations_that_begin_alike_are_scored_in_full(tiny):
    """The cache would hold tokens of which the log-probability is asked for."""
    ours, theirs = tiny
    generator = torch.Generator().manual_seed(2)
    context, beginning = words(ours, 90, generator), words(ours, 40, generator)
    requests = [(None, context, beginning + words(ours, count, generator)) for count in (1, 2, 3)]
    requests += [(None, context, beginning), (None, context + beginning, words(ours, 2, generator))]
    assert_same(*(model._loglikelihood_tokens(requests) for model in (ours, theirs)))


def test_any_number_of_one_token_choices_share_an_input(tiny):
    ours, theirs = tiny
    context = words(ours, 20, torch.Generator().manual_seed(3))
    requests = [(None, context, [token]) for token in range(2, 302)]
    ours.start_counting(quiet)
    answers = ours._loglikelihood_tokens(requests)
    assert_same(answers, theirs._loglikelihood_tokens(requests))
    assert sum(is_greedy for _, is_greedy in answers) == 1
    assert ours.input_tokens == 20 * 3  # 300 choices, 128 at once


def instances(texts):
    kind = "loglikelihood_rolling"
    return [
        Instance(request_type=kind, doc={}, arguments=(text,), idx=0, metadata=("text", index, 1))
        for index, text in enumerate(texts)
    ]


def test_long_texts_are_scored_in_the_same_windows_and_progress_is_told(tiny):
    ours, theirs = tiny
    texts = ["Anna has a red car . " * 90, "Bob", "the box of Carl is big . " * 30]
    seen = []
    ours.on_progress = lambda done, total: seen.append((done, total))
    answers, expected = (model.loglikelihood_rolling(instances(texts)) for model in (ours, theirs))
    ours.on_progress = quiet
    assert answers == pytest.approx(expected, abs=CLOSE)
    assert seen[0] == (0, seen[-1][1]) and seen[-1][0] == seen[-1][1] > len(texts)


def test_a_cache_too_small_for_all_inputs_changes_no_score(tiny):
    """Inputs are computed in pieces, and some of them again, after their blocks were given to others."""
    _, theirs = tiny
    requests = five_shot(theirs, 5, torch.Generator().manual_seed(4))
    options = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 96, "max_num_seqs": 8}
    # So that several inputs are begun and none is finished.
    options |= {"long_prefill_token_threshold": 32, "scheduler_reserve_full_isl": False}
    with engine(pretrained_path("dcformer-tiny"), **options) as ours:
        scheduler = ours.engine.engine_core.engine_core.scheduler
        preempted: list = []
        original = scheduler._preempt_request
        scheduler._preempt_request = lambda *given, **named: preempted.append(1) or original(*given, **named)
        assert_same(*(model._loglikelihood_tokens(requests) for model in (ours, theirs)))
        assert preempted


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


@pytest.fixture
def start(folders, fixtures, tmp_path):
    def start(output, tasks="piqa,winogrande,sciq,wikitext2_ppl", **options):
        settings = {"limit": 4, "dtype": "float32", "device": "cpu", "data_dir": fixtures / "benchdata", **options}
        return evaluate(str(folders[50304]), output=tmp_path / output, tasks=tasks, max_length=POSITIONS, **settings)

    return start


def test_tasks_have_the_records_of_transformers_and_are_reused(start, tmp_path, monkeypatch):
    """With five examples every prompt is cut to all positions, behind which there is no row."""
    import vllm

    options = {"num_fewshot": (0, 5)}
    ours, theirs = start("vllm", engine="vllm", **options), start("transformers", **options)
    assert len(ours) == len(theirs) == 7
    for record, other in zip(ours, theirs, strict=True):
        assert (record.task, record.num_samples) == (other.task, other.num_samples)
        assert record.settings["engine"] == "vllm" and record.settings["versions"]["vllm"] == vllm.__version__
        assert record.observed == other.observed
        assert record.timings["input_tokens"] == other.timings["input_tokens"]
        for name, measured in record.metrics.items():
            assert measured["value"] == pytest.approx(other.metrics[name]["value"], rel=1e-5)
        samples = read_samples(tmp_path / "vllm", record)
        for sample, expected in zip(samples, read_samples(tmp_path / "transformers", other), strict=True):
            assert sample["doc_hash"] == expected["doc_hash"]
            for request, asked in zip(sample["requests"], expected["requests"], strict=True):
                assert request.pop("log_likelihood") == pytest.approx(asked.pop("log_likelihood"), abs=CLOSE)
                assert request == asked
    monkeypatch.setattr(run, "_build_scorer", None)
    assert start("vllm", engine="vllm", **options) == ours


SPACED = "a  b"  # whose second token has the id 50,276


@pytest.fixture(scope="module", params=["error", "pad"])
def few_rows(request, folders):
    options = {"oov_policy": request.param, "max_length": POSITIONS}
    theirs = DCFormerLM(str(folders[50257]), dtype="float32", device="cpu", on_progress=quiet, **options)
    with engine(folders[50257], **options) as ours:
        yield request.param, ours, theirs


def pairs():
    kind = "loglikelihood"
    asked = [("One", " two"), (SPACED, " c"), ("a", "  b c"), ("a  b  ", "c d")]
    return [
        Instance(request_type=kind, doc={}, arguments=pair, idx=0, metadata=("question", index, 1))
        for index, pair in enumerate(asked)
    ]


def test_ids_without_a_row_follow_the_policy(few_rows, monkeypatch):
    policy, ours, theirs = few_rows
    assert (ours.embedding_rows, ours.trained_rows) == (theirs.embedding_rows, theirs.trained_rows)
    if policy == "error":
        with monkeypatch.context() as patch:
            patch.setattr(ours.engine, "add_request", None)
            with pytest.raises(ValueError, match="50276 in document 1 of question"):
                ours.loglikelihood(pairs())
        ours.oov_policy = theirs.oov_policy = "clamp"
        ours.start_counting(quiet)
    assert_same(*(model.loglikelihood(pairs()) for model in (ours, theirs)))
    assert ours.oov_documents == theirs.oov_documents == {("question", 1), ("question", 2), ("question", 3)}


def test_another_device_than_that_of_the_build_is_refused():
    with pytest.raises(ValueError, match="'cuda:1'"):
        check_device_of_vllm(torch.device("cuda:1"))
