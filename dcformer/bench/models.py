"""`dcformer bench decode`, `train` and `model`: tokens per second beside Transformer++, as in Tables 6 and 10.

Models of the published depth do not fit a benchmark. Three models of a few layers are measured, with one layer of each
kind, more global ones, and more local ones; their differences are the time of a layer of either kind. These make up
the published depth in any ratio of local to global layers, and rows of such models say that they are extrapolated.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import StaticCache

from ..compose_dcformer import cache_bytes_per_token
from ..configuration_dcformer import DCFormerConfig
from ..dcmha import PREFIX
from ..modeling_dcformer import DCFormerForCausalLM
from ..training import flops_per_token
from . import paper
from .candidates import Candidate, gate, own_candidates
from .measure import Run, Timing, in_cuda_graph
from .operands import step_operands


_TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "sliding_window": 16,
    "bos_token_id": None,
    "eos_token_id": None,
}
RATIOS = (1, 3, 7)  # local layers for each global one, in the columns of Table 10


class Family(NamedTuple):
    """Models that differ in their layers alone."""

    name: str
    values: dict[str, Any]  # fields of the configuration
    attention: str
    candidate: Candidate | None = None  # its operator, for the gate; None where nothing is composed


BASELINE = Family("Transformer++", {"compose_pre": False, "compose_post": False}, "sdpa")


class LayerTimes(NamedTuple):
    """Seconds of a global layer, of a local one, and of everything outside the layers."""

    full: float
    sliding: float
    rest: float

    def total(self, full: int, sliding: int) -> float:
        return full * self.full + sliding * self.sliding + self.rest


class Comparison(NamedTuple):
    """A call to time with every family."""

    kind: str  # "decode", "train" or "forward"
    size: str  # name of the shape in the paper
    setting: str  # for the title
    tokens: int  # of one call
    length: int  # tokens before a decoding step, or of a row
    more: int  # further layers of one kind in the second and the third model
    measure: Callable[[Family, DCFormerConfig], Timing]
    printed: Mapping[tuple[str, bool, int], tuple[float, ...]]  # shares of the paper's tables

    @property
    def group(self) -> str:
        return f"{self.kind}: {self.size} shape, {self.setting}"


def sizes(is_quick: bool) -> dict[str, str | None]:
    """Published shapes by their names in the paper, with their presets; or a tiny one."""
    return {"tiny": None} if is_quick else {"6.9B": "dcformer-6.9b", "2.8B": "dcformer-2.8b"}


def configuration(preset: str | None, **values: Any) -> DCFormerConfig:
    return DCFormerConfig(**{**_TINY, **values}) if preset is None else DCFormerConfig.from_preset(preset, **values)


def make_model(run: Run, family: Family, config: DCFormerConfig) -> DCFormerForCausalLM:
    """Make a model with random weights where it stays."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(run.dtype)
    try:
        with run.device:
            model = DCFormerForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    torch._dynamo.reset()  # graphs of other models would count against the limit of this one's
    model.set_attn_implementation(family.attention)
    return model.eval()


def compare(run: Run, of: Comparison) -> None:
    """Measure Transformer++, DCFormer++ with each implementation, and the fastest query-wise; then whole models."""
    found: dict[str, tuple[Family, LayerTimes]] = {}

    def take(family: Family) -> None:
        seconds = []
        for full, sliding in ((1, 1), (1 + of.more, 1), (1, 1 + of.more)):
            kinds = ["sliding_attention"] * sliding + ["full_attention"] * full
            values = {"num_hidden_layers": len(kinds), "layer_types": kinds, "max_position_embeddings": of.length + 128}
            config = configuration(sizes(run.is_quick)[of.size], **values, **family.values)
            name = f"{family.name}, {full} global + {sliding} local"
            row = run.measured(of.group, name, functools.partial(_measure, run, of, family, config))
            if row.timing is None:
                return
            row.figures |= figures(run, of, config, row.timing.median)
            seconds.append(row.timing.median)
        both, more_full, more_sliding = seconds
        times = (more_full - both) / of.more, (more_sliding - both) / of.more
        if min(times) <= 0:
            run.add(of.group, family.name, note="not extrapolated: noise was larger than the time of a layer")
            return
        found[family.name] = family, LayerTimes(*times, both - sum(times))

    own = [Family(f"DCFormer++, {each.name}", {}, PREFIX + each.name, each) for each in own_candidates()]
    for family in (BASELINE, *own):
        take(family)
    composing = [pair for pair in found.values() if pair[0] is not BASELINE]
    if composing:
        fastest, _ = min(composing, key=lambda pair: pair[1].total(1, 1))
        take(fastest._replace(name=f"{fastest.name}, query-wise", values={"compose_key": False}))
    if BASELINE.name in found:
        add_whole_models(run, of, found)


def _measure(run: Run, of: Comparison, family: Family, config: DCFormerConfig) -> Timing | str:
    """Time a model whose operator passes the gate."""
    if family.candidate is not None:
        options = {"is_step": of.kind == "decode", "with_gradients": of.kind == "train"}
        problem = gate(run, family.candidate, config.num_attention_heads, config.head_dim, **options)
        if problem is not None:
            return problem
    return of.measure(family, config)


