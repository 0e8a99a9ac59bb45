"""The kernels compile for GPUs of three generations that are not there."""

import json
import operator
import os
import subprocess
import sys
from pathlib import Path

import dcformer


# Instructions for a score of the kernels that compose, on Hopper with 32 heads: the softmax's sums, weights, weights in
# the backward pass; gradients of scores before and after the softmax; gradients of queries' matrices, launched twice.
# Of products those of a step beside as many scores: masks of what they load, or loads by registers, double them.
# The most of Triton 3.6 to 3.9, none of which compiles everything to the fewest.
INSTRUCTIONS = {"softmax_sums_fwd_kernel": [27], "weights_fwd_kernel": [25], "weights_bwd_kernel": [43]}
INSTRUCTIONS |= {"compose_bwd_kernel": [25, 27], "query_factors_bwd_kernel": [4]}
INSTRUCTIONS |= {"scores_fwd_kernel": [29, 29, 29], "attention_bwd_kernel_dkv": [22]}


def printed_by(*arguments):
    """The JSON that Python prints with these arguments, where Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(dcformer.__file__).parents[1])])
    command = [sys.executable, *map(str, arguments)]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def test_kernels_compile_without_spilled_registers_in_loops_and_to_few_instructions():
    kernels = printed_by(Path(__file__).with_name("compile_all.py"), "80", "90", "100")
    # Those of 64 heads leave no register free: of their five hundred instructions Triton 3.9 lets ten reach the stack.
    wide = [kernel for kernel in kernels if kernel["operator"] == "composing 64 heads"]
    assert len(wide) == 9 and [kernel for kernel in wide if kernel["spills"] > 10 or kernel["stack"] > 64] == []
    kernels = [kernel for kernel in kernels if kernel not in wide]
    operators = {(kernel["capability"], kernel["operator"]) for kernel in kernels}
    assert operators == {(each, name) for each in (80, 90, 100) for name in ("forward", "backward", "decode")}
    hopper = [kernel for kernel in kernels if kernel["capability"] == 90]
    assert [kernel for kernel in hopper if kernel.get("spills", 0) > 0 or kernel["stack"] > 48] == []
    for name, bounds in INSTRUCTIONS.items():
        found = sorted(kernel["instructions"] for kernel in hopper if kernel["kernel"] == name)
        assert len(found) == len(bounds) and all(map(operator.le, found, bounds)), (name, found)
    # What others wrote is read after the ticket, which is taken when all threads have written, past the first cache.
    values = [kernel["ordering"] for kernel in kernels if kernel["kernel"] == "decode_values_kernel"]
    tickets = [order.index("atom.global.gpu.acq_rel.add.u32") for order in values]
    assert len(values) == 3 and all(order[at - 1] == "bar.sync" for order, at in zip(values, tickets))
    assert all("ld.global.cg" in order[at:] and "ld.global.cg" not in order[:at] for order, at in zip(values, tickets))
    # Elsewhere the sums of the keys' gradients and their factors leave a few registers too few.
    assert [kernel for kernel in kernels if kernel["stack"] > 160] == []
    # KiB that a program may have: of those for 8.0 what 8.6 and 8.9, which run them too, have; of the others their own.
    limits = {80: 99, 90: 227, 100: 227}
    assert [kernel for kernel in kernels if kernel["shared"] > limits[kernel["capability"]] * 2**10] == []


GROWING_CACHE = """
import json, torch
from compile_all import Call, GPUTarget, composed_decode, launches, states

def steps():
    query, own = states(2, 32, 1, 64), states(2, 32, 1, 5)
    for length in range(1030, 1062):  # between powers of 2
        rows, padding = states(2, 32, length, 72), torch.empty(2, length, dtype=torch.bool, device="meta")
        key, factors = rows[..., :64], rows[..., 64:69]
        stages = (own, factors, None, own, factors, None)
        composed_decode(Call(query, key, key, *stages, padding, None, None, 1, True, None, length - 1, 0.1))

print(json.dumps(sorted(source.fn.fn.__name__ for source, *_ in launches(steps, GPUTarget("cuda", 90, 32)))))
"""


def test_a_cache_that_grows_by_a_key_a_step_is_read_by_the_same_kernels():
    assert printed_by("-c", GROWING_CACHE) == ["decode_scores_kernel", "decode_values_kernel"]
