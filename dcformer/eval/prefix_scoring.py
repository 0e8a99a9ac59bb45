"""Scoring of inputs that begin alike: the beginning runs once, and what differs reads its keys and values from a cache.

The beginnings of a batch have different lengths. They run with padding on the right, which no scored position sees.
Their keys and values then stand on the left of what follows, with the padding before them, as Transformers pads when it
generates: so distances are right for sliding windows too, and positions are given with the tokens. Layers with a window
keep all keys here, as a cache that is not told of windows does, and the mask hides those out of the window.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from . import scoring
from .scoring import ScoredInput, Target, TargetScore, TargetScorer
from .shared_prefixes import Stretch, all_stretches, shared_stretches


# Bytes of keys and values of one batch; three such may be held at once. On a GPU an eighth of what is free, if more.
MOST_CACHED = 2**31
# How far log-probabilities with and without the cache may be apart, as a share of their spread over the vocabulary.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.1}
# Windows up to this length are crossed when a model is tried out.
_LONGEST_WINDOW_TRIED = 512


class CannotShare(Exception):
    """Why a model cannot compute a shared beginning once."""


class _Query(NamedTuple):
    """A token whose log-probability is asked for: where in a stretch it is predicted, and whose it is."""

    column: int
    token: int
    place: int
    target: int
    offset: int


@dataclass
class _Past:
    """
    Keys and values of a batch that has run.

    Attributes:
        layers: For every layer keys and values, (batch, heads, key, channels) each; None for one that stores none.
        starts: For every row, the column of its first token.
    """

    layers: list[tuple[Tensor, Tensor] | None]
    starts: list[int]


class _Row(NamedTuple):
    """A stretch that is to run, and where the keys and values of what is before it are."""

    stretch: Stretch
    past: _Past | None
    past_row: int

    @property
    def length(self) -> int:
        return self.stretch.stop - self.stretch.start


class PrefixScorer:
    """
    Scores inputs with a causal language model of Transformers, computing what several begin with once.

    Args:
        plain: Scores the inputs that share nothing, by the same model.

    Attributes:
        saved_tokens: Number of tokens that were read from a cache instead of computed, so far.

    Raises:
        CannotShare: if the model has no cache of keys and values, or other scores with it than without.
    """

    def __init__(self, plain: TargetScorer):
        self.plain = plain
        self.saved_tokens = 0
        model = plain.model
        if getattr(model, "_is_stateful", False):
            raise CannotShare("the model keeps a state that cannot be divided by tokens, instead of keys and values")
        parameters = inspect.signature(model.forward).parameters
        if not {"use_cache", "past_key_values", "attention_mask"} <= parameters.keys():
            raise CannotShare("the model takes no cache")
        self._takes_positions = "position_ids" in parameters
        self._longest = _longest_of_one_kind(model)
        self._bytes_per_token = 0
        # Where the output layer can be given the scored positions alone, no other logits are computed.
        reasons = []
        for head in (model.get_output_embeddings(), None):
            self._head = head
            try:
                self._try_out()
                return
            except CannotShare as error:
                reasons.append(str(error))
        raise CannotShare(reasons[-1])

    @torch.no_grad()
    def score(
        self, inputs: Sequence[ScoredInput], roots: Sequence[Stretch], batch_size: Callable[[int], int]
    ) -> Iterator[list[tuple[int, list[TargetScore]]]]:
        """
        Score inputs, and say whenever some are done.

        Args:
            inputs: All inputs, the longest first.
            roots: Their tree, as [`dcformer.eval.shared_prefixes.shared_stretches`] makes it.
            batch_size: Number of inputs in the batch that begins with the input of a given index. Of inputs that share
                a beginning as many rows run at once as have no more tokens than that many inputs of full length.

        Returns:
            Places among the inputs, and the scores of the targets of each.

        Raises:
            CannotShare: if it shows only now that the model cannot; what was not said to be done is left to do.
        """
        if inputs and len(inputs[0].ids) > self._longest:
            raise CannotShare(
                f"in inputs of more than {self._longest} tokens the model gives all tokens other rotary angles"
            )
        shared = [root for root in roots if root.children]
        alone = sorted(place for root in roots if not root.children for place in root.places)
        if shared:
            first = min(root.first for root in shared)
            most_tokens = batch_size(first) * len(inputs[first].ids)
            yield from _Run(self, inputs, shared, most_tokens).results()
        batches = self.plain.batches([inputs[place] for place in alone], lambda index: batch_size(alone[index]))
        places = iter(alone)
        for batch in batches:
            yield [(next(places), scores) for scores in self.plain.score(batch)]

    @property
    def most_cached_tokens(self) -> float:
        """Most tokens whose keys and values one batch may hold."""
        return self._most_bytes / self._bytes_per_token if self._bytes_per_token else math.inf

    def forward(
        self, rows: Sequence[_Row], ids: Sequence[Sequence[int]], columns: Sequence[Sequence[int]], keeps: bool
    ) -> tuple[Tensor, _Past | None]:
        """
        Run stretches after what is before them.

        Args:
            rows: The stretches.
            ids: Token ids of each.
            columns: Of each, the tokens at which logits are needed.
            keeps: Whether keys and values are needed afterwards.

        Returns:
            Logits (number of columns of all rows, vocabulary), and the keys and values.
        """
        device = self.plain.model.device
        lengths = [row.stretch.start for row in rows]  # of what is before
        before, new = max(lengths), max(map(len, ids))
        input_ids = torch.zeros(len(rows), new, dtype=torch.long)
        for row, own in enumerate(ids):
            input_ids[row, : len(own)] = torch.tensor(own)
        arguments: dict[str, Any] = {}
        if before:
            columns_of_all = torch.arange(before + new)
            starts = torch.tensor([before - length for length in lengths])[:, None]
            stops = torch.tensor([before + len(own) for own in ids])[:, None]
            is_token = (columns_of_all >= starts) & (columns_of_all < stops)  # (batch, key)
            arguments["attention_mask"] = is_token.long().to(device)
            if self._takes_positions:
                # Padding on the right stays at the last position, beyond which a model may have none.
                positions = columns_of_all[before:].minimum(stops - 1) - starts  # (batch, new tokens)
                arguments["position_ids"] = positions.to(device)
        if before or keeps:
            arguments["past_key_values"] = _as_cache(rows, before)
        arguments["use_cache"] = before > 0 or keeps
        logits, cache = self._logits(input_ids.to(device), columns, arguments)
        if not keeps:
            return logits, None
        past = _Past(_layers_of(cache, len(rows), before + new), [before - length for length in lengths])
        self._bytes_per_token = _past_bytes(past) // (len(rows) * (before + new))
        return logits, past

    def _logits(self, input_ids: Tensor, columns: Sequence[Sequence[int]], arguments: dict[str, Any]) -> Any:
        device = input_ids.device
        in_rows = torch.tensor([row for row, own in enumerate(columns) for _ in own], dtype=torch.long, device=device)
        in_columns = torch.tensor([column for own in columns for column in own], dtype=torch.long, device=device)
        if self._head is not None:
            with _only_at(self._head, in_rows, in_columns):
                output = self.plain.forward(input_ids, **arguments)
            if output.logits.shape[:2] != (1, len(in_rows)):
                raise CannotShare("the output layer does not compute logits position by position")
            return output.logits[0], output.past_key_values
        kept = in_columns.unique()  # sorted
        logits, output = self.plain.forward_at(input_ids, kept, **arguments)
        return logits[in_rows, torch.searchsorted(kept, in_columns)], output.past_key_values

    @torch.no_grad()
    def _try_out(self) -> None:
        """
        Score a few made-up inputs with and without the cache, beyond the sliding window if it is not too long.

        Raises:
            CannotShare: if that does not work, or the log-probabilities are not the same.
        """
        model = self.plain.model
        self._most_bytes = _most_bytes(model.device)
        inputs = [ScoredInput(ids, [Target(range(len(ids)), ids)]) for ids in _made_up(model.config, self.plain.rows)]
        tolerance = _TOLERANCES.get(model.dtype, 0.1)
        try:
            roots = shared_stretches([each.ids for each in inputs])
            run = _Run(self, inputs, roots, most_tokens=2**31, keeps_logits=True)
            for _ in run.results():
                pass
            for place, each in enumerate(inputs):
                expected, _ = self.plain.forward_at(
                    torch.tensor([each.ids], device=model.device), torch.arange(len(each.ids), device=model.device)
                )
                difference = _difference(torch.stack(run.logits[place]), expected[0])
                if not difference <= tolerance:
                    raise CannotShare(
                        f"with its cache the model computes other logits, by {difference:.1g} of their spread"
                    )
        except CannotShare:
            raise
        except Exception as error:  # of any model's code, which need not know what it is asked for
            reason = (str(error).strip().splitlines() or [""])[0]
            raise CannotShare(f"the model cannot continue from its cache: {type(error).__name__}: {reason}") from error


class _Run:
    """One scoring of inputs whose tree of stretches is known."""

    def __init__(
        self,
        scorer: PrefixScorer,
        inputs: Sequence[ScoredInput],
        roots: list[Stretch],
        most_tokens: int,
        keeps_logits: bool = False,
    ):
        self.scorer = scorer
        self.inputs = inputs
        self.roots = roots
        self.most_tokens = most_tokens
        self.queries = _queries(inputs, roots)
        self.values = {place: [[0.0] * len(target.ids) for target in inputs[place].targets] for place in _places(roots)}
        self.hits = {place: [True] * len(inputs[place].targets) for place in _places(roots)}
        self.logits: dict[int, list[Any]] | None = None
        if keeps_logits:
            self.logits = {place: [None] * len(inputs[place].ids) for place in _places(roots)}

    def results(self) -> Iterator[list[tuple[int, list[TargetScore]]]]:
        return self._results([_Row(root, None, 0) for root in self.roots])

    def _results(self, rows: list[_Row]) -> Iterator[list[tuple[int, list[TargetScore]]]]:
        for batch in self._batches(rows):
            for part, past in self._runs(batch):
                done = [place for row in part for place in row.stretch.places]
                if done:
                    yield [(place, self._scores(place)) for place in done]
                following = [
                    _Row(child, past, index) for index, row in enumerate(part) for child in row.stretch.children
                ]
                del past  # those that follow hold it
                if following:
                    yield from self._results(following)

    def _runs(self, batch: list[_Row]) -> Iterator[tuple[list[_Row], _Past | None]]:
        """The batch with its keys and values, in smaller parts where the memory of a GPU is not enough."""
        try:
            past = self._run(batch)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        else:
            yield batch, past
            return
        torch.cuda.empty_cache()
        self.most_tokens //= 2
        half = len(batch) // 2
        yield from self._runs(batch[:half])
        yield from self._runs(batch[half:])

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Stretches of similar length, as many at once as tokens, cache and logits allow."""
        ordered = sorted(rows, key=lambda row: (-row.length, row.stretch.start))
        most_logits = scoring.MOST_LOGITS // self.scorer.plain.rows
        batch: list[_Row] = []
        before = positions = 0
        for row in ordered:
            own = len(self._columns(row.stretch))
            before = max(before, row.stretch.start)
            new = batch[0].length if batch else row.length
            count = len(batch) + 1
            is_full = count * new > self.most_tokens or positions + own > most_logits
            if batch and (is_full or count * (before + new) > self.scorer.most_cached_tokens):
                yield batch
                batch, positions, before = [], 0, row.stretch.start
            batch.append(row)
            positions += own
        yield batch

    def _columns(self, stretch: Stretch) -> list[int]:
        """Tokens of a stretch at which logits are needed, in ascending order."""
        return sorted({query.column for query in self.queries.get(id(stretch), ())})

    def _run(self, batch: list[_Row]) -> _Past | None:
        ids = [self.inputs[row.stretch.first].ids[row.stretch.start : row.stretch.stop] for row in batch]
        columns = [self._columns(row.stretch) for row in batch]
        keeps = any(row.stretch.children for row in batch)
        past = None
        if keeps or any(columns):
            if not any(columns):
                columns[0] = [0]  # not every output layer takes no positions at all
            logits, past = self.scorer.forward(batch, ids, columns, keeps)
            self._read(batch, columns, logits)
        self.scorer.saved_tokens += sum((_number_below(row.stretch) - 1) * row.length for row in batch)
        return past

    def _read(self, batch: list[_Row], columns: list[list[int]], logits: Tensor) -> None:
        """Take what is asked for from logits (positions, vocabulary)."""
        queries: list[_Query] = []
        of_queries: list[int] = []
        first = 0
        for row, own in zip(batch, columns):
            line = {column: first + index for index, column in enumerate(own)}
            for query in self.queries.get(id(row.stretch), ()):
                queries.append(query)
                of_queries.append(line[query.column])
            first += len(own)
        if not queries:
            return
        lines = torch.tensor(of_queries, device=logits.device)
        tokens = torch.tensor([query.token for query in queries], device=logits.device)
        normalizer, best = self.scorer.plain.normalizer_and_best(logits)
        log_probabilities = logits[lines, tokens].to(normalizer.dtype) - normalizer[lines]
        hits = best[lines] == tokens
        for query, value, hit in zip(queries, log_probabilities.double().tolist(), hits.tolist()):
            self.values[query.place][query.target][query.offset] = value
            self.hits[query.place][query.target] &= hit
        if self.logits is not None:
            for query, line in zip(queries, of_queries):
                self.logits[query.place][query.offset] = logits[line]

    def _scores(self, place: int) -> list[TargetScore]:
        pairs = zip(self.values.pop(place), self.hits.pop(place))
        return [TargetScore(math.fsum(values), is_greedy) for values, is_greedy in pairs]


