"""The kernels compile for GPUs of three generations that are not there, and spill no registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import dcformer


def test_no_kernel_spills_registers():
    script = Path(__file__).with_name("compile_all.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, script, Path(dcformer.__file__).parent, "80", "90", "100"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kernels = json.loads(run.stdout)
    operators = {(kernel["capability"], kernel["operator"]) for kernel in kernels}
    inference = {f"{name}-D{channels}" for name in ("forward", "decode") for channels in (80, 128)}
    expected = {(capability, name) for capability in (80, 90, 100) for name in inference}
    assert operators == expected | {(90, "backward-D128"), (90, "preparation-D128")}
    assert [kernel for kernel in kernels if kernel["stack"] > 0] == []
