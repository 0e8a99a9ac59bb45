"""Scoring with lm-evaluation-harness: any causal language model of Transformers, DCFormer above all.

[`DCFormerLM`] is registered with lm-eval as "dcformer". It differs from lm-eval's `HFLM` in four points: logits, and
their log-softmax in float32, are computed only at positions before a scored token; shared prefixes of inputs are
computed once; a policy decides what happens to token ids without an embedding row; and tokens that a tokenizer appends
to texts are not part of a context.
"""

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

from ..common.processes import count_processes
from ..loading import NOT_A_NUMBER, FoundModel, choose_device, find_model
from .perplexity import encode
from .prefixes import Score, ScoredInput, Scorer, Target
from .task_data import import_extra


CPU_BATCH_SIZE = 16
# Further arguments of `HFLM` that hold here too.
_AS_IN_HFLM = (
    *("batch_size", "max_batch_size", "max_length", "add_bos_token", "prefix_token_id"),
    *("chat_template_args", "enable_thinking", "logits_cache", "think_end_token"),
)
harness: Any = import_extra("lm_eval.models.huggingface")
harness_utils = import_extra("lm_eval.utils")
HFLM: Any = harness.HFLM
TemplateLM: Any = harness.TemplateLM


class LogLikelihoods(TemplateLM):
    """A base of model classes for lm-eval, whatever computes the log-likelihoods; subclasses set the attributes."""

    add_bos_token: bool | None = None
    custom_prefix_token_id: int | None = None
    cache_hook: Any
    batch_size_per_gpu: int | str
    _rank: int
    _world_size: int
    oov_policy: str
    embedding_rows: int  # token ids that the model can read and predict
    max_length: int = 0  # most tokens of an input
    _score: Callable[[Sequence[ScoredInput]], Iterator[list[Score]]]  # in any order, in batches of any size

    def start_counting(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Reset the counts of documents and tokens; `on_progress` gets the numbers of requests done and in all."""
        self.on_progress = on_progress
        self.oov_documents: set[tuple[str, int]] = set()
        self.truncated_documents: set[tuple[str, int]] = set()
        self.scored_requests = self.input_tokens = self.computed_tokens = 0
        self._documents: Sequence[tuple[str, int]] = ()  # task and doc_id of the requests that are scored next
        self._window_share = (0, 1)

    @property
    def cached_tokens(self) -> int:
        """Tokens of inputs that were read from a cache instead of computed."""
        return self.input_tokens - self.computed_tokens

    def counts(self) -> dict[str, Any]:
        """All counts, for the record."""
        counts = {"requests": self.scored_requests, "input_tokens": self.input_tokens}
        documents = {"oov": self.oov_documents, "truncated": self.truncated_documents}
        return {**counts, "cached_tokens": self.cached_tokens, **documents}

    def close(self) -> None:
        """Free what garbage collection does not."""

    @contextlib.contextmanager
    def whole_documents(self) -> Iterator[None]:
        """Give every process all documents and divide their windows instead, since long texts may be few."""
        rank, count = self._rank, self._world_size
        self._rank, self._world_size, self._window_share = 0, 1, (rank, count)
        try:
            yield
        finally:
            self._rank, self._world_size, self._window_share = rank, count, (0, 1)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        adds_bos = self.add_bos_token if add_special_tokens is None else add_special_tokens
        return encode(self.tokenizer, string, adds_bos, self.custom_prefix_token_id)

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._documents = _documents_of(requests)
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.on_progress is not None)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, every token predicted once, in windows of at most `max_length`."""
        windows = [
            [(number, *harness_utils.make_disjoint_window(piece), [])]
            for number, request in enumerate(requests)
            for piece in harness_utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
        ]
        totals = self.score_windows(windows, _documents_of(requests), disable_tqdm)
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def score_windows(
        self, windows: Sequence[list[tuple]], documents: Sequence[tuple[str, int]], disable_tqdm: bool = False
    ) -> list[float]:
        """
        Log-likelihoods of texts, which are named by task and document. A window is read once for its parts: the number
        of a text, token ids before its tokens, these, and the rest of the window.
        """
        first, step = self._window_share
        parts = list(itertools.chain(*windows[first::step]))
        self._documents = [documents[number] for number, *_ in parts]
        answers = self._loglikelihood_tokens([(None, *part) for _, *part in parts], disable_tqdm=disable_tqdm)
        scores: list[list[float]] = [[] for _ in documents]
        pairs = [(number, value) for (number, *_), (value, _) in zip(parts, answers)]
        for number, value in itertools.chain(*self._gather(pairs)) if step > 1 else pairs:
            scores[number].append(value)
        return list(map(math.fsum, scores))

    def _loglikelihood_tokens(self, requests: list[tuple], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation and if it is greedy, from (key, ids before, continuation, ids after)."""
        # lm-eval does not pass the documents with the tokens.
        documents, self._documents = self._documents or [("requests", n) for n in range(len(requests))], ()
        inputs = self._inputs(requests, documents)
        self.scored_requests += len(requests)
        self.input_tokens += sum(len(scored.ids) for scored in inputs)
        answers: list = [None] * len(requests)
        problem, n_done = None, 0
        on_progress = self.on_progress or (lambda done, total: None)
        on_progress(0, len(requests))
        is_hidden = disable_tqdm or self.rank != 0 or self.on_progress is not None
        with tqdm(total=len(requests), desc="Scoring", unit=" requests", disable=is_hidden) as bar:
            for done in self._score(inputs):
                for index, *answer in done:
                    answers[index] = tuple(answer)
                    if math.isnan(answer[0]):
                        problem = problem or (
                            f"The log-likelihood of {_name(documents[index])} is not a number: {NOT_A_NUMBER}"
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

    def _inputs(self, requests: list[tuple], documents: Sequence[tuple[str, int]]) -> list[ScoredInput]:
        """Inputs of the model, the longest first; documents that are cut, or have ids without a row, are counted."""
        inputs: dict[tuple[int, ...], ScoredInput] = {}
        problem, last = None, self.embedding_rows - 1
        for index, (document, (_, context, continuation, *rest)) in enumerate(zip(documents, requests)):
            whole, count, where = [*context, *continuation, *itertools.chain(*rest)], len(continuation), _name(document)
            if (largest := max(whole, default=-1)) > last:
                self.oov_documents.add(document)
                problem = problem or self._oov_problem(largest, where)
            if len(context) + count > self.max_length + 1:
                self.truncated_documents.add(document)
            if not context or not continuation:
                problem = problem or f"There is an empty context or continuation in {where}, which cannot be scored."
            elif count > self.max_length:
                problem = problem or (
                    f"The continuation in {where} must have at most {self.max_length} tokens, the model's positions, "
                    f"got {count}; leave the task out with --tasks."
                )
            # The input ends with all tokens except the last.
            ids = tuple(min(token, last) for token in whole[-self.max_length - 1 : -1])
            first = len(ids) - count - sum(map(len, rest))
            # Requests with the same input, such as the one-token choices of a question, share it.
            scored = inputs.setdefault(ids, ScoredInput(ids))
            scored.targets.append(Target(index, first, [min(token, last) for token in continuation]))
        self._raise_on_all_processes(problem)
        return sorted(inputs.values(), key=lambda scored: (-len(scored.ids), scored.ids))

    def _oov_problem(self, largest: int, where: str) -> str | None:
        if largest < self.embedding_rows or self.oov_policy == "clamp":
            return None
        return (
            f"Token id {largest} in {where} has no row in the embedding, which has {self.embedding_rows}; use the "
            "tokenizer of the model, or --oov-policy clamp (oov_policy=clamp) to read the last row."
        )

    def _raise_on_all_processes(self, problem: str | None) -> None:
        """Raise the problem of any process in all of them; otherwise they would wait for it for ever."""
        if problems := list(filter(None, self._gather(problem))):
            raise ValueError(problems[0])

    def _gather(self, value: Any) -> list[Any]:
        """The values of all processes, in all of them."""
        if max(self.world_size, self._window_share[1]) == 1:
            return [value]
        return import_extra("accelerate.utils").gather_object([value])


def _documents_of(requests: list) -> list[tuple[str, int]]:
    return [(request.task_name, request.doc_id) for request in requests]


def _name(document: tuple[str, int]) -> str:
    return f"document {document[1]} of {document[0]}"


@harness.register_model("dcformer")
class DCFormerLM(LogLikelihoods, HFLM):
    """
    Args:
        pretrained: A model's name for [`dcformer.loading.find_model`], the result of that function, or a loaded model,
            which stays on its device.
        tokenizer (*optional*): With a name, `find_model`'s argument; with a loaded model, its tokenizer.
        device (*optional*): As in [`dcformer.loading.choose_device`]; without a CUDA device "cuda" is as `None`. Of
            several processes, each has its own.
        dtype (*optional*): Such as `"bfloat16"`; `None`: the dtype of the stored weights.
        oov_policy (*optional*): What happens to token ids without an embedding row. "error" raises; "clamp" reads the
            last row, as JAX does. `None`: "clamp" if all such ids are runs of spaces, else the configuration's policy,
            else "error".
        shared_prefixes (defaults to `True`): Compute shared prefixes of inputs once (for DCFormer, DCPythia, GPT-NeoX
            and Llama; other models compute every input whole).
        on_progress (*optional*): Called with the numbers of requests done and in all; `None`: a tqdm bar.
        revision, trust_remote_code: As in `HFLM`.
        options: As in `HFLM`: add_bos_token, batch_size, chat_template_args, enable_thinking, logits_cache,
            max_batch_size, max_length, prefix_token_id, think_end_token. `batch_size` (`int` or `"auto"`, the default)
            is the most inputs in a forward pass; "auto" is 16 on a CPU and `max_batch_size`, by default 64, on a GPU. A
            batch is halved if it does not fit into the GPU's memory, and cut if its logits would exceed 1 GiB.

    Raises:
        ValueError: for a folder without the weights of some parameters, and for other arguments of `HFLM`.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        tokenizer: Any = None,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        oov_policy: str | None = None,
        shared_prefixes: bool = True,
        on_progress: Callable[[int, int], None] | None = None,
        revision: str = "main",
        trust_remote_code: bool = False,
        **options: Any,
    ):
        defaults = {name: known.default for name, known in inspect.signature(HFLM.__init__).parameters.items()}
        for name, value in options.items():
            if name not in _AS_IN_HFLM and value not in (None, "causal", defaults.get(name)):
                raise ValueError(
                    f"DCFormerLM takes no {name}={value!r}: a decoder is loaded as it is, on one device, and scored "
                    "with a softmax in float32; give a loaded model, or use lm-eval's own class, by --model hf."
                )
        if isinstance(pretrained, str):
            hub: dict[str, Any] = {"revision": revision, "trust_remote_code": bool(trust_remote_code)}
            pretrained, tokenizer = find_model(pretrained, tokenizer=tokenizer, **hub), None
        if not isinstance(pretrained, FoundModel):
            device = pretrained.device
        elif "cuda" in str(device) and not torch.cuda.is_available():
            device = None  # as in HFLM, since lm-eval's command names cuda:0 if it is given none
        device, accelerator = choose_device(device), None
        if count_processes() > 1:
            accelerator = import_extra("accelerate").Accelerator(cpu=device.type == "cpu")
            device = accelerator.device
        if isinstance(pretrained, FoundModel):
            tokenizer = tokenizer or pretrained.tokenizer
            pretrained = pretrained.load(device=device, dtype=dtype)
        known = {"batch_size": "auto", **{name: options[name] for name in _AS_IN_HFLM if name in options}}
        known["max_batch_size"] = known.get("max_batch_size") or 64
        super().__init__(pretrained, tokenizer=tokenizer, backend="causal", **known)
        self.max_length = HFLM.max_length.fget(self)
        self.oov_policy = policy_in_force(self.config, self.tokenizer, oov_policy)
        if self.batch_size_per_gpu == "auto":
            # On a Mac's GPU torch raises no OutOfMemoryError by which batches could be halved.
            is_gpu = self.device.type not in ("cpu", "mps")
            self.batch_size_per_gpu = self.max_batch_size if is_gpu else CPU_BATCH_SIZE
        if accelerator is not None:
            self.accelerator = accelerator
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        self.start_counting(on_progress)
        self.scorer = Scorer(self.model, shared_prefixes)
        self.embedding_rows = self.scorer.rows

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Continuations as the harness makes them; contexts that it cuts or that hold other ids are counted."""
        self.scored_requests += len(requests)
        for document, (context, settings) in zip(_documents_of(requests), (request.args for request in requests)):
            ids, n_new = self.tok_encode(context), harness.normalize_gen_kwargs(settings, self.max_gen_toks)
            if len(ids) > self.max_length - n_new["max_gen_toks"]:
                self.truncated_documents.add(document)
            if max(ids, default=-1) >= self.embedding_rows:
                self.oov_documents.add(document)
        hook, done, on_progress = self.cache_hook, itertools.count(1), self.on_progress
        if on_progress is None:
            return super().generate_until(requests, disable_tqdm)

        def report(*answer: Any) -> None:
            hook.add_partial(*answer)
            on_progress(next(done), len(requests))

        on_progress(0, len(requests))
        self.cache_hook = SimpleNamespace(add_partial=report)  # gets every answer
        try:
            return super().generate_until(requests, disable_tqdm=True)
        finally:
            self.cache_hook = hook

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self.tok_encode(string)[-(left_truncate_len or 0) :] for string in strings]
        if problem := self._oov_problem(max(itertools.chain(*rows), default=-1), "a context"):
            raise ValueError(problem)
        padded = self.tokenizer.pad({"input_ids": rows}, padding_side=padding_side, return_tensors="pt")
        # Padding may have no row either; it is masked.
        return padded["input_ids"].clamp(max=self.embedding_rows - 1), padded["attention_mask"]

    def get_model_info(self) -> dict:
        # HFLM would query the Hub for a repository with the folder's name.
        return {"model_num_parameters": self.model.num_parameters(), "model_dtype": self.model.dtype}

    def _score(self, inputs: Sequence[ScoredInput]) -> Iterator[list[Score]]:
        for scores, n_tokens in self.scorer.score(inputs, self.batch_size):
            self.computed_tokens += n_tokens
            yield scores


def policy_in_force(config: Any, tokenizer: Any, oov_policy: str | None) -> str:
    """
    `oov_policy`, or if it is `None`, the default for token ids without an embedding row: "clamp" if all are runs of
    spaces, as with the GPT-NeoX tokenizer and the released models; else the configuration's policy, else "error".
    """
    if oov_policy not in (None, "error", "clamp"):
        raise ValueError(f"oov_policy must be error or clamp, got {oov_policy!r}.")
    tokens = tokenizer.convert_ids_to_tokens(list(range(config.get_text_config().vocab_size, len(tokenizer))))
    default = "clamp" if tokens and all(str(token).isspace() for token in tokens) else None
    return str(oov_policy or default or getattr(config, "oov_policy", "error"))