def _queries(inputs: Sequence[ScoredInput], roots: list[Stretch]) -> dict[int, list[_Query]]:
    """By the identity of a stretch, what is asked for at its tokens."""
    queries: dict[int, list[_Query]] = {}
    left: list[tuple[Stretch, ...]] = [(root,) for root in roots]
    while left:
        path = left.pop()
        left.extend((*path, child) for child in path[-1].children)
        for place in path[-1].places:
            for index, target in enumerate(inputs[place].targets):
                for offset, (position, token) in enumerate(zip(target.positions, target.ids, strict=True)):
                    stretch = next(each for each in path if position < each.stop)
                    query = _Query(position - stretch.start, token, place, index, offset)
                    queries.setdefault(id(stretch), []).append(query)
    return queries


def _places(roots: list[Stretch]) -> Iterator[int]:
    for stretch in all_stretches(roots):
        yield from stretch.places


def _number_below(stretch: Stretch) -> int:
    return sum(1 for _ in _places([stretch]))


def _as_cache(rows: Sequence[_Row], before: int) -> DynamicCache:
    """
    A cache with what is before every row, so that all end together; what is on the left of a shorter one is masked.

    Layers with a window are no different from others: a cache of Transformers knows of windows by a configuration only.
    """
    cache = DynamicCache()
    past = rows[0].past
    if past is None:
        return cache
    past_rows = [row.past_row for row in rows]
    firsts = [past.starts[row.past_row] + row.stretch.start - before for row in rows]  # columns, below 0 in padding
    for index, layer in enumerate(past.layers):
        if layer is None:
            continue
        keys, values = (_taken(states, past_rows, firsts, before) for states in layer)
        cache.update(keys, values, index)
    return cache


