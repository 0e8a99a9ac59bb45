"""Computing once what inputs begin with: the same scores as without, and only of models that can."""

import json
import logging
import random

import pytest
import torch
from tiny_models import tiny_model
from tokenizers import Tokenizer, models
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import DynamicCache


pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM
from test_eval_scoring import save_model, save_tokenizer

from benchmarks import evaluation
from dcformer.eval import prefix_scoring
from dcformer.eval.language_model import DCFormerLM
from dcformer.eval.records import read_record, record_path
from dcformer.eval.runner import evaluate
from dcformer.eval.shared_prefixes import shared_stretches


ROWS = 67
POSITIONS = 64
SHAPE = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS = {
    # Windows of 6, so that what is shared is longer and shorter than they are.
    "dcformer": lambda: tiny_model("dcformer"),
    "dcpythia": lambda: tiny_model("dcpythia"),
    "grouped_query_attention": lambda: tiny_model("grouped_query_attention"),
    "learned_positions": lambda: tiny_model("plain_transformer_with_learned_positions"),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE, intermediate_size=64, initializer_range=0.3)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, intermediate_size=64, num_key_value_heads=2, initializer_range=0.3)
    ),
    # Takes its positions from the mask.
    "opt": lambda: OPTForCausalLM(OPTConfig(**SHAPE, ffn_dim=64, word_embed_proj_dim=32, init_std=0.3)),
    "mamba": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=ROWS, hidden_size=32, num_hidden_layers=2, state_size=4, eos_token_id=None)
    ),
    "openai_gpt": lambda: OpenAIGPTLMHeadModel(
        OpenAIGPTConfig(vocab_size=ROWS, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS)
    ),
}
# Float32 sums in another order; log-likelihoods are up to 100.
TOLERANCE = 2e-5


def make_model(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def make_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(ROWS)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1")


def language_model(model, **options):
    return DCFormerLM(
        model,
        tokenizer=make_tokenizer(),
        max_length=POSITIONS,
        on_progress=lambda *_: None,
        **{"batch_size": 8, **options},
    )


def questions(model, count=12):
    """Requests of questions with one to five choices: of one token, equal, alike at first, greedy; some are cut."""
    generator = random.Random(0)

    def ids(number):
        return [generator.randrange(ROWS) for _ in range(number)]

    requests = []
    for index in range(count):
        # The empty context is one token. Of the longest, less is kept the longer a choice is.
        context = ids([1, 5, 12, 20, 21, 33, 55, 62, 70][index % 9])
        choices = [ids(generator.choice([1, 1, 2, 5, 9])) for _ in range(1 + index % 5)]
        if index % 3 == 0:
            beginning = ids(10)
            choices = [beginning + choice for choice in choices]
        if index % 4 == 1:
            choices.append(list(choices[0]))
            choices.append(choices[0] + ids(2))
        greedy: list[int] = []
        for _ in range(index % 3):
            with torch.no_grad():
                logits = model(torch.tensor([(context + greedy)[-POSITIONS:]])).logits[0, -1]
            greedy.append(int(logits.argmax()))
            choices.append(list(greedy))
        requests += [(None, context, choice) for choice in choices]
    generator.shuffle(requests)
    return requests


def answers_of(scorer, requests):
    answers = scorer._loglikelihood_tokens(requests)
    return torch.tensor([value for value, _ in answers]), [greedy for _, greedy in answers]


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("mamba", "openai_gpt")])
def test_scores_are_those_of_whole_inputs(name):
    model = make_model(name)
    requests = questions(model)
    expected, greedy = answers_of(language_model(model, shared_prefixes=False), requests)
    assert any(greedy) and not all(greedy)
    for batch_size in (1, 8):
        scorer = language_model(model, batch_size=batch_size)
        found, flags = answers_of(scorer, requests)
        assert scorer.sharing_problem is None
        assert found == pytest.approx(expected, abs=TOLERANCE, rel=1e-6)
        assert flags == greedy
        assert 0.2 * scorer.input_tokens < scorer.cached_tokens < 0.8 * scorer.input_tokens


