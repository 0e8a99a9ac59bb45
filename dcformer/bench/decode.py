"""`dcformer bench decode`: tokens per second of decoding, beside Transformer++ of the same shape.

A step is one token through the model with a static cache, its most likely successor included; on a GPU one CUDA graph,
of what torch.compile makes of the model. The cache holds random rows as if a prompt had been read, and a sample is as
many steps as the paper generates. The step's attention alone is measured as well, over copies of its operands in turns,
so that the device's cache does not hold them.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StaticCache

from ..configuration_dcformer import DCFormerConfig
from ..dcmha_cache import cache_bytes_per_token
from ..modeling_dcformer import DCFormerForCausalLM
from . import forms, paper
from .context import Context
from .gate import check
from .layers import (
    Family,
    LayerTimes,
    Size,
    compare_families,
    families,
    layer_times,
    make_model,
    sizes,
)
from .operands import step_operands
from .report import Row
from .timing import Timing, in_cuda_graph


_ROW_SCALE = 0.1
_CACHES_OF_COPIES = 4
_MOST_COPIES = 64


class Setting(NamedTuple):
    """Batch, tokens in the cache, and tokens of a sample."""

    batch: int
    prompt: int
    steps: int

    def __str__(self) -> str:
        return f"batch {self.batch}, prompt {self.prompt}"


def settings(is_quick: bool) -> list[Setting]:
    """In the order of their importance; the first is the paper's."""
    if is_quick:
        return [Setting(1, 24, 4)]
    return [Setting(1, 1024, 128), Setting(1, 4096, 128), Setting(8, 1024, 128), Setting(64, 1024, 128)]


class Decoder:
    """
    A model that decodes token after token from a cache that is full of random rows.

    Args:
        model (`DCFormerForCausalLM`): Any.
        setting (`Setting`): Its batch and lengths.
        compiles (`bool`): Whether a step is compiled, as one graph.
    """

    def __init__(self, model: DCFormerForCausalLM, setting: Setting, compiles: bool):
        self.setting = setting
        self.cache = StaticCache(config=model.config, max_cache_len=setting.prompt + setting.steps)
        self.token = torch.zeros(setting.batch, 1, dtype=torch.long, device=model.device)
        with torch.no_grad():
            model(self.token, past_key_values=self.cache)  # allocates
            for layer in self.cache.layers:
                for rows in (layer.keys, layer.values):
                    rows.normal_(std=_ROW_SCALE)
        self._read = torch.compile(model, fullgraph=True) if compiles else model
        self.reset()

    def reset(self) -> None:
        """Back to the end of the prompt."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.setting.prompt)
        self._reset_numbers()

    @torch.no_grad()
    def step(self) -> Tensor:
        """Read a token and choose the next one."""
        # Sliding layers count on the host besides; another count would be another graph.
        self._reset_numbers()
        logits = self._read(self.token, past_key_values=self.cache, logits_to_keep=1).logits
        self.token.copy_(logits.argmax(-1))
        return self.token

    def _reset_numbers(self) -> None:
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = self.setting.prompt


def measure_step(context: Context, family: Family, setting: Setting, config: DCFormerConfig) -> Timing:
    """Seconds of one step, from samples of several."""
    torch._dynamo.reset()  # graphs of other models would count against the limit of this one's
    decoder = Decoder(make_model(config, family.attention, context).eval(), setting, context.compiles)
    step = in_cuda_graph(decoder.step, context.device)

    def steps() -> None:
        for _ in range(setting.steps):
            step()

    timing = context.timer(steps, reset=decoder.reset)
    return Timing(timing.median / setting.steps, timing.minimum / setting.steps, timing.samples)


def step_bytes(config: DCFormerConfig, setting: Setting, dtype: torch.dtype) -> int:
    """What a step must read: every parameter but the embeddings of other tokens, and the cache."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in DCFormerForCausalLM(config).parameters())
    parameters -= (config.vocab_size - setting.batch) * config.hidden_size
    per_token = cache_bytes_per_token(config, dtype)
    total = parameters * dtype.itemsize
    for kind in config.layer_types:
        window = config.sliding_window if kind == "sliding_attention" else None
        total += setting.batch * per_token * min(setting.prompt, window or setting.prompt)
    return total


def compare(context: Context, size: Size, setting: Setting) -> None:
    """All families at one setting."""
    group = f"decode: {size.name} shape, {setting}"

    def figures(config: DCFormerConfig, seconds: float) -> dict[str, float]:
        moved = step_bytes(config, setting, context.dtype)
        return {"GB/s at least": moved / seconds / 1e9, "reading / time": moved / context.rates.read_bytes / seconds}

    def measure_family(family: Family) -> LayerTimes | None:
        measure = functools.partial(measure_step, context, family, setting)
        more = 1 if context.is_quick else 4
        positions = {"max_position_embeddings": setting.prompt + setting.steps}
        return layer_times(context, group, family, size, more, measure, figures, **positions)

    is_the_papers = setting == settings(False)[0]
    published: dict[tuple[str, bool, int], Any] = dict(paper.DECODING) if is_the_papers else {}
    compare_families(
        context,
        group,
        size,
        families(),
        measure_family,
        is_step=True,
        trains=False,
        tokens=setting.batch,
        paper=published,
    )


def attention_of_a_step(context: Context, size: Size, keys: int) -> None:
    """The operator alone, over as many copies of its operands as the device's cache cannot hold."""
    config = size.config()
    heads, channels = config.num_attention_heads, config.head_dim
    group = f"attention of a step: H {heads}, D {channels}, {keys} keys, batch 1"
    operands = step_operands(heads, channels, keys, context.device, context.dtype)
    moved = cache_bytes_per_token(config, context.dtype) * keys
    # Rows of a cache hold states and factors side by side; in a deep copy they share their memory as before.
    copies = [operands, *(copy.deepcopy(operands) for _ in range(_number_of_copies(context, moved) - 1))]
    for form in forms.own_forms():
        if (reason := form.why_not(operands, None, None)) is not None:
            context.report.add(Row(group, form.name, note=f"not measured: {reason}"))
            continue
        wrong = None
        if not context.budget.is_over:
            wrong = check(form.make, heads, channels, context.device, context.dtype, is_step=True)
        if wrong is not None:
            context.report.add(Row(group, form.name, note=wrong.reason, has_failed=True))
            continue
        calls = [form.make(of, None, None) for of in copies]
        with torch.no_grad():
            row = context.measured(group, form.name, functools.partial(_in_turns, context, calls))
        if row.seconds is not None:
            row.figures["GB/s at least"] = moved / row.seconds / 1e9


def _in_turns(context: Context, calls: list) -> Timing:
    return context.timer(*(in_cuda_graph(call, context.device) for call in calls))


def _number_of_copies(context: Context, moved: int) -> int:
    if not context.on_gpu:
        return 1
    cache = torch.cuda.get_device_properties(context.device).L2_cache_size
    return min(_MOST_COPIES, 1 + _CACHES_OF_COPIES * cache // moved)


def run(context: Context) -> None:
    """The paper's setting for every shape, the step's attention alone, then other batches and prompts."""
    first, *others = settings(context.is_quick)
    wanted = sizes(context.is_quick)
    for size in wanted:
        compare(context, size, first)
    for size in wanted:
        attention_of_a_step(context, size, first.prompt)
    for setting in others:
        for size in wanted:
            compare(context, size, setting)
    if not context.compiles:
        context.report.note("Nothing was compiled; --compile does that.")
    if not context.on_gpu:
        context.report.note("Steps are plain calls: CUDA graphs are for GPUs.")