def _taken(states: Tensor, rows: list[int], firsts: list[int], length: int) -> Tensor:
    """Of (batch, heads, key, channels) some rows, of each `length` keys from an own first one on."""
    in_rows = torch.tensor(rows, device=states.device)
    if len(set(firsts)) == 1 and firsts[0] >= 0:
        return states[:, :, firsts[0] : firsts[0] + length].index_select(0, in_rows)
    columns = (torch.tensor(firsts)[:, None] + torch.arange(length)).clamp(min=0).to(states.device)
    return states.transpose(1, 2)[in_rows[:, None], columns].transpose(1, 2)


def _layers_of(cache: Any, batch: int, length: int) -> list[tuple[Tensor, Tensor] | None]:
    """
    Raises:
        CannotShare: if a layer holds something else than keys and values of every token.
    """
    layers: list[tuple[Tensor, Tensor] | None] = []
    for layer in getattr(cache, "layers", ()):
        if not layer.is_initialized:
            layers.append(None)
            continue
        for states in (layer.keys, layer.values):
            if states.dim() != 4 or (states.shape[0], states.shape[2]) != (batch, length):
                raise CannotShare("the model's cache holds other things than keys and values of every token")
        layers.append((layer.keys, layer.values))
    if not any(layers):
        raise CannotShare("the model does not use the cache that it is given")
    return layers


