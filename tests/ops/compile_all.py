"""Print as JSON what the kernels of every operator take of GPUs: `python compile_all.py FOLDER CAPABILITY ...`."""

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator

import torch
from offline_compilation import compile_launches
from torch import Tensor


HEADS = 32
RANK = 2
LENGTH = 512


def states(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def operators(ops: str, capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Operators at the shapes of the published models, by names such as `forward-D80`, of layers with a window."""
    arguments, forward, backward, decode, preparation = (
        importlib.import_module(f"{ops}.{name}")
        for name in ("arguments", "forward", "backward", "decode", "decode_preparation")
    )
    mask = arguments.Mask(sliding_window=256)
    for channels in (80, 128):
        factors = states(1, HEADS, LENGTH, 2 * RANK + 1)
        composition = arguments.Composition(factors, factors)
        query = states(1, HEADS, LENGTH, channels)
        inputs = (query, query, query, composition, composition)
        options = {"scaling": channels**-0.5, "mask": mask, "workspace_bytes": 2**28}
        yield f"forward-D{channels}", functools.partial(forward.composed_forward, *inputs, **options)

        # Keys and factors as they lie in blocks of a cache: [key | factors], [value | factors].
        rows = states(64, HEADS, 16, 2 * (channels + 8))
        key, value = rows[..., :channels], rows[..., channels + 8 : 2 * channels + 8]
        own = states(2, HEADS, 1, 2 * RANK + 1)
        stages = [
            arguments.Composition(own, rows[..., first : first + 2 * RANK + 1])
            for first in (channels, 2 * channels + 8)
        ]
        yield (
            f"decode-D{channels}",
            functools.partial(
                decode.composed_decode,
                *(states(2, HEADS, 1, channels), key, value, *stages),
                scaling=channels**-0.5,
                mask=mask,
                key_lengths=states(2, dtype=torch.int32),
                block_table=states(2, 32, dtype=torch.int32),
            ),
        )
    if capability == 90:
        log_sums = states(1, HEADS, LENGTH, dtype=torch.float32)
        yield "backward-D128", functools.partial(backward.composed_backward, query, *inputs, log_sums, **options)
        layout = preparation.JoinedProjection(HEADS, HEADS, 128, 1, RANK, True, (0, 1, 2, 3))
        yield "preparation-D128", functools.partial(prepare, preparation, layout)


def prepare(preparation, layout) -> object:
    """One token for a static cache."""
    channels = layout.head_dim
    key, value = (states(1, HEADS, 1024, channels + 8) for _ in range(2))
    return preparation.prepare_step(
        states(1, 1, layout.columns),
        layout,
        key,
        value,
        positions=states(1, dtype=torch.int64),
        query_norm=states(channels),
        key_norm=states(channels),
        cos=states(1, 1, channels, dtype=torch.float32),
        sin=states(1, 1, channels, dtype=torch.float32),
        low_rank_weight=states(1, 4, 2 * RANK * HEADS, 2 * RANK, HEADS),
    )


def main() -> None:
    folder, *capabilities = sys.argv[1:]
    # As a package of its own, which is how others may take it.
    sys.path.insert(0, folder)
    found = []
    for capability in map(int, capabilities):
        for name, call in operators("ops", capability):
            about = {"capability": capability, "operator": name}
            found += [{**about, **usage._asdict()} for usage in compile_launches(call, capability)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
