"""Log-likelihoods of the lm-eval model class against plain forward passes and against the harness's own class."""

import functools

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast


pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from dcformer.eval.language_model import DCFormerLM
from dcformer.eval.scoring import TargetScorer


# Text with a run of spaces, whose id 50,276 lies beyond 50,257 rows.
SPACED = "a  b"
PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " London"),
    ("The capital of France is", " a city in the north of the country"),
    ("", "A text without a context"),
    ("Question: what is composed?\nAnswer: ", "heads"),
    ("Heads " * 30, "work together"),
    ("One", " two three four five six seven eight nine ten"),
    ("Numbers: 1 2 3 4 5 6 7 8 9", " 10"),
]
TEXTS = ["One short text.", "Every pair of a query and a key has its own map of the heads. " * 8, "A"]


def save_tokenizer(folder, fixtures):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(fixtures / "benchdata/tokenizer/20B_tokenizer.json"), eos_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_model(folder, kind, rows=50304, seed=0):
    """A random model of 64 positions."""
    if kind == "gpt_neox":
        torch.manual_seed(seed)
        config = GPTNeoXConfig(
            vocab_size=rows,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            initializer_range=0.2,
        )
        model = GPTNeoXForCausalLM(config)
    else:
        model = tiny_model(kind, seed=seed, vocab_size=rows)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(fixtures, tmp_path_factory):
    made = {}
    for kind in ("dcformer", "gpt_neox"):
        for rows in (50304, 50257):
            made[kind, rows] = tmp_path_factory.mktemp(f"{kind}_{rows}")
            save_model(made[kind, rows], kind, rows)
            save_tokenizer(made[kind, rows], fixtures)
    return made


def language_model(folder, **options):
    return DCFormerLM(str(folder), **{"dtype": "float32", "device": "cpu", "on_progress": lambda *_: None, **options})


def instances(pairs):
    kind = "loglikelihood" if isinstance(pairs[0], tuple) else "loglikelihood_rolling"
    return [
        Instance(
            request_type=kind,
            doc={},
            arguments=pair if isinstance(pair, tuple) else (pair,),
            idx=0,
            metadata=("question", index, 1),
        )
        for index, pair in enumerate(pairs)
    ]


@functools.cache
def loaded(folder):
    return (
        PreTrainedTokenizerFast.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    )


def by_hand(folder, context, continuation, most=64):
    """Log-probability of the continuation and whether it is greedy, by one plain forward pass without padding."""
    tokenizer, model = loaded(folder)
    spaces = len(context) - len(context.rstrip())
    whole = tokenizer(context + continuation)["input_ids"]
    start = len(tokenizer(context[: len(context) - spaces])["input_ids"])
    if not context:
        whole, start = [tokenizer.eos_token_id, *whole], 1
    target = torch.tensor(whole[start:])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([whole[-most - 1 : -1]])).logits[0, -len(target) :].float()
    scores = logits.log_softmax(-1).gather(-1, target[:, None])
    return float(scores.sum()), bool((logits.argmax(-1) == target).all())


def values(answers):
    return torch.tensor([answer[0] if isinstance(answer, tuple) else answer for answer in answers])


@pytest.mark.parametrize("kind", ["dcformer", "gpt_neox"])
def test_log_likelihoods_equal_plain_forward_passes(kind, folders):
    folder = folders[kind, 50304]
    answers = language_model(folder).loglikelihood(instances(PAIRS))
    expected = [by_hand(folder, *pair) for pair in PAIRS]
    assert values(answers) == pytest.approx(values(expected), abs=1e-4)
    assert [greedy for _, greedy in answers] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("kind", ["dcformer", "gpt_neox"])
def test_batch_size_changes_nothing(kind, folders):
    one, many = (language_model(folders[kind, 50304], batch_size=size) for size in (1, 32))
    for method, requests in (("loglikelihood", PAIRS), ("loglikelihood_rolling", TEXTS)):
        alone, together = (getattr(model, method)(instances(requests)) for model in (one, many))
        assert values(alone) == pytest.approx(values(together), abs=1e-4)


@pytest.mark.parametrize("kind", ["dcformer", "gpt_neox"])
def test_truncation_and_rolling_windows_are_those_of_the_harness(kind, folders):
    folder = folders[kind, 50304]
    ours = language_model(folder, batch_size=4)
    harness = HFLM(str(folder), dtype="float32", device="cpu", batch_size=4, backend="causal")
    assert ours.max_length == harness.max_length == 64
    long = [("Heads " * words, "work together") for words in (60, 61, 62, 63, 64, 65, 200)]
    for method, requests in (("loglikelihood", PAIRS + long), ("loglikelihood_rolling", TEXTS)):
        expected = getattr(harness, method)(instances(requests), disable_tqdm=True)
        answers = getattr(ours, method)(instances(requests))
        # The harness adds up in float32, where a text at -1,448 is known to 1.2e-4.
        assert values(answers) == pytest.approx(values(expected), abs=1e-4, rel=1e-6)
        if method == "loglikelihood":
            assert [greedy for _, greedy in answers] == [greedy for _, greedy in expected]


