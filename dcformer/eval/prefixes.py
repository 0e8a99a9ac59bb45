"""Log-likelihoods by forward passes that compute shared prefixes once, and logits only where they are scored.

An input that is a prefix of a longer one is scored in it. Of other inputs with a common prefix, the prefixes run first,
padded on the right, where no scored position sees the padding. Then the suffixes run, with the keys and values of the
prefixes on the left and the padding before these, so that distances are right for sliding windows too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicCache

from ..inputs_dcformer import CACHE_NAME


# Most logits of a batch; in float32 they are 1 GiB.
MOST_LOGITS = 2**28
# Most bytes of keys and values of a batch, two of which may be held at once; on a GPU an eighth of its free memory, if
# that is more.
MOST_CACHED = 2**31
# A shorter prefix saves less than copying its keys and values costs.
LEAST_SHARED = 8
_MOST_TOGETHER = 32
_POSITIONS_AT_ONCE = 128
# Models that are tested to give the same logits with a cache as for whole inputs.
_SHARING_MODELS = ("dcformer", "dcpythia", "gpt_neox", "llama")
# Types of rotary embedding with angles that depend on the length of the input.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


class Target(NamedTuple):
    """Tokens that a request scores; `ids[k]` is predicted at position `first + k` of the input."""

    request: int
    first: int
    ids: Sequence[int]


@dataclass
class ScoredInput:
    """Token ids that a model reads, and everything that is scored in them."""

    ids: tuple[int, ...]
    targets: list[Target] = field(default_factory=list)


class Score(NamedTuple):
    """Log-likelihood (nats) of all tokens of a request together, and whether all are the most probable ones."""

    request: int
    log_likelihood: float
    is_greedy: bool


class PrefixGroup(NamedTuple):
    """Inputs by index, and the length of the prefix that is computed once for them; 0 for a single input."""

    length: int
    indices: list[int]


class _Query(NamedTuple):
    """A token to score, the column of its row where it is predicted, and its request."""

    column: int
    token: int
    request: int


@dataclass
class _Row:
    """Tokens of an input that run together, after `start` tokens with keys and values in row `past_row` of a cache."""

    ids: Sequence[int]
    queries: list[_Query]
    start: int = 0
    past_row: int = 0
    suffixes: list[_Row] = field(default_factory=list)  # if this is a shared prefix


def can_share_prefixes(config: Any) -> bool:
    """True if a model with this configuration computes the same with a cache as in one pass."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # one, or one per type of layer
    return text.model_type in _SHARING_MODELS and not any(kind.get("rope_type") in _LENGTH_DEPENDENT for kind in kinds)


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[least:middle] == other[least:middle] else (least, middle - 1)
    return least


def without_prefixes(inputs: Sequence[ScoredInput]) -> list[ScoredInput]:
    """The inputs that are no prefix of another; the targets of those that are move to the longer one."""
    kept: list[ScoredInput] = []
    for scored in sorted(inputs, key=lambda scored: scored.ids, reverse=True):
        if kept and kept[-1].ids[: len(scored.ids)] == scored.ids:
            kept[-1].targets.extend(scored.targets)
        else:
            kept.append(ScoredInput(scored.ids, list(scored.targets)))
    return kept


def group_by_prefix(inputs: Sequence[tuple[int, ...]]) -> list[PrefixGroup]:
    """Groups of at most 32 inputs with a common prefix, chosen to save most tokens; no input is another's prefix."""
    order = sorted(range(len(inputs)), key=inputs.__getitem__)
    common = [shared_length(inputs[one], inputs[other]) for one, other in itertools.pairwise(order)]
    saved, starts = [0], [0]  # by the number of inputs: most tokens saved, and the start of the last group
    for stop in range(1, len(order) + 1):
        best, best_start, length = saved[-1], stop - 1, math.inf
        for start in range(stop - 2, max(stop - _MOST_TOGETHER, 0) - 1, -1):
            length = min(length, common[start])
            if length < LEAST_SHARED:
                break
            if (total := saved[start] + (stop - start - 1) * int(length)) > best:
                best, best_start = total, start
        saved.append(best)
        starts.append(best_start)
    groups, stop = [], len(order)
    while stop:
        start = starts[stop]
        groups.append(PrefixGroup(min(common[start : stop - 1], default=0), order[start:stop]))
        stop = start
    return groups


