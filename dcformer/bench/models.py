"""`dcformer bench decode`, `train` and `model`: tokens per second beside Transformer++.

Models have the layers of the published ones in size, but fewer of them, half of them local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import StaticCache

from ..compose_dcformer import cache_bytes_per_token
from ..configuration_dcformer import DCFormerConfig
from ..dcmha import PREFIX
from ..modeling_dcformer import DCFormerForCausalLM
from ..training import flops_per_token
from .candidates import Candidate, gate, own_candidates
from .measure import Run, Timing, add_ratios, in_cuda_graph


LAYERS = 4
PLAIN = {"compose_pre": False, "compose_post": False}
_NO_ENDS = {"bos_token_id": None, "eos_token_id": None}
_TINY = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "sliding_window": 16}


class Family(NamedTuple):
    """Models that differ in their layers alone."""

    name: str
    values: dict[str, Any]  # fields of the configuration
    attention: str
    candidate: Candidate | None = None  # its operator, for the gate; None where nothing is composed


BASELINE = Family("Transformer++, same windows", PLAIN, "sdpa")
ALL_GLOBAL = Family("Transformer++, all global", {**PLAIN, "sliding_window": None}, "sdpa")


def shapes(is_quick: bool) -> list[str]:
    """Presets whose layers are measured; or a tiny shape."""
    return ["tiny"] if is_quick else ["dcformer-6.9b", "dcformer-2.8b"]


def configuration(shape: str, **values: Any) -> DCFormerConfig:
    if shape == "tiny":
        return DCFormerConfig(**{**_TINY, **_NO_ENDS, **values})
    return DCFormerConfig.from_preset(shape, **values)


def make_model(run: Run, family: Family, config: DCFormerConfig) -> DCFormerForCausalLM:
    """Make a model with random weights where it stays."""
    torch.manual_seed(0)
    with run.device:
        model = DCFormerForCausalLM._from_config(config, dtype=run.dtype)
    torch._dynamo.reset()  # graphs of other models would count against the limit of this one's
    model.set_attn_implementation(family.attention)
    return model.eval()


def compare(
    run: Run, kind: str, shape: str, setting: str, tokens: int, length: int, measure: Callable[..., Timing]
) -> None:
    """
    Time Transformer++, and DCFormer++ with each implementation and without the keys' side of the composition.

    Args:
        kind (`str`): "decode", "train" or "forward".
        shape, setting (`str`): For the title; the shape as in `shapes`.
        tokens, length (`int`): Tokens of one call; tokens of a row, or before a decoding step.
        measure (`Callable`): Times a call of a model, given its `Family` and `DCFormerConfig`.
    """
    families = [BASELINE, ALL_GLOBAL]
    for each in own_candidates():
        families.append(Family(f"DCFormer++, {each.name}", {}, PREFIX + each.name, each))
        families.append(families[-1]._replace(name=f"{families[-1].name}, query-wise", values={"compose_key": False}))
    group, rows = f"{kind}: {LAYERS} layers of {shape}, {setting}", []
    for family in families:
        values = {"num_hidden_layers": LAYERS, "max_position_embeddings": length + 128, **family.values}
        config = configuration(shape, **values)

        def timed(family: Family = family, config: DCFormerConfig = config) -> Timing | str:
            options = {"is_step": kind == "decode", "with_gradients": kind == "train"}
            heads = config.num_attention_heads, config.head_dim
            problem = family.candidate and gate(run, family.candidate, *heads, **options)
            return problem or measure(family, config)

        row = run.measured(group, family.name, timed)
        rows.append(row)
        if row.timing is not None:
            row.figures |= figures(run, kind, config, tokens, length, row.timing.median)
    for base in (BASELINE, ALL_GLOBAL):
        add_ratios(rows, base.name, f"time / {base.name}")


def figures(run: Run, kind: str, config: DCFormerConfig, tokens: int, length: int, seconds: float) -> dict[str, float]:
    """Rates that a call reached, beside the measured ones of the machine."""
    if kind == "decode":
        moved = step_bytes(config, tokens, length, run.dtype)
        rates = {"GB/s at least": moved / seconds / 1e9, "reading / time": moved / run.rates.read_bytes / seconds}
    else:
        flops = tokens * flops_per_token(config, length) / (1 if kind == "train" else 3)
        rates = {"TFLOP/s": flops / seconds / 1e12, "roofline / time": flops / seconds / run.rates.flops}
    return {"tokens/s": tokens / seconds, **rates}


def step_bytes(config: DCFormerConfig, batch: int, prompt: int, dtype: torch.dtype) -> int:
    """Bytes that a step must read: every parameter but the embeddings of other tokens, and the cache."""
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
    keys = sum(min(prompt, window or prompt) for window in windows)
    total = (_parameters(config)[0] - (config.vocab_size - batch) * config.hidden_size) * dtype.itemsize
    return total + batch * keys * cache_bytes_per_token(config, dtype)


def _parameters(config: DCFormerConfig) -> tuple[int, int]:
    """Parameters of the whole model, and of its layers."""
    with torch.device("meta"):
        model = DCFormerForCausalLM(config)
    return model.num_parameters(), sum(parameter.numel() for parameter in model.model.layers.parameters())


class Decoder:
    """A model that decodes token after token from a static cache full of random rows."""

    def __init__(self, model: DCFormerForCausalLM, compiles: bool, batch: int, prompt: int, steps: int):
        self.prompt = prompt
        self.cache = StaticCache(config=model.config, max_cache_len=prompt + steps)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        with torch.no_grad():
            model(self.token, past_key_values=self.cache)  # allocates
            for layer in self.cache.layers:
                for rows in (layer.keys, layer.values):
                    rows.normal_(std=0.1)
        self._read = torch.compile(model, fullgraph=True) if compiles else model
        self.reset()

    def reset(self) -> None:
        """Go back to the end of the prompt."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.prompt)
        self._reset_numbers()

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Read a token and choose the next one."""
        self._reset_numbers()
        logits = self._read(self.token, past_key_values=self.cache, logits_to_keep=1).logits
        self.token.copy_(logits.argmax(-1))
        return self.token

    def _reset_numbers(self) -> None:
        """Sliding layers count on the host besides; another count would be another graph."""
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = self.prompt


def decode(run: Run) -> None:
    """Decode with a static cache; on a GPU a compiled step in one CUDA graph."""
    settings = [(1, 24, 4)] if run.is_quick else [(1, 1024, 128), (1, 4096, 128), (8, 1024, 128), (64, 1024, 128)]
    for batch, prompt, steps in settings:

        def measure(family: Family, config: DCFormerConfig, setting: tuple = (batch, prompt, steps)) -> Timing:
            decoder = Decoder(make_model(run, family, config), run.compiles, *setting)
            step = in_cuda_graph(decoder.step, run.device)

            def decode_steps(reset: None) -> None:
                for _ in range(setting[2]):
                    step()

            return run.timer.time(decode_steps, prepare=decoder.reset, parts=setting[2])

        for shape in shapes(run.is_quick):
            compare(run, "decode", shape, f"batch {batch}, prompt {prompt}", batch, prompt, measure)


def train(run: Run) -> None:
    """Forward and backward of a few rows, each layer compiled on a GPU."""
    passes(run, trains=True)
    run.note("A call is forward and backward; the optimizer's step is left out.")


def model(run: Run) -> None:
    """Table 2's overheads of the published models, and a forward pass."""
    for preset, length in (("dcformer-1.4b", 2048), ("dcformer-6.9b", 2048), ("dcformer-6.9b", 8192)):
        found = overhead(DCFormerConfig.from_preset(preset, sliding_window=None), length)
        run.add("Table 2: what composition adds, in %", f"{preset}, {length} tokens", figures=found)
    passes(run, trains=False)