def _past_bytes(past: _Past) -> int:
    return sum(states.nbytes for layer in past.layers if layer is not None for states in layer)


@contextlib.contextmanager
def _only_at(head: torch.nn.Module, rows: Tensor, columns: Tensor) -> Iterator[None]:
    """Let an output layer see some positions of (batch, length, hidden) alone, as (1, positions, hidden)."""

    def select(_: Any, arguments: tuple) -> tuple:
        hidden, *others = arguments
        return (hidden[rows.to(hidden.device), columns.to(hidden.device)][None], *others)

    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def _longest_of_one_kind(model: torch.nn.Module) -> float:
    """Length of inputs up to which a token's rotary angles do not depend on how long the input is."""
    longest = math.inf
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            own = parameters if layer_type is None else parameters.get(layer_type) or {}
            if kind == "longrope":
                longest = min(longest, own.get("original_max_position_embeddings", 0))
            elif kind == "dynamic":
                longest = min(longest, getattr(module, "original_max_seq_len", 0))
    return longest


def _most_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return MOST_CACHED
    free, _ = torch.cuda.mem_get_info(device)
    return max(MOST_CACHED, free // 8)


def _made_up(config: Any, rows: int) -> list[list[int]]:
    """Two beginnings of different lengths, each with two ends, of ids that are the same every time."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    window = window if isinstance(window, int) and window <= _LONGEST_WINDOW_TRIED else 0
    most = getattr(text, "max_position_embeddings", None)
    length = max(24, window + 16)
    length = min(length, most - 8) if isinstance(most, int) else length
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(rows, (count,), generator=generator).tolist()

    long, short = ids(max(length, 10)), ids(9)
    return [[*long, *ids(6)], [*long, *ids(3)], [*short, *ids(4)], [*short, *ids(2)]]


def _difference(logits: Tensor, expected: Tensor) -> float:
    """The largest distance of two (positions, vocabulary) log-probabilities, as a share of their spread."""
    ours, theirs = (each.float().log_softmax(-1) for each in (logits, expected))
    spread = (theirs - theirs.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((ours - theirs).norm(dim=-1) / spread.clamp(min=1e-6)).max())
