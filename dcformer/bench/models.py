"""`dcformer bench decode`, `train` and `model`: tokens per second beside Transformer++.

Models have layers of the published sizes, but fewer of them, half of them with a window, and no output layer: beside so
few layers it would be a fifth of the work.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..compose_dcformer import cache_bytes_per_token
from ..configuration_dcformer import DCFormerConfig
from ..dcmha import PREFIX
from ..modeling_dcformer import DCFormerForCausalLM, DCFormerModel
from ..training import flops_per_token
from .candidates import Candidate, flash_attention, gate, our_candidates, plain_candidates
from .measure import Case, Row, Run, add_ratios


LAYERS = 4
STEPS = 16  # of decoding, in one call
PLAIN = {"compose_pre": False, "compose_post": False}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "sliding_window": 16}
FLASH_ATTENTION = "bench_fa2"  # the name of the baseline's attention in Transformers
MakeCase = Callable[[DCFormerModel, int, int], Case]  # from a model, a number of rows and their length


class Family(NamedTuple):
    """Models that differ in their layers alone."""

    name: str
    values: dict[str, Any]  # fields of the configuration
    attention: str
    candidate: Candidate  # its operator, for the gate


def families(device: torch.device) -> list[Family]:
    """Models to compare: those that matter most are the first two, Transformer++ with the same windows the first."""
    plain = plain_candidates(device, False, None)[0]
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
    """Make a model with random weights on the run's device."""
    torch.manual_seed(0)
    with run.device:
        model = DCFormerModel._from_config(config, dtype=run.dtype)
    torch._dynamo.reset()  # graphs of other models would count against the limit of this one's
    model.set_attn_implementation(attention)
    return model.eval()


def compare(run: Run, kind: str, title: str, settings: list[tuple[int, int]], make_case: MakeCase) -> None:
    """
    Time Transformer++, and DCFormer++ with each implementation and without key-wise composition.

    `settings` are numbers of rows and their length: a call computes them, or one token after each ("decode").
    """
    options = {"is_step": kind == "decode", "with_gradients": kind == "train"}
    shapes = ["tiny"] if run.is_quick else ["dcformer-6.9b", "dcformer-2.8b"]
    chosen = families(run.device)

    def make(family: Family, config: DCFormerConfig, rows: int, length: int) -> Case | str:
        problem = gate(run, family.candidate, config.num_attention_heads, config.head_dim, **options)
        return problem or make_case(make_model(run, config, family.attention), rows, length)

    bases = [family.name for family in chosen if family.values.keys() >= PLAIN.keys()]
    for part, (rows, length), shape in itertools.product((chosen[:2], chosen[2:]), settings, shapes):
        group = f"{kind}: {LAYERS} layers of {shape}, {title.format(rows, length)}"
        for family in part:
            config = configuration(shape, max_position_embeddings=length + 128, **family.values)
            row = run.measured(group, family.name, functools.partial(make, family, config, rows, length))
            if row.timing is not None:
                row.figures |= figures(run, kind, config, rows, length, row.timing.median)
        for base in bases:
            add_ratios(run.rows_of(group), base, f"time / {base.rpartition(', ')[2]}")


def figures(run: Run, kind: str, config: DCFormerConfig, rows: int, length: int, seconds: float) -> dict[str, float]:
    """The rates that a call reached, and their ratios to the measured rates of the machine."""
    tokens = rows if kind == "decode" else rows * length
    if kind == "decode":
        moved = step_bytes(config, rows, length, run.dtype)
        rates = {"GB/s at least": moved / seconds / 1e9, "reading / time": moved / run.rates.read_bytes / seconds}
    else:
        flops = tokens * flops_per_token(config, length) / (1 if kind == "train" else 3)
        rates = {"TFLOP/s": flops / seconds / 1e12, "roofline / time": flops / seconds / run.rates.flops}
    return {"tokens/s": tokens / seconds, **rates}


def step_bytes(config: DCFormerConfig, batch: int, prompt: int, dtype: torch.dtype) -> int:
    """Bytes that a step must read: the layers' parameters, and the cache."""
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
    keys = sum(min(prompt, window or prompt) for window in windows)
    return _parameters(config)[1] * dtype.itemsize + batch * keys * cache_bytes_per_token(config, dtype)


def _parameters(config: DCFormerConfig) -> tuple[int, int]:
    """Parameters of the whole model, and of its layers."""
    with torch.device("meta"):
        model = DCFormerForCausalLM(config)
    return model.num_parameters(), sum(parameter.numel() for parameter in model.model.layers.parameters())


class Decoder:
    """A model that decodes token after token from a static cache full of random rows."""

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


def decode(run: Run) -> None:
    """Decode with a static cache; on a GPU a compiled model, the steps in one CUDA graph."""

    def make_case(model: DCFormerModel, rows: int, length: int) -> Case:
        return Case(Decoder(model, run.compiles, rows, length).decode, parts=STEPS)

    settings = [(1, 24)] if run.is_quick else [(1, 1024), (16, 1024), (1, 4096), (64, 1024)]
    compare(run, "decode", "batch {}, prompt {}", settings, make_case)


def train(run: Run) -> None:
    """Forward and backward of a few rows, each layer compiled on a GPU."""
    passes(run, trains=True)
    run.notes.append("A call is forward and backward; the optimizer's step is left out.")


def model(run: Run) -> None:
    """Table 2's overheads of the published models, and a forward pass."""
    for preset, length in (("dcformer-1.4b", 2048), ("dcformer-6.9b", 2048), ("dcformer-6.9b", 8192)):
        figures = overhead(DCFormerConfig.from_preset(preset, sliding_window=None), length)
        run.rows.append(Row("Table 2: what composition adds, in %", f"{preset}, {length} tokens", figures=figures))
    passes(run, trains=False)


def overhead(config: DCFormerConfig, length: int) -> dict[str, float]:
    """Count what composition adds to the parameters and FLOPs of a model and of its layers, in percent."""
    plain = type(config).from_dict({**config.to_dict(), **PLAIN})
    parameters, in_layers = _parameters(plain)
    extra = _parameters(config)[0] - parameters
    flops = flops_per_token(plain, length)
    extra_flops = flops_per_token(config, length) - flops
    return {
        "parameters": 100 * extra / parameters,
        "of layers": 100 * extra / in_layers,
        "FLOPs": 100 * extra_flops / flops,
        "FLOPs of layers": 100 * extra_flops / (flops - 3 * 2 * config.hidden_size * config.vocab_size),
    }


def passes(run: Run, trains: bool) -> None:
    """Compare all shapes, forward, or forward and backward."""

    def make_case(model: DCFormerModel, rows: int, length: int) -> Case:
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

        return Case(step)

    settings = [(1, 48)] if run.is_quick else [(2, 2048)]
    compare(run, "train" if trains else "forward", "{} rows of {} tokens", settings, make_case)