class Scorer:
    """Scores inputs with a causal language model of Transformers, and shares prefixes if the model allows it."""

    def __init__(self, model: Any, shares: bool = True):
        self.model = model
        self.shares = shares and can_share_prefixes(model.config)
        self._head = model.get_output_embeddings()
        tables = [getattr(layer, "weight", None) for layer in (model.get_input_embeddings(), self._head)]
        sizes = [table.shape[0] for table in tables if table is not None]
        # Token ids that it can both read and predict; a layer that someone has wrapped or replaced may not say so.
        self.rows = min(sizes, default=model.config.get_text_config().vocab_size)
        self._most_positions = math.inf  # of a batch and the cache before it
        if self.shares:
            _, cache = self._run([_Row([0], [])], keeps=True)
            nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            free = torch.cuda.mem_get_info(model.device)[0] if model.device.type == "cuda" else 0
            self._most_positions = max(MOST_CACHED, free // 8) // nbytes

    def score(self, inputs: Sequence[ScoredInput], batch_size: int) -> Iterator[tuple[list[Score], int]]:
        """Score inputs; yields the scores of every batch, and the number of tokens that it computed."""
        groups = [PrefixGroup(0, [index]) for index in range(len(inputs))]
        if self.shares:
            inputs = without_prefixes(inputs)
            groups = group_by_prefix([scored.ids for scored in inputs])
        rows, prefixes = [], []
        for length, indices in groups:
            members = [inputs[index] for index in indices]
            if len(members) == 1:
                rows.append(_row_of(members[0]))
            else:
                queries = [query for scored in members for query in _row_of(scored, stop=length).queries]
                suffixes = [_row_of(scored, start=length) for scored in members]
                prefixes.append(_Row(members[0].ids[:length], queries, suffixes=suffixes))
        most_tokens = batch_size * max((len(row.ids) for row in prefixes), default=0)
        for batch in itertools.chain(self._batches(rows, most_rows=batch_size), self._batches(prefixes, most_tokens)):
            n_tokens = sum(len(part.ids) for row in batch for part in (row, *row.suffixes))
            yield _summed(self._values(batch, most_tokens)), n_tokens

    def _values(
        self, batch: list[_Row], most_tokens: float, past: DynamicCache | None = None
    ) -> list[tuple[int, float, bool]]:
        """Values of the queries of rows and of their suffixes, by halves if the memory of a GPU is not enough."""
        try:
            following = [replace(suffix, past_row=index) for index, row in enumerate(batch) for suffix in row.suffixes]
            values, cache = self._run(batch, past, keeps=bool(following))
            for part in self._batches(following, most_tokens):
                values += self._values(part, most_tokens, cache)
            return values
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        torch.cuda.empty_cache()
        middle = len(batch) // 2
        # Later batches of this size would not fit either.
        self._most_positions = min(self._most_positions, middle * max(row.start + len(row.ids) for row in batch))
        halves = batch[:middle], batch[middle:]
        return [value for half in halves for value in self._values(half, most_tokens, past)]

    def _batches(self, rows: list[_Row], most_tokens: float = math.inf, most_rows: float = math.inf) -> Iterator[list]:
        """Batches of rows of similar length, the longest first, so that memory runs out early if it does."""
        batch: list[_Row] = []
        before = positions = 0
        for row in sorted(rows, key=lambda row: (-len(row.ids), row.start)):
            scored = len({query.column for query in row.queries})
            count, new = len(batch) + 1, len(batch[0].ids) if batch else len(row.ids)
            before = max(before, row.start)
            is_full = count > most_rows or count * new > most_tokens or (positions + scored) * self.rows > MOST_LOGITS
            if batch and (is_full or count * (before + new) > self._most_positions):
                yield batch
                batch, positions, before = [], 0, row.start
            batch.append(row)
            positions += scored
        if batch:
            yield batch

    @torch.no_grad()
    def _run(
        self, rows: list[_Row], past: DynamicCache | None = None, keeps: bool = False
    ) -> tuple[list[tuple[int, float, bool]], DynamicCache]:
        """(request, log-probability, whether it is the largest) of every query, and a cache if it `keeps` one."""
        queries = [(index, query) for index, row in enumerate(rows) for query in row.queries]
        if not queries and not keeps:
            return [], past
        before, new = max(row.start for row in rows), max(len(row.ids) for row in rows)
        device = self.model.device
        input_ids = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True).to(device)
        arguments: dict[str, Any] = {"use_cache": keeps or past is not None}
        if past is not None:
            columns = torch.arange(before + new)
            starts = torch.tensor([before - row.start for row in rows])[:, None]
            stops = torch.tensor([before + len(row.ids) for row in rows])[:, None]
            is_token = (columns >= starts) & (columns < stops)  # (batch, key)
            # Padding on the right repeats the last position, since a model may have no further ones.
            position_ids = columns[before:].minimum(stops - 1) - starts  # (batch, new tokens)
            arguments |= {"attention_mask": is_token.long().to(device), "position_ids": position_ids.to(device)}
            arguments[CACHE_NAME] = _left_padded(past, rows, before)
        elif keeps:
            # Without a configuration a cache keeps all keys of layers with a sliding window too.
            arguments[CACHE_NAME] = DynamicCache()
        # (row, column); some output layers need one position at least
        scored = torch.tensor([(index, query.column) for index, query in queries] or [(0, 0)])
        positions, indices = scored.unique(dim=0, return_inverse=True)
        logits, output = self._logits(input_ids, positions, arguments)
        indices = indices[: len(queries)].to(logits.device)
        tokens = torch.tensor([query.token for _, query in queries], dtype=torch.long, device=logits.device)
        # In pieces, since float32 logits of all positions would be a large copy.
        pieces = [(piece.float().logsumexp(-1), piece.argmax(-1)) for piece in logits.split(_POSITIONS_AT_ONCE)]
        normalizer, best = map(torch.cat, zip(*pieces))
        values = (logits[indices, tokens].float() - normalizer[indices]).double().tolist()
        hits = (best[indices] == tokens).tolist()
        scores = [(query.request, value, hit) for (_, query), value, hit in zip(queries, values, hits)]
        return scores, getattr(output, CACHE_NAME) if keeps else past

    def _logits(self, input_ids: Tensor, positions: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Any]:
        """Logits `(positions, vocabulary)` at `positions`, (positions, 2) of row and column, and the whole output."""
        rows, columns = positions.T

        def select(_: Any, arguments: tuple) -> tuple:
            hidden, *others = arguments
            return (hidden[rows.to(hidden.device), columns.to(hidden.device)][None], *others)

        if self._head is not None:
            handle = self._head.register_forward_pre_hook(select)
            try:
                output = self.model(input_ids, **arguments)
            finally:
                handle.remove()
            if output.logits.shape[:2] == (1, len(positions)):
                return output.logits[0], output
            self._head = None  # the model's output needs all positions
        output = self.model(input_ids, **arguments)
        return output.logits[rows, columns], output


