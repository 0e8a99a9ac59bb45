"""The kernels compile for GPUs that are not there, and those of the forward pass and of decoding spill no registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dcformer


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_inference_spill_no_registers(capability):
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
    assert {kernel["operator"].split("-")[0] for kernel in kernels} >= {"forward"}
    spilling = [kernel for kernel in kernels if kernel["stack"] > 0 and not kernel["operator"].startswith("backward")]
    assert spilling == []
