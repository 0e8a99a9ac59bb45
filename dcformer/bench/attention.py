"""`dcformer bench attention`: the operator alone, forward and backward, beside attention without composition.

Everything runs in the same process: each of our implementations, attention over the same keys without composition (on a
GPU FlashAttention 2, beside cuDNN or FlexAttention), and the authors' formulation, eager and compiled.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import authors, roofline
from .candidates import Candidate, authors_candidates, gate, our_candidates, plain_candidates
from .measure import Case, Row, Run, add_ratios
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
    """Shapes of the published 6.9B and 2.8B models, the most important first and the longest last; or tiny ones."""
    if is_quick:
        return [Shape(4, 16, 48), Shape(4, 16, 48, 16)]
    sizes = itertools.product((2048, 4096, 8192), (128, 80), (None, 256))
    single = [Shape(32, head_dim, length, window) for length, head_dim, window in sizes]
    return [*single[:8], Shape(32, 128, 2048, batch=4), Shape(32, 80, 2048, batch=4), *single[8:]]


def run(run: Run) -> None:
    """Measure the most important first, until the time is over."""
    chosen = shapes(run.is_quick)
    for shape in chosen[:4]:
        compare(run, shape)
    packed(run, chosen[0], document=chosen[0].length // 8)
    branches(run, chosen[0])
    for shape in chosen[4:]:
        compare(run, shape)
    for shape in chosen:
        compare(run, shape, is_compiled=True)
    run.notes += [
        "Forward and backward count three times the FLOPs of forward; the roofline takes all of them at the measured "
        "rate of matrix products. MiB is peak memory over what the operands take, on GPUs only.",
        authors.NOTE,
    ]


def compare(run: Run, shape: Shape, *, is_compiled: bool = False) -> None:
    """Time what Inductor compiles, or everything else, at one shape: forward, then forward and backward."""
    plain, work = plain_candidates(run.device, run.compiles, shape.window), roofline.forward_work(*shape)
    entries = [*plain, *our_candidates(), *authors_candidates(run.compiles)]
    for group, passes in ((f"forward: {shape}", 1), (f"forward and backward: {shape}", 3)):
        for entry in entries:
            if entry.is_compiled != is_compiled:
                continue
            row = timed(run, group, entry, shape, with_gradients=passes == 3)
            if row.timing is not None:
                flops = passes * (work.matmul_flops + entry.composes * work.compose_flops)
                row.figures["roofline / time"] = flops / run.rates.flops / row.timing.median
        add_ratios(run.rows_of(group), plain[0].name, f"/ {plain[0].name}")


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

    def make() -> Case | str:
        options = {"window": shape.window, "is_packed": document is not None, "with_gradients": with_gradients}
        if (problem := gate(run, entry, shape.heads, shape.channels, vary=vary, **options)) is not None:
            return problem
        of = vary(prompt_operands(shape.heads, shape.channels, shape.length, run.device, run.dtype, shape.batch))
        mask = None if document is None else packed_documents(shape.length, document, run.device)
        if not with_gradients:
            return Case(entry.make(of, shape.window, mask))
        call = entry.gradient_call(of.leaves(), shape.window, mask)
        if run.device.type == "cuda":
            call()  # compiles
            torch.cuda.reset_peak_memory_stats(run.device)
            before = torch.cuda.memory_allocated(run.device)
            call()
            figures["MiB"] = (torch.cuda.max_memory_allocated(run.device) - before) / 2**20
        return Case(call)

    with torch.set_grad_enabled(with_gradients):
        row = run.measured(group, name or entry.name, make)
    row.figures |= figures
    row.has_failed &= entry.composes  # torch's failures are not ours
    return row


def packed(run: Run, shape: Shape, document: int) -> None:
    """A sequence of documents that do not see each other, beside the same sequence as one document."""
    for entry in (*our_candidates(), authors_candidates(run.compiles)[0]):
        names = {f"{entry.name}, one document": None, f"{entry.name}, documents of {document}": document}
        rows = [timed(run, f"packed: {shape}", entry, shape, name=name, document=size) for name, size in names.items()]
        add_ratios(rows, rows[0].name, "/ one document")


def branches(run: Run, shape: Shape) -> None:
    """The cost of each branch of the composition, in the fastest of our implementations at this shape."""
    entries = {entry.name: entry for entry in our_candidates()}
    rows = run.rows_of(f"forward: {shape}")
    seconds = {row.name: row.timing.median for row in rows if row.timing and row.name in entries}
    if not seconds:
        return
    fastest = min(seconds, key=seconds.__getitem__)
    for way in ("forward", "forward and backward"):
        title, with_gradients = f"branches, {way} by {fastest}: {shape}", way != "forward"
        for branch in BRANCHES:
            timed(run, title, entries[fastest], shape, name=branch, branch=branch, with_gradients=with_gradients)
        add_ratios(run.rows_of(title), "no composition", "/ no composition")


def _without(of: Operands, part: str) -> Operands:
    """Both compositions without their query-wise ("query") or key-wise ("key") branches."""
    pre, post = (weights and weights._replace(**{part: None}) for weights in (of.pre, of.post))
    return of._replace(pre=pre, post=post)


BRANCHES: dict[str, Callable[[Operands], Operands]] = {
    "no composition": lambda of: of._replace(pre=None, post=None),
    "all": lambda of: of,
    "query-wise only": lambda of: _without(of, "key"),
    "key-wise only": lambda of: _without(of, "query"),
    "pre only": lambda of: of._replace(post=None),
    "post only": lambda of: of._replace(pre=None),
}
