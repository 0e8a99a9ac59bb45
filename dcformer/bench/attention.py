"""`dcformer bench attention`: the operator alone, forward and backward, against attention that composes nothing.

Baselines run in the same process, one after the other: torch's scaled dot product attention of all keys (FlashAttention
on a GPU) and with the same window, FlexAttention with it, and the authors' formulation as it is and compiled. What each
branch of the composition costs is measured with the fastest form of ours, and so are static talking heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..dcmha import ComposeWeights
from ..training.throughput import visible_pairs
from . import forms, roofline
from .context import Context
from .forms import Form
from .gate import WINDOW, Failure, check, leaves, packed_documents
from .operands import Operands, prompt_operands
from .report import Row
from .timing import Call


_STATIC_SCALE = 0.3


class Shape(NamedTuple):
    """Of one comparison; window None for all keys."""

    heads: int
    channels: int
    length: int
    window: int | None
    batch: int = 1

    def __str__(self) -> str:
        mask = "global" if self.window is None else f"window {self.window}"
        return f"H {self.heads}, D {self.channels}, T {self.length}, {mask}, batch {self.batch}"


class Plan(NamedTuple):
    """What is measured, in the order of its importance."""

    shapes: list[Shape]
    packed: Shape
    document: int
    branches: Shape
    memory: list[Shape]


def plan(is_quick: bool) -> Plan:
    """The shapes of the published 6.9B and 2.8B models, or tiny ones."""
    if is_quick:
        shapes = [Shape(4, 16, 48, None), Shape(4, 16, 48, 16)]
        return Plan(shapes, shapes[0], 16, shapes[0], shapes[:1])
    first = [Shape(32, channels, 4096, window) for channels in (128, 80) for window in (None, 256)]
    second = [Shape(32, channels, 2048, window) for channels in (128, 80) for window in (None, 256)]
    third = [Shape(32, channels, 8192, window) for channels in (128, 80) for window in (None, 256)]
    batches = [Shape(32, channels, 2048, None, batch=4) for channels in (128, 80)]
    memory = [Shape(32, 128, length, None) for length in (2048, 4096, 8192)]
    return Plan(
        [*first, *second, *third, *batches], Shape(32, 128, 2048, None), 256, Shape(32, 128, 4096, None), memory
    )


class _Operator:
    """The measurements on one context; what passed the gate once need not pass it again."""

    def __init__(self, context: Context):
        self.context = context
        self._verdicts: dict[tuple, Failure | None] = {}
        self._last: tuple[Shape, Operands] | None = None

    def compare(self, shape: Shape) -> None:
        """Forward, then forward and backward, of everything at one shape."""
        context = self.context
        entries = [
            *forms.own_forms(),
            *forms.plain_forms(context.device, context.compiles, shape.window),
            *forms.authors_forms(context.compiles),
        ]
        forward, both = f"forward: {shape}", f"forward and backward: {shape}"
        found = [self.row(forward, form, shape) for form in entries]
        found_both = [self.row(both, form, shape, with_gradients=True) for form in entries]
        self._add_rates(shape, found, passes=1)
        self._add_rates(shape, found_both, passes=3)
        for row, whole in zip(found, found_both):
            if row.seconds is not None and whole.seconds is not None:
                whole.figures["backward ms"] = 1000 * (whole.seconds - row.seconds)
        for rows in (found, found_both):
            _add_ratios(rows, forms.SDPA_WINDOW if shape.window else forms.SDPA)

    def row(
        self,
        group: str,
        form: Form,
        shape: Shape,
        *,
        name: str | None = None,
        vary: tuple[str, Callable[[Operands], Operands]] = ("", lambda of: of),
        document: int | None = None,
        with_gradients: bool = False,
    ) -> Row:
        """Time one form, or say why it is not timed."""
        context, name = self.context, name or form.name
        if context.budget.is_over:
            return context.report.add(Row(group, name, note=context.no_time_left))
        mask = None if document is None else packed_documents(shape.length, document, context.device)
        of = vary[1](self._operands(shape))
        if with_gradients:
            of = leaves(of)
        if (reason := form.why_not(of, shape.window, mask)) is not None:
            return context.report.add(Row(group, name, note=f"not measured: {reason}"))
        failure = self._verdict(form, shape, vary, document is not None, with_gradients)
        if failure is not None:
            return context.report.add(Row(group, name, note=failure.reason, has_failed=True))

        def prepare() -> Call:
            if not with_gradients:
                return forms.finished(form, form.make(of, shape.window, mask), context.device)
            return forms.finished(form, forms.gradient_call(form, of, shape.window, mask), context.device)

        note = "as a CUDA graph" if form.in_graph and context.on_gpu else ""
        with torch.set_grad_enabled(with_gradients):
            row = context.timed(group, name, prepare, note)
        row.has_failed = row.has_failed and form.composes  # what others cannot run is no fault of ours
        return row

    def packed(self, shape: Shape, document: int) -> None:
        """A row of documents that do not see each other, beside the same row as one document."""
        group = f"packed: {shape}"
        for form in (*forms.own_forms(), *forms.authors_forms(self.context.compiles)):
            whole = self.row(group, form, shape, name=f"{form.name}, one document")
            parts = self.row(group, form, shape, name=f"{form.name}, documents of {document}", document=document)
            if whole.seconds and parts.seconds:
                parts.figures["/ one document"] = parts.seconds / whole.seconds

    def branches(self, shape: Shape) -> None:
        """What each branch of the composition costs, by the form of ours that is fastest at this shape."""
        fastest = self._fastest(f"forward: {shape}")
        if fastest is None:
            self.context.report.note("No form of ours was timed, so branches of the composition were not either.")
            return
        for group, with_gradients in (("forward", False), ("forward and backward", True)):
            title = f"branches, {group} by {fastest.name}: {shape}"
            rows = [
                self.row(title, fastest, shape, name=name, vary=(name, vary), with_gradients=with_gradients)
                for name, vary in _BRANCHES.items()
            ]
            _add_ratios(rows, "no composition")

    def memory(self, shapes: list[Shape]) -> None:
        """Peak memory of forward and backward, beside what the operands take."""
        context = self.context
        if not context.on_gpu:
            context.report.note("Memory was not measured: torch counts that of GPUs only.")
            return
        entries = [*forms.own_forms(), *forms.plain_forms(context.device, False, None), *forms.authors_forms(False)]
        for shape in shapes:
            for form in entries:
                self._memory_row(f"memory of forward and backward: {shape}", form, shape)

    def _memory_row(self, group: str, form: Form, shape: Shape) -> None:
        context = self.context
        if context.budget.is_over:
            context.report.add(Row(group, form.name, note=context.no_time_left))
            return
        of = leaves(self._operands(shape))
        if (reason := form.why_not(of, shape.window, None)) is not None:
            context.report.add(Row(group, form.name, note=f"not measured: {reason}"))
            return
        if (failure := self._verdict(form, shape, ("", lambda same: same), False, True)) is not None:
            context.report.add(Row(group, form.name, note=failure.reason, has_failed=True))
            return
        call = forms.gradient_call(form, of, shape.window, None)
        row = Row(group, form.name)
        try:
            call()
            torch.cuda.synchronize(context.device)
            torch.cuda.reset_peak_memory_stats(context.device)
            before = torch.cuda.memory_allocated(context.device)
            call()
            torch.cuda.synchronize(context.device)
            row.figures["MiB"] = (torch.cuda.max_memory_allocated(context.device) - before) / 2**20
        except torch.OutOfMemoryError:
            row.note = "not measured: it does not fit into the device's memory"
        context.report.add(row)

    def _operands(self, shape: Shape) -> Operands:
        """Random ones of a shape, the same for every form."""
        if self._last is None or self._last[0] != shape:
            context, self._last = self.context, None
            sizes = shape.heads, shape.channels, shape.length, context.device, context.dtype
            self._last = shape, prompt_operands(*sizes, batch=shape.batch)
        return self._last[1]

    def _verdict(self, form: Form, shape: Shape, vary: tuple, is_packed: bool, with_gradients: bool) -> Failure | None:
        if not form.composes:
            return None
        window = None if shape.window is None else min(shape.window, WINDOW)
        key = form.name, shape.heads, shape.channels, window, vary[0], is_packed, with_gradients
        if key not in self._verdicts:
            self._verdicts[key] = check(
                form.make,
                shape.heads,
                shape.channels,
                self.context.device,
                self.context.dtype,
                vary=vary[1],
                window=window,
                is_packed=is_packed,
                with_gradients=with_gradients,
            )
        return self._verdicts[key]

    def _add_rates(self, shape: Shape, rows: list[Row], passes: int) -> None:
        """What each row reached, per (head, query, key) that is seen, and of what the machine can do."""
        context = self.context
        work = context.work(shape.batch, shape.heads, shape.channels, shape.length, shape.window)
        elements = shape.batch * shape.heads * visible_pairs(shape.length, shape.window)
        for row in rows:
            if row.seconds is None:
                continue
            composes = row.name not in (forms.SDPA, forms.SDPA_WINDOW, forms.FLEX)
            seen = work
            if row.name == forms.SDPA:
                seen = context.work(shape.batch, shape.heads, shape.channels, shape.length, None)
            flops = passes * (seen.matmul_flops + composes * seen.compose_flops)
            row.figures["ps/element"] = 1e12 * row.seconds / elements
            row.figures["TFLOP/s"] = flops / row.seconds / 1e12
            row.figures["GB/s at least"] = passes * seen.compulsory_bytes / row.seconds / 1e9
            if composes:
                row.figures["roofline / time"] = passes * roofline.bounds(seen, context.rates)["fused"] / row.seconds

    def _fastest(self, group: str) -> Form | None:
        timed = {row.name: row.seconds for row in self.context.report.rows if row.group == group and row.seconds}
        own = [form for form in forms.own_forms() if form.name in timed]
        return min(own, key=lambda form: timed[form.name], default=None)


def _add_ratios(rows: list[Row], base_name: str) -> None:
    base = next((row.seconds for row in rows if row.name == base_name), None)
    if base is None:
        return
    for row in rows:
        if row.seconds is not None:
            row.figures[f"/ {base_name}"] = row.seconds / base


def _dynamic(of: Operands, query: bool, key: bool, pre: bool = True, post: bool = True) -> Operands:
    def stage(weights: ComposeWeights | None, is_on: bool) -> ComposeWeights | None:
        if weights is None or not is_on:
            return None
        return ComposeWeights(weights.query if query else None, weights.key if key else None, None, weights.groups)

    return of._replace(pre=stage(of.pre, pre), post=stage(of.post, post))


def _static(of: Operands) -> Operands:
    heads, generator = of.query.shape[1], torch.Generator().manual_seed(0)

    def stage() -> ComposeWeights:
        static = _STATIC_SCALE * torch.randn(1, heads, heads, generator=generator)
        return ComposeWeights(static=static.to(of.query.device, of.query.dtype))

    return of._replace(pre=stage(), post=stage())


_BRANCHES: dict[str, Callable[[Operands], Operands]] = {
    "no composition": lambda of: of._replace(pre=None, post=None),
    "all": lambda of: of,
    "query-wise only": lambda of: _dynamic(of, query=True, key=False),
    "key-wise only": lambda of: _dynamic(of, query=False, key=True),
    "pre only": lambda of: _dynamic(of, query=True, key=True, post=False),
    "post only": lambda of: _dynamic(of, query=True, key=True, pre=False),
    "static talking heads": _static,
}


def run(context: Context) -> None:
    """Measure all of it, the most important first, until the time is over."""
    wanted = plan(context.is_quick)
    operator = _Operator(context)
    first, rest = wanted.shapes[:2], wanted.shapes[2:]
    for shape in first:
        operator.compare(shape)
    operator.packed(wanted.packed, wanted.document)
    operator.branches(wanted.branches)
    operator.memory(wanted.memory)
    for shape in rest:
        operator.compare(shape)
    context.report.note(
        "Forward and backward count three times the operations and bytes of forward. Bytes are those of all inputs and "
        "outputs, moved once. The roofline takes every operation at the measured rate of matrix products."
    )
    if context.on_gpu and context.dtype.itemsize != 2:
        context.report.note("sdpa is FlashAttention in 16 bits only.")


__all__ = ["Plan", "Shape", "plan", "run"]