def figures(run: Run, of: Comparison, config: DCFormerConfig, seconds: float) -> dict[str, float]:
    """Rates that a call reached, beside the measured ones of the machine."""
    if of.kind == "decode":
        moved = step_bytes(config, of.tokens, of.length, run.dtype)
        return {"GB/s at least": moved / seconds / 1e9, "reading / time": moved / run.rates.read_bytes / seconds}
    flops = of.tokens * flops_per_token(config, of.length) / (1 if of.kind == "train" else 3)
    return {"TFLOP/s": flops / seconds / 1e12, "of measured matmul": flops / seconds / run.rates.flops}


def step_bytes(config: DCFormerConfig, batch: int, prompt: int, dtype: torch.dtype) -> int:
    """Bytes that a step must read: every parameter but the embeddings of other tokens, and the cache."""
    with torch.device("meta"):
        parameters = DCFormerForCausalLM(config).num_parameters()
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
    keys = sum(min(prompt, window or prompt) for window in windows)
    total = (parameters - (config.vocab_size - batch) * config.hidden_size) * dtype.itemsize
    return total + batch * keys * cache_bytes_per_token(config, dtype)


def add_whole_models(run: Run, of: Comparison, found: dict[str, tuple[Family, LayerTimes]]) -> None:
    """Rows of whole models, with their shares of Transformer++'s tokens per second, and what the paper prints."""
    layers = configuration(sizes(run.is_quick)[of.size]).num_hidden_layers
    group = f"{of.group}, whole model of {layers} layers (extrapolated)"
    base = found[BASELINE.name][1]

    def add(name: str, seconds: float, **shares: float) -> None:
        run.add(group, name, Timing(seconds, seconds), figures={"tokens/s": of.tokens / seconds, **shares})

    everything = base.total(layers, 0)
    add(f"{BASELINE.name}, all global", everything)
    for name, (family, times) in found.items():
        for ratio in RATIOS:
            full = layers // (ratio + 1)
            seconds, shares = times.total(full, layers - full), {}
            if family is not BASELINE:
                shares = {"/ all global": everything, "/ same windows": base.total(full, layers - full)}
                shares = {title: value / seconds for title, value in shares.items()}
                printed = of.printed.get((of.size, "compose_key" not in family.values, ratio), ())
                shares |= zip(("/ all global, paper", "/ same windows, paper"), printed)
            add(f"{name}, local:global {ratio}:1", seconds, **shares)
    run.note("Whole models are extrapolated: the time of a layer of each kind is a difference between small models.")


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
    """Decode with a static cache, a compiled step in one CUDA graph; then time the attention of a step alone."""
    settings = [(1, 24, 4)] if run.is_quick else [(1, 1024, 128), (1, 4096, 128), (8, 1024, 128), (64, 1024, 128)]
    for number, (batch, prompt, steps) in enumerate(settings):

        def measure(family: Family, config: DCFormerConfig, setting: tuple = (batch, prompt, steps)) -> Timing:
            decoder = Decoder(make_model(run, family, config), run.compiles, *setting)
            step = in_cuda_graph(decoder.step, run.device)

            def decode_steps(reset: None) -> None:
                for _ in range(setting[2]):
                    step()

            return run.timer.time(decode_steps, prepare=decoder.reset, parts=setting[2])

        for size in sizes(run.is_quick):
            title = f"batch {batch}, prompt {prompt}"
            printed = {} if number else paper.DECODING
            compare(run, Comparison("decode", size, title, batch, prompt, 1 if run.is_quick else 4, measure, printed))
        if number == 0:
            for preset in sizes(run.is_quick).values():
                attention_of_a_step(run, configuration(preset), prompt)


def attention_of_a_step(run: Run, config: DCFormerConfig, keys: int) -> None:
    """Time the operator alone, over as many copies of its operands as the device's cache cannot hold."""
    heads, channels = config.num_attention_heads, config.head_dim
    moved = cache_bytes_per_token(config, run.dtype) * keys
    for entry in own_candidates():

        def measure(entry: Candidate = entry) -> Timing | str:
            if (problem := gate(run, entry, heads, channels, is_step=True)) is not None:
                return problem
            operands = step_operands(heads, channels, keys, run.device, run.dtype)
            copies = 1
            if run.device.type == "cuda":
                copies += min(63, 4 * torch.cuda.get_device_properties(run.device).L2_cache_size // moved)
            # Rows of a cache hold states and factors side by side; a deep copy keeps that.
            calls = [entry.make(copy.deepcopy(operands), None, None) for _ in range(copies)]
            with torch.no_grad():
                turns = itertools.cycle([in_cuda_graph(call, run.device) for call in calls])
                return run.timer.time(lambda: next(turns)())

        row = run.measured(f"attention of a step: H {heads}, D {channels}, {keys} keys, batch 1", entry.name, measure)
        if row.timing is not None:
            row.figures["GB/s at least"] = moved / row.timing.median / 1e9


def train(run: Run) -> None:
    """
    Forward and backward of a few rows, each layer compiled on a GPU.

    The optimizer's step is left out: at the paper's two million tokens of a batch it is next to nothing.
    """
    passes(run, trains=True)
    run.note("A call is forward and backward; the optimizer's step is left out.")


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

    kind, printed = ("train", paper.TRAINING) if trains else ("forward", {})
    for size in sizes(run.is_quick):
        title = f"{rows} rows of {length} tokens"
        compare(run, Comparison(kind, size, title, rows * length, length, 1 if run.is_quick else 2, measure, printed))
