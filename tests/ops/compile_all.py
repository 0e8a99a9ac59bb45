"""Print as JSON what the kernels of every operator take of a GPU: `python compile_all.py CAPABILITY FOLDER_OF_OPS`."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator

import torch
from offline_compilation import compile_launches
from torch import Tensor


HEADS = 32
RANK = 2


def states(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def operators(ops: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every operator at the shapes of the published models, by the name `WHAT-D80`."""
    arguments = importlib.import_module(f"{ops}.arguments")
    forward = importlib.import_module(f"{ops}.forward").composed_forward
    length = 512
    for channels, window in ((80, 256), (128, None)):
        factors = states(1, HEADS, length, 2 * RANK + 1)
        composition = arguments.Composition(factors, factors)
        query = states(1, HEADS, length, channels)
        options = {"scaling": channels**-0.5, "mask": arguments.Mask(sliding_window=window), "workspace_bytes": 2**28}
        inputs = (query, query, query, composition, composition)
        yield f"forward-D{channels}", lambda inputs=inputs, options=options: forward(*inputs, **options)


def main() -> None:
    capability, folder = int(sys.argv[1]), sys.argv[2]
    # As a package of its own, which is how others may take it.
    sys.path.insert(0, folder)
    found = []
    for name, call in operators("ops"):
        found += [{"operator": name, **usage._asdict()} for usage in compile_launches(call, capability)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
