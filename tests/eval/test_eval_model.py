"""Log-likelihoods of the model class against plain forward passes and lm-eval's class, with shared prefixes."""

import functools
import inspect
import random

import pytest
import torch
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast


pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from dcformer.common import contexts
from dcformer.eval import DCFormerLM, prefixes
from dcformer.eval.prefixes import ScoredInput, Target, group_by_prefix
from dcformer.eval.vllm_model import VLLMLM, which_may_read


ROWS = 67
POSITIONS = 64
SHAPE = {"vocab_size": ROWS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"max_position_embeddings": POSITIONS, "bos_token_id": None, "eos_token_id": None}
SHAPE |= {"intermediate_size": 64, "initializer_range": 0.3}
LEARNED = "plain_transformer_with_learned_positions"
CONTEXT = "w3 w4 w5 w6 w7 w8 w9 w20 w21"
PAIRS = [(CONTEXT, " w30"), (CONTEXT, " w31"), (CONTEXT, " w32 w33 w34 w35 w36 w37"), ("", "w38 w39 w40")]
PAIRS += [
    ("w41 w42 ", "w43"),
    ("w34 " * 30, "w35 w36"),
    ("w37", " w3 w4 w5 w6 w7 w8 w9"),
    (f"w40 {CONTEXT}", " w2"),
]
OTHERS = {"gpt_neox": {}, "llama": {"num_key_value_heads": 2}}
OTHERS["opt"] = {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3}


def build_model(kind, **values):
    """A random model, ours by its variant; windows of 6, so that what is shared is longer and shorter than they are."""
    torch.manual_seed(0)
    if kind not in OTHERS:
        return tiny_model(kind, **values)
    config = AutoConfig.for_model(kind, **{**SHAPE, **OTHERS[kind], **values})
    return AutoModelForCausalLM.from_config(config).eval()


def language_model(folder, **options):
    return DCFormerLM(folder, **{"dtype": "float32", "device": "cpu", "on_progress": lambda *_: None, **options})


def instances(pairs):
    """Requests of (context, continuation), of (context, options) for a generation, or of a whole text."""
    given = [pair if isinstance(pair, tuple) else (pair,) for pair in pairs]
    kinds = {str: "loglikelihood", dict: "generate_until"}
    kind = kinds[type(given[0][1])] if len(given[0]) == 2 else "loglikelihood_rolling"
    return [Instance(kind, {}, texts, 0, metadata=("question", index, 1)) for index, texts in enumerate(given)]


