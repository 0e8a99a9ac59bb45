"""Memory and throughput of the MaxText converter on synthetic checkpoints of published shapes.

    python -m benchmarks.conversion make /tmp/run --preset dcformer-6.9b --layers 4
    python -m benchmarks.conversion measure /tmp/run /tmp/converted

`make` writes random leaves as orbax does. `measure` runs `dcformer convert maxtext` in a process of its own and `cp -r`
of the parameters on the same disk, in turns; the figures are minima.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import tensorstore

from dcformer import DCFormerConfig
from dcformer.conversion.mapping import MAXTEXT_ROWS, array_shape, axis_sizes


def make(arguments: argparse.Namespace) -> None:
    config = DCFormerConfig.from_preset(arguments.preset, num_hidden_layers=arguments.layers)
    item = arguments.run / "checkpoints" / "1000" / "state"
    item.mkdir(parents=True)
    sizes, metadata = axis_sizes(config), {}
    fused = ("qkv_proj", "wi.kernel", "pre_proj", "post_proj")
    skipped = fused if config.qk_norm else (*fused, "q_norm", "k_norm")
    for row in MAXTEXT_ROWS:
        if any(part in row.array for part in skipped):
            continue
        for sub in range(arguments.layers_per_block if row.per_layer else 1):
            name = row.array.format(sub=sub)
            name = f"params.decoder.layers.{name}" if row.per_layer else f"params.{name}"
            shape = array_shape(row, sizes, 1, config.num_hidden_layers // arguments.layers_per_block)
            dtype = "bfloat16" if name.endswith("qkw") else "float32"
            _write_leaf(item / name, shape, dtype, arguments.devices)
            metadata[str(tuple(name.split(".")))] = {
                "key_metadata": [{"key": key, "key_type": 2} for key in name.split(".")],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
            }
    text = json.dumps({"tree_metadata": metadata, "use_zarr3": False})
    (item / "_METADATA").write_text(text, encoding="utf-8")


def _write_leaf(folder: Path, shape: tuple[int, ...], dtype: str, devices: int) -> None:
    """Random values, in one chunk per device along the first axis that divides so, as fully sharded runs have them."""
    axis = next((axis for axis, size in enumerate(shape) if size % devices == 0), None)
    chunks = tuple(size // devices if position == axis else size for position, size in enumerate(shape))
    store = tensorstore.open(
        {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{folder}/"},
            "metadata": {
                "shape": shape,
                "chunks": chunks,
                "dtype": "bfloat16" if dtype == "bfloat16" else "<f4",
                "compressor": {"id": "zstd", "level": 1},
                "dimension_separator": ".",
            },
        },
        create=True,
    ).result()
    generator = np.random.default_rng(len(folder.name))
    for corner in itertools.product(*(range(0, size, step) for size, step in zip(shape, chunks))):
        values = generator.standard_normal(chunks, dtype=np.float32)
        values *= 0.02
        region = tuple(slice(start, start + step) for start, step in zip(corner, chunks))
        store[region].write(values.astype(store.dtype.numpy_dtype)).result()


def measure(arguments: argparse.Namespace) -> None:
    item = arguments.run / "checkpoints" / "1000" / "state"
    leaves = sorted(item.glob("params.*"))
    nbytes = sum(path.stat().st_size for leaf in leaves for path in leaf.iterdir())
    copy = arguments.converted.with_name(arguments.converted.name + ".copy")
    copying, converting = [], []
    command = [sys.executable, "-m", "dcformer.cli", "convert", "maxtext", str(arguments.run), str(arguments.converted)]
    for _ in range(arguments.times):
        copy.mkdir(parents=True)
        copying.append(_seconds(["cp", "-r", *map(str, leaves), str(copy)]))
        shutil.rmtree(copy)
        converting.append(_seconds([*command, *arguments.options]))
        shutil.rmtree(arguments.converted)
    copying, converting = min(copying), min(converting)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"parameters on disk             {nbytes / 1e9:8.2f} GB")
    print(f"cp -r                          {copying:8.1f} s   {nbytes / copying / 1e6:6.0f} MB/s")
    print(f"convert, with verification     {converting:8.1f} s   {nbytes / converting / 1e6:6.0f} MB/s")
    print(f"throughput against cp -r       {copying / converting:8.2f}")
    print(f"peak memory of the process     {peak / 2**20:8.0f} MiB")


def _seconds(command: list[str]) -> float:
    os.sync()
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make")
    making.set_defaults(function=make)
    making.add_argument("run", type=Path)
    making.add_argument("--preset", default="dcformer-2.8b")
    making.add_argument("--layers", type=int, default=32)
    making.add_argument("--layers-per-block", type=int, default=2)
    making.add_argument("--devices", type=int, default=1, help="chunks per leaf, as from a mesh of that size")
    measuring = commands.add_parser("measure")
    measuring.set_defaults(function=measure)
    measuring.add_argument("run", type=Path)
    measuring.add_argument("converted", type=Path)
    measuring.add_argument("--times", type=int, default=3)
    measuring.add_argument("options", nargs="*", default=[], help="options of the converter, after --")
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