def test_requests_of_one_input_share_a_row_and_each_gets_its_own_number(folders):
    """ " Paris" scored alone, and as the last token of a longer continuation of a shorter context."""
    folder = folders["dcformer", 50304]
    model = language_model(folder)
    pairs = [("The capital of France is", " Paris"), ("The capital of", " France is London"), ("The capital of", "")]
    answers = model.loglikelihood(instances(pairs[:2]))
    assert model.input_tokens == 5  # one row of five tokens for both
    assert values(answers) == pytest.approx(values([by_hand(folder, *pair) for pair in pairs[:2]]), abs=1e-4)
    with pytest.raises(ValueError, match="empty context or continuation in document 0 of question"):
        model.loglikelihood(instances(pairs[2:]))


def test_a_batch_is_cut_where_its_logits_would_not_fit(folders, monkeypatch):
    folder = folders["gpt_neox", 50304]
    expected = language_model(folder).loglikelihood(instances(PAIRS))
    monkeypatch.setattr("dcformer.eval.scoring.MOST_LOGITS", 50304 * 12)
    model = language_model(folder)
    sizes = []
    score = TargetScorer.score
    monkeypatch.setattr(TargetScorer, "score", lambda self, batch: sizes.append(len(batch)) or score(self, batch))
    assert values(model.loglikelihood(instances(PAIRS))) == pytest.approx(values(expected), abs=1e-4)
    assert len(sizes) > 1


@pytest.mark.parametrize("kind", ["dcformer", "gpt_neox"])
def test_an_id_without_a_row_is_an_error_that_says_what_to_do(kind, folders):
    model = language_model(folders[kind, 50257])
    with pytest.raises(ValueError, match=r"Token id 50276 in document 1 of question .* 50257; .*--oov-policy clamp"):
        model.loglikelihood(instances([PAIRS[0], (SPACED, " c")]))
    assert model.oov_documents == {("question", 1)}


@pytest.mark.parametrize("kind", ["dcformer", "gpt_neox"])
def test_clamp_takes_the_last_row_as_input_and_as_target(kind, folders):
    folder = folders[kind, 50257]
    model = language_model(folder, oov_policy="clamp")
    answers = model.loglikelihood(instances([PAIRS[0], (SPACED, " c"), ("a", "  b")]))
    assert model.oov_documents == {("question", 1), ("question", 2)}
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor(PreTrainedTokenizerFast.from_pretrained(folder)("a  b")["input_ids"])
    assert tokens.max() == 50276
    clamped = tokens.clamp(max=50256)
    with torch.no_grad():
        scores = plain(input_ids=clamped[None, :-1]).logits[0].log_softmax(-1)
    assert answers[2][0] == pytest.approx(float(scores.gather(-1, clamped[1:, None]).sum()), abs=1e-4)


def test_pad_adds_mean_rows_to_our_models_only(folders):
    folder = folders["dcformer", 50257]
    model = language_model(folder, oov_policy="pad")
    assert (model.embedding_rows, model.trained_rows) == (50304, 50257)
    (answer,) = model.loglikelihood(instances([(SPACED, " c")]))
    assert model.oov_documents == {("question", 0)}
    padded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, oov_policy="pad")
    tokens = torch.tensor(PreTrainedTokenizerFast.from_pretrained(folder)(SPACED + " c")["input_ids"])
    with torch.no_grad():
        scores = padded(input_ids=tokens[None, :-1]).logits[0, -1].log_softmax(-1)
    assert answer[0] == pytest.approx(float(scores[tokens[-1]]), abs=1e-4)
    with pytest.raises(ValueError, match="not to a gpt_neox model"):
        language_model(folders["gpt_neox", 50257], oov_policy="pad")
    with pytest.raises(ValueError, match="got 'wrap'"):
        language_model(folder, oov_policy="wrap")


def test_the_policy_of_the_configuration_holds_unless_another_is_asked_for(folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders["dcformer", 50257], oov_policy="clamp")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders["dcformer", 50257])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert language_model(tmp_path).oov_policy == "clamp"
    assert language_model(tmp_path, oov_policy="pad").embedding_rows == 50304


def test_a_continuation_longer_than_the_model_is_an_error(folders):
    model = language_model(folders["dcformer", 50304])
    with pytest.raises(ValueError, match=r"document 0 of question has .* tokens, more than the model's 64 positions"):
        model.loglikelihood(instances([("a", " word" * 70)]))


def test_the_cache_hook_sees_every_answer_and_the_class_is_registered(folders):
    from lm_eval.api.registry import get_model

    assert get_model("dcformer") is DCFormerLM
    model = language_model(folders["dcformer", 50304])
    seen = []
    model.cache_hook.add_partial = lambda *entry: seen.append(entry)
    answers = model.loglikelihood(instances(PAIRS))
    assert {key: answer for _, key, answer in seen} == dict(zip(PAIRS, answers))
    seen.clear()
    totals = model.loglikelihood_rolling(instances(TEXTS))
    assert seen == [("loglikelihood_rolling", (text,), total) for text, total in zip(TEXTS, totals)]
    assert model.batch_size == 16