@pytest.mark.parametrize("name", ["dcformer", "dcpythia", "gpt_neox", "llama"])
def test_scores_are_those_of_the_harness(name):
    model = make_model(name)
    requests = questions(model)
    harness = HFLM(model, tokenizer=make_tokenizer(), backend="causal", batch_size=1, max_length=POSITIONS)
    expected = harness._loglikelihood_tokens(requests, disable_tqdm=True)
    found, flags = answers_of(language_model(model), requests)
    assert found.tolist() == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert flags == [greedy for _, greedy in expected]


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_beginnings_are_shared_as_long_as_angles_do_not_depend_on_the_length(rope_type, caplog):
    # Inputs have up to 64 tokens.
    short = {
        "longrope": {
            "short_factor": [1.0] * 4,
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 40,
        },
        "dynamic": {"factor": 2.0},
    }[rope_type]
    positions = 64 if rope_type == "longrope" else 40
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, **short}
    torch.manual_seed(0)
    model = tiny_model("all_global", max_position_embeddings=positions, rope_parameters=rope).eval()
    short_ones = [each for each in questions(model) if len(each[1]) + len(each[2]) <= 40]
    scorer = language_model(model)
    for requests, shares in ((short_ones, True), (questions(model), False)):
        # One by one: the longest input of a batch decides on the angles of all.
        expected, greedy = answers_of(language_model(model, shared_prefixes=False, batch_size=1), requests)
        scorer.batch_size_per_gpu = 8 if shares else 1
        before = scorer.cached_tokens
        found, flags = answers_of(scorer, requests)
        assert found == pytest.approx(expected, abs=TOLERANCE, rel=1e-6) and flags == greedy
        assert (scorer.cached_tokens > before) is shares
    assert "inputs of more than 40 tokens" in scorer.sharing_problem


def test_contexts_that_begin_alike_are_shared_without_a_scored_token():
    model = make_model("dcformer")
    beginning, continuation = list(range(20)), [30, 31, 32]
    requests = [(None, [*beginning, *ending], continuation) for ending in ([40], [41, 42], [43, 44, 45])]
    expected, greedy = answers_of(language_model(model, shared_prefixes=False), requests)
    scorer = language_model(model)
    found, flags = answers_of(scorer, requests)
    assert found == pytest.approx(expected, abs=TOLERANCE) and flags == greedy
    assert scorer.cached_tokens == 2 * 20 and scorer.input_tokens == 3 * (20 + 2) + 6


@pytest.mark.parametrize(
    "name, reason", [("mamba", "a state that cannot be divided"), ("openai_gpt", "the model takes no cache")]
)
def test_model_without_a_cache_computes_inputs_whole_and_says_so_once(name, reason, caplog):
    model = make_model(name)
    requests = questions(model, count=4)
    expected, greedy = answers_of(language_model(model, shared_prefixes=False), requests)
    scorer = language_model(model)
    with caplog.at_level(logging.WARNING, "dcformer.eval"):
        found, flags = answers_of(scorer, requests)
        answers_of(scorer, requests)
    assert torch.equal(found, expected) and flags == greedy
    (message,) = (record.getMessage() for record in caplog.records if record.name.startswith("dcformer"))
    assert reason in message
    assert scorer.cached_tokens == 0
    record = scorer.sharing()
    assert record["shared_prefixes"] is False and reason in record["sharing_problem"]


class WithoutPadding(GPTNeoXForCausalLM):
    """Reads its cache, but neither the mask nor the positions that come with it."""

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **arguments
    ):
        return super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache, **arguments)


class WithoutMemory(GPTNeoXForCausalLM):
    """Takes a cache and leaves it as it is."""

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None, **arguments):
        return super().forward(input_ids, use_cache=False)


@pytest.mark.parametrize(
    "model_class, reason", [(WithoutPadding, "computes other logits"), (WithoutMemory, "does not use the cache")]
)
def test_cache_that_changes_scores_is_not_used(model_class, reason):
    torch.manual_seed(0)
    model = model_class(GPTNeoXConfig(**SHAPE, intermediate_size=64, initializer_range=0.3)).eval()
    requests = questions(model, count=4)
    scorer = language_model(model)
    found, _ = answers_of(scorer, requests)
    assert reason in scorer.sharing_problem
    assert torch.equal(found, answers_of(language_model(model, shared_prefixes=False), requests)[0])


class WithWindowOfItsOwn(MistralForCausalLM):
    """Takes a cache of its own, which drops what has left the window."""

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **arguments
    ):
        if past_key_values is not None and past_key_values.get_seq_length() == 0:
            past_key_values = DynamicCache(config=self.config)
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **arguments,
        )


def test_model_that_fails_beyond_what_was_tried_computes_inputs_whole(monkeypatch, caplog):
    monkeypatch.setattr(prefix_scoring, "_LONGEST_WINDOW_TRIED", 0)
    torch.manual_seed(0)
    model = WithWindowOfItsOwn(MistralConfig(**SHAPE, intermediate_size=64, num_key_value_heads=2, sliding_window=45))
    requests = questions(model.eval())
    expected, greedy = answers_of(language_model(model, shared_prefixes=False), requests)
    scorer = language_model(model)
    assert scorer._prefix_scorer is not None
    with caplog.at_level(logging.WARNING, "dcformer.eval"):
        found, flags = answers_of(scorer, requests)
    assert found == pytest.approx(expected, abs=TOLERANCE) and flags == greedy
    assert "other things than keys and values" in scorer.sharing_problem and scorer.sharing_problem in caplog.text


