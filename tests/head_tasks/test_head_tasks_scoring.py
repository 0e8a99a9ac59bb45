"""Scores of documents of head tasks: many answers of one forward pass against one model call per answer."""

import math

import pytest
import torch
from tiny_models import tiny_model
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from dcformer.head_tasks import build_tokenizer, generate_documents
from dcformer.head_tasks.scoring import score_documents, summarise


# Kinds with answers of one and of several words, and texts of several lengths.
KINDS = ("task16", "task56", "task62", "task70", "task2", "task15")


@pytest.fixture(scope="module")
def word_tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def documents():
    return generate_documents(12, seed=3, split="test", lines=(1, 4), kinds=KINDS)


def gpt_neox(vocab_size: int) -> GPTNeoXForCausalLM:
    torch.manual_seed(1)
    config = GPTNeoXConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = GPTNeoXForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    return model


def one_at_a_time(model, tokenizer, document, first_id_of_answer_has_space):
    """(log-likelihood, tokens, correct) of every answer: the text up to it, and the answer, each tokenised alone."""
    for start, end in document["answers"]:
        context, answer = document["text"][:start], document["text"][start:end]
        if not first_id_of_answer_has_space:
            context, answer = context + " ", answer[1:]
        context_ids = tokenizer(context)["input_ids"]
        answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([context_ids + answer_ids])).logits[0].double()
        log_probabilities = logits.log_softmax(-1)
        places = range(len(context_ids) - 1, len(context_ids) + len(answer_ids) - 1)
        yield (
            sum(log_probabilities[place, token].item() for place, token in zip(places, answer_ids)),
            len(answer_ids),
            all(logits[place].argmax().item() == token for place, token in zip(places, answer_ids)),
        )


def assert_equal_scores(scores, model, tokenizer, documents, first_id_of_answer_has_space):
    expected = [
        (index, shots, *values)
        for index, document in enumerate(documents)
        for shots, values in enumerate(one_at_a_time(model, tokenizer, document, first_id_of_answer_has_space))
    ]
    assert [(score["document"], score["shots"]) for score in scores] == [row[:2] for row in expected]
    assert [score["tokens"] for score in scores] == [row[3] for row in expected]
    assert [score["correct"] for score in scores] == [row[4] for row in expected]
    # float32 sums of a few logarithms near 10.
    for score, row in zip(scores, expected):
        assert score["log_likelihood"] == pytest.approx(row[2], abs=1e-5 * max(1, abs(row[2])))


def with_likely_answers(model, tokenizer, documents):
    """The same model, whose logits are 0 but for a few words, so that some answers of a random model are right."""
    words = sorted(
        {
            tokenizer(document["text"][start + 1 : end], add_special_tokens=False)["input_ids"][0]
            for document in documents
            for start, end in document["answers"]
        }
    )
    with torch.no_grad():
        output = model.get_output_embeddings().weight
        kept = output[words].clone()
        output.zero_()
        output[words] = kept
    return model


def with_a_right_answer(model, tokenizer, documents):
    """The documents and one more, whose answer is what the model would say."""
    for document in documents:
        start = document["answers"][0][0]
        text = document["text"][:start]
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1]
        word = tokenizer.decode([logits.argmax().item()], skip_special_tokens=True)
        if word.strip():
            answers = [[start, start + 1 + len(word)]]
            return [*documents, {**document, "text": f"{text} {word}", "answers": answers}]
    raise LookupError("the model answers no document by a word")


@pytest.mark.parametrize("batch_size", [1, 5, 32])
@pytest.mark.parametrize("variant", ["dcformer", "dcpythia", "plain_gated_transformer"])
def test_a_batch_scores_as_one_call_per_answer(variant, batch_size, word_tokenizer, documents):
    model = tiny_model(variant, vocab_size=len(word_tokenizer), max_position_embeddings=256)
    with_likely_answers(model, word_tokenizer, documents)
    documents = with_a_right_answer(model, word_tokenizer, documents)
    scores = score_documents(model, word_tokenizer, documents, batch_size)
    assert_equal_scores(scores, model, word_tokenizer, documents, first_id_of_answer_has_space=False)
    assert {score["correct"] for score in scores} == {True, False}
    assert max(score["tokens"] for score in scores) > 1


def test_the_gpt_neox_tokenizer_whose_tokens_include_the_space(tokenizer, documents):
    model = gpt_neox(50304)
    scores = score_documents(model, tokenizer, documents, batch_size=4)
    assert_equal_scores(scores, model, tokenizer, documents, first_id_of_answer_has_space=True)


def test_left_padding_of_the_tokenizer_and_the_order_of_documents_do_not_matter(word_tokenizer, documents):
    assert word_tokenizer.padding_side == "left"
    model = tiny_model(vocab_size=len(word_tokenizer), max_position_embeddings=256)
    forwards = score_documents(model, word_tokenizer, documents, batch_size=5)
    backwards = score_documents(model, word_tokenizer, documents[::-1], batch_size=5)
    for score in backwards:
        score["document"] = len(documents) - 1 - score["document"]
    backwards.sort(key=lambda score: (score["document"], score["shots"]))
    for first, second in zip(forwards, backwards, strict=True):
        assert first.pop("log_likelihood") == pytest.approx(second.pop("log_likelihood"), abs=1e-4)
        assert first == second


