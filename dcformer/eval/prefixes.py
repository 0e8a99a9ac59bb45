"""Log-likelihoods by forward passes that compute shared beginnings once, and logits only where they are scored.

An input that begins a longer one is scored in it. Of others that begin alike, the beginnings of a batch run first, with
padding on the right, which no scored position sees. Their keys and values then stand on the left of what follows, with
the padding before them, so distances are right for sliding windows too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..modeling_dcformer import CACHE_NAME


# A batch is cut where its logits would be more; in float32 this many are 1 GiB.
MOST_LOGITS = 2**28
# Bytes of keys and values of one batch; two such may be held at once. On a GPU an eighth of what is free, if more.
MOST_CACHED = 2**31
# A shorter beginning saves less than handing its keys and values on costs.
LEAST_SHARED = 8
_MOST_TOGETHER = 32
_POSITIONS_AT_ONCE = 128
# Models whose logits after a cache are tested to be those of whole inputs.
_SHARING_MODELS = ("dcformer", "dcpythia", "gpt_neox", "llama")
# Angles of these depend on the length of the input.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


class Target(NamedTuple):
    """Tokens whose probability a request asks for; `ids[k]` is predicted at position `first + k` of the input."""

    request: int
    first: int
    ids: Sequence[int]


@dataclass
class ScoredInput:
    """Token ids that a model reads, and all that is scored in them."""

    ids: Sequence[int]
    targets: list[Target] = field(default_factory=list)


class Score(NamedTuple):
    """Log-likelihood (nats) of all tokens of a request together, and whether each is the most probable one."""

    request: int
    log_likelihood: float
    is_greedy: bool


class Beginning(NamedTuple):
    """Inputs by their places, and how many tokens they begin with that are computed once; 0 for a single input."""

    length: int
    places: list[int]


class _Query(NamedTuple):
    """A token whose log-probability is asked for: where in a row it is predicted, and for which request."""

    column: int
    token: int
    request: int


@dataclass
class _Row:
    """Tokens of an input that run together, after `start` others whose keys and values are in row `past_row`."""

    ids: Sequence[int]
    queries: list[_Query]
    start: int = 0
    past_row: int = 0
    ends: list[_Row] = field(default_factory=list)  # of a shared beginning, what follows it


def shares_beginnings(config: Any) -> bool:
    """Whether a model of a configuration computes the same after a cache as in one pass."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # one, or one per type of layer
    return text.model_type in _SHARING_MODELS and not any(kind.get("rope_type") in _LENGTH_DEPENDENT for kind in kinds)


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[least:middle] == other[least:middle] else (least, middle - 1)
    return least


def without_prefixes(inputs: Sequence[ScoredInput]) -> list[ScoredInput]:
    """Inputs none of which begins another; what was scored in those that do is scored in the longer one."""
    kept: list[ScoredInput] = []
    for each in sorted(inputs, key=lambda each: each.ids, reverse=True):
        if kept and kept[-1].ids[: len(each.ids)] == each.ids:
            kept[-1].targets.extend(each.targets)
        else:
            kept.append(ScoredInput(each.ids, list(each.targets)))
    return kept


def shared_beginnings(inputs: Sequence[Sequence[int]]) -> list[Beginning]:
    """Part inputs, none of which begins another, into groups of at most 32 that begin alike: fewest tokens are left."""
    order = sorted(range(len(inputs)), key=inputs.__getitem__)
    common = [shared_length(inputs[one], inputs[other]) for one, other in itertools.pairwise(order)]
    saved, firsts = [0], [0]  # by the number of inputs: most tokens saved, and where the last group begins
    for stop in range(1, len(order) + 1):
        best, first, length = saved[-1], stop - 1, math.inf
        for start in range(stop - 2, max(stop - _MOST_TOGETHER, 0) - 1, -1):
            length = min(length, common[start])
            if length < LEAST_SHARED:
                break
            if (own := saved[start] + (stop - start - 1) * int(length)) > best:
                best, first = own, start
        saved.append(best)
        firsts.append(first)
    groups, stop = [], len(order)
    while stop:
        start = firsts[stop]
        groups.append(Beginning(min(common[start : stop - 1], default=0), order[start:stop]))
        stop = start
    return groups


