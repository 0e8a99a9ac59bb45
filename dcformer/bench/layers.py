"""Times of whole models from models of a few layers: what a global layer, a local layer and all the rest take.

Three models are measured, with one layer of each kind, more global ones, and more local ones. Their differences are the
time of a layer of either kind. These make up the published number of layers in any ratio of local to global ones, as in
Table 10 of the paper, and models without windows. Such figures are extrapolated, and their rows say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..configuration_dcformer import DCFormerConfig
from ..dcmha import PREFIX
from ..modeling_dcformer import DCFormerForCausalLM
from . import forms
from .context import Context
from .gate import LENGTH, check, leaves
from .operands import prompt_operands, step_operands
from .report import Row
from .timing import Timing


_NO_COMPOSITION = {"compose_pre": False, "compose_post": False}
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
# Local layers for each global one, in the columns of Table 10.
RATIOS = (1, 3, 7)


class Size(NamedTuple):
    """A published shape by its name in the paper, or a tiny one for trying the command."""

    name: str
    preset: str | None

    def config(self, **values: Any) -> DCFormerConfig:
        return DCFormerConfig(**{**_TINY, **values}) if self.preset is None else self._published(**values)

    def _published(self, **values: Any) -> DCFormerConfig:
        return DCFormerConfig.from_preset(str(self.preset), **values)


def sizes(is_quick: bool) -> list[Size]:
    """What Tables 6 and 10 are about, as far as it fits on one GPU."""
    if is_quick:
        return [Size("tiny", None)]
    return [Size("6.9B", "dcformer-6.9b"), Size("2.8B", "dcformer-2.8b")]


class Family(NamedTuple):
    """
    Models of one shape that differ in the number of layers alone.

    Args:
        name (`str`): In the rows.
        values (`dict`): Fields of the configuration.
        attention (`str`): The attention implementation.
        form (`forms.Form`, *optional*): What the gate checks; None where nothing is composed.
        composes_keys (`bool`): Whether the keys' side composes.
    """

    name: str
    values: dict[str, Any]
    attention: str
    form: forms.Form | None = None
    composes_keys: bool = True


BASELINE = Family("Transformer++", _NO_COMPOSITION, "sdpa")


def families(names: set[str] | None = None) -> list[Family]:
    """A DCFormer++ with each implementation of the table."""
    own = [form for form in forms.own_forms() if names is None or form.name in names]
    return [Family(f"DCFormer++, {form.name}", {}, PREFIX + form.name, form) for form in own]


def query_wise(family: Family) -> Family:
    """The same with the queries' side of the composition alone."""
    return family._replace(name=f"{family.name}, query-wise", values={"compose_key": False}, composes_keys=False)


class LayerTimes(NamedTuple):
    """Seconds of a global layer, of a local one, and of everything outside the layers."""

    full: float
    sliding: float
    rest: float

    def total(self, full: int, sliding: int) -> float:
        return full * self.full + sliding * self.sliding + self.rest

    @property
    def are_sound(self) -> bool:
        """Whether noise was small enough for the differences to mean something."""
        return self.full > 0 and self.sliding > 0 and self.total(1, 1) > 0