def overhead(config: DCFormerConfig, length: int) -> dict[str, float]:
    """Count what composition adds to the parameters and operations of a model and of its layers, in percent."""
    plain = type(config).from_dict({**config.to_dict(), **PLAIN})
    everything, layers = _parameters(plain)
    extra = _parameters(config)[0] - everything
    operations = flops_per_token(plain, length)
    extra_operations = flops_per_token(config, length) - operations
    in_layers = operations - 3 * 2 * config.hidden_size * config.vocab_size
    return {
        "parameters": 100 * extra / everything,
        "of layers": 100 * extra / layers,
        "FLOPs": 100 * extra_operations / operations,
        "FLOPs of layers": 100 * extra_operations / in_layers,
    }


def passes(run: Run, trains: bool) -> None:
    """Compare all shapes, forward, or forward and backward."""
    rows, length = (1, 48) if run.is_quick else (2, 2048)

    def measure(family: Family, config: DCFormerConfig) -> Timing:
        model = make_model(run, family, config).train(trains)
        if run.compiles:
            for layer in model.model.layers:
                layer.compile()
        token_ids = torch.randint(config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))
        token_ids = token_ids.to(run.device)

        def step() -> None:
            if not trains:
                with torch.no_grad():
                    model(token_ids, use_cache=False, logits_to_keep=1)
                return
            model(token_ids, labels=token_ids, use_cache=False).loss.backward()
            model.zero_grad()

        return run.timer.time(step)

    for shape in shapes(run.is_quick):
        setting = f"{rows} rows of {length} tokens"
        compare(run, "train" if trains else "forward", shape, setting, rows * length, length, measure)
