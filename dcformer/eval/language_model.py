"""Scoring with lm-evaluation-harness: any causal language model of Transformers, ours above all.

Importing this module registers the class under the name "dcformer". It differs from the harness's own `HFLM` in two
points: logits are computed, and their log-softmax taken in float32, only at the positions whose next token is scored;
and a token id without an embedding row is handled by a named policy instead of reading past the end of the table.
`stock_language_model` is the harness's own class, to compare with.
"""

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch


try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"Evaluation needs {error.name}: pip install 'dcformer[eval]'.") from error

from ..configuration_dcformer import DCFormerConfig
from .devices import choose_device
from .model_files import check_complete
from .processes import processes_here
from .scoring import ScoredInput, Target, TargetScorer, clamped, message_of_missing_row, message_of_nan


OOV_POLICIES = ("error", "clamp", "pad")

CPU_BATCH_SIZE = 16
# Arguments by which the harness loads something else than the weights of a folder.
_OTHER_LOADERS = ("peft", "delta", "autogptq", "gptqmodel", "gguf_file")


@register_model("dcformer")
class DCFormerLM(HFLM):
    """
    Args:
        pretrained (`str` or `PreTrainedModel`): Folder, Hub id or a loaded model.
        device (`str`, *optional*): As [`dcformer.eval.devices.choose_device`] takes it; of a loaded model its own.
        batch_size (`int` or `"auto"`, defaults to `"auto"`): Inputs in a forward pass. "auto" is 16 on a CPU and what
            fits on a GPU. A batch whose logits would exceed 1 GiB is cut.
        oov_policy (`str`, *optional*): For a token id without an embedding row. "error" raises; "clamp" takes the last
            row, as JAX does; "pad" adds mean rows and is known to our models only. None: the configuration's own, for
            other models "error".
        on_progress (`Callable`, *optional*): Called with the numbers of requests done and in all; None: a tqdm bar.
        kwargs: As `HFLM`.

    Raises:
        ValueError: for an unknown policy, or "pad" with a model that cannot; for a device that is not there, or is not
            that of a loaded model; for a folder without the weights of some parameters.
    """

    def __init__(
        self,
        pretrained,
        *,
        device: str | None = None,
        batch_size: int | str = "auto",
        oov_policy: str | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        backend: str = "causal",
        **kwargs,
    ):
        if oov_policy is not None and oov_policy not in OOV_POLICIES:
            raise ValueError(f"oov_policy must be one of {', '.join(OOV_POLICIES)}, got {oov_policy!r}.")
        if isinstance(pretrained, str):
            device = choose_device(device, processes_here())
        else:
            _check_device_of(pretrained, device)
        self.oov_policy = oov_policy
        self.on_progress = on_progress
        self._instances: Sequence = ()
        self._window_share = (0, 1)
        super().__init__(pretrained, device=device, batch_size=batch_size, backend=backend, **kwargs)
        self.oov_policy = policy_in_force(self.model.config, oov_policy)
        if self.batch_size_per_gpu == "auto" and self.device.type == "cpu":
            self.batch_size_per_gpu = CPU_BATCH_SIZE
        if hasattr(self, "accelerator"):
            # HFLM counts processes only where each of several sees all GPUs of one machine.
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        self._scorer = TargetScorer(self.model, self.softmax_dtype, self.mixed_precision_dtype)
        self.embedding_rows = self._scorer.rows
        # Rows that hold an embedding of their own; HFLM's configuration was read before any were added.
        self.trained_rows = min(self.embedding_rows, self.config.get_text_config().vocab_size)
        self.forget_documents()

    def forget_documents(self) -> None:
        """Start counting documents and tokens anew."""
        self.oov_documents: set[tuple[str, int]] = set()
        self.cut_documents: set[tuple[str, int]] = set()
        self.scored_requests = self.input_tokens = 0

    def _create_model(self, pretrained, **kwargs):
        policy = policy_in_force(self.config, self.oov_policy)
        if isinstance(self.config, DCFormerConfig):
            kwargs["oov_policy"] = policy
        if any(kwargs.get(name) for name in _OTHER_LOADERS):
            super()._create_model(pretrained, **kwargs)
            return
        super()._create_model(pretrained, output_loading_info=True, **kwargs)
        self._model, info = self._model
        check_complete(self._model, info, pretrained)

    def get_model_info(self) -> dict:
        if not isinstance(self.pretrained, str) or not Path(self.pretrained).is_dir():
            return super().get_model_info()
        # The harness would ask the Hub for a repository of the folder's name.
        return {"model_num_parameters": self.model.num_parameters(), "model_dtype": self.model.dtype}

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
        ordered = sorted(groups.items(), key=lambda group: (-len(group[0]), group[0]))
        inputs = [ScoredInput(ids, [_target(ids, requests[index][2]) for index in own]) for ids, own in ordered]
        owners = iter([index for _, own in ordered for index in own])
        answers: list = [None] * len(requests)
        self.scored_requests += len(requests)
        problem = None
        with self._bar(len(requests), disable_tqdm) as advance:
            sizes = self._batch_sizes([requests[own[0]] for _, own in ordered], override_bs)
            for batch in self._scorer.batches(inputs, sizes):
                self.input_tokens += sum(len(each.ids) for each in batch)
                scores = [tuple(score) for of_input in self._scorer.score(batch) for score in of_input]
                for answer, index in zip(scores, owners):
                    answers[index] = answer
                    if math.isnan(answer[0]):
                        instance = self._instances[index] if self._instances else None
                        problem = problem or message_of_nan(_name(instance))
                    if requests[index][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                advance(len(scores))
                if problem:
                    break
        self._raise_on_all_processes(problem)
        return answers

    def _batch_sizes(self, longest_first: list[tuple], override_bs: int | None) -> Callable[[int], int]:
        """Number of inputs in the batch that begins with the input of an index."""
        self.batch_sizes = {}

        def size_at(start: int) -> int:
            size = override_bs or self.batch_size
            if size != "auto":
                return size
            # The harness announces on stdout what it tries.
            with contextlib.redirect_stdout(io.StringIO()):
                return self._batch_scheduler(start, longest_first)

        return size_at

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


def stock_language_model(pretrained: str, *, device: str, batch_size: int | str, **options) -> HFLM:
    """
    The harness's own class for causal models, with its own batches, forward passes and log-softmax.

    Args:
        pretrained (`str`): Folder or Hub id.
        device (`str`): What [`dcformer.eval.devices.choose_device`] has chosen.
        batch_size (`int` or `"auto"`): Inputs in a forward pass.
        options: Further arguments of `HFLM`.
    """
    return HFLM(pretrained, backend="causal", device=device, batch_size=batch_size, **options)


def _check_device_of(model, device: str | None) -> None:
    """That a loaded model is on the device that is asked for, since it stays where it is."""
    if device is None:
        return
    asked, own = torch.device(choose_device(device)), model.device
    if asked.type != own.type or asked.index not in (None, own.index):
        raise ValueError(f"The model is on {str(own)!r}, and device is {str(device)!r}; move it, or leave device out.")


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


def _target(ids: Sequence[int], continuation: Sequence[int]) -> Target:
    """The continuation of a text, of whose tokens all but the last end its input."""
    return Target(range(len(ids) - len(continuation), len(ids)), continuation)


def _name(instance) -> str:
    return "a request" if instance is None else f"document {instance.doc_id} of {instance.task_name}"
