"""Log-likelihoods of chosen tokens, by forward passes that compute logits only where they are scored.

The model class of lm-eval (language_model.py) and the head tasks (dcformer/head_tasks/scoring.py) both score here.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


# A batch is cut where its logits would be more; in float32 this many are 1 GiB.
MOST_LOGITS = 2**28
_POSITIONS_AT_ONCE = 128


@dataclass(frozen=True)
class Target:
    """
    Tokens whose probability is asked for.

    Attributes:
        positions: Positions of the input, each of which predicts one of the tokens.
        ids: The tokens themselves, as many as there are positions.
    """

    positions: Sequence[int]
    ids: Sequence[int]


@dataclass(frozen=True)
class ScoredInput:
    """
    What a model reads, and all that is scored in it.

    Attributes:
        ids: Token ids of the input.
        targets: The tokens that are scored; several targets may share positions.
    """

    ids: Sequence[int]
    targets: Sequence[Target]

    @cached_property
    def positions(self) -> list[int]:
        """Positions at which logits are needed, in ascending order."""
        return sorted({position for target in self.targets for position in target.positions})


class TargetScore(NamedTuple):
    """Log-likelihood (nats) of all tokens of a target together, and whether each is the most probable one."""

    log_likelihood: float
    is_greedy: bool


class TargetScorer:
    """
    Scores targets with a causal language model of Transformers.

    Args:
        model: Any causal language model; it is used as it is, so call `eval()` before.
        softmax_dtype (defaults to float32): Precision of the log-softmax.
        mixed_precision_dtype (*optional*): Precision of `torch.autocast`; it is off by default.

    Attributes:
        rows: Number of token ids that the model can both read and predict.
    """

    def __init__(
        self,
        model: Any,
        softmax_dtype: torch.dtype | None = None,
        mixed_precision_dtype: torch.dtype | None = None,
    ):
        self.model = model
        self.rows = usable_rows(model)
        self._softmax_dtype = softmax_dtype or torch.float32
        self._mixed_precision_dtype = mixed_precision_dtype
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._arguments = {"use_cache": False} if "use_cache" in parameters else {}

    def batches(
        self, inputs: Sequence[ScoredInput], batch_size: Callable[[int], int]
    ) -> Iterator[Sequence[ScoredInput]]:
        """
        Consecutive inputs, as many at once as the batch size says, or fewer where their logits would exceed 1 GiB.

        Args:
            inputs: All inputs; sort them by length, the longest first, so that memory runs out at once if it does.
            batch_size: Number of inputs in the batch that begins with the input of a given index.
        """
        start = 0
        while start < len(inputs):
            batch: list[ScoredInput] = []
            positions: set[int] = set()
            longest = 0
            for each in inputs[start : start + batch_size(start)]:
                positions.update(each.positions)
                longest = max(longest, len(each.ids))
                logits_of_each = self.rows * (len(positions) if self._keeps_logits else longest)
                if batch and (len(batch) + 1) * logits_of_each > MOST_LOGITS:
                    break
                batch.append(each)
            yield batch
            start += len(batch)

    @torch.no_grad()
    def score(self, batch: Sequence[ScoredInput]) -> list[list[TargetScore]]:
        """For every input of a batch, the scores of its targets."""
        kept = sorted({position for each in batch for position in each.positions})
        if not kept:
            return [[] for _ in batch]
        input_ids = torch.zeros(len(batch), max(len(each.ids) for each in batch), dtype=torch.long)
        for row, each in enumerate(batch):
            input_ids[row, : len(each.ids)] = torch.tensor(each.ids)
        device = self.model.device
        all_logits = self._logits(input_ids.to(device), torch.tensor(kept, device=device))

        column = {position: place for place, position in enumerate(kept)}
        columns = [column[position] for each in batch for target in each.targets for position in target.positions]
        ids = [token for each in batch for target in each.targets for token in target.ids]
        scored_in_each = [sum(len(target.ids) for target in each.targets) for each in batch]
        pairs = torch.tensor([columns, ids], device=device).split(scored_in_each, dim=1)
        log_probabilities, hits = [], []
        for each, (places, expected), logits in zip(batch, pairs, all_logits):
            if len(places) == 0:
                continue
            own = [column[position] for position in each.positions]
            is_range = own[-1] - own[0] + 1 == len(own)  # of which a slice is no copy
            rows = logits[own[0] : own[-1] + 1] if is_range else logits[own]
            normalizer, best = self.normalizer_and_best(rows)
            in_rows = torch.searchsorted(torch.tensor(own, device=device), places)
            picked = logits[places, expected].to(normalizer.dtype)
            log_probabilities.append(picked - normalizer[in_rows])
            hits.append(best[in_rows] == expected)
        lengths = [len(target.ids) for each in batch for target in each.targets]
        parts = zip(*(torch.cat(values).cpu().split(lengths) for values in (log_probabilities, hits)))
        scores = (TargetScore(float(values.double().sum()), bool(greedy.all())) for values, greedy in parts)
        return [[next(scores) for _ in each.targets] for each in batch]

    def normalizer_and_best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-sum-exp of (positions, vocabulary) logits and the id of the largest, without a copy of all of them."""
        pieces = logits.split(_POSITIONS_AT_ONCE)
        normalizer = torch.cat([piece.to(self._softmax_dtype).logsumexp(-1) for piece in pieces])
        return normalizer, torch.cat([piece.argmax(-1) for piece in pieces])

    def _logits(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """(batch, positions, vocabulary). Right padding needs no mask, since no scored position sees it."""
        return self.forward_at(input_ids, positions, **self._arguments)[0]

    def forward_at(self, input_ids: Tensor, positions: Tensor, **arguments: Any) -> tuple[Tensor, Any]:
        """
        Run the model on (batch, length) ids.

        Args:
            input_ids: The ids.
            positions: Where logits are needed, in every row.
            arguments: Further arguments of the model.

        Returns:
            Logits (batch, positions, vocabulary), and all that the model returned.
        """
        if self._keeps_logits:
            output = self.forward(input_ids, logits_to_keep=positions, **arguments)
            return output.logits, output
        output = self.forward(input_ids, **arguments)
        return output.logits[:, positions], output

    def forward(self, input_ids: Tensor, **arguments: Any) -> Any:
        """What the model returns, computed in the precision that was asked for."""
        mixed = self._mixed_precision_dtype
        context = contextlib.nullcontext() if mixed is None else torch.autocast(self.model.device.type, dtype=mixed)
        with context:
            return self.model(input_ids, **arguments)


def usable_rows(model: Any) -> int:
    """Number of token ids that a model can both read and predict."""
    rows = model.get_input_embeddings().weight.shape[0]
    output = model.get_output_embeddings()
    return rows if output is None else min(rows, output.weight.shape[0])


def message_of_missing_row(token: int, rows: int, where: str = "", advice: str = "") -> str:
    """
    The sentence that refuses a token id without a row in the embedding.

    Args:
        token: The id.
        rows: Number of rows that the embedding has.
        where: What the id was found in, if that is known.
        advice: What else can be done about it, before the last resort.
    """
    place = f" in {where}" if where else ""
    remedy = f"{advice}, or use the model's own tokenizer" if advice else "use the model's own tokenizer"
    return f"Token id {token}{place} has no row in the embedding, which has {rows}; {remedy}."


def message_of_nan(what: str) -> str:
    """The sentence that refuses a log-likelihood that is not a number; `what` is what was scored."""
    return (
        f"The log-likelihood of {what} is not a number: the weights hold NaN or infinity, or the dtype is too narrow "
        "for them; check the weights, or give a wider dtype."
    )


def clamped(ids: Iterable[int], rows: int) -> list[int]:
    """Token ids where those without a row are replaced by the last that has one, as JAX reads them."""
    return [min(token, rows - 1) for token in ids]
