"""The kernels compile for GPUs of three generations that are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import dcformer


def test_kernels_compile_and_hardly_spill_registers():
    script = Path(__file__).with_name("compile_all.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(dcformer.__file__).parent.parent)
    run = subprocess.run(
        [sys.executable, script, "80", "90", "100"], env=environment, capture_output=True, text=True, check=True
    )
    kernels = json.loads(run.stdout)
    operators = {(kernel["capability"], kernel["operator"]) for kernel in kernels}
    inference = {(capability, f"{name}-D80") for capability in (80, 100) for name in ("forward", "decode")}
    assert operators == inference | {(90, "forward-D128"), (90, "backward-D128")}
    # Bytes of spilled registers. Factors of the keys and the sums of their gradients fill all that a thread has. With
    # more threads for them nothing spills, but there are half as many instructions again.
    bounds = {"_gradients_kernel": 512}
    assert [kernel for kernel in kernels if kernel["stack"] > bounds.get(kernel["kernel"], 16)] == []
    # KiB that a program may have: of those for 8.0 what 8.6 and 8.9, which run them too, have; of the others their own.
    limits = {80: 99, 90: 227, 100: 227}
    assert [kernel for kernel in kernels if kernel["shared"] > limits[kernel["capability"]] * 2**10] == []
