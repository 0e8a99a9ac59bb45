"""The Triton kernels run in Triton's interpreter where there is no GPU."""

from collections.abc import Iterator

import pytest
import torch
from quick_interpreter import spare_repeated_patches


pytest.importorskip("triton")
spare_repeated_patches()


@pytest.fixture(autouse=True)
def several_queries_at_once(monkeypatch):
    """The interpreter takes as long for a tile of sixteen queries as for that of one."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("dcformer.kernels.plan.QUERIES_AT_ONCE", 16)


@pytest.fixture
def poisoned_memory(monkeypatch) -> Iterator[None]:
    """Every new tensor that nothing was written to holds NaN, as memory of a GPU may."""

    def poisoned(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    yield
