"""`dcformer bench decode`, `train` and `model`: tokens per second beside Transformer++.

Models have the layers of the published ones in size, but fewer of them, half of them local.
"""

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
from .measure import Row, Run, Timing, add_ratios, in_cuda_graph


LAYERS = 4
PLAIN = {"compose_pre": False, "compose_post": False}
_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "sliding_window": 16,
    "bos_token_id": None,
    "eos_token_id": None,
}


class Family(NamedTuple):
    """Models that differ in their layers alone."""

    name: str
    values: dict[str, Any]  # fields of the configuration
    candidate: Candidate | None = None  # its operator, for the gate; None where nothing is composed


BASELINE = Family("Transformer++, same windows", PLAIN)
ALL_GLOBAL = Family("Transformer++, all global", {**PLAIN, "sliding_window": None})


def configuration(shape: str, **values: Any) -> DCFormerConfig:
    """A few layers of a preset, or of a tiny shape."""
    values = {"num_hidden_layers": LAYERS, **values}
    return DCFormerConfig(**{**_TINY, **values}) if shape == "tiny" else DCFormerConfig.from_preset(shape, **values)


def make_model(run: Run, config: DCFormerConfig, attention: str) -> DCFormerForCausalLM:
    """Make a model with random weights where it stays."""
    torch.manual_seed(0)
    with run.device:
        model = DCFormerForCausalLM._from_config(config, dtype=run.dtype)
    torch._dynamo.reset()  # graphs of other models would count against the limit of this one's
    model.set_attn_implementation(attention)
    return model.eval()


def compare(
    run: Run, kind: str, setting: str, tokens: int, length: int, measure: Callable[[DCFormerForCausalLM], Timing]
) -> None:
    """
    Time Transformer++, and DCFormer++ with each implementation and without the keys' side of the composition.

    A call computes `tokens`, in rows of `length` or each after `length` tokens ("decode").
    """
    families = [BASELINE, ALL_GLOBAL]
    for each in own_candidates():
        families.append(Family(f"DCFormer++, {each.name}", {}, each))
        families.append(Family(f"DCFormer++, {each.name}, query-wise", {"compose_key": False}, each))
    options = {"is_step": kind == "decode", "with_gradients": kind == "train"}
    for shape in ["tiny"] if run.is_quick else ["dcformer-6.9b", "dcformer-2.8b"]:
        rows = []
        for family in families:
            config = configuration(shape, max_position_embeddings=length + 128, **family.values)

            def timed(config: DCFormerConfig = config, operator: Candidate | None = family.candidate) -> Timing | str:
                if operator is None:
                    return measure(make_model(run, config, "sdpa"))
                problem = gate(run, operator, config.num_attention_heads, config.head_dim, **options)
                return problem or measure(make_model(run, config, PREFIX + operator.name))

            rows.append(run.measured(f"{kind}: {LAYERS} layers of {shape}, {setting}", family.name, timed))
            if rows[-1].timing is not None:
                rows[-1].figures |= figures(run, kind, config, tokens, length, rows[-1].timing.median)
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
            model(self.token, cache=self.cache)  # allocates
            for layer in self.cache.layers:
                for rows in (layer.keys, layer.values):
                    rows.normal_(std=0.1)
        self._read = torch.compile(model, fullgraph=True) if compiles else model
        self.reset()

    def reset(self) -> None:
        """Go back to the end of the prompt."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.prompt)

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Read a token and choose the next one."""
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length_int"):  # sliding layers count on the host too: one graph per count
                layer.cumulative_length_int = self.prompt
        logits = self._read(self.token, cache=self.cache, logits_to_keep=1).logits
        self.token.copy_(logits.argmax(-1))
        return self.token


def decode(run: Run) -> None:
    """Decode with a static cache; on a GPU a compiled step in one CUDA graph."""
    settings = [(1, 24, 4)] if run.is_quick else [(1, 1024, 128), (1, 4096, 128), (8, 1024, 128), (64, 1024, 128)]
    for batch, prompt, steps in settings:

        def measure(model: DCFormerForCausalLM, setting: tuple = (batch, prompt, steps)) -> Timing:
            decoder = Decoder(model, run.compiles, *setting)
            step = in_cuda_graph(decoder.step, run.device)

            def decode_steps(reset: None) -> None:
                for _ in range(setting[2]):
                    step()

            return run.timer.time(decode_steps, prepare=decoder.reset, parts=setting[2])

        compare(run, "decode", f"batch {batch}, prompt {prompt}", batch, prompt, measure)


def train(run: Run) -> None:
    """Forward and backward of a few rows, each layer compiled on a GPU."""
    passes(run, trains=True)
    run.notes.append("A call is forward and backward; the optimizer's step is left out.")


def model(run: Run) -> None:
    """Table 2's overheads of the published models, and a forward pass."""
    for preset, length in (("dcformer-1.4b", 2048), ("dcformer-6.9b", 2048), ("dcformer-6.9b", 8192)):
        found = overhead(DCFormerConfig.from_preset(preset, sliding_window=None), length)
        run.rows.append(Row("Table 2: what composition adds, in %", f"{preset}, {length} tokens", figures=found))
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

    def measure(model: DCFormerForCausalLM) -> Timing:
        model.train(trains)
        if run.compiles:
            for layer in model.model.layers:
                layer.compile()
        token_ids = torch.randint(model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))
        token_ids = token_ids.to(run.device)

        def step() -> None:
            if trains:
                model(token_ids, labels=token_ids, use_cache=False).loss.backward()
                model.zero_grad()
                return
            with torch.no_grad():
                model(token_ids, use_cache=False, logits_to_keep=1)

        return run.timer.time(step)

    setting = f"{rows} rows of {length} tokens"
    compare(run, "train" if trains else "forward", setting, rows * length, length, measure)
