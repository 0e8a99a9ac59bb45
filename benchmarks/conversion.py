"""Memory, throughput and restarts of the MaxText converter on synthetic checkpoints of published shapes.

    python -m benchmarks.conversion make /tmp/run --preset dcformer-6.9b --layers 4
    python -m benchmarks.conversion measure /tmp/run /tmp/converted
    python -m benchmarks.conversion kill /tmp/run /tmp/converted --times 20

`make` writes random leaves as orbax does. `measure` runs `dcformer convert maxtext` in a process of its own and `cp -r`
of the parameters on the same disk, in turns; the figures are minima. `kill` ends conversions at random moments with
SIGKILL and compares the resumed runs, byte by byte, with an uninterrupted one.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import tensorstore

from dcformer import DCFormerConfig
from dcformer.conversion.mapping import MAXTEXT_ROWS, axis_sizes, leaf_shape


def make(arguments: argparse.Namespace) -> None:
    config = DCFormerConfig.from_preset(arguments.preset, num_hidden_layers=arguments.layers)
    item = arguments.run / "checkpoints" / "1000" / "state"
    item.mkdir(parents=True)
    sizes, metadata = axis_sizes(config), {}
    fused = ("qkv_proj", "wi.kernel", "pre_proj", "post_proj")
    skipped = fused if config.qk_norm else (*fused, "q_norm", "k_norm")
    for row in MAXTEXT_ROWS:
        if any(part in row.leaf for part in skipped):
            continue
        for sub in range(arguments.layers_per_block if row.per_layer else 1):
            name = row.leaf.format(sub=sub)
            name = f"params.decoder.layers.{name}" if row.per_layer else f"params.{name}"
            shape = leaf_shape(row, sizes, 1, config.num_hidden_layers // arguments.layers_per_block)
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
    generator = np.random.default_rng(int(hashlib.sha256(folder.name.encode()).hexdigest()[:8], 16))
    for corner in itertools.product(*(range(0, size, step) for size, step in zip(shape, chunks))):
        values = generator.standard_normal(chunks, dtype=np.float32)
        values *= 0.02
        region = tuple(slice(start, start + step) for start, step in zip(corner, chunks))
        store[region].write(values.astype(store.dtype.numpy_dtype)).result()


def _command(arguments: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "dcformer.cli", "convert", "maxtext", str(arguments.run), str(arguments.converted)]
    return [*command, "--max-shard-size", arguments.max_shard_size, *arguments.options]


def measure(arguments: argparse.Namespace) -> None:
    item = arguments.run / "checkpoints" / "1000" / "state"
    leaves = sorted(item.glob("params.*"))
    nbytes = sum(path.stat().st_size for leaf in leaves for path in leaf.iterdir())
    copy = arguments.converted.with_name(arguments.converted.name + ".copy")
    copying, converting = [], []
    for _ in range(arguments.times):
        copy.mkdir(parents=True)
        copying.append(_seconds(["cp", "-r", *map(str, leaves), str(copy)]))
        shutil.rmtree(copy)
        converting.append(_seconds(_command(arguments)))
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


def kill(arguments: argparse.Namespace) -> None:
    command = _command(arguments)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = time.monotonic()
    subprocess.run(command, check=True, **quiet)
    whole = time.monotonic() - started
    expected = _hashes(arguments.converted)
    shutil.rmtree(arguments.converted)
    generator = random.Random(0)
    killed = runs = equal = 0
    while killed < arguments.times:
        runs += 1
        process = subprocess.Popen(command, **quiet)
        try:
            process.wait(generator.uniform(0.1, 0.95) * whole)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
        if not arguments.converted.exists():
            subprocess.run(command, check=True, **quiet)
        equal += _hashes(arguments.converted) == expected
        shutil.rmtree(arguments.converted)
    print(f"{killed} of {runs} conversions of {whole:.1f} s killed, {equal} of {runs} ended byte-identical")


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (make, measure, kill):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument("run", type=Path)
        if function is make:
            command.add_argument("--preset", default="dcformer-2.8b")
            command.add_argument("--layers", type=int, default=32)
            command.add_argument("--layers-per-block", type=int, default=2)
            command.add_argument("--devices", type=int, default=1, help="chunks per leaf, as from a mesh of that size")
            continue
        command.add_argument("converted", type=Path)
        command.add_argument("--max-shard-size", default="4GB" if function is measure else "20MB")
        command.add_argument("--times", type=int, default=3 if function is measure else 20)
        command.add_argument("options", nargs="*", default=[])
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