def test_what_was_scored_before_a_model_fails_is_kept(monkeypatch):
    model = make_model("gpt_neox")
    requests = questions(model)
    expected, greedy = answers_of(language_model(model, shared_prefixes=False), requests)
    scorer = language_model(model, batch_size=1)
    assert scorer._prefix_scorer is not None
    forward, calls = prefix_scoring.PrefixScorer.forward, []

    def failing_at_last(self, batch, *arguments):
        calls.append(len(batch))
        if len(calls) > 10:
            raise prefix_scoring.CannotShare("no more")
        return forward(self, batch, *arguments)

    monkeypatch.setattr(prefix_scoring.PrefixScorer, "forward", failing_at_last)
    found, flags = answers_of(scorer, requests)
    assert found == pytest.approx(expected, abs=TOLERANCE) and flags == greedy
    assert scorer.sharing_problem == "no more" and scorer.cached_tokens > 0
    assert answers_of(scorer, requests)[0] == pytest.approx(expected, abs=TOLERANCE) and len(calls) == 11


def test_model_in_bfloat16_shares():
    scorer = language_model(make_model("dcformer").to(torch.bfloat16))
    answers_of(scorer, questions(make_model("dcformer"), count=4))
    assert scorer.sharing_problem is None and scorer.cached_tokens > 0


def test_little_memory_for_caches_changes_nothing(monkeypatch):
    model = make_model("dcformer")
    requests = questions(model)
    expected, _ = answers_of(language_model(model), requests)
    rows = []
    forward = prefix_scoring.PrefixScorer.forward

    def counting(self, batch, *arguments):
        rows.append(len(batch))
        return forward(self, batch, *arguments)

    monkeypatch.setattr(prefix_scoring.PrefixScorer, "forward", counting)
    monkeypatch.setattr(prefix_scoring, "MOST_CACHED", 1)
    assert answers_of(language_model(model), requests)[0] == pytest.approx(expected, abs=TOLERANCE)
    assert set(rows[2:]) == {1}  # after the model was tried out


def test_batch_for_which_memory_runs_out_is_halved(monkeypatch):
    model = make_model("gpt_neox")
    requests = questions(model)
    expected, _ = answers_of(language_model(model), requests)
    forward = prefix_scoring.PrefixScorer.forward
    failed = []

    def short_of_memory(self, batch, *arguments):
        if len(batch) > 4:
            failed.append(len(batch))
            raise torch.OutOfMemoryError
        return forward(self, batch, *arguments)

    monkeypatch.setattr(prefix_scoring.PrefixScorer, "forward", short_of_memory)
    assert answers_of(language_model(model), requests)[0] == pytest.approx(expected, abs=TOLERANCE)
    assert failed


def test_stretches_hold_every_token_of_what_is_shared_once():
    context, other = list(range(10)), list(range(50, 60))
    inputs = [[*context, 20], [*context, 21, 22], [*context], [*other, 1], other[:3], [*other, 1, 2]]
    roots = shared_stretches(inputs, least=8)
    whole = {(root.start, root.stop): root for root in roots}
    first, third = whole[0, 10], whole[0, 3]
    assert first.places == [2] and sorted(child.places[0] for child in first.children) == [0, 1]
    assert third.places == [4] and not third.children  # three tokens are too few to share
    (longer,) = (root for root in roots if root.stop == 11)
    assert longer.places == [3] and [(child.start, child.stop, child.places) for child in longer.children] == [
        (11, 12, [5])
    ]
    assert len(roots) == 3


def tokens_of(roots):
    """Tokens to compute, most stretches of an input, and the inputs that are there."""
    tokens, depth, places, left = 0, 0, [], [(root, 1) for root in roots]
    while left:
        stretch, level = left.pop()
        tokens, depth = tokens + stretch.stop - stretch.start, max(depth, level)
        places += stretch.places
        left += [(child, level + 1) for child in stretch.children]
    return tokens, depth, sorted(places)


def test_chain_of_beginnings_has_a_bounded_depth():
    inputs = [list(range(8 * number)) for number in range(1, 200)]
    tokens, depth, places = tokens_of(shared_stretches(inputs, least=8, most_levels=3))
    assert depth == 3 and places == list(range(199))
    assert tokens < sum(map(len, inputs)) / 2


def test_beginnings_that_save_little_do_not_take_the_place_of_those_that_save_much():
    # All texts begin alike, those of a group have another example in common, and choices share their question.
    def text(group, question, choice):
        example = [1000 + 100 * group + number for number in range(30)]
        return [*range(10), *example, *(5000 + 100 * question + number for number in range(80)), choice]

    inputs = [
        text(group, 4 * group + question, choice) for group in range(6) for question in range(4) for choice in (1, 2, 3)
    ]
    tokens, depth, places = tokens_of(shared_stretches(inputs, least=8, most_levels=3))
    # The examples of six groups, with what all begin with, the questions, and the choices.
    assert tokens == 6 * 40 + 24 * 80 + 72 and depth == 3 and places == list(range(72))