def _row_of(scored: ScoredInput, start: int = 0, stop: int | None = None) -> _Row:
    """The part of an input from position `start` to before `stop`, and the tokens predicted there."""
    ids = scored.ids[start:stop]
    queries = [
        _Query(target.first + offset - start, token, target.request)
        for target in scored.targets
        for offset, token in enumerate(target.ids)
        if 0 <= target.first + offset - start < len(ids)
    ]
    return _Row(ids, queries, start)


def _summed(values: list[tuple[int, float, bool]]) -> list[Score]:
    of_requests: dict[int, list[tuple[float, bool]]] = {}
    for request, value, hit in values:
        of_requests.setdefault(request, []).append((value, hit))
    return [
        Score(request, math.fsum(value for value, _ in tokens), all(hit for _, hit in tokens))
        for request, tokens in of_requests.items()
    ]


def _left_padded(past: DynamicCache, rows: list[_Row], length: int) -> DynamicCache:
    """Keys and values of the `length` positions before the rows, aligned on the right; shorter ones are masked."""
    in_rows = torch.tensor([row.past_row for row in rows])[:, None]
    columns = (torch.tensor([row.start for row in rows])[:, None] - length + torch.arange(length)).clamp(min=0)
    cache = DynamicCache()
    for index, layer in enumerate(past.layers):
        device = layer.keys.device
        keys, values = (
            states.transpose(1, 2)[in_rows.to(device), columns.to(device)].transpose(1, 2)
            for states in (layer.keys, layer.values)
        )
        cache.update(keys, values, index)
    return cache
