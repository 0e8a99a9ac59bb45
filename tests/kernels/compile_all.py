"""Print as JSON what the kernels of operators take of GPUs: `python compile_all.py CAPABILITY ...`.

The operators run on meta tensors, so that their launches are those of real sizes; instead of being run, each kernel is
compiled by Triton and NVIDIA's assembler for a GPU that is not there. Triton must not be in its interpreter's mode.
"""

import functools
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton._C.libtriton import native_specialize_impl
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from dcformer.kernels.backward import composed_backward
from dcformer.kernels.call import Call
from dcformer.kernels.decode import composed_decode
from dcformer.kernels.forward import composed_forward


OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "maxnreg"}
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
    channels, window = (128, None) if capability == 90 else (80, 256)
    call, step = call_of(channels, window), call_of(channels, window, pages=True)
    yield f"forward-D{channels}", functools.partial(composed_forward, call, 2**28)
    if capability == 90:
        log_sums = states(1, HEADS, LENGTH, dtype=torch.float32)
        yield f"backward-D{channels}", functools.partial(composed_backward, call.query, call, log_sums, 2**28)
    else:
        yield f"decode-D{channels}", functools.partial(composed_decode, step, lengths, table)


def launches(function: Callable[[], Any], target: GPUTarget) -> list[tuple[ASTSource, dict[str, Any]]]:
    """Each different kernel that a function launches, with the options of its launch."""
    found: dict[str, tuple[ASTSource, dict[str, Any]]] = {}

    def record(kernel, *args, grid, warmup=False, **kwargs):
        bound = inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in kwargs.items() if k not in OPTIONS})
        options = {name: value for name, value in kwargs.items() if name in OPTIONS}
        source = specialised(kernel, list(bound.arguments.values()), target)
        found[f"{kernel.fn.__name__} {source.signature} {source.constants} {options}"] = (source, options)

    before, JITFunction.run = JITFunction.run, record
    try:
        function()
    finally:
        JITFunction.run = before
    return list(found.values())


def specialised(kernel: JITFunction, arguments: list[Any], target: GPUTarget) -> ASTSource:
    """The kernel specialised for its arguments, as a launch does it."""
    backend = make_backend(target)
    names = [parameter.name for parameter in kernel.params]
    found = [
        ("constexpr", value)
        if parameter.is_constexpr
        else native_specialize_impl(type(backend), value, False, not parameter.do_not_specialize, True)
        for parameter, value in zip(kernel.params, arguments)
    ]
    types = [kind for kind, _ in found]
    keys = ["" if kind == "constexpr" else key for kind, key in found]
    constants = find_paths_if(types, lambda _, kind: kind == "constexpr")
    attributes = find_paths_if(keys, lambda _, key: isinstance(key, str))
    return ASTSource(
        fn=kernel,
        signature=dict(zip(names, types)),
        constexprs={path: get_iterable_path(arguments, path) for path in constants},
        attrs={path: backend.parse_attr(get_iterable_path(keys, path)) for path in attributes},
    )


def usage(source: ASTSource, options: dict[str, Any], target: GPUTarget) -> dict[str, Any]:
    """Registers of a thread, bytes of its stack (where spilled registers go), and shared memory of a program."""
    compiled = triton.compile(source, target=target, options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout + told.stderr).groups()
    name, shared = source.fn.fn.__name__, compiled.metadata.shared
    return {"kernel": name, "registers": int(registers), "stack": int(stack), "shared": shared}


def main() -> None:
    found = []
    for capability in map(int, sys.argv[1:]):
        target = GPUTarget("cuda", capability, 32)
        for name, function in operators(capability):
            about = {"capability": capability, "operator": name}
            found += [{**about, **usage(*launch, target)} for launch in launches(function, target)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
