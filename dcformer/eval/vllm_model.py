"""Scoring with lm-evaluation-harness by vLLM: many inputs in one step, and shared beginnings computed once.

The last token of every input is scored as one that could be generated next, and those before it by the
log-probabilities of the prompt. vLLM has the latter only for tokens that it computes itself, so by default a request
for them reads nothing from the cache of prefixes. Here a request does read from it, unless another input shares more
than its context: then the cache might hold tokens whose log-probabilities are asked for.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from ..common.optional import import_optional
from ..configuration_dcformer import DCFormerConfig
from ..loading import FoundModel, find_model
from .data import import_extra
from .model import LogLikelihoods, policy_in_force
from .prefixes import Score, ScoredInput, shared_length


# Tokens of a block of the cache, of which a prefix is shared in whole ones: few, and as many as every backend takes.
BLOCK_SIZE = 32
# Requests that wait in the engine, so that it never runs dry while others are made.
_WAITING = 1024


def import_vllm() -> ModuleType:
    """vLLM, which tells of errors only, and may take one token more than a model has positions."""
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    return import_optional("vllm", "--engine vllm (engine='vllm')", "vllm")


def check_device_of_vllm(device: torch.device) -> None:
    """That the engine will compute where it is asked to."""
    import_vllm()
    from vllm.platforms import current_platform

    if device.type != current_platform.device_type or device.index:
        raise ValueError(
            f"The installed vLLM computes on the first device of kind {current_platform.device_type!r}, got "
            f"{str(device)!r}; give that as --device, and choose among GPUs by CUDA_VISIBLE_DEVICES."
        )


class VLLMLM(LogLikelihoods):
    """
    A causal language model in an engine of vLLM, for log-likelihoods alone, with options as [`DCFormerLM`] has them.

    The engine computes in a process of its own, so a script that makes one needs `if __name__ == "__main__":`.
    `engine_options` are further arguments of vLLM's `EngineArgs`, such as `enforce_eager=False`.
    """

    def __init__(
        self,
        pretrained: str | FoundModel,
        *,
        dtype: str = "bfloat16",
        batch_size: int | str = "auto",
        max_length: int | None = None,
        oov_policy: str | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **engine_options: Any,
    ):
        import_vllm()
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.inputs import tokens_input
        from vllm.platforms import current_platform
        from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS

        super().__init__()
        found = find_model(pretrained) if isinstance(pretrained, str) else pretrained
        config, self.tokenizer = found.config, found.tokenizer
        resolve_max_length = import_extra("lm_eval.models.utils").resolve_max_length
        self.max_length = max_length or resolve_max_length(config, self.tokenizer, default=2048)
        self.batch_size = batch_size
        self._device = torch.device(current_platform.device_type)
        self.oov_policy = policy_in_force(config, self.tokenizer, oov_policy)
        self.embedding_rows = config.get_text_config().vocab_size
        if isinstance(config, DCFormerConfig):
            engine_options["hf_overrides"] = {"oov_policy": self.oov_policy}
        options = {
            "dtype": dtype,
            # The token that vLLM generates after an input takes a place, but no position: nothing is computed of it.
            "max_model_len": self.max_length + 1,
            "max_num_seqs": None if batch_size == "auto" else int(batch_size),
            "enable_prefix_caching": True,
            "block_size": BLOCK_SIZE,
            # Scoring is prefill alone, in steps of thousands of tokens, where graphs save less than they take to make.
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "revision": found.revision,
            "trust_remote_code": found.trust_remote_code,
            **engine_options,
        }
        self.block_size = options["block_size"]
        self._as_prompt = tokens_input
        self._sampling = functools.partial(SamplingParams, temperature=0, max_tokens=1, detokenize=False)
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=found.path, **options))
        self.most_targets = MAX_LOGPROB_TOKEN_IDS
        self.start_counting(on_progress)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("VLLMLM computes log-likelihoods only; for texts take lm-eval's own model `vllm`.")

    def close(self) -> None:
        """End the engine and its process, which would hold the memory of a GPU until they are collected."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    def _score(
        self, inputs: Sequence[ScoredInput], requests: Sequence[tuple], override_bs: int | None
    ) -> Iterator[list[Score]]:
        most = self.most_targets
        pieces = [
            ScoredInput(each.ids, each.targets[start : start + most])
            for each in inputs
            for start in range(0, len(each.targets), most)
        ]
        self.input_tokens += sum(len(each.ids) for each in pieces) - sum(len(each.ids) for each in inputs)
        # Inputs that begin alike follow each other, so that the blocks they share are still there.
        ordered = sorted(pieces, key=lambda each: each.ids)
        # So that what is read does not depend on what was scored before, and the rules above hold.
        self.engine.reset_prefix_cache()
        waiting = self._prompts(ordered)
        running: set[str] = set()
        try:
            while True:
                for name, ids, sampling in itertools.islice(waiting, _WAITING - len(running)):
                    self.engine.add_request(name, self._as_prompt(list(ids)), sampling)
                    running.add(name)
                if not running:
                    return
                done: list[Score] = []
                for output in self.engine.step():
                    if output.finished:
                        running.remove(output.request_id)
                        self.computed_tokens += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
                        if output.request_id.isdecimal():
                            done += self._read(ordered[int(output.request_id)], output)
                if done:
                    yield done
        finally:
            self.engine.abort_request(list(running))

    def _prompts(self, inputs: Sequence[ScoredInput]) -> Iterator[tuple[str, Sequence[int], Any]]:
        """What goes to the engine: inputs by their places, before them the contexts that they read from the cache."""
        before: Sequence[int] = ()
        for place, (each, may_read) in enumerate(zip(inputs, which_may_read(inputs, self.block_size))):
            has_longer = any(len(target.ids) > 1 for target in each.targets)
            context = each.ids[: _first_of_prompt(each) // self.block_size * self.block_size]
            # Of a context that goes ahead no logits are computed; the input before may have computed it already.
            if has_longer and may_read and shared_length(before, each.ids) < len(context):
                yield f"context of {place}", context, self._sampling()
            before = each.ids
            sampling = self._sampling(
                logprob_token_ids=sorted({target.ids[-1] for target in each.targets}),
                # That of the token itself and of the most probable one.
                prompt_logprobs=1 if has_longer else None,
                skip_reading_prefix_cache=not may_read,
            )
            yield str(place), each.ids, sampling

    def _read(self, each: ScoredInput, output: Any) -> list[Score]:
        cached = output.num_cached_tokens or 0
        most = max(len(target.ids) for target in each.targets) - 1
        if cached > _first_of_prompt(each) or len(output.prompt_logprobs or ()) < most:
            raise RuntimeError(
                f"vLLM left out log-probabilities that were asked for, with {cached} of {len(each.ids)} tokens in its "
                "cache; please report it."
            )
        return [Score(target.request, *_score_of(target.ids, output)) for target in each.targets]


def which_may_read(inputs: Sequence[ScoredInput], block_size: int) -> list[bool]:
    """Of sorted inputs, which may read from the cache of prefixes: those of which it holds nothing that is scored."""
    shared = [0, *(shared_length(one.ids, other.ids) for one, other in itertools.pairwise(inputs)), 0]
    may_read = []
    for each, before, after in zip(inputs, shared, shared[1:]):
        # The cache holds what two inputs share, in whole blocks, and never the last token.
        most_cached = min(max(before, after), len(each.ids) - 1) // block_size * block_size
        may_read.append(most_cached <= _first_of_prompt(each))
    return may_read


def _first_of_prompt(each: ScoredInput) -> int:
    """The first position of an input that predicts one of its own tokens; the last one predicts none of them."""
    return min((target.first for target in each.targets if len(target.ids) > 1), default=len(each.ids) - 1)


def _score_of(ids: Sequence[int], output: Any) -> tuple[float, bool]:
    """Of tokens of which all but the last end the prompt."""
    of_prompt = output.prompt_logprobs[1 - len(ids) :] if len(ids) > 1 else []
    entries = [position[token] for token, position in zip(ids[:-1], of_prompt, strict=True)]
    (generated,) = output.outputs[0].token_ids
    last = output.outputs[0].logprobs[0][ids[-1]]
    log_likelihood = sum((entry.logprob for entry in entries), start=last.logprob)
    return float(log_likelihood), generated == ids[-1] and all(entry.rank == 1 for entry in entries)
