"""Log-likelihood and accuracy of the answers in documents of head tasks: one forward pass for all answers of a text."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# A batch is cut where its logits would be more; in float32 this many are 1 GiB.
_MOST_LOGITS = 2**28
_GROUPS = {"by_pattern": "pattern", "by_transformation": "transformation", "by_task": "task"}


@torch.no_grad()
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
    encoded = [_encode(tokenizer, document, index) for index, document in enumerate(documents)]
    _check_ids(model, encoded)
    scores: list[list[dict[str, Any]]] = [[] for _ in documents]
    done = 0
    # Texts of like length together, the longest first, so that memory runs out at once if it does.
    order = sorted(range(len(encoded)), key=lambda index: -len(encoded[index][0]))
    for batch in _batches(order, encoded, batch_size, _rows(model)):
        for index, (log_probabilities, hits) in zip(batch, _forward(model, [encoded[index] for index in batch])):
            scores[index] = list(_answers(documents[index], index, encoded[index][1], log_probabilities, hits))
        done += len(batch)
        if on_progress is not None:
            on_progress(done, len(documents))
    return [score for of_document in scores for score in of_document]


def summarise(documents: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """
    Means over all answers and over those of every pattern, transformation, task and number of shots.

    Args:
        documents: The rows that were scored, with `pattern`, `transformation` and `task`.
        scores: What [`score_documents`] returned for them.

    Returns:
        `accuracy` (of whole answers), `perplexity` (exponential of the mean negative log-likelihood of an answer),
        `token_perplexity` (per token instead), `answers`, `documents`; and `by_pattern`, `by_transformation`,
        `by_task`, `by_shots`: name -> the same five. All names are strings, so that JSON holds the same.

    Raises:
        ValueError: if there are no scores.
    """
    if not scores:
        raise ValueError("There are no scores to summarise; score at least one document that has an answer.")
    groups = {
        name: _grouped(scores, lambda score, key=key: documents[score["document"]][key])
        for name, key in _GROUPS.items()
    }
    groups["by_shots"] = _grouped(scores, lambda score: score["shots"])
    means = {name: {key: _means(members) for key, members in group.items()} for name, group in groups.items()}
    return {**_means(scores), **means}


def _grouped(scores: Iterable[Mapping], key: Callable[[Mapping], Any]) -> dict[str, list[Mapping]]:
    groups: dict[Any, list[Mapping]] = {}
    for score in scores:
        groups.setdefault(key(score), []).append(score)
    return {str(name): groups[name] for name in sorted(groups)}


def _means(scores: Sequence[Mapping]) -> dict[str, Any]:
    log_likelihood = math.fsum(score["log_likelihood"] for score in scores)
    return {
        "accuracy": sum(score["correct"] for score in scores) / len(scores),
        "perplexity": _exponential(-log_likelihood / len(scores)),
        "token_perplexity": _exponential(-log_likelihood / sum(score["tokens"] for score in scores)),
        "answers": len(scores),
        "documents": len({score["document"] for score in scores}),
    }


def _exponential(value: float) -> float:
    """As `math.exp`, but infinite where that is too large for a float."""
    return math.exp(value) if value < 709 else math.inf


def _encode(
    tokenizer: PreTrainedTokenizerBase, document: Mapping[str, Any], index: int
) -> tuple[list[int], list[list[int]]]:
    """Token ids of a text, and the positions of each answer's tokens."""
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
    return encoding["input_ids"], positions


def _check_ids(model: PreTrainedModel, encoded: list[tuple[list[int], list[list[int]]]]) -> None:
    largest, rows = max((max(ids) for ids, _ in encoded), default=0), _rows(model)
    if largest >= rows and getattr(model.config, "oov_policy", "error") != "clamp":
        raise ValueError(
            f"Token id {largest} has no row in the embedding, which has {rows}; use the model's own tokenizer."
        )


def _rows(model: PreTrainedModel) -> int:
    return model.get_input_embeddings().weight.shape[0]


def _batches(order: list[int], encoded: list, batch_size: int, rows: int) -> Iterator[list[int]]:
    batch: list[int] = []
    length = 0
    for index in order:
        most = max(length, len(encoded[index][0]))
        if batch and (len(batch) == batch_size or (len(batch) + 1) * most * rows > _MOST_LOGITS):
            yield batch
            batch, most = [], len(encoded[index][0])
        batch.append(index)
        length = most
    if batch:
        yield batch


def _forward(
    model: PreTrainedModel, batch: list[tuple[list[int], list[list[int]]]]
) -> Iterator[tuple[dict[int, float], dict[int, bool]]]:
    """Of every text, position -> log-probability of the token there, and whether it is the most probable."""
    lengths = [len(ids) for ids, _ in batch]
    input_ids = torch.zeros(len(batch), max(lengths), dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, (ids, _) in enumerate(batch):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        attention_mask[row, : len(ids)] = 1
    scored = [sorted({position for own in answers for position in own}) for _, answers in batch]
    kept = sorted({position - 1 for positions in scored for position in positions})
    if not kept:
        yield from (({}, {}) for _ in batch)
        return
    logits = _logits(model, input_ids.to(model.device), attention_mask.to(model.device), kept)
    column = {position: place for place, position in enumerate(kept)}
    for row, positions in enumerate(scored):
        if not positions:
            yield {}, {}
            continue
        own = logits[row, [column[position - 1] for position in positions]].float()  # (positions, vocabulary)
        targets = input_ids[row, positions].to(own.device)
        log_probabilities = own.gather(-1, targets[:, None])[:, 0] - own.logsumexp(-1)
        hits = own.argmax(-1) == targets
        yield dict(zip(positions, log_probabilities.tolist())), dict(zip(positions, hits.tolist()))


def _logits(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, kept: list[int]) -> Tensor:
    """(batch, kept positions, vocabulary)."""
    parameters = inspect.signature(model.forward).parameters
    arguments = {"use_cache": False} if "use_cache" in parameters else {}
    positions = torch.tensor(kept, device=input_ids.device)
    if "logits_to_keep" in parameters:
        return model(input_ids, attention_mask=attention_mask, logits_to_keep=positions, **arguments).logits
    return model(input_ids, attention_mask=attention_mask, **arguments).logits[:, positions]


def _answers(
    document: Mapping[str, Any],
    index: int,
    positions: list[list[int]],
    log_probabilities: dict[int, float],
    hits: dict[int, bool],
) -> Iterator[dict[str, Any]]:
    shots = document.get("shots") or range(len(positions))
    if len(shots) != len(positions):
        raise ValueError(f"Document {index} has {len(positions)} answers, but {len(shots)} numbers of `shots`.")
    for before, own in zip(shots, positions):
        yield {
            "document": index,
            "shots": before,
            "log_likelihood": math.fsum(log_probabilities[position] for position in own),
            "tokens": len(own),
            "correct": all(hits[position] for position in own),
        }
