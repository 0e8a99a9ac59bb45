"""The kernels compile for GPUs of three generations that are not there."""

import collections
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
INSTRUCTIONS = {"softmax_sums_fwd_kernel": [27], "weights_fwd_kernel": [26], "weights_bwd_kernel": [43]}
INSTRUCTIONS |= {"compose_bwd_kernel": [25, 27], "query_factors_bwd_kernel": [4]}
INSTRUCTIONS |= {"scores_fwd_kernel": [29, 29, 29], "attention_bwd_kernel_dkv": [22]}


def compiled():
    """What compile_all.py prints where Triton compiles instead of interpreting, by the operator that launches it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(dcformer.__file__).parents[1])
    command = [sys.executable, Path(__file__).with_name("compile_all.py"), *INSTRUCTIONS]
    found = collections.defaultdict(list)
    for kernel in json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout):
        found[kernel["operator"]].append(kernel)
    return found


def test_kernels_compile_without_spilled_registers_in_loops_and_to_few_instructions():
    """All in one process, since starting one takes longer than to compile for a capability."""
    found = compiled()
    projections, wide = found.pop("projection"), found.pop("composing 64 heads")
    names = collections.Counter(kernel["kernel"] for kernel in projections)
    factors = {"factors_fwd_kernel": 4 + 3, "factors_bwd_kernel": 4, "partial_products_kernel": 3}
    assert names == {**factors, "rotation_fwd_kernel": 3}
    assert all(kernel["stack"] == 0 and kernel["registers"] <= 128 for kernel in projections)
    assert all(kernel["shared"] <= 99 * 2**10 for kernel in projections)
    # A cache that grows by a key a step is read by the same kernels.
    growing = found.pop("a growing cache")
    assert sorted(kernel["kernel"] for kernel in growing) == ["decode_scores_kernel", "decode_values_kernel"]
    # Those of 64 heads leave no register free: of their five hundred instructions Triton 3.9 lets ten reach the stack.
    assert len(wide) == 9 and [kernel for kernel in wide if kernel.get("spills", 0) > 10 or kernel["stack"] > 64] == []
    assert found.keys() == {"forward", "backward", "decode"}
    assert all({kernel["capability"] for kernel in each} == {80, 90, 100} for each in found.values())
    kernels = [kernel for each in found.values() for kernel in each]
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