@functools.cache
def loaded(folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def by_hand(folder, context, continuation, most=64):
    """
    Log-probability of the continuation and whether it is greedy, by one plain forward pass without padding, with the
    tokenizer and the model of a folder, or these themselves.
    """
    tokenizer, model = loaded(folder) if isinstance(folder, str) else folder
    spaces = len(context) - len(context.rstrip())
    whole = tokenizer(context + continuation)["input_ids"]
    start = len(tokenizer(context[: len(context) - spaces])["input_ids"])
    if not context:
        whole, start = [tokenizer.eos_token_id, *whole], 1
    whole = torch.tensor(whole).clamp(max=model.config.vocab_size - 1)  # without a row, as the last one
    target = whole[start:]
    with torch.no_grad():
        logits = model(input_ids=whole[None, -most - 1 : -1]).logits[0, -len(target) :].float()
    scores = logits.log_softmax(-1).gather(-1, target[:, None])
    return float(scores.sum()), bool((logits.argmax(-1) == target).all())


def values(answers):
    return torch.tensor([answer[0] if isinstance(answer, tuple) else answer for answer in answers])


def test_an_input_is_computed_once_for_all_its_requests_and_in_a_longer_one():
    """ " w8" scored alone, and as the last token of a longer continuation of a shorter context."""
    scorer = scorer_of(build_model("dcformer"))
    pairs = [("w3 w4 w5 w6 w7", " w8"), ("w3 w4 w5 w6", " w7 w9"), ("w3", " w4")]
    answers = scorer.loglikelihood(instances(pairs))
    assert (scorer.input_tokens, scorer.cached_tokens) == (
        6,
        1,
    )  # rows of five tokens, and of one that begins the other
    assert values(answers) == pytest.approx(
        values(by_hand((scorer.tokenizer, scorer.model), *p) for p in pairs), abs=1e-4
    )


def test_batches_are_cut_where_logits_or_keys_would_not_fit(monkeypatch):
    model, requests, run = build_model("llama"), questions(), prefixes.Scorer._run
    sizes = []

    def measured_run(self, rows, *given, **named):
        if len(rows) > 1:
            positions = len(rows) * (max(row.start for row in rows) + max(len(row.ids) for row in rows))
            sizes.append((positions, sum(len({query.column for query in row.queries}) for row in rows)))
        return run(self, rows, *given, **named)

    monkeypatch.setattr(prefixes.Scorer, "_run", measured_run)
    expected, _ = answers_of(scorer_of(model, batch_size=8), requests)
    most_positions, most_scored = map(max, zip(*sizes))
    assert most_positions > 150 and most_scored > 12
    monkeypatch.setattr(prefixes, "MOST_LOGITS", ROWS * 12)
    monkeypatch.setattr(prefixes, "MOST_CACHED", 150 * 2 * 2 * 16 * 4)  # keys and values of two layers, in float32
    sizes.clear()
    assert answers_of(scorer_of(model, batch_size=8), requests)[0] == pytest.approx(expected, abs=2e-5, rel=1e-6)
    most_positions, most_scored = map(max, zip(*sizes))
    assert 100 < most_positions <= 150 and 6 < most_scored <= 12


@pytest.mark.parametrize("shares", [True, False], ids=["shared prefixes", "whole inputs"])
def test_a_batch_that_does_not_fit_into_memory_is_halved_and_answers_are_cached(shares, monkeypatch):
    model, cached = scorer_of(build_model("gpt_neox"), shared_prefixes=shares, batch_size=64), {}
    model.cache_hook.add_partial = lambda _, key, answer: cached.update({key: answer})
    sizes, forward, fits, refused = [], model.model.forward, 2, []

    def forward_in_little_memory(input_ids, **arguments):
        if len(input_ids) > fits:
            refused.append(len(input_ids))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        sizes.append(len(input_ids))
        return forward(input_ids, **arguments)

    monkeypatch.setattr(model.model, "forward", forward_in_little_memory)
    answers = model.loglikelihood(instances(PAIRS))
    expected = [by_hand((model.tokenizer, model.model), *pair) for pair in PAIRS]
    assert values(answers) == pytest.approx(values(expected), abs=1e-4)
    assert [greedy for _, greedy in answers] == [greedy for _, greedy in expected]
    assert cached == dict(zip(PAIRS, answers))
    assert max(sizes) == 2 and len(refused) < 4  # later batches are no larger
    fits = 0
    with pytest.raises(torch.OutOfMemoryError):  # nothing smaller is left to try
        model.loglikelihood(instances(PAIRS))


@pytest.mark.parametrize("kind", ["dcformer", "gpt_neox"])
def test_ids_without_a_row_are_refused_or_read_as_the_last_one(kind):
    pairs, model = [PAIRS[0], ("w3 w66", " w5"), ("w3", " w66")], build_model(kind, vocab_size=ROWS - 9)
    with pytest.raises(ValueError, match="66 in document 1 of question"):
        scorer_of(model, oov_policy="error").loglikelihood(instances(pairs))
    scorer = scorer_of(model, oov_policy="clamp")
    answers = scorer.loglikelihood(instances(pairs))
    assert scorer.oov_documents == {("question", 1), ("question", 2)}
    assert answers[2][0] == pytest.approx(by_hand((scorer.tokenizer, model), *pairs[2])[0], abs=1e-4)


def test_what_cannot_be_scored_is_refused():
    model = scorer_of(build_model("dcformer"))
    with pytest.raises(ValueError, match="empty context or continuation in document 0"):
        model.loglikelihood(instances([("w3", "")]))
    with pytest.raises(ValueError, match=r"at most 64 tokens, .* got 65"):
        model.loglikelihood(instances([("w3", " w4" * 65)]))
    with torch.no_grad():
        model.model.lm_head.weight[:] = torch.nan
    with pytest.raises(ValueError, match="document 0 of question is not a number"):
        model.loglikelihood(instances(PAIRS[:1]))


def word_tokenizer(processor=None, **options):
    """A token for every word `w0`, `w1`, ...; w0 begins texts and w1 ends them, where the processor does it."""
    words = models.WordLevel({f"w{index}": index for index in range(ROWS)}, unk_token="w2")
    backend = Tokenizer(words)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor is not None:
        backend.post_processor = processor
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w1", **options)


def template(text):
    return processors.TemplateProcessing(single=text, special_tokens=[(f"w{index}", index) for index in range(3)])


APPENDING = {
    "an option": (word_tokenizer(add_eos_token=True), word_tokenizer()),
    "the same token": (word_tokenizer(template("w1 $A w1")), word_tokenizer(template("w1 $A"))),
    "two tokens": [word_tokenizer(template(f"w0 $A{end}"), bos_token="w0") for end in (" w2 w1", "")],
}


@pytest.mark.parametrize("kind", APPENDING)
def test_what_a_tokenizer_appends_is_no_part_of_a_context(kind, caplog, monkeypatch):
    model, (appending, plain) = build_model("llama"), APPENDING[kind]
    assert appending("w5")["input_ids"][-1] == 1 != plain("w5")["input_ids"][-1]
    contexts._warn_once.cache_clear()
    ours, expected = (scorer_of(model, tokenizer=tokenizer, batch_size=2) for tokenizer in (appending, plain))
    # The text itself may end so, and white space alone holds no token.
    pairs = [("w3 w4 w5", " w6"), ("w3 w4 w5", " w7 w8"), ("", "w9 w10"), ("w3 ", "w4"), ("w3 w1", " w5")]
    assert ours.loglikelihood(instances(pairs)) == expected.loglikelihood(instances(pairs))
    for text in ("", "  ", "w3 w4", "w3 w1"):
        assert ours.tok_encode(text) == expected.tok_encode(text) == plain(text)["input_ids"]
    texts = ["w3 w4 w5 " * 50, "w6"]
    assert ours.loglikelihood_rolling(instances(texts)) == expected.loglikelihood_rolling(instances(texts))
    # lm-eval gives each of two processes texts of its own.
    monkeypatch.setattr("accelerate.utils.gather_object", lambda values: 2 * values)
    ours._world_size = 2
    assert ours.loglikelihood_rolling(instances(texts)) == expected.loglikelihood_rolling(instances(texts))
    ours._world_size = 1
    asked = instances([(text, {"until": ["w2"], "max_gen_toks": 9}) for text in ("w3 w4 w5", "w3", "w9 " * 90)])
    assert ours.generate_until(asked, disable_tqdm=True) == expected.generate_until(asked, disable_tqdm=True)
    by_vllm = VLLMLM.__new__(VLLMLM)
    by_vllm.tokenizer = appending
    assert by_vllm.tok_encode("w3 w4") == plain("w3 w4")["input_ids"]
    (message,) = [record.getMessage() for record in caplog.records if "appends" in record.message]
    assert "w1' to texts" in message


@pytest.mark.parametrize("adds_bos", [None, True, False])
@pytest.mark.parametrize("kind", ["adds none", "adds it", "adds another", "has none"])
def test_answers_are_those_of_the_harness(kind, adds_bos, tmp_path):
    """Of texts that begin with the token before empty contexts, of shared prefixes, of what is cut, and of windows."""
    begins = {"adds it": template("w0 $A"), "adds another": template("w2 $A")}.get(kind)
    word_tokenizer(begins, bos_token=None if kind == "has none" else "w0").save_pretrained(tmp_path)
    tiny_model("dcformer", seed=0, vocab_size=ROWS).save_pretrained(tmp_path)
    few, many = "w3 w4 w5 w6 w7 w8 w9 w20 w21", "".join(f"w{3 + n * n % 7} " for n in range(66))
    pairs = [(few, " w6"), (few, " w7 w8"), (f"{few} w22", " w4"), ("", "w9 w3"), ("", "w0 w5 w6"), ("", "w7 w8")]
    pairs += [("w3 ", "w4"), ("w0 w3 w4", " w5"), ("w7 w3", " w4"), (many, "w9 w3 w4"), ("w3", " w5" * POSITIONS)]
    pairs += [(many[: 3 * words - 1], " w9 w3") for words in (62, 63, 64)]
    texts = ["w3 w4 w5 " * 50, "w6", "w0 w3", "w7 w3 w9", ""]
    asked = instances([(text, {"until": ["w2"], "max_gen_toks": 9}) for text in (few, many, "w3")])
    shared = {"dtype": "float32", "device": "cpu", "batch_size": 4, "max_length": POSITIONS, "add_bos_token": adds_bos}
    if kind == "has none" and adds_bos:  # which the harness ignores
        with pytest.raises(ValueError, match=r"add_bos_token=True.* has no beginning of text"):
            language_model(str(tmp_path), **shared).loglikelihood(instances(pairs))
        return
    for prefix in (None,) if adds_bos is False else (None, 7):
        ours = language_model(str(tmp_path), prefix_token_id=prefix, **shared)
        harness = HFLM(str(tmp_path), prefix_token_id=prefix, backend="causal", **shared)
        for method, requests in (("loglikelihood_rolling", texts), ("loglikelihood", pairs)):
            ours.start_counting(lambda *_: None)
            expected = getattr(harness, method)(instances(requests), disable_tqdm=True)
            assert values(getattr(ours, method)(instances(requests))) == pytest.approx(values(expected), rel=1e-6)
        lengths = {("question", number): len(ours.tok_encode("".join(pair))) for number, pair in enumerate(pairs)}
        assert ours.truncated_documents == {pair for pair, length in lengths.items() if length > POSITIONS + 1}
        assert ours.cached_tokens > 0 and get_model("dcformer") is type(ours)
        if prefix is not None:
            continue
        ours.start_counting(lambda *_: None)
        texts_after = ours.generate_until(asked, disable_tqdm=True)
        assert ours.truncated_documents == {("question", 1)} and ours.counts()["requests"] == 3
        assert texts_after == harness.generate_until(asked, disable_tqdm=True)
        context, (first, *more) = next((t, a.split()) for (t, _), a in zip((r.args for r in asked), texts_after) if a)
        greedy = [(context, f" {first} {' '.join(more)}".rstrip()), (context, f" {first} w3 w4")]
        assert [flag for _, flag in ours.loglikelihood(instances(greedy))] == [True, False]


HERE = {"tokenizer": None, "revision": "main", "dtype": "float32", "device": "cpu", "batch_size": 2, "max_length": 32}
HERE |= {"max_batch_size": 8, "trust_remote_code": False, "add_bos_token": False, "prefix_token_id": 5}
HERE |= {"logits_cache": False, "think_end_token": "w5", "enable_thinking": True, "chat_template_args": {"of": "mine"}}


def test_every_argument_of_the_harness_holds_or_is_refused_by_its_name(tmp_path):
    tiny_model("dcformer", seed=0, vocab_size=ROWS).save_pretrained(tmp_path)
    word_tokenizer(bos_token="w0").save_pretrained(tmp_path)
    known = inspect.signature(HFLM).parameters
    assert HERE.keys() < known.keys()
    model = language_model(str(tmp_path), backend="default", parallelize=False, **HERE)
    assert (model.prefix_token_id, model.max_length, model.think_end_token) == (5, 32, "w5")
    assert model.chat_template_args == {"of": "mine", "enable_thinking": True} and model.max_batch_size == 8
    for name in [*known.keys() - HERE.keys() - {"pretrained", "kwargs"}, "device_map", "load_in_4bit"]:
        with pytest.raises(ValueError, match=rf"takes no {name}='x': \w+ \w+"):
            language_model(str(tmp_path), **{name: "x"})


@pytest.mark.parametrize("kind", ["dcformer", "gpt_neox"])
def test_contexts_of_generations_obey_the_policy_too(kind, tmp_path):
    """With 9 of the tokenizer's 67 ids; the padding has no row either."""
    model, answers = build_model(kind, vocab_size=9), []
    for text in ("w3 w44", "w3 w8"):
        asked = instances([(each, {"until": ["w2"], "max_gen_toks": 5}) for each in ("w5", text, "w3 w4 w5")])
        scorer = DCFormerLM(model, tokenizer=word_tokenizer(pad_token="w66"), oov_policy="clamp", batch_size=2)
        answers.append(scorer.generate_until(asked, disable_tqdm=True))
        assert scorer.oov_documents == ({("question", 1)} if "w44" in text else set())
    assert answers[0] == answers[1] and len(set(answers[0])) > 1
    model.set_output_embeddings(torch.nn.Linear(1, 8))
    assert prefixes.Scorer(model, shares=False).rows == 8  # what it can read and predict
    scorer.oov_policy = "error"
    with pytest.raises(ValueError, match=r"Token id 44 in a context has no row .* 9"):
        scorer.tok_batch_encode(["w3", "w44"])


def questions(count=12):
    """Requests of questions with one to five choices: of one token, equal, with a common prefix; some are cut."""
    generator = random.Random(0)

    def ids(number):
        return [generator.randrange(ROWS) for _ in range(number)]

    requests = []
    for index in range(count):
        # The empty context is one token. Of the longest, less is kept the longer a choice is.
        context = ids([1, 5, 12, 20, 21, 33, 55, 62, 70][index % 9])
        choices = [ids(generator.choice([1, 1, 2, 5, 9])) for _ in range(1 + index % 5)]
        if index % 3 == 0:
            prefix = ids(10)
            choices = [prefix + choice for choice in choices]
        if index % 4 == 1:
            choices += [list(choices[0]), choices[0] + ids(2)]
        requests += [(None, context, choice) for choice in choices]
    generator.shuffle(requests)
    return requests


def scorer_of(model, **options):
    defaults = {"tokenizer": word_tokenizer(), "max_length": POSITIONS, "on_progress": lambda *_: None}
    return DCFormerLM(model, **{**defaults, **options})


def answers_of(scorer, requests):
    answers = scorer._loglikelihood_tokens(requests)
    return torch.tensor([value for value, _ in answers]), [greedy for _, greedy in answers]


@pytest.mark.parametrize("kind", ["dcformer", "dcpythia", "grouped_query_attention", LEARNED, "gpt_neox", "llama"])
def test_scores_are_those_of_whole_inputs(kind):
    model, requests = build_model(kind), questions()
    expected, greedy = answers_of(scorer_of(model, shared_prefixes=False, batch_size=8), requests)
    for batch_size in (1, 8):
        scorer = scorer_of(model, batch_size=batch_size)
        answers, flags = answers_of(scorer, requests)
        # Float32 sums in another order; log-likelihoods are up to 100.
        assert answers == pytest.approx(expected, abs=2e-5, rel=1e-6)
        assert flags == greedy
        assert 0.2 * scorer.input_tokens < scorer.cached_tokens < 0.8 * scorer.input_tokens


def test_models_whose_cache_is_not_tested_or_whose_angles_depend_on_the_length_share_nothing():
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    for model in (build_model("opt"), build_model("llama", rope_parameters=dynamic)):
        scorer, requests = scorer_of(model, batch_size=1), questions(4)
        harness = HFLM(model, tokenizer=scorer.tokenizer, backend="causal", batch_size=1, max_length=POSITIONS)
        expected = harness._loglikelihood_tokens(requests, disable_tqdm=True)
        assert answers_of(scorer, requests)[0].tolist() == pytest.approx([value for value, _ in expected], abs=1e-4)
        assert scorer.cached_tokens == 0 and not scorer.scorer.shares


def test_groups_hold_every_input_once_and_save_what_any_groups_can():
    generator = random.Random(1)
    for _ in range(20):
        inputs = []
        for _ in range(4):
            shared = [generator.randrange(3) for _ in range(generator.randrange(6, 14))]
            inputs += [(*shared, *generator.choices(range(3), k=9)) for _ in range(3)]
        inputs = sorted(set(inputs))
        groups = group_by_prefix(inputs)
        assert sorted(index for group in groups for index in group.indices) == list(range(len(inputs)))
        saved = sum(group.length * (len(group.indices) - 1) for group in groups)
        assert all(len({inputs[index][: group.length] for index in group.indices}) == 1 for group in groups)

        def best(start, inputs=inputs):
            """Over all ways to group the sorted inputs from one on."""
            savings = [0]
            for stop in range(start + 1, len(inputs) + 1):
                common = prefixes.shared_length(inputs[start], inputs[stop - 1])
                if stop - start == 1 or common >= prefixes.LEAST_SHARED:
                    savings.append((stop - start - 1) * common + (best(stop) if stop < len(inputs) else 0))
            return max(savings)

        assert saved == best(0)


def test_an_input_reads_from_vllms_cache_only_where_nothing_is_scored():
    def scored(length, tokens):
        return ScoredInput(tuple(range(length)), [Target(0, length - tokens, range(tokens))])

    # Of 70 tokens 64 are in whole blocks; predictions before position 64 would be lost.
    assert which_may_read([scored(70, 1), scored(71, 2)], 32) == [True, True]
    assert which_may_read([scored(70, 20), scored(71, 20)], 32) == [False, False]
    assert which_may_read([scored(70, 20)], 32) == [True]
