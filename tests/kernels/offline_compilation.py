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

import triton
from triton._C.libtriton import native_specialize_impl
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction


_OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "maxnreg"}


class Usage(NamedTuple):
    """Registers of a thread, bytes of its stack (where spilled registers go), and shared memory of a program."""

    kernel: str
    registers: int
    stack: int
    shared: int


def compile_launches(function: Callable[[], Any], capability: int) -> list[Usage]:
    """What each different kernel launched by `function()` takes on a device of that compute capability (90: 9.0)."""
    target = GPUTarget("cuda", capability, 32)
    launches: dict[str, tuple[ASTSource, dict[str, Any]]] = {}

    def record(kernel, *args, grid, warmup=False, **kwargs):
        bound = inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in kwargs.items() if k not in _OPTIONS})
        options = {name: value for name, value in kwargs.items() if name in _OPTIONS}
        source = _source(kernel, list(bound.arguments.values()), target)
        launches[f"{kernel.fn.__name__} {source.signature} {source.constants} {options}"] = (source, options)

    before, JITFunction.run = JITFunction.run, record
    try:
        function()
    finally:
        JITFunction.run = before
    return [_compiled(source, options, target) for source, options in launches.values()]


def _source(kernel: JITFunction, arguments: list[Any], target: GPUTarget) -> ASTSource:
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


def _compiled(source: ASTSource, options: dict[str, Any], target: GPUTarget) -> Usage:
    compiled = triton.compile(source, target=target, options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        found = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", found.stdout + found.stderr)
    if usage is None:
        raise RuntimeError(f"cuobjdump tells no registers: {found.stdout}{found.stderr}")
    return Usage(source.fn.fn.__name__, int(usage[1]), int(usage[2]), compiled.metadata.shared)