class Scorer:
    """Scores inputs with a causal language model of Transformers, and shares beginnings where the model allows it."""

    def __init__(self, model: Any, shares: bool = True):
        self.model = model
        self.shares = shares and shares_beginnings(model.config)
        self.computed_tokens = 0  # without padding
        self._head = model.get_output_embeddings()
        embeddings = [each for each in (model.get_input_embeddings(), self._head) if each is not None]
        self.rows = min(each.weight.shape[0] for each in embeddings)  # token ids that it can both read and predict
        self._most_positions = math.inf  # of a batch, with those before it
        if self.shares:
            _, cache = self._run([_Row([0], [])], keeps=True)
            nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            free = torch.cuda.mem_get_info(model.device)[0] if model.device.type == "cuda" else 0
            self._most_positions = max(MOST_CACHED, free // 8) // nbytes

    def score(self, inputs: Sequence[ScoredInput], batch_size: int) -> Iterator[list[Score]]:
        """Score inputs, and say whenever some are done."""
        groups = [Beginning(0, [place]) for place in range(len(inputs))]
        if self.shares:
            inputs = without_prefixes(inputs)
            groups = shared_beginnings([each.ids for each in inputs])
        rows, shared = [], []
        for length, places in groups:
            own = [inputs[place] for place in places]
            if len(own) == 1:
                rows.append(_Row(own[0].ids, _queries(own[0], 0, len(own[0].ids))))
            else:
                queries = [query for each in own for query in _queries(each, 0, length)]
                ends = [_Row(each.ids[length:], _queries(each, length, len(each.ids)), length) for each in own]
                shared.append(_Row(own[0].ids[:length], queries, ends=ends))
        most_tokens = batch_size * max((len(row.ids) for row in shared), default=0)
        for batch in itertools.chain(self._batches(rows, most_rows=batch_size), self._batches(shared, most_tokens)):
            scores = _summed(self._values(batch, most_tokens))
            self.computed_tokens += sum(len(each.ids) for row in batch for each in (row, *row.ends))
            yield scores

    def _values(
        self, batch: list[_Row], most_tokens: float, past: DynamicCache | None = None
    ) -> list[tuple[int, float, bool]]:
        """Values of the queries of rows and of their ends, by halves where the memory of a GPU is not enough."""
        try:
            following = [replace(end, past_row=index) for index, row in enumerate(batch) for end in row.ends]
            values, past_of_ends = self._run(batch, past, keeps=bool(following))
            for part in self._batches(following, most_tokens):
                values += self._values(part, most_tokens, past_of_ends)
            return values
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        torch.cuda.empty_cache()
        middle = len(batch) // 2
        # Batches to come would not fit either.
        self._most_positions = min(self._most_positions, middle * max(row.start + len(row.ids) for row in batch))
        halves = batch[:middle], batch[middle:]
        return [value for half in halves for value in self._values(half, most_tokens, past)]

    def _batches(self, rows: list[_Row], most_tokens: float = math.inf, most_rows: float = math.inf) -> Iterator[list]:
        """Rows of similar length, the longest first, so that memory runs out at once if it does."""
        batch: list[_Row] = []
        before = positions = 0
        for row in sorted(rows, key=lambda row: (-len(row.ids), row.start)):
            own = len({query.column for query in row.queries})
            count, new = len(batch) + 1, len(batch[0].ids) if batch else len(row.ids)
            before = max(before, row.start)
            is_full = count > most_rows or count * new > most_tokens or (positions + own) * self.rows > MOST_LOGITS
            if batch and (is_full or count * (before + new) > self._most_positions):
                yield batch
                batch, positions, before = [], 0, row.start
            batch.append(row)
            positions += own
        if batch:
            yield batch

    @torch.no_grad()
    def _run(
        self, rows: list[_Row], past: DynamicCache | None = None, keeps: bool = False
    ) -> tuple[list[tuple[int, float, bool]], DynamicCache]:
        """(request, log-probability, whether it is the largest) of every query, and keys and values."""
        places = {(index, query.column) for index, row in enumerate(rows) for query in row.queries}
        if not places and not keeps:
            return [], past
        before, new = max(row.start for row in rows), max(len(row.ids) for row in rows)
        device = self.model.device
        input_ids = torch.zeros(len(rows), new, dtype=torch.long)
        for index, row in enumerate(rows):
            input_ids[index, : len(row.ids)] = torch.tensor(row.ids)
        arguments: dict[str, Any] = {"use_cache": keeps or past is not None}
        if past is not None:
            columns = torch.arange(before + new)
            starts = torch.tensor([before - row.start for row in rows])[:, None]
            stops = torch.tensor([before + len(row.ids) for row in rows])[:, None]
            is_token = (columns >= starts) & (columns < stops)  # (batch, key)
            # Padding on the right stays at the last position, beyond which a model may have none.
            positions = columns[before:].minimum(stops - 1) - starts  # (batch, new tokens)
            arguments |= {"attention_mask": is_token.long().to(device), "position_ids": positions.to(device)}
            arguments[CACHE_NAME] = _taken(past, rows, before)
        elif keeps:
            # A cache that is not told of windows keeps all keys of layers that have one.
            arguments[CACHE_NAME] = DynamicCache()
        ordered = sorted(places) or [(0, 0)]  # not every output layer takes no positions at all
        logits, output = self._logits(input_ids.to(device), ordered, arguments)
        line = {place: number for number, place in enumerate(ordered)}
        queries = [(line[index, query.column], query) for index, row in enumerate(rows) for query in row.queries]
        lines = torch.tensor([number for number, _ in queries], dtype=torch.long, device=logits.device)
        tokens = torch.tensor([query.token for _, query in queries], dtype=torch.long, device=logits.device)
        normalizer, best = _normalizer_and_best(logits)
        values = (logits[lines, tokens].float() - normalizer[lines]).double().tolist()
        hits = (best[lines] == tokens).tolist()
        found = [(query.request, value, hit) for (_, query), value, hit in zip(queries, values, hits)]
        return found, getattr(output, CACHE_NAME) if keeps else past

    def _logits(
        self, input_ids: Tensor, places: list[tuple[int, int]], arguments: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """Logits (places, vocabulary) at (row, column) of the ids, and all that the model returned."""
        rows, columns = torch.tensor(places, device=input_ids.device).T

        def select(_: Any, arguments: tuple) -> tuple:
            hidden, *others = arguments
            return (hidden[rows.to(hidden.device), columns.to(hidden.device)][None], *others)

        if self._head is not None:
            handle = self._head.register_forward_pre_hook(select)
            try:
                output = self.model(input_ids, **arguments)
            finally:
                handle.remove()
            if output.logits.shape[:2] == (1, len(places)):
                return output.logits[0], output
            self._head = None  # the model does more with its output than position by position
        output = self.model(input_ids, **arguments)
        return output.logits[rows, columns], output


def _queries(each: ScoredInput, start: int, stop: int) -> list[_Query]:
    """What is predicted at positions from `start` to before `stop`, as columns from `start` on."""
    return [
        _Query(target.first + offset - start, token, target.request)
        for target in each.targets
        for offset, token in enumerate(target.ids)
        if start <= target.first + offset < stop
    ]


def _summed(values: list[tuple[int, float, bool]]) -> list[Score]:
    of_requests: dict[int, list[tuple[float, bool]]] = {}
    for request, *value in values:
        of_requests.setdefault(request, []).append(tuple(value))
    return [
        Score(request, math.fsum(value for value, _ in own), all(hit for _, hit in own))
        for request, own in of_requests.items()
    ]


def _normalizer_and_best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp in float32 of (positions, vocabulary) logits and the id of the largest, without a copy of all."""
    pieces = logits.split(_POSITIONS_AT_ONCE)
    return torch.cat([piece.float().logsumexp(-1) for piece in pieces]), torch.cat([each.argmax(-1) for each in pieces])


def _taken(past: DynamicCache, rows: list[_Row], length: int) -> DynamicCache:
    """Of every row the keys and values before it, so that all end together; the left of a shorter one is masked."""
    in_rows = torch.tensor([row.past_row for row in rows])[:, None]
    columns = (torch.tensor([row.start for row in rows])[:, None] - length + torch.arange(length)).clamp(min=0)
    cache = DynamicCache()
    for index, layer in enumerate(past.layers):
        device = layer.keys.device
        states = (each.transpose(1, 2)[in_rows.to(device), columns.to(device)] for each in (layer.keys, layer.values))
        cache.update(*(each.transpose(1, 2) for each in states), index)
    return cache
