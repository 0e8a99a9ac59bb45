"""Requests of lm-eval as inputs of a model: windows, cuts, policies for unknown ids, and the counting of documents.

What every model class of ours does alike, whatever computes the log-likelihoods: Transformers (language_model.py) or
an engine of vLLM (vllm_model.py).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"Evaluation needs {error.name}: pip install 'dcformer[eval]'.") from error

from ..configuration_dcformer import DCFormerConfig
from .scoring import ScoredInput, Target, TargetScore, clamped, message_of_missing_row, message_of_nan


OOV_POLICIES = ("error", "clamp", "pad")


class LogLikelihoods(TemplateLM):
    """
    The part of a model class of lm-eval that is the same whatever computes the log-likelihoods.

    A class made with it sets `oov_policy`, `embedding_rows` (token ids that the model can read and predict) and
    `trained_rows` (those whose rows were trained, not added), calls `start_counting`, and defines `_score`.
    """

    # The most targets that one input may have; None: any number.
    most_targets: int | None = None

    oov_policy: str | None
    embedding_rows: int
    trained_rows: int
    max_length: int

    def start_counting(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """
        Args:
            on_progress (`Callable`, *optional*): Called with the numbers of requests done and in all; None: a tqdm bar.
        """
        self.on_progress = on_progress
        self._instances: Sequence = ()
        self._window_share = (0, 1)
        self.forget_documents()

    def forget_documents(self) -> None:
        """Start counting documents and tokens anew."""
        self.oov_documents: set[tuple[str, int]] = set()
        self.cut_documents: set[tuple[str, int]] = set()
        self.scored_requests = self.input_tokens = self.cached_tokens = 0

    def sharing(self) -> dict[str, Any]:
        """What a record says of inputs that begin alike, beside the number of tokens that were not computed again."""
        return {}

    def _score(
        self, inputs: Sequence[ScoredInput], requests: Sequence[tuple], override_bs: int | None
    ) -> Iterator[list[tuple[int, list[TargetScore]]]]:
        """
        Score inputs, in any order and as many at once as is best.

        Args:
            inputs: What is scored, the longest first.
            requests: For every input, one of its requests.
            override_bs: Number of inputs in a batch that the harness asks for.

        Returns:
            Whenever some are done, their places among the inputs and the scores of their targets.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def whole_documents(self) -> Iterator[None]:
        """Give every process all documents, and divide the windows of long texts instead, of which there may be few."""
        rank, count = self._rank, self._world_size
        self._rank, self._world_size, self._window_share = 0, 1, (rank, count)
        try:
            yield
        finally:
            self._rank, self._world_size, self._window_share = rank, count, (0, 1)

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        with self._naming(requests):
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.on_progress is not None)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, every token predicted once, in windows of at most `max_length`."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            pieces = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for piece in pieces:
                windows.append((None, *make_disjoint_window(piece)))
                owners.append(index)
        first, step = self._window_share
        own = range(first, len(windows), step)
        with self._naming([requests[owners[index]] for index in own]):
            answers = self._loglikelihood_tokens([windows[index] for index in own], disable_tqdm=disable_tqdm)
        by_window = {index: log_likelihood for index, (log_likelihood, _) in zip(own, answers)}
        if step > 1:
            shares: list[Any] = [None] * step
            torch.distributed.all_gather_object(shares, by_window)
            by_window = {index: value for share in shares for index, value in share.items()}
        totals = [0.0] * len(requests)
        for index, owner in enumerate(owners):
            totals[owner] += by_window[index]
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """
        Of each (key, context ids, continuation ids): the continuation's log-probability, and whether it is greedy.

        Requests of one input, as the one-token choices of a question are, share a row of the batch.
        """
        requests = self._within_the_vocabulary(requests)
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            groups.setdefault(tuple((context + continuation)[-self.max_length - 1 : -1]), []).append(index)
        ordered = sorted(_cut(groups, self.most_targets), key=lambda group: (-len(group[0]), group[0]))
        inputs = [ScoredInput(ids, [_target(ids, requests[index][2]) for index in own]) for ids, own in ordered]
        answers: list = [None] * len(requests)
        self.scored_requests += len(requests)
        problem = None
        with self._bar(len(requests), disable_tqdm) as advance:
            for done in self._score(inputs, [requests[own[0]] for _, own in ordered], override_bs):
                for place, scores in done:
                    ids, own = ordered[place]
                    self.input_tokens += len(ids)
                    for index, score in zip(own, scores, strict=True):
                        answers[index] = tuple(score)
                        if math.isnan(score.log_likelihood):
                            instance = self._instances[index] if self._instances else None
                            problem = problem or message_of_nan(_name(instance))
                        if requests[index][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
                advance(sum(len(scores) for _, scores in done))
                if problem:
                    break
        self._raise_on_all_processes(problem)
        return answers

    def _within_the_vocabulary(self, requests: list[tuple]) -> list[tuple]:
        """The requests with ids that all have an embedding row, by `oov_policy`; counts documents that had others."""
        problem = None
        for index, (_, context, continuation) in enumerate(requests):
            instance = self._instances[index] if self._instances else None
            largest = max((*context, *continuation), default=-1)
            if largest >= self.trained_rows and instance is not None:
                self.oov_documents.add((instance.task_name, instance.doc_id))
            if len(context) + len(continuation) > self.max_length + 1 and instance is not None:
                self.cut_documents.add((instance.task_name, instance.doc_id))
            problem = problem or self._problem(largest, context, continuation, instance)
        self._raise_on_all_processes(problem)
        if self.oov_policy != "clamp":
            return requests
        rows = self.embedding_rows
        return [(key, clamped(context, rows), clamped(continuation, rows)) for key, context, continuation in requests]

    def _problem(self, largest: int, context: list[int], continuation: list[int], instance) -> str | None:
        if largest >= self.embedding_rows and self.oov_policy != "clamp":
            others = "--oov-policy clamp" if self.oov_policy == "pad" else "--oov-policy clamp|pad"
            advice = f"say by {others} what to do with such ids"
            return message_of_missing_row(largest, self.embedding_rows, _name(instance), advice)
        if not context or not continuation:
            return f"There is an empty context or continuation in {_name(instance)}, which cannot be scored."
        if len(continuation) > self.max_length:
            return (
                f"The continuation in {_name(instance)} has {len(continuation)} tokens, more than the model's "
                f"{self.max_length} positions; leave the task out with --tasks."
            )
        return None

    def _raise_on_all_processes(self, problem: str | None) -> None:
        """Raise everywhere what any process found; the others would wait for it for ever."""
        problems: list[str | None] = [problem]
        count = max(self.world_size, self._window_share[1])
        if count > 1:
            problems = [None] * count
            torch.distributed.all_gather_object(problems, problem)
        for problem in problems:
            if problem is not None:
                raise ValueError(problem)

    @contextlib.contextmanager
    def _naming(self, instances: Sequence) -> Iterator[None]:
        """Let messages name the request at fault: the harness passes tokens on without saying whose they are."""
        self._instances = instances
        try:
            yield
        finally:
            self._instances = ()

    @contextlib.contextmanager
    def _bar(self, total: int, disable: bool) -> Iterator[Callable[[int], None]]:
        if self.on_progress is not None:
            done = 0

            def advance(count: int) -> None:
                nonlocal done
                done += count
                self.on_progress(done, total)

            self.on_progress(0, total)
            yield advance
            return
        from tqdm import tqdm

        with tqdm(total=total, desc="Scoring", unit=" requests", disable=disable or self.rank != 0) as bar:
            yield bar.update


def check_policy(oov_policy: str | None) -> None:
    """
    Raises:
        ValueError: for a policy that there is not.
    """
    if oov_policy is not None and oov_policy not in OOV_POLICIES:
        raise ValueError(f"oov_policy must be one of {', '.join(OOV_POLICIES)}, got {oov_policy!r}.")


def policy_in_force(config, oov_policy: str | None) -> str:
    """
    The out-of-vocabulary policy of a model: what is asked for, else what its configuration says, else "error".

    Raises:
        ValueError: for "pad" with a model that cannot add rows.
    """
    if oov_policy == "pad" and not isinstance(config, DCFormerConfig):
        raise ValueError(
            f"oov_policy='pad' is known to DCFormer and DCPythia only, not to a {config.model_type} model; "
            "use --oov-policy clamp."
        )
    return oov_policy or getattr(config, "oov_policy", "error")


def _cut(groups: dict[tuple[int, ...], list[int]], most: int | None) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Inputs with their requests, those with more than `most` requests in several pieces."""
    for ids, own in groups.items():
        for start in range(0, len(own), most or len(own)):
            yield ids, own[start : start + (most or len(own))]


def _target(ids: Sequence[int], continuation: Sequence[int]) -> Target:
    """The continuation of a text, of whose tokens all but the last end its input."""
    return Target(range(len(ids) - len(continuation), len(ids)), continuation)


def _name(instance) -> str:
    return "a request" if instance is None else f"document {instance.doc_id} of {instance.task_name}"
