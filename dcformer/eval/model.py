"""Scoring with lm-evaluation-harness: any causal language model of Transformers, ours above all.

[`DCFormerLM`] is registered with lm-eval as "dcformer". It differs from the harness's own `HFLM` in four points:
logits are computed, and their log-softmax taken in float32, only at the positions whose next token is scored; what
several inputs begin with is computed once; a token id without an embedding row is handled by a named policy; and what
a tokenizer appends to texts is no part of a context.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from ..loading import FoundModel, find_model
from .data import import_extra
from .perplexity import encode
from .prefixes import Score, ScoredInput, Scorer, Target


CPU_BATCH_SIZE = 16
harness, harness_utils = import_extra("lm_eval.models.huggingface"), import_extra("lm_eval.utils")


class LogLikelihoods(harness.TemplateLM):
    """What a model class of lm-eval does whatever computes the log-likelihoods; it defines these."""

    tokenizer: Any
    add_bos_token: bool | None = None
    oov_policy: str
    embedding_rows: int  # token ids that the model can read and predict
    max_length: int
    computed_tokens: int
    _score: Callable[..., Iterator[list[Score]]]  # of inputs, in any order and as many at once as is best

    def start_counting(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Count documents and tokens anew; `on_progress` gets the numbers of requests done and in all."""
        self.on_progress = on_progress
        self.oov_documents: set[tuple[str, int]] = set()
        self.truncated_documents: set[tuple[str, int]] = set()
        self.scored_requests = self.input_tokens = self.computed_tokens = 0
        self._instances: Sequence = ()
        self._window_share = (0, 1)

    @property
    def cached_tokens(self) -> int:
        """Tokens of inputs that were not computed again."""
        return self.input_tokens - self.computed_tokens

    def counts(self) -> dict[str, Any]:
        """What was counted, for the record."""
        tokens = {"input_tokens": self.input_tokens, "cached_tokens": self.cached_tokens}
        documents = {"oov": self.oov_documents, "truncated": self.truncated_documents}
        return {"requests": self.scored_requests, **tokens, **documents}

    def set_max_length(self, max_length: int) -> None:
        """Let inputs have at most so many tokens from now on."""
        self.max_length = max_length

    @contextlib.contextmanager
    def whole_documents(self) -> Iterator[None]:
        """Give every process all documents, and divide the windows of long texts instead, of which there may be few."""
        rank, count = self._rank, self._world_size
        self._rank, self._world_size, self._window_share = 0, 1, (rank, count)
        try:
            yield
        finally:
            self._rank, self._world_size, self._window_share = rank, count, (0, 1)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return encode(self.tokenizer, string, self.add_bos_token if add_special_tokens is None else add_special_tokens)

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._instances = requests
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.on_progress is not None)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, every token predicted once, in windows of at most `max_length`."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            pieces = harness_utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for piece in pieces:
                windows.append((None, *harness_utils.make_disjoint_window(piece)))
                owners.append(index)
        first, step = self._window_share
        own = range(first, len(windows), step)
        self._instances = [requests[owners[index]] for index in own]
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
        """Of each (key, context ids, continuation ids): the continuation's log-probability, and if it is greedy."""
        requests = self._within_the_vocabulary(requests)
        inputs: dict[tuple[int, ...], ScoredInput] = {}
        for index, (_, context, continuation) in enumerate(requests):
            # Requests of one input, as the one-token choices of a question are, share it.
            ids = tuple((context + continuation)[-self.max_length - 1 : -1])
            # All tokens of the continuation but the last end the input.
            target = Target(index, len(ids) - len(continuation), continuation)
            inputs.setdefault(ids, ScoredInput(ids)).targets.append(target)
        self.scored_requests += len(requests)
        self.input_tokens += sum(map(len, inputs))
        ordered = sorted(inputs.values(), key=lambda each: (-len(each.ids), each.ids))
        answers: list = [None] * len(requests)
        problem, n_done = None, 0
        on_progress = self.on_progress or (lambda done, total: None)
        on_progress(0, len(requests))
        is_hidden = disable_tqdm or self.rank != 0 or self.on_progress is not None
        with tqdm(total=len(requests), desc="Scoring", unit=" requests", disable=is_hidden) as bar:
            for done in self._score(ordered, requests, override_bs):
                for index, *answer in done:
                    answers[index] = tuple(answer)
                    if math.isnan(answer[0]):
                        problem = problem or (
                            f"The log-likelihood of {self._name(index)} is not a number: the weights hold NaN or "
                            "infinity, or the dtype is too narrow for them; check the weights, or give a wider dtype."
                        )
                    if requests[index][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
                n_done += len(done)
                bar.update(len(done))
                on_progress(n_done, len(requests))
                if problem:
                    break
        self._raise_on_all_processes(problem)
        return answers

    def _within_the_vocabulary(self, requests: list[tuple]) -> list[tuple]:
        """The requests with ids that all have an embedding row, by `oov_policy`; counts documents that had others."""
        problem = None
        for index, (_, context, continuation) in enumerate(requests):
            largest = max((*context, *continuation), default=-1)
            document = self._document(index)
            if largest >= self.embedding_rows and document:
                self.oov_documents.add(document)
            if len(context) + len(continuation) > self.max_length + 1 and document:
                self.truncated_documents.add(document)
            problem = problem or self._problem(largest, context, continuation, index)
        self._raise_on_all_processes(problem)
        if self.oov_policy != "clamp":
            return requests
        last = self.embedding_rows - 1
        return [(key, *([min(token, last) for token in ids] for ids in pair)) for key, *pair in requests]

    def _problem(self, largest: int, context: list[int], continuation: list[int], index: int) -> str | None:
        if largest >= self.embedding_rows and self.oov_policy != "clamp":
            return (
                f"Token id {largest} in {self._name(index)} has no row in the embedding, which has "
                f"{self.embedding_rows}; use the model's own tokenizer, or --oov-policy clamp to read the last row."
            )
        if not context or not continuation:
            return f"There is an empty context or continuation in {self._name(index)}, which cannot be scored."
        if len(continuation) > self.max_length:
            return (
                f"The continuation in {self._name(index)} must have at most {self.max_length} tokens, the model's "
                f"positions, got {len(continuation)}; leave the task out with --tasks."
            )
        return None

    def _raise_on_all_processes(self, problem: str | None) -> None:
        """Raise everywhere what any process found; the others would wait for it for ever."""
        problems: list[str | None] = [problem]
        count = max(self.world_size, self._window_share[1])
        if count > 1:
            problems = [None] * count
            torch.distributed.all_gather_object(problems, problem)
        if any(problems):
            raise ValueError(next(filter(None, problems)))

    def _document(self, index: int) -> tuple[str, int] | None:
        """Whose a request is: the harness passes tokens on without saying it."""
        instance = self._instances[index] if index < len(self._instances) else None
        return None if instance is None else (instance.task_name, instance.doc_id)

    def _name(self, index: int) -> str:
        document = self._document(index)
        return "a request" if document is None else f"document {document[1]} of {document[0]}"


@harness.register_model("dcformer")
class DCFormerLM(LogLikelihoods, harness.HFLM):
    """
    Args:
        pretrained: A name as [`dcformer.loading.find_model`] takes it, what that returns, or a loaded model, which
            stays where it is.
        tokenizer (*optional*): Of a name as `find_model` takes it; with a loaded model its tokenizer.
        device (*optional*): As [`dcformer.loading.choose_device`] takes it.
        dtype (*optional*): Such as `"bfloat16"`; `None`: that in which the weights are stored.
        batch_size (`int` or `"auto"`, defaults to `"auto"`): Most inputs in a forward pass. "auto" is 16 on a CPU and
            `max_batch_size` on a GPU. A batch for which its memory is not enough is halved, and one whose logits would
            exceed 1 GiB is cut.
        max_length (*optional*): Most tokens of an input; `None`: what the model takes.
        oov_policy (*optional*): For a token id without an embedding row. "error" raises; "clamp" takes the last row, as
            JAX does. `None`: "clamp" if all such ids are runs of spaces, else as the configuration says, else "error".
        shared_prefixes (defaults to `True`): Compute once what several inputs begin with (models of ours, GPT-NeoX and
            Llama; others compute every input whole).
        on_progress (*optional*): Called with the numbers of requests done and in all; `None`: a tqdm bar.
        revision, trust_remote_code, add_bos_token, max_batch_size: As `HFLM`, whose `max_batch_size` is 64 by default.

    Raises:
        ValueError: for a folder without the weights of some parameters.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        tokenizer: Any = None,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        batch_size: int | str = "auto",
        max_length: int | None = None,
        oov_policy: str | None = None,
        shared_prefixes: bool = True,
        on_progress: Callable[[int, int], None] | None = None,
        revision: str = "main",
        trust_remote_code: bool = False,
        add_bos_token: bool | None = None,
        max_batch_size: int | None = None,
    ):
        if isinstance(pretrained, str):
            hub = {"revision": revision, "trust_remote_code": bool(trust_remote_code)}
            pretrained, tokenizer = find_model(pretrained, tokenizer=tokenizer, **hub), None
        if isinstance(pretrained, FoundModel):
            tokenizer = tokenizer or pretrained.tokenizer
            pretrained = pretrained.load(device=device, dtype=dtype)
        super().__init__(
            pretrained,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            max_batch_size=max_batch_size or 64,
            max_length=max_length,
            add_bos_token=add_bos_token,
        )
        self.oov_policy = policy_in_force(self.config, self.tokenizer, oov_policy)
        if self.batch_size_per_gpu == "auto":
            # Of a Mac's GPU, too, torch does not say by an error of its own that its memory is not enough.
            is_gpu = self.device.type not in ("cpu", "mps")
            self.batch_size_per_gpu = self.max_batch_size if is_gpu else CPU_BATCH_SIZE
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import Accelerator

            self.accelerator = Accelerator(cpu=self.device.type == "cpu")
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        self.start_counting(on_progress)
        self.scorer = Scorer(self.model, shared_prefixes)
        self.embedding_rows = self.scorer.rows

    def set_max_length(self, max_length: int) -> None:
        self._max_length = max_length

    def tok_batch_encode(self, strings, padding_side="left", left_truncate_len=None, truncation=False):
        rows = [self.tok_encode(string)[-(left_truncate_len or 0) :] for string in strings]
        padded = self.tokenizer.pad({"input_ids": rows}, padding_side=padding_side, return_tensors="pt")
        return padded["input_ids"], padded["attention_mask"]

    def get_model_info(self) -> dict:
        # HFLM would ask the Hub for a repository of the folder's name.
        return {"model_num_parameters": self.model.num_parameters(), "model_dtype": self.model.dtype}

    def _score(
        self, inputs: Sequence[ScoredInput], requests: Sequence[tuple], override_bs: int | None
    ) -> Iterator[list[Score]]:
        before = self.computed_tokens - self.scorer.computed_tokens
        for done in self.scorer.score(inputs, override_bs or self.batch_size):
            self.computed_tokens = before + self.scorer.computed_tokens
            yield done


def policy_in_force(config: Any, tokenizer: Any, oov_policy: str | None) -> str:
    """
    What happens to token ids without an embedding row, unless it is asked for: "clamp" if all of them are runs of
    spaces, as the GPT-NeoX tokenizer has for the released models; else what the configuration says, else "error".
    """
    if oov_policy not in (None, "error", "clamp"):
        raise ValueError(f"oov_policy must be error or clamp, got {oov_policy!r}.")
    tokens = tokenizer.convert_ids_to_tokens(list(range(config.get_text_config().vocab_size, len(tokenizer))))
    default = "clamp" if tokens and all(str(token).isspace() for token in tokens) else None
    return oov_policy or default or getattr(config, "oov_policy", "error")
