"""Print as JSON what the kernels of operators take of GPUs: `python compile_all.py KERNEL_TO_COUNT ...`.

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

from dcformer.kernels.call import Call
from dcformer.kernels.triton import tuning
from dcformer.kernels.triton.attention_backward import composed_backward
from dcformer.kernels.triton.attention_decode import composed_decode
from dcformer.kernels.triton.attention_forward import composed_forward
from dcformer.kernels.triton.compose_weights import _factors, _factors_of_few, _gradients
from dcformer.kernels.triton.rotation import Heads, launch_rotation


OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "maxnreg"}
LENGTH, FACTORS = 512, 5
COMPOSING = "weights_fwd_kernel", "deltas_bwd_kernel", "compose_fwd_kernel", "compose_bwd_kernel"
# Of each capability: whether matrix products of four warps take registers, and the heads and channels of a shape.
SHAPES = {80: (False, 16, 80), 90: (True, 32, 128), 100: (False, 32, 128)}
# Heads, rank and number types of states and weights: of many tokens, then of a few.
FACTORS_OF = {
    80: [(32, 2, torch.bfloat16, torch.bfloat16)],
    90: [(32, 2, torch.bfloat16, torch.bfloat16), (40, 4, torch.float32, torch.float32)],
    100: [(64, 4, torch.bfloat16, torch.float32)],  # as under autocast
}
FACTORS_OF_FEW = {80: (52, 4, torch.bfloat16), 90: (32, 2, torch.bfloat16), 100: (32, 2, torch.float32)}
ROTATED = {80: (16, 80, 20), 90: (32, 128, 128), 100: (24, 104, 104)}  # heads, channels and those that turn


def states(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def prompt_call(heads: int, channels: int, window: int | None) -> Call:
    """As a layer's projections lay out states and factors."""
    query, key, value = (states(1, LENGTH, heads, channels).transpose(1, 2) for _ in range(3))
    factors = states(4, 1, LENGTH, FACTORS, heads).permute(0, 1, 4, 2, 3).unbind(0)
    stages = (factors[0], factors[1], None, factors[2], factors[3], None)
    return Call(query, key, value, *stages, *[None] * 3, 1, True, window, 0, channels**-0.5)


def step_call(heads: int, channels: int, window: int | None) -> Call:
    """With keys and factors as they lie in rows of a paged cache."""
    cached = states(64, heads, 16, 2 * (channels + 8))
    key, pre, value, post = (
        cached[..., first : first + size]
        for first, size in ((0, channels), (channels, FACTORS), (channels + 8, channels), (2 * channels + 8, FACTORS))
    )
    own = states(2, 1, heads, FACTORS).transpose(1, 2)
    query = states(2, heads, 1, channels)
    return Call(query, key, value, own, pre, None, own, post, None, *[None] * 3, 1, True, window, 0, channels**-0.5)


def growing_cache() -> None:
    """A step a length between two powers of 2."""
    query, own = states(2, 32, 1, 64), states(2, 32, 1, 5)
    for length in range(1030, 1062):
        rows, padding = states(2, 32, length, 72), torch.empty(2, length, dtype=torch.bool, device="meta")
        key, factors = rows[..., :64], rows[..., 64:69]
        stages = (own, factors, None, own, factors, None)
        composed_decode(Call(query, key, key, *stages, padding, None, None, 1, True, None, length - 1, 0.1))


def projections(capability: int) -> Iterator[Callable[[], object]]:
    for heads, rank, dtype, of_weight in FACTORS_OF[capability]:
        inner, outer = 2 * rank * heads, (1, 4, 2 * rank * heads, 2 * rank, heads)
        call = states(1, 4096, 1, 4, inner + heads, dtype=dtype), states(*outer, dtype=of_weight)
        gradient = states(4, 1, heads, 4096, 2 * rank + 1, dtype=dtype).permute(0, 1, 3, 4, 2)
        yield functools.partial(_factors, "none", 1e-6, *call)
        yield functools.partial(_gradients, "none", 1e-6, gradient, *call, True)
    heads, rank, dtype = FACTORS_OF_FEW[capability]
    inner = 2 * rank * heads
    shapes = (1, 1, 4096), (4096, 1, 4, inner), (1, 4, inner, 2 * rank, heads), (4096, 1, 4, heads)
    yield functools.partial(_factors_of_few, "none", 1e-6, *(states(*shape, dtype=dtype) for shape in shapes))
    heads, channels, rotary = ROTATED[capability]
    query, key = (states(2, 1, 3, heads, channels)[:, :, i].transpose(1, 2) for i in range(2))
    norm, angles = states(channels), states(1, 1, rotary, dtype=torch.float32)
    sides = [Heads.of(tensor, norm if channels > 80 else None, 1e-6) for tensor in (query, key)]
    yield functools.partial(launch_rotation, *sides, angles, angles)


