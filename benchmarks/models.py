"""Decoding, training and reading of a few layers of the published models, beside Transformer++.

    python -m benchmarks.models --only train          # on a GPU, if there is one, in bfloat16 and as CUDA graphs

Models have layers of the published sizes, but fewer of them, half of them with a window, and neither embedding nor
output layer: beside so few layers that would be a fifth of the work. On a GPU they are compiled.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dcformer.cache_size import cache_bytes_per_token
from dcformer.configuration_dcformer import DCFormerConfig
from dcformer.dcmha import PREFIX
from dcformer.modeling_dcformer import DCFormerModel
from dcformer.training import flops_per_token

from .attention import Candidate, flash_attention, gate, our_candidates, plain_candidates
from .measure import Benchmark, Case, Entry, Run, run_command


LAYERS = 4
STEPS = 16  # of decoding, in one call
PLAIN = {"compose_pre": False, "compose_post": False}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "sliding_window": 16}
FLASH_ATTENTION = "bench_fa2"  # the name of the baseline's attention in Transformers


class Family(NamedTuple):
    """Models that differ in their layers alone."""

    name: str
    values: dict[str, Any]  # fields of the configuration
    attention: str
    candidate: Candidate  # its operator, for the gate


# What is done, the layers' shape, numbers of rows and of their tokens, and the part of the families that is measured.
Setting = tuple[str, str, int, int, slice]


def settings(run: Run, kind: str) -> list[Setting]:
    """Settings to time, the most important first: in all of them, the first two families come before the others."""
    shapes = ["tiny"] if run.is_quick else ["dcformer-6.9b", "dcformer-2.8b"]
    full = [(1, 1024), (16, 1024), (1, 4096), (64, 1024)] if kind == "decode" else [(2, 2048)]
    sizes, parts = [(1, 24 if kind == "decode" else 48)] if run.is_quick else full, (slice(2), slice(2, None))
    return [(kind, shape, *size, part) for part, size, shape in itertools.product(parts, sizes, shapes)]


def families(device: torch.device) -> list[Family]:
    """Models to compare: those that matter most are the first two, Transformer++ with the same windows the first."""
    plain = plain_candidates(device, None)[0]
    name, attention = f"Transformer++, {plain.name}", FLASH_ATTENTION if device.type == "cuda" else "sdpa"
    ours = [(f"DCFormer++, {entry.name}", PREFIX + entry.name, entry) for entry in our_candidates()]
    return [
        Family(f"{name}, same windows", PLAIN, attention, plain),
        *(Family(our_name, {}, *operator) for our_name, *operator in ours),
        Family(f"{name}, all global", {**PLAIN, "sliding_window": None}, attention, plain),
        *(Family(f"{our_name}, query-wise", {"compose_key": False}, *operator) for our_name, *operator in ours),
    ]


def _flash_attention_forward(
    _: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, sliding_window: int, **options: Any
) -> tuple[Tensor, None]:
    return flash_attention(query, key, value, sliding_window, scaling).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(FLASH_ATTENTION, _flash_attention_forward)  # Transformers makes no masks for it


def configuration(shape: str, **values: Any) -> DCFormerConfig:
    """A few layers of a preset, or of a tiny shape, with next to no vocabulary."""
    values = {"num_hidden_layers": LAYERS, "vocab_size": 1, "bos_token_id": None, "eos_token_id": None, **values}
    return DCFormerConfig(**{**_TINY, **values}) if shape == "tiny" else DCFormerConfig.from_preset(shape, **values)


def make_model(run: Run, config: DCFormerConfig, attention: str) -> DCFormerModel:
    torch.manual_seed(0)
    with run.device:
        model = DCFormerModel._from_config(config, dtype=run.dtype)
    torch._dynamo.reset()  # graphs of other models would count against the limit of this one's
    model.set_attn_implementation(attention)
    return model.eval()


def compare(run: Run, setting: Setting) -> None:
    """Time Transformer++, and DCFormer++ with each implementation and without key-wise composition."""
    kind, shape, rows, length, part = setting
    options = {"is_step": kind == "decode", "graded": kind == "train"}
    chosen = families(run.device)

    def make(family: Family) -> Case | str:
        config = configuration(shape, max_position_embeddings=length + 128, **family.values)
        problem = gate(run, family.candidate, config.num_attention_heads, config.head_dim, **options)
        if problem is not None:
            return problem
        model = make_model(run, config, family.attention)
        if kind == "decode":
            call = Decoder(model, run.compiles, rows, length).decode
            rates = {"tokens/s": rows, "GB/s at least": step_bytes(model, rows, length) / 1e9}
            return Case(call, parts=STEPS, rates=rates)
        flops = rows * length * flops_per_token(model.config, length) / (1 if kind == "train" else 3)
        call = one_pass(run, model, rows, length, trains=kind == "train")
        return Case(call, rates={"tokens/s": rows * length, "TFLOP/s": flops / 1e12})

    bases = [family.name for family in chosen if family.values.keys() >= PLAIN.keys()]
    ratios = {base: f"time / {base.rpartition(', ')[2]}" for base in bases}
    title = f"batch {rows}, prompt {length}" if kind == "decode" else f"{rows} rows of {length} tokens"
    title = f"{kind}: {LAYERS} layers of {shape}, {title}"
    run.compare(title, [Entry(family.name, partial(make, family)) for family in chosen[part]], ratios)


def step_bytes(model: DCFormerModel, batch: int, prompt: int) -> int:
    """Bytes that a step must read: the layers' parameters, and the cache."""
    windows = [layer.self_attn.sliding_window or prompt for layer in model.layers]
    read = sum(parameter.nbytes for parameter in model.layers.parameters())
    keys = sum(min(prompt, window) for window in windows)
    return read + batch * keys * cache_bytes_per_token(model.config, model.dtype)