def make_model(config: DCFormerConfig, attention: str, context: Context) -> DCFormerForCausalLM:
    """With random weights, made where they stay."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(context.dtype)
    try:
        with context.device:
            model = DCFormerForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.set_attn_implementation(attention)
    return model.to(context.dtype)


def why_left_out(context: Context, family: Family, config: DCFormerConfig, is_step: bool, trains: bool) -> Row | None:
    """A row that says why a family is not timed: it cannot run, or it computes something else than it should."""
    if family.form is None:
        return None
    heads, channels = config.num_attention_heads, config.head_dim
    make = step_operands if is_step else prompt_operands
    operands = make(heads, channels, LENGTH, context.device, context.dtype)
    if trains:
        operands = leaves(operands)
    if (reason := family.form.why_not(operands, None, None)) is not None:
        return Row("", family.name, note=f"not measured: {reason}")
    sizes_of_gate = heads, channels, context.device, context.dtype
    failure = check(family.form.make, *sizes_of_gate, is_step=is_step, with_gradients=trains)
    return None if failure is None else Row("", family.name, note=failure.reason, has_failed=True)


def layer_times(
    context: Context,
    group: str,
    family: Family,
    size: Size,
    more: int,
    measure: Callable[[DCFormerConfig], Timing],
    figures: Callable[[DCFormerConfig, float], dict[str, float]],
    **values: Any,
) -> LayerTimes | None:
    """
    Measure the three models of a family.

    Args:
        group (`str`): Of the rows.
        more (`int`): How many layers more of one kind the second and the third model have.
        measure (`Callable`): Of a configuration: seconds of one call.
        figures (`Callable`): Of a configuration and seconds: further figures of the row.
        values: Further fields of the configuration.

    Returns:
        `LayerTimes`: or None, if a model was not measured.
    """
    found = []
    for full, sliding in ((1, 1), (1 + more, 1), (1, 1 + more)):
        kinds = ["sliding_attention"] * sliding + ["full_attention"] * full
        config = size.config(num_hidden_layers=full + sliding, layer_types=kinds, **family.values, **values)
        name = f"{family.name}, {full} global + {sliding} local"
        row = context.measured(group, name, lambda config=config: measure(config))  # type: ignore[misc]
        if row.seconds is None:
            return None
        row.figures |= figures(config, row.seconds)
        found.append(row.seconds)
    both, more_full, more_sliding = found
    full_time, sliding_time = (more_full - both) / more, (more_sliding - both) / more
    return LayerTimes(full_time, sliding_time, both - full_time - sliding_time)


def add_whole_models(
    context: Context,
    group: str,
    size: Size,
    tokens: int,
    found: dict[str, tuple[Family, LayerTimes]],
    paper: dict[tuple[str, bool, int], Any],
) -> None:
    """
    Rows of whole models, extrapolated, with their shares of Transformer++'s tokens per second.

    Args:
        tokens (`int`): Of one call that was timed.
        found (`dict`): Family and layer times by the family's name, Transformer++ among them.
        paper (`dict`): What the paper prints, of `dcformer.bench.paper`.
    """
    layers = size.config().num_hidden_layers
    title = f"{group}, whole model of {layers} layers (extrapolated)"
    for name, (_, times) in list(found.items()):
        if not times.are_sound:
            context.report.add(Row(title, name, note="not extrapolated: noise was larger than the time of a layer"))
            del found[name]
    base = found.get(BASELINE.name)
    if base is not None:
        seconds = base[1].total(layers, 0)
        context.report.add(Row(title, f"{BASELINE.name}, all global", seconds, figures={"tokens/s": tokens / seconds}))
    for name, (family, times) in found.items():
        for ratio in RATIOS:
            full = layers // (ratio + 1)
            seconds = times.total(full, layers - full)
            row = Row(title, f"{name}, local:global {ratio}:1", seconds, figures={"tokens/s": tokens / seconds})
            if base is not None and family is not base[0]:
                row.figures["/ all global"] = base[1].total(layers, 0) / seconds
                row.figures["/ same windows"] = base[1].total(full, layers - full) / seconds
                printed = paper.get((size.name, family.composes_keys, ratio))
                names = ("/ all global, paper", "/ same windows, paper")
                row.figures |= dict(zip(names, printed if isinstance(printed, tuple) else (printed,)))
                row.figures = {key: value for key, value in row.figures.items() if value is not None}
            context.report.add(row)
    context.report.note(
        "Whole models are extrapolated from models of a few layers: the time of a layer of each kind is a difference."
    )


def compare_families(
    context: Context,
    group: str,
    size: Size,
    candidates: list[Family],
    measure_family: Callable[[Family], LayerTimes | None],
    *,
    is_step: bool,
    trains: bool,
    tokens: int,
    paper: dict[tuple[str, bool, int], Any],
) -> None:
    """Transformer++, then each candidate, then the fastest candidate's query-wise variant, and whole models of all."""
    found: dict[str, tuple[Family, LayerTimes]] = {}

    def take(family: Family) -> None:
        if not context.budget.is_over:
            left_out = why_left_out(context, family, size.config(), is_step, trains)
            if left_out is not None:
                left_out.group = group
                context.report.add(left_out)
                return
        times = measure_family(family)
        if times is not None:
            found[family.name] = (family, times)

    for family in (BASELINE, *candidates):
        take(family)
    own = [(family, times) for family, times in found.values() if family is not BASELINE]
    if own:
        fastest, _ = min(own, key=lambda pair: pair[1].total(1, 1))
        take(query_wise(fastest))
    if found:
        add_whole_models(context, group, size, tokens, found, paper)
