"""Print as JSON what the kernels of every operator take of GPUs: `python compile_all.py CAPABILITY ...`."""

import functools
import json
import sys
from collections.abc import Callable, Iterator

import torch
from offline_compilation import compile_launches
from torch import Tensor

from dcformer.kernels.backward import composed_backward
from dcformer.kernels.call import Call
from dcformer.kernels.decode import composed_decode
from dcformer.kernels.forward import composed_forward


HEADS, LENGTH, FACTORS = 32, 512, 5


def states(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call_of(channels: int, window: int | None, *, pages: bool = False) -> Call:
    """At the shapes of the published models, with keys and factors as they lie in rows of a cache."""
    batch, length, rows = (64, 1, 16) if pages else (1, LENGTH, LENGTH)
    cached = states(batch, HEADS, rows, 2 * (channels + 8))
    key, pre, value, post = (
        cached[..., first : first + size]
        for first, size in ((0, channels), (channels, FACTORS), (channels + 8, channels), (2 * channels + 8, FACTORS))
    )
    own = states(2 if pages else 1, length, HEADS, FACTORS).transpose(1, 2)
    query = states(2 if pages else 1, HEADS, length, channels)
    return Call(query, key, value, own, pre, None, own, post, None, *[None] * 3, 1, True, window, 0, channels**-0.5)


def operators(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    lengths, table = states(2, dtype=torch.int32), states(2, 32, dtype=torch.int32)
    for channels, window in ((80, 256), (128, None)):
        call, step = call_of(channels, window), call_of(channels, window, pages=True)
        yield f"forward-D{channels}", functools.partial(composed_forward, call, 2**28)
        yield f"decode-D{channels}", functools.partial(composed_decode, step, lengths, table)
    log_sums = states(1, HEADS, LENGTH, dtype=torch.float32)
    if capability == 80:
        call = Call(*(part.float() if isinstance(part, Tensor) else part for part in call))
        yield "backward-float32-D128", functools.partial(composed_backward, call.query, call, log_sums, 2**28)
    if capability == 90:
        yield "backward-D128", functools.partial(composed_backward, call.query, call, log_sums, 2**28)


def main() -> None:
    found = []
    for capability in map(int, sys.argv[1:]):
        for name, call in operators(capability):
            about = {"capability": capability, "operator": name}
            found += [{**about, **usage._asdict()} for usage in compile_launches(call, capability)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
