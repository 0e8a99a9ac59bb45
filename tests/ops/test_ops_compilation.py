"""The kernels compile for GPUs of three generations that are not there, and spill no registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dcformer


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_no_kernel_spills_registers(capability):
    script = Path(__file__).with_name("compile_all.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, script, str(capability), Path(dcformer.__file__).parent],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kernels = json.loads(run.stdout)
    operators = {kernel["operator"].split("-")[0] for kernel in kernels}
    assert operators == {"forward", "decode"} | ({"backward", "preparation"} if capability == 90 else set())
    assert [kernel for kernel in kernels if kernel["stack"] > 0] == []
