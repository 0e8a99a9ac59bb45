"""`dcformer bench attention`: the operator alone, forward and backward, beside attention that composes nothing.

Everything runs in the same process: each of our implementations, torch's scaled dot product attention of all keys
(FlashAttention on a GPU) and with the same window, FlexAttention, and the authors' formulation, eager and compiled.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..dcmha import ComposeWeights
from . import roofline
from .candidates import SDPA, SDPA_WINDOW, Candidate, authors_candidates, gate, own_candidates, plain_candidates
from .measure import Row, Run, Timing, add_ratios, in_cuda_graph
from .operands import Operands, packed_documents, prompt_operands


class Shape(NamedTuple):
    """Shape of one comparison; window None for all keys."""

    heads: int
    channels: int
    length: int
    window: int | None = None
    batch: int = 1

    def __str__(self) -> str:
        mask = "global" if self.window is None else f"window {self.window}"
        return f"H {self.heads}, D {self.channels}, T {self.length}, {mask}, batch {self.batch}"


def shapes(is_quick: bool) -> list[Shape]:
    """Shapes of the published 6.9B and 2.8B models, the most important first; or tiny ones."""
    if is_quick:
        return [Shape(4, 16, 48), Shape(4, 16, 48, 16)]
    found = [Shape(32, width, length, window) for length in (4096, 2048, 8192) for width in (128, 80)
             for window in (None, 256)]  # fmt: skip
    return [*found, Shape(32, 128, 2048, batch=4), Shape(32, 80, 2048, batch=4)]


def run(run: Run) -> None:
    """Measure the most important first, until the time is over."""
    first, *others = shapes(run.is_quick)
    compare(run, first)
    compare(run, others[0])
    packed(run, first._replace(length=min(first.length, 2048)), document=first.length // 8)
    branches(run, first)
    for shape in others[1:]:
        compare(run, shape)
    run.notes.append(
        "Forward and backward count three times the operations of forward. The roofline takes every operation at the "
        "measured rate of matrix products. MiB is peak memory over what the operands take, on GPUs only."
    )


def compare(run: Run, shape: Shape) -> None:
    """Time everything at one shape, forward, then forward and backward."""
    base = SDPA_WINDOW if shape.window else SDPA
    entries = [*own_candidates(), *plain_candidates(run.device, run.compiles, shape.window)]
    entries += authors_candidates(run.compiles)
    for group, passes in ((f"forward: {shape}", 1), (f"forward and backward: {shape}", 3)):
        rows = [timed(run, group, entry, shape, with_gradients=passes == 3) for entry in entries]
        for row, entry in zip(rows, entries):
            if row.timing is not None:
                seen = shape._replace(window=None) if entry.name == SDPA else shape
                work = roofline.forward_work(*seen)
                flops = passes * (work.matmul_flops + entry.composes * work.compose_flops)
                row.figures["roofline / time"] = flops / run.rates.flops / row.timing.median
        add_ratios(rows, base, f"/ {base}")


def timed(
    run: Run,
    group: str,
    entry: Candidate,
    shape: Shape,
    *,
    name: str | None = None,
    branch: str = "all",
    document: int | None = None,
    with_gradients: bool = False,
) -> Row:
    """Time a candidate that passes the gate; on a GPU measure the memory of its gradients too."""
    vary, figures = BRANCHES[branch], {}

    def measure() -> Timing | str:
        options = {"window": shape.window, "is_packed": document is not None, "with_gradients": with_gradients}
        if (problem := gate(run, entry, shape.heads, shape.channels, vary=vary, **options)) is not None:
            return problem
        of = vary(prompt_operands(shape.heads, shape.channels, shape.length, run.device, run.dtype, shape.batch))
        mask = None if document is None else packed_documents(shape.length, document, run.device)
        with torch.set_grad_enabled(with_gradients):
            make = entry.gradient_call if with_gradients else entry.make
            call = make(of.leaves() if with_gradients else of, shape.window, mask)
            if with_gradients and run.device.type == "cuda":
                call()  # compiles
                torch.cuda.reset_peak_memory_stats(run.device)
                before = torch.cuda.memory_allocated(run.device)
                call()
                figures["MiB"] = (torch.cuda.max_memory_allocated(run.device) - before) / 2**20
            return run.timer.time(in_cuda_graph(call, run.device) if entry.in_graph else call)

    row = run.measured(group, name or entry.name, measure, "as a CUDA graph" if entry.in_graph else "")
    row.figures |= figures
    row.has_failed &= entry.composes  # torch's failures are not ours
    return row


def packed(run: Run, shape: Shape, document: int) -> None:
    """A row of documents that do not see each other, beside the same row as one document."""
    for entry in (*own_candidates(), *authors_candidates(run.compiles)):
        names = f"{entry.name}, one document", f"{entry.name}, documents of {document}"
        rows = [timed(run, f"packed: {shape}", entry, shape, name=names[0])]
        rows.append(timed(run, f"packed: {shape}", entry, shape, name=names[1], document=document))
        add_ratios(rows, names[0], "/ one document")


def branches(run: Run, shape: Shape) -> None:
    """The cost of each branch of the composition, in the fastest of our implementations at this shape."""
    entries = {entry.name: entry for entry in own_candidates()}
    rows = [row for row in run.rows if row.group == f"forward: {shape}" and row.name in entries]
    seconds = {row.name: row.timing.median for row in rows if row.timing}
    if not seconds:
        return
    fastest = min(seconds, key=seconds.__getitem__)
    for way in ("forward", "forward and backward"):
        title, with_gradients = f"branches, {way} by {fastest}: {shape}", way != "forward"
        found = [
            timed(run, title, entries[fastest], shape, name=branch, branch=branch, with_gradients=with_gradients)
            for branch in BRANCHES
        ]
        add_ratios(found, "no composition", "/ no composition")


def _part(of: Operands, query: bool = True, key: bool = True, pre: bool = True, post: bool = True) -> Operands:
    """The composition with some of its branches."""

    def stage(weights: ComposeWeights | None, is_on: bool) -> ComposeWeights | None:
        if weights is None or not is_on:
            return None
        return weights._replace(query=weights.query if query else None, key=weights.key if key else None)

    return of._replace(pre=stage(of.pre, pre), post=stage(of.post, post))


BRANCHES: dict[str, Callable[[Operands], Operands]] = {
    "no composition": lambda of: _part(of, pre=False, post=False),
    "all": lambda of: of,
    "query-wise only": lambda of: _part(of, key=False),
    "key-wise only": lambda of: _part(of, query=False),
    "pre only": lambda of: _part(of, post=False),
    "post only": lambda of: _part(of, pre=False),
}