class Decoder:
    """Decodes rows after a prompt of random cached states, again and again from the prompt's end."""

    def __init__(self, model: DCFormerModel, compiles: bool, batch: int, prompt: int):
        self.prompt = prompt
        self.cache = StaticCache(config=model.config, max_cache_len=prompt + STEPS)
        self.states = torch.randn(batch, 1, model.config.hidden_size, device=model.device, dtype=model.dtype)
        with torch.no_grad():
            model(inputs_embeds=self.states, cache=self.cache)  # allocates
            for layer in self.cache.layers:
                for rows in (layer.keys, layer.values):
                    rows.normal_(std=0.1)
        self._read = torch.compile(model, fullgraph=True) if compiles else model

    @torch.no_grad()
    def decode(self) -> Tensor:
        """Read `STEPS` tokens, the first of them after the prompt; nothing waits for the device if it is compiled."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.prompt)
        for _ in range(STEPS):
            for layer in self.cache.layers:
                if hasattr(layer, "cumulative_length_int"):  # they count on the host too: one graph per count
                    layer.cumulative_length_int = self.prompt
            states = self._read(inputs_embeds=self.states, cache=self.cache).last_hidden_state
        return states


def one_pass(run: Run, model: DCFormerModel, rows: int, length: int, *, trains: bool) -> Callable[[], Any]:
    """Forward, or forward and backward without an optimizer's step; each layer compiled on a GPU."""
    model.train(trains)
    if run.compiles:
        for layer in model.layers:
            layer.compile()
    size, options = (rows, length, model.config.hidden_size), {"device": run.device, "dtype": run.dtype}
    states, upstream = torch.randn(size, **options, requires_grad=trains), torch.randn(size, **options)
    leaves = [states, *model.layers.parameters()]

    def step() -> Any:
        with torch.set_grad_enabled(trains):
            output = model(inputs_embeds=states, use_cache=False).last_hidden_state
        return torch.autograd.grad(output, leaves, upstream) if trains else output

    return step


_ROW = "Transformer++ with FlashAttention 2 or SDPA", "the operator in float64"
REGISTRY = (
    Benchmark("decode", "steps with a static cache", *_ROW, partial(settings, kind="decode"), compare),
    Benchmark("train", "forward and backward", *_ROW, partial(settings, kind="train"), compare),
    Benchmark("forward", "a forward pass", *_ROW, partial(settings, kind="forward"), compare),
)


if __name__ == "__main__":
    sys.exit(run_command(__doc__, REGISTRY))
