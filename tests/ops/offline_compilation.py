"""Compile every kernel that a function launches for a GPU that is not there, and tell what the kernels take of it.

The function runs on meta tensors, so that its launches are those of real sizes; instead of being run, each kernel is
compiled by Triton and NVIDIA's assembler. Triton must not be in its interpreter's mode.
"""

import inspect
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction


_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "maxnreg"}


class Usage(NamedTuple):
    """Registers of a thread, bytes of its stack (where spilled registers go), and shared memory of a program."""

    kernel: str
    registers: int
    stack: int
    shared: int


def compile_launches(function: Callable[[], Any], capability: int) -> list[Usage]:
    """What each different kernel launched by `function()` takes on a device of that compute capability (90: 9.0)."""
    launches: dict[str, tuple[JITFunction, dict[str, Any]]] = {}

    def record(kernel, *args, grid, warmup=False, **kwargs):
        bound = inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in kwargs.items() if k not in _OPTIONS})
        options = {name: value for name, value in kwargs.items() if name in _OPTIONS}
        source = _source(kernel, dict(bound.arguments))
        launches[f"{kernel.fn.__name__} {source.signature} {source.constants} {options}"] = (source, options)

    before, JITFunction.run = JITFunction.run, record
    try:
        function()
    finally:
        JITFunction.run = before
    return [_compiled(source, options, capability) for source, options in launches.values()]


def _source(kernel: JITFunction, arguments: dict[str, Any]) -> ASTSource:
    """The kernel with the types of its arguments, as Triton itself would specialise it."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and specialised):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = _TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and specialised:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def _compiled(source: ASTSource, options: dict[str, Any], capability: int) -> Usage:
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        found = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", found.stdout + found.stderr)
    if usage is None:
        raise RuntimeError(f"cuobjdump tells no registers: {found.stdout}{found.stderr}")
    return Usage(source.fn.fn.__name__, int(usage[1]), int(usage[2]), compiled.metadata.shared)
