"""Time of the composed-attention operator against scaled dot product attention and the authors' formulation.

    python -m benchmarks.attention --heads 16 --head-dim 64 --length 2048 --window 256 --threads 1 2

Both other peers see the same keys: sdpa has a mask where there is a window. Only ours and the authors' compose.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from dcformer import Visibility
from dcformer.bench import authors, operands, roofline

from . import common


RANK = 2


def forward_calls(
    of: operands.Operands, window: int | None = None, with_authors: bool = True
) -> dict[str, Callable[[], Tensor]]:
    """What computes the output of a prompt: "composed", "sdpa" and "authors" (in chunks)."""
    length, scaling = of.query.shape[2], of.query.shape[3] ** -0.5
    mask = visible(length, window, of.query.device)
    band = {"is_causal": True} if window is None or window >= length else {"attn_mask": mask}
    calls = {
        "composed": lambda: of.composed(sliding_window=window),
        "sdpa": lambda: functional.scaled_dot_product_attention(*of.states, **band),
    }
    if with_authors:
        calls["authors"] = lambda: authors.attend_in_chunks(*of.states, of.peer, mask, scaling, window)
    return calls


def visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """(query, key) boolean, True for the keys that causality and the window leave."""
    age = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (age >= 0) & (age < (window or length))


def training_calls(of: operands.Operands, window: int | None = None, with_authors: bool = True):
    """`forward_calls` with the gradients of all that they read."""
    leaves = {"composed": of.states + of.factors, "sdpa": of.states, "authors": of.states + list(of.peer)}
    gradient = torch.randn_like(of.query)
    for tensors in leaves.values():
        for tensor in tensors:
            tensor.requires_grad_()

    def with_gradients(name: str, call: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(), leaves[name], gradient)

    return {name: with_gradients(name, call) for name, call in forward_calls(of, window, with_authors).items()}


def step_calls(of: operands.Operands) -> dict[str, Callable[[], Tensor]]:
    """One decoding step: "composed" reads factors from rows of the cache, "sdpa" keys and values that lie alone."""
    alone = of.query, of.key.contiguous(), of.value.contiguous()
    return {"composed": of.composed, "sdpa": lambda: functional.scaled_dot_product_attention(*alone)}


def packed_calls(heads: int, head_dim: int, length: int, document: int, device: torch.device, dtype: torch.dtype):
    """
    A row of documents, each of which sees itself only, and the same documents as a batch and one by one. The row's
    numbers are not the documents': only the work is the same.
    """
    number = length // document
    row = operands.prompt_operands(heads, head_dim, length, device, dtype)
    batch = operands.prompt_operands(heads, head_dim, document, device, dtype, batch=number)
    single = operands.prompt_operands(heads, head_dim, document, device, dtype)
    sequence_ids = torch.arange(number, device=device).repeat_interleave(document)[None]
    packed = Visibility(length, length, sequence_ids=sequence_ids)
    return {
        "packed": lambda: row.composed(attention_mask=packed),
        "batch": batch.composed,
        "one by one": lambda: [single.composed() for _ in range(number)],
    }


def forward_work(heads: int, head_dim: int, length: int, window: int | None, dtype: torch.dtype) -> roofline.Work:
    return roofline.forward_work(
        batch=1,
        heads=heads,
        length=length,
        head_dim=head_dim,
        rank=RANK,
        itemsize=dtype.itemsize,
        sliding_window=window,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="queries and keys; keys when decoding")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=80)
    parser.add_argument("--window", type=int, help="sliding window; without it, full causal attention")
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--repeats", type=int, default=20)
    common.add_common_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    device, dtype = args.device, common.DTYPES[args.dtype]
    shape = args.heads, args.head_dim, args.length, device, dtype
    common.show_environment(device)
    print(f"batch 1, heads {args.heads}, head_dim {args.head_dim}, length {args.length}, rank {RANK}, {args.dtype}")
    groups = {
        "forward": forward_calls(operands.prompt_operands(*shape), args.window),
        "forward and backward": training_calls(operands.prompt_operands(*shape), args.window),
        "decode": step_calls(operands.step_operands(*shape)),
    }
    figures = {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        for group, calls in groups.items():
            probes = roofline.rate_probes(device, dtype) if group == "forward" else {}
            with torch.set_grad_enabled(group == "forward and backward"):
                timings = common.interleave({**calls, **probes}, args.repeats, device)
            if probes:
                rates = roofline.measured_rates({name: timings.pop(name).minimum for name in probes}, device)
                show_roofline(timings["composed"], rates, args)
                figures[f"rates, {threads} threads"] = rates._asdict()
            show_timings(f"{group}, {threads} threads", timings)
            figures[f"{group}, {threads} threads"] = {name: timing._asdict() for name, timing in timings.items()}
    common.write_json(args, figures)


def show_roofline(timing: common.Timing, rates: roofline.Rates, args: argparse.Namespace) -> None:
    """Print what a forward pass must cost and how far from it the measured one is."""
    print(
        f"\nRates: {rates.flops / 1e9:.0f} Gflop/s in {args.dtype} matrix products, "
        f"{rates.memory_bytes / 1e9:.1f} GB/s copied in memory, {rates.cache_bytes / 1e9:.1f} GB/s in cache"
    )
    work = forward_work(args.heads, args.head_dim, args.length, args.window, common.DTYPES[args.dtype])
    rows = [
        [name, f"{1000 * seconds:.3f}", f"{timing.minimum / seconds:.2f}"]
        for name, seconds in roofline.bounds(work, rates).items()
    ]
    common.show_table(["forward: bound", "ms", "measured / bound"], rows)


def show_timings(title: str, timings: dict[str, common.Timing]) -> None:
    """Print the timings, each against sdpa, which composes nothing."""
    plain = timings["sdpa"]
    rows = [
        [
            name,
            f"{1000 * timing.minimum:.3f}",
            f"{1000 * timing.median:.3f}",
            f"{timing.minimum / plain.minimum:.2f}",
            f"{timing.median / plain.median:.2f}",
        ]
        for name, timing in timings.items()
    ]
    common.show_table([title, "min ms", "median ms", "min / sdpa", "median / sdpa"], rows)


if __name__ == "__main__":
    main()
