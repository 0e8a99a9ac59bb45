"""Log-likelihood and accuracy of the answers in documents of head tasks: one forward pass for all answers of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..common.numbers import exponential
from ..eval.scoring import ScoredInput, Target, TargetScore, TargetScorer, clamped, message_of_missing_row


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_GROUPS = {"by_subject": "subject", "by_pattern": "pattern", "by_transformation": "transformation", "by_task": "task"}


def score_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Mapping[str, Any]],
    batch_size: int = 32,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """
    Score every answer of every document given all of the text before it.

    A token is one of an answer's if it ends inside the answer's span; so it may, but need not, include the space
    before the first word.

    Args:
        model: Any causal language model; it is used as it is, so call `eval()` before.
        tokenizer: A fast one.
        documents: Rows with `text` and `answers`, the [start, end) of every answer in characters, the space before it
            included; and optionally `shots`, the number of examples before each answer, by default its place.
        batch_size (defaults to 32): Documents in a forward pass; fewer where their logits would exceed 1 GiB.
        on_progress (*optional*): Called with the numbers of documents done and in all.

    Returns:
        For every answer, in order: `document` (the index of its row), `shots`, `log_likelihood` (nats, of all its
        tokens together, from a float32 log-softmax), `tokens`, `correct` (every token is the most probable one).

    Raises:
        ValueError: if the tokenizer is not fast, an answer has no token of its own or nothing before it, or a token
            has no row in the embedding.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    if not tokenizer.is_fast:
        raise ValueError(
            f"Answers are found by their characters, which {type(tokenizer).__name__} does not tell of its tokens; use "
            "a fast tokenizer."
        )
    scorer = TargetScorer(model)
    inputs = [_input(scorer, tokenizer, document, index) for index, document in enumerate(documents)]
    scores: list[list[dict[str, Any]]] = [[] for _ in documents]
    done = 0
    # Texts of like length together, the longest first, so that memory runs out at once if it does.
    order = sorted(range(len(inputs)), key=lambda index: -len(inputs[index].ids))
    waiting = iter(order)
    for batch in scorer.batches([inputs[index] for index in order], lambda _: batch_size):
        for own, index in zip(scorer.score(batch), waiting):
            scores[index] = list(_answers(documents[index], index, inputs[index], own))
        done += len(batch)
        if on_progress is not None:
            on_progress(done, len(documents))
    return [score for of_document in scores for score in of_document]


def summarise(documents: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """
    Means over all answers and over those of every subject, pattern, transformation, task and number of shots.

    Args:
        documents: The rows that were scored, with `subject`, `pattern`, `transformation` and `task`.
        scores: What [`score_documents`] returned for them.

    Returns:
        `accuracy` (of whole answers), `perplexity` (exponential of the mean negative log-likelihood of an answer),
        `token_perplexity` (per token instead), `answers`, `documents`; and `by_subject`, `by_pattern`,
        `by_transformation`, `by_task`, `by_shots`: name -> the same five. `by_shots` of `"0"` are single questions;
        both subjects have a `by_shots` of their own. All names are strings, so that JSON holds the same. Perplexities
        are `None` if a log-likelihood is.

    Raises:
        ValueError: if there are no scores.
    """
    if not scores:
        raise ValueError("There are no scores to summarise; score at least one document that has an answer.")
    summary = _means_by_shots(scores)
    for name, key in _GROUPS.items():
        groups = _grouped(scores, lambda score, key=key: documents[score["document"]][key])
        means = _means_by_shots if name == "by_subject" else _means
        summary[name] = {member: means(members) for member, members in groups.items()}
    return summary


def _means_by_shots(scores: Sequence[Mapping]) -> dict[str, Any]:
    groups = _grouped(scores, lambda score: score["shots"])
    return {**_means(scores), "by_shots": {shots: _means(members) for shots, members in groups.items()}}


def _grouped(scores: Iterable[Mapping], key: Callable[[Mapping], Any]) -> dict[str, list[Mapping]]:
    groups: dict[Any, list[Mapping]] = {}
    for score in scores:
        groups.setdefault(key(score), []).append(score)
    return {str(name): groups[name] for name in sorted(groups)}


def _means(scores: Sequence[Mapping]) -> dict[str, Any]:
    log_likelihoods = [score["log_likelihood"] for score in scores]
    perplexities: dict[str, float | None] = {"perplexity": None, "token_perplexity": None}
    if None not in log_likelihoods:
        total = math.fsum(log_likelihoods)
        perplexities["perplexity"] = exponential(-total / len(scores))
        perplexities["token_perplexity"] = exponential(-total / sum(score["tokens"] for score in scores))
    return {
        "accuracy": sum(score["correct"] for score in scores) / len(scores),
        **perplexities,
        "answers": len(scores),
        "documents": len({score["document"] for score in scores}),
    }


def _input(
    scorer: TargetScorer, tokenizer: PreTrainedTokenizerBase, document: Mapping[str, Any], index: int
) -> ScoredInput:
    """Token ids of a text, with the tokens of every answer as a target."""
    encoding = tokenizer(document["text"], return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    positions = []
    for first, last in document["answers"]:
        own = [
            position
            for position, (start, end) in enumerate(encoding["offset_mapping"])
            if start < end and first < end <= last
        ]
        if not own or own[0] == 0:
            reason = "has no token of its own" if not own else "has no token before it"
            raise ValueError(
                f"The answer {document['text'][first:last]!r} of document {index} {reason} with the tokenizer "
                f"{tokenizer.name_or_path!r}; check the spans in `answers`, or use another tokenizer."
            )
        positions.append(own)
    ids = _known_ids(scorer, encoding["input_ids"])
    targets = [Target([place - 1 for place in own], [ids[place] for place in own]) for own in positions]
    return ScoredInput(ids, targets)


def _known_ids(scorer: TargetScorer, ids: list[int]) -> list[int]:
    largest = max(ids, default=0)
    if largest < scorer.rows:
        return ids
    if getattr(scorer.model.config, "oov_policy", "error") != "clamp":
        raise ValueError(message_of_missing_row(largest, scorer.rows))
    return clamped(ids, scorer.rows)


def _answers(
    document: Mapping[str, Any], index: int, scored: ScoredInput, scores: Sequence[TargetScore]
) -> Iterator[dict[str, Any]]:
    shots = document.get("shots") or range(len(scores))
    if len(shots) != len(scores):
        raise ValueError(f"Document {index} has {len(scores)} answers, but {len(shots)} numbers of `shots`.")
    for before, target, score in zip(shots, scored.targets, scores):
        yield {
            "document": index,
            "shots": before,
            "log_likelihood": score.log_likelihood,
            "tokens": len(target.ids),
            "correct": score.is_greedy,
        }