def test_no_other_way_of_sharing_leaves_fewer_tokens():
    generator = random.Random(0)
    for _ in range(150):
        inputs = []
        for _ in range(generator.randint(1, 7)):
            beginning = generator.choice(inputs)[: generator.randint(0, 8)] if inputs else []
            inputs.append([*beginning, *(generator.randrange(3) for _ in range(generator.randint(1, 4)))])
        inputs = [list(each) for each in sorted(set(map(tuple, inputs)))]
        least, most_levels = generator.randint(1, 3), generator.randint(1, 4)
        found = tokens_of(shared_stretches(inputs, least, most_levels))
        assert found[0] == fewest_tokens(inputs, least, most_levels)
        assert found[1] <= most_levels and found[2] == list(range(len(inputs)))


def fewest_tokens(inputs, least, most_levels):
    """Of all choices of places where inputs part, or one ends, to share what is before them."""

    def fewest(rest, start, allowed):
        if not rest:
            return 0
        first = rest[0]
        found = [len(first) - start + fewest(rest[1:], start, allowed)]
        for stop in range(start + least, len(first) + 1) if allowed else ():
            alike = [each for each in inputs if each[:stop] == first[:stop]]
            if (
                len(first) == stop
                or len({each[stop] for each in alike if len(each) > stop}) > 1
                or first[:stop] in inputs
            ):
                longer = [each for each in rest if each[:stop] == first[:stop] and len(each) > stop]
                others = [each for each in rest if each[:stop] != first[:stop]]
                found.append(stop - start + fewest(longer, stop, allowed - 1) + fewest(others, start, allowed))
        return min(found)

    return fewest(inputs, 0, most_levels - 1)


@pytest.mark.parametrize("task", ["arc_easy", "flan_ppl"])
def test_record_says_what_was_shared_and_the_option_belongs_to_its_settings(task, fixtures, tmp_path):
    folder = tmp_path / "model"
    save_model(folder, "gpt_neox")
    save_tokenizer(folder, fixtures)
    data_dir = fixtures / "benchdata"
    if task == "flan_ppl":
        data_dir = tmp_path / "data"
        (data_dir / "flan").mkdir(parents=True)
        asked = "Translate into the language of the neighbours, word by word:"
        examples = [{"inputs": f"{asked} {word}", "targets": word.upper()} for word in ("one", "two", "three")]
        (data_dir / "flan" / "a.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    options = {
        "output": tmp_path / "results",
        "tasks": task,
        "data_dir": data_dir,
        "limit": 3,
        "dtype": "float32",
        "device": "cpu",
        "max_length": 64,
    }
    path = record_path(options["output"], str(folder), task, 0)
    samples = {}
    for shared in (True, False):
        evaluate(str(folder), shared_prefixes=shared, **options)
        record = read_record(path)
        assert record.settings.get("shared_prefixes", False) is shared
        assert record.timings["shared_prefixes"] is shared
        assert (record.timings["cached_tokens"] > 0) is shared
        lines = path.with_suffix(".samples.jsonl").read_text().splitlines()
        samples[shared] = [request for line in lines for request in json.loads(line)["requests"]]
    for ours, whole in zip(samples[True], samples[False], strict=True):
        assert ours["log_likelihood"] == pytest.approx(whole["log_likelihood"], abs=1e-4)
        assert {**ours, "log_likelihood": 0} == {**whole, "log_likelihood": 0}


def test_the_benchmark_counts_what_the_scorer_computes(fixtures):
    data_dir = str(fixtures / "benchdata")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{data_dir}/tokenizer/20B_tokenizer.json", eos_token="<|endoftext|>"
    )
    tasks = evaluation.load_tasks(data_dir, ["piqa", "arc_easy"])
    counted = evaluation.count_tokens(tasks, tokenizer, [1], 4)
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": 50304, "hidden_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 512}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**shape, intermediate_size=8))
    scorer = DCFormerLM(model, tokenizer=tokenizer, max_length=512, batch_size=8, on_progress=lambda *_: None)
    for name, task in tasks.items():
        scorer.forget_documents()
        scorer.loglikelihood(evaluation.make_requests(task, 1, 4))
        own = {"tokens": scorer.input_tokens, "computed": scorer.input_tokens - scorer.cached_tokens}
        assert counted[f"{name}, 1-shot"] == own and own["computed"] < own["tokens"]
    assert counted["all, 1-shot"]["tokens"] == sum(
        counted[f"{name}, 1-shot"]["tokens"] for name in ("piqa", "arc_easy")
    )