def test_logits_are_asked_for_only_before_answers(word_tokenizer, documents, monkeypatch):
    model = tiny_model(vocab_size=len(word_tokenizer), max_position_embeddings=256)
    shapes, whole = [], model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda states: shapes.append(states.shape) or whole(states))
    scores = score_documents(model, word_tokenizer, documents[:1])
    assert [shape[:2] for shape in shapes] == [(1, sum(score["tokens"] for score in scores))]


def test_a_batch_is_cut_where_logits_would_not_fit(word_tokenizer, documents, monkeypatch):
    model = tiny_model(vocab_size=len(word_tokenizer), max_position_embeddings=256)
    whole = score_documents(model, word_tokenizer, documents)
    seen, forward = [], model.forward

    def spy(input_ids, attention_mask=None, logits_to_keep=0, use_cache=None):
        seen.append(input_ids.shape[0])
        return forward(input_ids, attention_mask, logits_to_keep=logits_to_keep, use_cache=use_cache)

    monkeypatch.setattr(model, "forward", spy)
    monkeypatch.setattr("dcformer.eval.scoring.MOST_LOGITS", 2 * 100 * len(word_tokenizer))
    cut = score_documents(model, word_tokenizer, documents)
    assert sum(seen) == len(documents) and max(seen) < len(documents)
    for first, second in zip(whole, cut, strict=True):
        assert first["log_likelihood"] == pytest.approx(second["log_likelihood"], abs=1e-4)


def test_progress_and_given_numbers_of_shots(word_tokenizer, documents):
    model = tiny_model(vocab_size=len(word_tokenizer), max_position_embeddings=256)
    rows = [{**document, "shots": [5 + i for i in range(len(document["answers"]))]} for document in documents]
    seen = []
    scores = score_documents(model, word_tokenizer, rows, 5, lambda done, total: seen.append((done, total)))
    assert seen == [(5, 12), (10, 12), (12, 12)]
    assert scores[0]["shots"] == 5
    with pytest.raises(ValueError, match="but 9 numbers of `shots`"):
        score_documents(model, word_tokenizer, [{**documents[0], "shots": list(range(9))}])


def test_summaries_are_means_over_answers(documents):
    rows = [
        {"pattern": "a", "transformation": "copy", "task": "task1", "subject": "persons"},
        {"pattern": "b", "transformation": "copy", "task": "task2", "subject": "lists"},
        {"pattern": "b", "transformation": "copy", "task": "task2", "subject": "lists"},
    ]
    values = [(0, 0, -1.0, 1, True), (0, 1, -2.0, 3, False), (1, 0, -0.5, 1, True), (2, 0, -4.0, 2, True)]
    names = ("document", "shots", "log_likelihood", "tokens", "correct")
    summary = summarise(rows, [dict(zip(names, value)) for value in values])
    assert summary["accuracy"] == 0.75 and summary["answers"] == 4 and summary["documents"] == 3
    assert summary["perplexity"] == pytest.approx(math.exp(7.5 / 4))
    assert summary["token_perplexity"] == pytest.approx(math.exp(7.5 / 7))
    assert summary["by_pattern"]["b"] == pytest.approx(
        {"accuracy": 1, "perplexity": math.exp(2.25), "token_perplexity": math.exp(1.5), "answers": 2, "documents": 2}
    )
    assert list(summary["by_shots"]) == ["0", "1"] and summary["by_shots"]["1"]["accuracy"] == 0
    assert summary["by_transformation"]["copy"]["answers"] == 4 and summary["by_task"]["task1"]["accuracy"] == 0.5
    assert summary["by_subject"]["persons"]["accuracy"] == 0.5
    assert summary["by_subject"]["persons"]["by_shots"]["1"] == summary["by_shots"]["1"]
    assert list(summary["by_subject"]["lists"]["by_shots"]) == ["0"]
    with pytest.raises(ValueError, match="There are no scores"):
        summarise(rows, [])


def test_errors(word_tokenizer, documents):
    model = tiny_model(vocab_size=len(word_tokenizer), max_position_embeddings=256)
    text = documents[0]["text"]
    with pytest.raises(ValueError, match="has no token of its own"):
        score_documents(model, word_tokenizer, [{"text": text, "answers": [[5, 5]]}])
    small = tiny_model(vocab_size=20, max_position_embeddings=256)
    with pytest.raises(ValueError, match="has no row in the embedding, which has 20"):
        score_documents(small, word_tokenizer, documents)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        score_documents(model, word_tokenizer, documents, batch_size=0)


def test_an_answer_at_the_start_of_a_text_without_a_first_token_is_refused(tokenizer):
    with pytest.raises(ValueError, match="has no token before it"):
        score_documents(gpt_neox(50304), tokenizer, [{"text": " violin", "answers": [[0, 7]]}])
