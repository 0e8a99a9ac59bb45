"""The Triton kernels run in Triton's interpreter where there is no GPU."""

import os
from collections.abc import Iterator

import pytest
import torch


pytest.importorskip("triton")
from triton.runtime import interpreter


def spare_repeated_patches() -> None:
    """
    Spare the interpreter a step that it repeats. A kernel has the language replaced by what works on arrays until it
    ends, and functions that it calls once more, each time that they are called, which takes half of the time. Ours see
    the modules that the kernel sees; those of Triton's library see others, which stay replaced after the first time.
    """
    patching_call = interpreter.InterpretedFunction.__call__
    patched: set[str] = set()

    def call(self, *args, **kwargs):
        module = self.fn.__module__
        if module.startswith("dcformer.") or module in patched:
            return self.rewrite()(*args, **kwargs)
        patched.add(module)
        return patching_call(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


if os.environ.get("TRITON_INTERPRET") == "1":
    spare_repeated_patches()
    # Nor whether a sum of integers leaves its type, which takes a third of the rest; one test asks for it.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


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
