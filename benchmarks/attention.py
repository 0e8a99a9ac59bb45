"""Time of the composed-attention operator against scaled dot product attention, which mixes no heads."""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from dcformer import ComposeSide, ComposeWeights, composed_attention


try:
    from . import common, roofline
except ImportError:  # run as a file, not as a module of the package
    import common
    import roofline


_RANK = 2
_WINDOW = 256
_WANTED_RATIO = 2.5


class Inputs:
    """
    Random operands of one call.

    Attributes:
        query: (1, heads, queries, head_dim).
        key, value: (1, heads, keys, head_dim).
        pre, post: `ComposeWeights` of rank 2 with both sides and gates.
    """

    def __init__(self, queries: int, keys: int, args: argparse.Namespace):
        self.generator = torch.Generator(args.device).manual_seed(0)
        self.options = {"device": args.device, "dtype": common.DTYPES[args.dtype]}
        self.heads = args.heads
        self.query = self.random(1, args.heads, queries, args.head_dim)
        self.key, self.value = (self.random(1, args.heads, keys, args.head_dim) for _ in range(2))
        self.pre, self.post = (ComposeWeights(self.side(queries), self.side(keys)) for _ in range(2))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, **self.options)

    def side(self, length: int) -> ComposeSide:
        """As a model makes them: w1 normalised over the heads, w2 small, gates within -1 and 1."""
        w1 = self.random(1, _RANK, self.heads, length)
        w1 = w1 * w1.pow(2).mean(2, keepdim=True).rsqrt()
        w2 = self.random(1, _RANK, self.heads, length) / self.heads
        return ComposeSide(w1, w2, torch.tanh(0.1 * self.random(1, self.heads, length)))

    def composed(self, sliding_window: int | None = None) -> Tensor:
        return composed_attention(self.query, self.key, self.value, self.pre, self.post, sliding_window=sliding_window)

    def plain(self) -> Tensor:
        is_causal = self.query.shape[2] > 1  # a lone query stands at the last key and sees them all
        return torch.nn.functional.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=is_causal)

    def with_gradients(self, forward: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], object]:
        """`forward` followed by the gradients of all `leaves`."""
        gradient = self.random(*self.query.shape)
        for leaf in leaves:
            leaf.requires_grad_()
        return lambda: torch.autograd.grad(forward(), leaves, gradient)

    @property
    def operands(self) -> list[Tensor]:
        return [self.query, self.key, self.value]

    @property
    def compose_operands(self) -> list[Tensor]:
        return [tensor for stage in (self.pre, self.post) for side in stage[:2] for tensor in side]


def forward_calls(args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    inputs = Inputs(args.length, args.length, args)
    return {
        "sdpa, causal": inputs.plain,
        "composed, causal": inputs.composed,
        f"composed, window {_WINDOW}": lambda: inputs.composed(_WINDOW),
    }


def training_calls(args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    inputs = Inputs(args.length, args.length, args)
    everything = inputs.operands + inputs.compose_operands
    return {
        "sdpa, causal": inputs.with_gradients(inputs.plain, inputs.operands),
        "composed, causal": inputs.with_gradients(inputs.composed, everything),
        f"composed, window {_WINDOW}": inputs.with_gradients(lambda: inputs.composed(_WINDOW), everything),
    }


def decode_calls(args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    inputs = Inputs(1, args.length, args)
    return {"sdpa": inputs.plain, "composed": inputs.composed}


def show_roofline(
    timings: dict[str, common.Timing], rates: roofline.Rates, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Print what a forward pass must cost and how far from it the measured one is; return the bounds in seconds."""
    print(
        f"\nRates: {rates.flops / 1e9:.0f} Gflop/s in {args.dtype} matrix products, "
        f"{rates.memory_bytes / 1e9:.1f} GB/s copied in memory, {rates.cache_bytes / 1e9:.1f} GB/s in cache"
    )
    rows, case_bounds = [], {}
    for name, window in (("composed, causal", None), (f"composed, window {_WINDOW}", _WINDOW)):
        work = roofline.forward_work(
            batch=1,
            heads=args.heads,
            length=args.length,
            head_dim=args.head_dim,
            rank=_RANK,
            itemsize=common.DTYPES[args.dtype].itemsize,
            sliding_window=window,
        )
        print(
            f"{name}: {work.matmul_flops / 1e9:.2f} Gflop in matrix products, {work.compose_flops / 1e9:.2f} in "
            f"compositions; {work.compulsory_bytes / 1e6:.0f} MB in and out, {work.pass_bytes / 1e6:.0f} pass by pass"
        )
        case_bounds[name] = roofline.bounds(work, rates)
        for bound, seconds in case_bounds[name].items():
            rows.append([f"{name}: {bound}", _milliseconds(seconds), f"{timings[name].minimum / seconds:.2f}"])
    common.show_table(["forward: bound", "ms", "measured / bound"], rows)
    return case_bounds


def show_timings(title: str, timings: dict[str, common.Timing]) -> None:
    """Print the timings, each against the first, which composes nothing."""
    plain = next(iter(timings.values()))
    rows = [
        [
            name,
            _milliseconds(timing.minimum),
            _milliseconds(timing.median),
            f"{timing.minimum / plain.minimum:.2f}",
            f"{timing.median / plain.median:.2f}",
        ]
        for name, timing in timings.items()
    ]
    common.show_table([title, "min ms", "median ms", "min / sdpa", "median / sdpa"], rows)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3f}" if seconds < 0.01 else f"{1000 * seconds:.1f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1024, help="queries and keys; keys when decoding")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=20)
    common.add_common_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    common.show_environment(args.device)
    print(f"batch 1, heads {args.heads}, head_dim {args.head_dim}, length {args.length}, rank {_RANK}, {args.dtype}")

    with torch.no_grad():
        probes = roofline.rate_probes(args.device, common.DTYPES[args.dtype])
        timings = common.interleave({**forward_calls(args), **probes}, args.repeats, args.device)
        decode = common.interleave(decode_calls(args), args.repeats, args.device)
    rates = roofline.measured_rates({name: timings.pop(name).minimum for name in probes}, args.device)
    case_bounds = show_roofline(timings, rates, args)
    show_timings("forward", timings)
    ratio = timings["composed, causal"].minimum / timings["sdpa, causal"].minimum
    print(f"Causal forward: {ratio:.2f} times sdpa; wanted on a CPU: at most {_WANTED_RATIO}\n")

    training = common.interleave(training_calls(args), args.repeats, args.device)
    show_timings("forward and backward", training)
    show_timings(f"decode, 1 query, {args.length} keys", decode)
    groups = {"forward": timings, "forward and backward": training, "decode": decode}
    figures = {group: {name: timing._asdict() for name, timing in rows.items()} for group, rows in groups.items()}
    common.write_json(args, {**figures, "rates": rates._asdict(), "bounds": case_bounds})


if __name__ == "__main__":
    main()
