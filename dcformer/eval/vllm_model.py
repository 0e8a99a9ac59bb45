"""Scoring with lm-evaluation-harness by vLLM: many inputs in one step, and shared prefixes computed once.

lm-eval's model "vllm" asks for the log-probabilities of whole prompts. vLLM has these only for tokens that it computes,
so such requests read nothing from its prefix cache. Here the last token of an input is scored as one that could be
generated next, and the cache is read wherever the tokens before it that are scored are not in the cache. They may be
there if another input shares more than the context.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from ..common import optional
from ..configuration_dcformer import DCFormerConfig
from ..loading import FoundModel, find_model
from .lm_eval_model import LogLikelihoods, harness, policy_in_force
from .prefixes import Score, ScoredInput, shared_length
from .task_data import import_extra


# Tokens of a block of the cache, which shares prefixes in whole blocks; the smallest size that every backend takes.
BLOCK_SIZE = 32
# Inputs per call of the engine, and between two reports of progress.
_AT_ONCE = 1024


def import_vllm() -> ModuleType:
    """Import vLLM with errors alone in its log, and let it take one token more than a model has positions."""
    settings = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return optional.import_vllm("--engine vllm (engine='vllm')", **settings)


def check_device_of_vllm(device: torch.device) -> None:
    """Raise ValueError if vLLM would compute on another device."""
    import_vllm()
    from vllm.platforms import current_platform

    if device.type != current_platform.device_type or device.index:
        raise ValueError(
            f"The installed vLLM computes on the first device of kind {current_platform.device_type!r}, got "
            f"{str(device)!r}; give that as --device, and choose among GPUs by CUDA_VISIBLE_DEVICES."
        )


class VLLMLM(LogLikelihoods):
    """
    A causal language model in vLLM, for log-likelihoods alone, with options as in [`DCFormerLM`].

    vLLM starts another process, so a script that makes one needs `if __name__ == "__main__":`.
    """

    eot_token_id, prefix_token_id = harness.HFLM.eot_token_id, harness.HFLM.prefix_token_id

    def __init__(
        self,
        pretrained: str | FoundModel,
        *,
        dtype: str = "bfloat16",
        batch_size: int | str = "auto",
        max_length: int | None = None,
        oov_policy: str | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ):
        vllm = import_vllm()
        from vllm.platforms import current_platform
        from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS

        super().__init__()
        unread = find_model(pretrained) if isinstance(pretrained, str) else pretrained
        config, self.tokenizer = unread.config, unread.tokenizer
        resolve_max_length = import_extra("lm_eval.models.utils").resolve_max_length
        self.max_length = max_length or resolve_max_length(config, self.tokenizer, default=2048)
        self._device = torch.device(current_platform.device_type)
        self.oov_policy = policy_in_force(config, self.tokenizer, oov_policy)
        self.embedding_rows = config.get_text_config().vocab_size
        self._sampling = functools.partial(vllm.SamplingParams, temperature=0, max_tokens=1, detokenize=False)
        self.llm = vllm.LLM(
            unread.path,
            dtype=dtype,
            # The token that vLLM generates after an input counts, though nothing is computed for it.
            max_model_len=self.max_length + 1,
            max_num_seqs=None if batch_size == "auto" else int(batch_size),
            enable_prefix_caching=True,
            block_size=BLOCK_SIZE,
            # Scoring is prefill alone, in steps of thousands of tokens: graphs would save less time than they take.
            enforce_eager=True,
            skip_tokenizer_init=True,
            generation_config="vllm",
            use_tqdm_on_load=False,
            revision=unread.commit or unread.revision,
            trust_remote_code=unread.trust_remote_code,
            hf_overrides={"oov_policy": self.oov_policy} if isinstance(config, DCFormerConfig) else {},
        )
        self.most_targets = MAX_LOGPROB_TOKEN_IDS
        self.start_counting(on_progress)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("VLLMLM computes log-likelihoods only; use lm-eval's model `vllm` to generate.")

    def close(self) -> None:
        """End vLLM's process, which would otherwise hold a GPU's memory until it is collected."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    def _score(self, inputs: Sequence[ScoredInput]) -> Iterator[list[Score]]:
        most, pieces = self.most_targets, []
        for scored in inputs:
            for end, ending in itertools.groupby(scored.targets, key=lambda target: target.first + len(target.ids)):
                targets = list(ending)
                for start in range(0, len(targets), most):
                    pieces.append(ScoredInput(scored.ids[:end], targets[start : start + most]))
        self.input_tokens += sum(len(piece.ids) for piece in pieces) - sum(len(scored.ids) for scored in inputs)
        # The cache must hold nothing but prefixes of these inputs, for which `which_may_read` decides.
        self.llm.reset_prefix_cache()
        # In this order the blocks that inputs share are still in the cache.
        prompts = self._prompts(sorted(pieces, key=lambda piece: piece.ids))
        while some := list(itertools.islice(prompts, _AT_ONCE)):
            tokens = [{"prompt_token_ids": list(ids)} for _, ids, _ in some]
            outputs = self.llm.generate(tokens, [sampling for *_, sampling in some], use_tqdm=False)
            self.computed_tokens += sum(len(o.prompt_token_ids) - (o.num_cached_tokens or 0) for o in outputs)
            yield [score for (piece, *_), o in zip(some, outputs) if piece for score in self._read(piece, o)]

    def _prompts(self, inputs: Sequence[ScoredInput]) -> Iterator[tuple[ScoredInput | None, Sequence[int], Any]]:
        """Inputs, their ids and vLLM's parameters; before some a context, for which the input is `None`."""
        before: Sequence[int] = ()
        for scored, may_read in zip(inputs, which_may_read(inputs, BLOCK_SIZE)):
            has_longer = any(len(target.ids) > 1 for target in scored.targets)
            context = scored.ids[: _first_of_prompt(scored) // BLOCK_SIZE * BLOCK_SIZE]
            # No logits are computed for the context alone. The input before may have computed it already.
            if has_longer and may_read and shared_length(before, scored.ids) < len(context):
                yield None, context, self._sampling()
            before = scored.ids
            sampling = self._sampling(
                logprob_token_ids=sorted({target.ids[-1] for target in scored.targets}),
                # Those of the token itself and of the most probable one.
                prompt_logprobs=1 if has_longer else None,
                skip_reading_prefix_cache=not may_read,
            )
            yield scored, scored.ids, sampling

    def _read(self, scored: ScoredInput, output: Any) -> list[Score]:
        cached = output.num_cached_tokens or 0
        most = max(len(target.ids) for target in scored.targets) - 1
        if cached > _first_of_prompt(scored) or len(output.prompt_logprobs or ()) < most:
            raise RuntimeError(
                f"vLLM left out requested log-probabilities, with {cached} of {len(scored.ids)} tokens in its cache; "
                "please report it."
            )
        return [Score(target.request, *_score_of(target.ids, output)) for target in scored.targets]


def which_may_read(inputs: Sequence[ScoredInput], block_size: int) -> list[bool]:
    """Tell which of the sorted inputs may read from the prefix cache: those without scored tokens in it."""
    shared = [0, *(shared_length(one.ids, other.ids) for one, other in itertools.pairwise(inputs)), 0]
    may_read = []
    for scored, before, after in zip(inputs, shared, shared[1:]):
        # The cache holds what two inputs share, in whole blocks, and never the last token.
        most_cached = min(max(before, after), len(scored.ids) - 1) // block_size * block_size
        may_read.append(most_cached <= _first_of_prompt(scored))
    return may_read


def _first_of_prompt(scored: ScoredInput) -> int:
    """The first position of an input that predicts a scored token of the input; else its last position."""
    return min((target.first for target in scored.targets if len(target.ids) > 1), default=len(scored.ids) - 1)


def _score_of(ids: Sequence[int], output: Any) -> tuple[float, bool]:
    """Log-likelihood of tokens, of which all but the last end the prompt, and whether they are greedy."""
    of_prompt = output.prompt_logprobs[1 - len(ids) :] if len(ids) > 1 else []
    entries = [position[token] for token, position in zip(ids[:-1], of_prompt, strict=True)]
    (generated,) = output.outputs[0].token_ids
    last = output.outputs[0].logprobs[0][ids[-1]]
    log_likelihood = sum((entry.logprob for entry in entries), start=last.logprob)
    return float(log_likelihood), generated == ids[-1] and all(entry.rank == 1 for entry in entries)
