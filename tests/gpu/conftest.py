"""The GPU, and which kernels ran on it."""

import pytest
import torch
from torch._dynamo.utils import counters

from dcformer.kernels.triton import attention_backward as backward
from dcformer.kernels.triton import attention_decode as decode
from dcformer.kernels.triton import attention_forward as forward
from dcformer.kernels.triton import triton_backend as triton_form


@pytest.fixture
def device() -> str:
    """Of every test here, which is skipped without one."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return "cuda"


@pytest.fixture
def launched(monkeypatch) -> set[str]:
    """The passes that ran on the kernels, such as "composed_forward"; in graphs they take calls of any size here."""
    names = set()

    def watch(name, run):
        def watched(*arguments):
            names.add(name)
            return run(*arguments)

        return watched

    for module in (forward, backward, decode):
        name = f"composed_{module.__name__.rpartition('_')[2]}"
        monkeypatch.setattr(module, name, watch(name, getattr(module, name)))
    monkeypatch.setattr(triton_form, "FEWEST_SCORES_IN_A_GRAPH", 0)
    # Graphs of other tests have another choice in them, and compiling is given up after a few of one function.
    torch._dynamo.reset()
    counters.clear()
    return names
