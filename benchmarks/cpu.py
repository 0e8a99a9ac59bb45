"""Whole models on CPUs, float32, beside models without composition, Llama, GPT-NeoX, Qwen3, and "authors".

    python -m benchmarks.cpu --threads 1 2 --json cpu.json         # everything
    python -m benchmarks.cpu --only decode --only prefill          # some of it
    OMP_NUM_THREADS=1 python -m benchmarks.cpu --only host         # what a decoding layer costs beside computing

What is compared runs in turns in one process. The machine must do nothing else: each of many short parallel operations
waits for its slowest thread. The operator alone: `python -m benchmarks.attention --device cpu`.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    StaticCache,
)

from dcformer import DCFormerConfig
from dcformer.modeling_dcformer import CACHE_NAME

from .authors import AuthorsDecoder
from .measure import Benchmark, Case, Entry, Run, relative_error, run_command


DCFORMER, PLAIN, GLOBAL, AUTHORS, QWEN = "DCFormer", "no composition", "no composition, all global", "authors", "Qwen3"
NAMES = DCFORMER, PLAIN, "Llama", "GPT-NeoX", AUTHORS


class Text(NamedTuple):
    """A text of a prompt and steps after it, and the shape of the models that read it."""

    prompt: int
    steps: int
    heads: int
    layers: int = 4
    width: int = 768
    intermediate: int = 2048
    vocabulary: int = 16384
    window: int | None = 256
    cache: str = "dynamic"

    def __str__(self) -> str:
        shape = f"float32, {self.layers} layers, H {self.heads} D {self.width // self.heads}, prompt {self.prompt}"
        return f"{shape}, {self.cache} cache" if self.steps else shape

    def tokens(self, number: int) -> torch.Tensor:
        return torch.randint(self.vocabulary, (1, number), generator=torch.Generator().manual_seed(0))

    def config(self, name: str) -> PreTrainedConfig:
        sizes = {"vocab_size": self.vocabulary, "hidden_size": self.width, "intermediate_size": self.intermediate}
        sizes |= {"num_hidden_layers": self.layers, "num_attention_heads": self.heads, "tie_word_embeddings": False}
        sizes |= {"max_position_embeddings": self.prompt + self.steps, "bos_token_id": None, "eos_token_id": None}
        plain = partial(DCFormerConfig, compose_pre=False, compose_post=False)
        makers: dict[str, Callable[..., PreTrainedConfig]] = {
            DCFORMER: partial(DCFormerConfig, sliding_window=self.window),
            PLAIN: partial(plain, sliding_window=self.window),
            GLOBAL: partial(plain, sliding_window=None),
            "Llama": LlamaConfig,
            "GPT-NeoX": GPTNeoXConfig,
            QWEN: partial(Qwen3Config, num_key_value_heads=self.heads, head_dim=self.width // self.heads),
        }
        return makers[name](**sizes)


QUICK = Text(48, 4, 4, width=64, intermediate=96, vocabulary=128, window=16)


def texts(run: Run, caches: Sequence[str] = ("dynamic",)) -> list[Text]:
    sizes = [QUICK] if run.is_quick else [Text(1024, 32, heads) for heads in (12, 6)]
    return [text._replace(cache=cache) for text in sizes for cache in caches]


def compare(run: Run, text: Text, kind: str, make_case: Callable, names: Sequence[str], bases: Sequence[str]) -> None:
    """Time models; ours and the authors' decoder only if they have the right logits, of more tokens than a window."""
    tokens = text.tokens(min((text.window or text.prompt) * 5 // 4, text.prompt))

    def make(name: str) -> Case | str:
        torch.manual_seed(0)
        is_checked = name in (DCFORMER, AUTHORS)
        model: Any = AutoModelForCausalLM.from_config(text.config(DCFORMER if is_checked else name)).eval()
        exact = copy.deepcopy(model).double() if is_checked else None
        if name == AUTHORS:
            model = AuthorsDecoder(model, text.prompt + text.steps)
        if exact is not None:
            exact.set_attn_implementation("dcmha_plain")
            error = relative_error(*(read(each, tokens, new_cache(each, text)) for each in (model, exact)))
            if not error <= 1e-4:
                return f"logits are wrong: relative error {error:.1e}"
        return make_case(model, text)

    entries = [Entry(name, partial(make, name)) for name in names]
    run.compare(f"{kind}: {text}", entries, {name: f"/ {name}" for name in bases}, in_turns=True)


@torch.no_grad()
def read(model: Any, token_ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Feed tokens to a model and its cache, for the logits of the last one."""
    if isinstance(model, AuthorsDecoder):
        return model(token_ids, cache, logits_to_keep=1)
    return model(token_ids, **{CACHE_NAME: cache}, logits_to_keep=1).logits


def new_cache(model: Any, text: Text) -> Any:
    if isinstance(model, AuthorsDecoder):
        return model.new_cache()
    static = partial(StaticCache, max_cache_len=text.prompt + text.steps)
    return (static if text.cache == "static" else DynamicCache)(config=model.config)


def prefill_case(model: Any, text: Text) -> Case:
    """A case that reads a prompt into an empty cache."""
    return Case(partial(read, model, text.tokens(text.prompt)), prepare=partial(new_cache, model, text))


def decode_case(model: Any, text: Text) -> Case:
    """A case that decodes given tokens one by one, each sample with a copy of a cache that holds the prompt."""
    token_ids, filled = text.tokens(text.prompt + text.steps), new_cache(model, text)
    read(model, token_ids[:, : text.prompt], filled)

    def steps(cache: Any) -> None:
        for token in token_ids[:, text.prompt :].split(1, dim=1):
            read(model, token, cache)

    return Case(steps, prepare=lambda: copy.deepcopy(filled), parts=text.steps)


def host_case(model: Any, text: Text) -> Case:
    """A layer's share of a decoding step."""
    return decode_case(model, text)._replace(parts=text.steps * text.layers)


def training_case(model: PreTrainedModel, text: Text) -> Case:
    """Forward, backward, clipping and fused AdamW."""
    token_ids = text.tokens(text.prompt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    model.train()

    def step() -> None:
        model(input_ids=token_ids, labels=token_ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Case(step)


def training_texts(run: Run) -> list[Text]:
    """A text for models of 50 M parameters."""
    return [QUICK if run.is_quick else Text(1024, 0, 8, 10, 512, 1536)]


def host_texts(run: Run) -> list[Text]:
    """A text for models so small that computing costs next to nothing."""
    return [Text(8, 20, 4, 3 if run.is_quick else 24, 64, 96, 64, window=None)]


def _row(name: str, what: str, shapes: Callable, make_case: Callable, names: Sequence[str], *bases: str) -> Benchmark:
    measure = partial(compare, kind=name, make_case=make_case, names=names, bases=bases)
    return Benchmark(name, what, ", ".join(bases), "logits of plain PyTorch in float64", shapes, measure)


_BOTH = partial(texts, caches=("dynamic", "static"))
REGISTRY = (
    _row("decode", "steps after a prompt", _BOTH, decode_case, NAMES, PLAIN, AUTHORS),
    _row("prefill", "reading a prompt", texts, prefill_case, NAMES, PLAIN, AUTHORS),
    _row("training", "a step with AdamW", training_texts, training_case, (PLAIN, DCFORMER, GLOBAL), PLAIN, GLOBAL),
    _row("host", "host time of a decoding layer", host_texts, host_case, (QWEN, DCFORMER, PLAIN, "Llama"), QWEN),
)


if __name__ == "__main__":
    sys.exit(run_command(__doc__, REGISTRY, device="cpu"))