def operators(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    tuning.is_hopper = lambda _: SHAPES[capability][0]
    _, *shape = SHAPES[capability]
    window = 256 if capability == 100 else None
    call, step = prompt_call(*shape, window), step_call(*shape, window)
    log_sums = states(1, shape[0], LENGTH, dtype=torch.float32)
    yield "forward", functools.partial(composed_forward, call, 2**28)
    if capability == 80:  # what takes most of the memory of 8.6 and 8.9: products of the widest heads in float32
        wide = [each.float() if isinstance(each, Tensor) else each for each in prompt_call(16, 256, None)]
        yield "forward", functools.partial(composed_forward, Call(*wide), 2**28)
    yield "backward", functools.partial(composed_backward, call.query, call, log_sums, 2**28)
    if capability == 90:  # what takes most registers
        wide = prompt_call(64, 128, None)
        log_sums = states(1, 64, LENGTH, dtype=torch.float32)
        yield "composing 64 heads", functools.partial(composed_backward, wide.query, wide, log_sums, 2**28)
        yield "a growing cache", growing_cache
    lengths, table = states(2, dtype=torch.int32), states(2, 32, dtype=torch.int32)
    yield "decode", functools.partial(composed_decode, step, lengths, table)
    yield from (("projection", function) for function in projections(capability))


def launches(function: Callable[[], Any], target: GPUTarget) -> list[tuple[ASTSource, dict[str, Any], Any]]:
    """Each different kernel that a function launches, with the options of its launch and its sizes."""
    found: dict[str, tuple[ASTSource, dict[str, Any], Any]] = {}

    def record(kernel, *args, grid, warmup=False, **kwargs):
        bound = inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in kwargs.items() if k not in OPTIONS})
        options = {name: value for name, value in kwargs.items() if name in OPTIONS}
        source = specialised(kernel, list(bound.arguments.values()), target)
        key = f"{kernel.fn.__name__} {source.signature} {source.constants} {source.attrs} {options}"
        found[key] = (source, options, bound.arguments.get("sizes"))

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


def usage(
    source: ASTSource, options: dict[str, Any], sizes: Any, target: GPUTarget, is_counted: bool
) -> dict[str, Any]:
    """
    Registers of a thread, bytes of its stack and shared memory of a program, and the instructions that order what
    programs write for one another. On Hopper, of the longest loop, the instructions for a score, as if each of its
    iterations took one query of a composing kernel, and those that reach spilled registers, if there can be any or they
    are to be counted: to disassemble takes longer than to compile.
    """
    compiled = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", cuobjdump("-res-usage", file.name)).groups()
        found = {
            "kernel": source.fn.fn.__name__,
            "registers": int(registers),
            "stack": int(stack),
            "shared": compiled.metadata.shared,
            "ordering": re.findall(r"bar\.sync|atom\.global[\w.]*|ld\.global\.cg", compiled.asm["ptx"]),
        }
        if target.arch == 90 and sizes is not None and (int(stack) > 0 or is_counted):
            loop = longest_loop(cuobjdump("-sass", file.name))
            scores = sizes.COMPOSE_N.value * sizes.HEADS.value / (32 * options["num_warps"])
            found["spills"] = sum(instruction in ("LDL", "STL") for instruction in loop)
            found["instructions"] = len(loop) / scores
    return found


def cuobjdump(option: str, file: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    told = subprocess.run([tool, option, file], capture_output=True, text=True, check=True)
    return told.stdout + told.stderr


def longest_loop(code: str) -> list[str]:
    """The names of its instructions: those from the target of a branch backwards to the branch."""
    found = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?(\w+)([^;]*);", code)
    places = [(int(address, 16), name, rest) for address, name, rest in found]
    loops: list[list[str]] = [[]]
    for address, name, rest in places:
        target = re.search(r"0x([0-9a-f]+)", rest) if name == "BRA" else None
        if target and int(target[1], 16) < address:
            loops.append([other for place, other, _ in places if int(target[1], 16) <= place <= address])
    return max(loops, key=len)


def main() -> None:
    found = []
    for capability in SHAPES:
        target = GPUTarget("cuda", capability, 32)
        for name, function in operators(capability):
            about = {"capability": capability, "operator": name}
            is_wide = name.startswith("composing")
            for launch in launches(function, target):
                kernel = launch[0].fn.fn.__name__
                if not is_wide or kernel in COMPOSING:
                    is_counted = kernel in sys.argv[1:] and not is_wide
                    found.append({**about, **usage(*launch, target, is_counted)})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
