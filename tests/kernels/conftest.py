"""The Triton kernels run in Triton's interpreter where there is no GPU."""

import functools
import math
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


pytest.importorskip("triton")
from triton.language import core, semantic
from triton.runtime import interpreter


# Operators of tensors, the last of which have the tensor on their right.
ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "rshift"]
COMPARISONS = ["lt", "le", "gt", "ge", "eq", "ne"]
REFLECTED = ["radd", "rsub", "rmul"]


def spare_repeated_work() -> None:
    """
    Spare the interpreter what it does anew at every step of a kernel, which takes most of the time: it puts what works
    on arrays in the language's place, makes types and shapes, and finds out what operators do with operands of their
    types. Nothing changes a type or a shape, so that each is made once, and those of two tensors are the same if they
    are one object.
    """
    patch_language, initialise = interpreter._patch_lang, core.block_type.__init__
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    @functools.cache
    def patch_once(function) -> interpreter._LangPatchScope:
        patch_language(function)
        return interpreter._LangPatchScope()  # which restores nothing

    @functools.cache
    def shapes(*sizes: int) -> dict[str, Any]:
        sizes = [core.constexpr(size) for size in sizes]
        return {"shape": core.tuple(sizes), "numel": core.constexpr(math.prod(size.value for size in sizes))}

    @functools.cache
    def block(element, *sizes: int) -> dict[str, Any]:
        made = object.__new__(core.block_type)
        initialise(made, element, list(sizes))
        return vars(made) | {"of_tensors": shapes(*made.shape.values)}

    def block_type(self, element_ty, shape):
        vars(self).update(block(element_ty, *shape))

    def tensor(self, handle, type):
        vars(self).update(vars(type).get("of_tensors", scalar), handle=handle, type=type, dtype=type.scalar)

    def broadcast_unequal(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    scalar = {"shape": core.tuple([]), "numel": core.constexpr(1)}
    core.pointer_type.__hash__ = core.block_type.__hash__ = core.dtype.__hash__
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    semantic.TritonSemantic.broadcast_impl_value = broadcast_unequal
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)
    calls = watch_calls("binary_op", "create_addptr", "create_idiv")
    for name in (*ARITHMETIC, *COMPARISONS, *REFLECTED):
        run = getattr(core.tensor, f"__{name}__")
        setattr(core.tensor, f"__{name}__", planned(run, name in REFLECTED, calls))


def watch_calls(*names: str) -> deque:
    """The last calls of methods of the interpreter that work on arrays: the method, its arguments and the result."""
    builder, calls = interpreter.interpreter_builder, deque(maxlen=2)

    def watched(method):
        def run(*arguments):
            result = method(*arguments)
            calls.append((method, *arguments, result))
            return result

        return run

    for name in names:
        setattr(builder, name, watched(getattr(builder, name)))
    return calls


def planned(run, is_reflected: bool, calls: deque):
    """
    The operator `run` of tensors. What it does with the arrays in the end, and the types that it brings them to, are
    the same for all operands of these types and shapes, or of this number; NumPy needs no arrays of one shape.
    """
    plans, builder = {}, interpreter.interpreter_builder

    def kind(x):
        return (x.dtype.name, id(x.shape)) if isinstance(x, core.tensor) else (type(x), repr(x))

    def brought(x, to):
        if not isinstance(x, core.tensor):
            return to
        data, dtype = x.handle.data, to.data.dtype
        return x.handle if data.dtype == dtype else interpreter.TensorHandle(data.astype(dtype), to.dtype)

    def follow(method, left, right, rest, type, operands):
        left, right = map(brought, operands, (left, right))
        return core.tensor(method(left, right, *rest), type)

    def operate(self, other):
        key, operands = (kind(self), kind(other)), (other, self) if is_reflected else (self, other)
        if plan := plans.get(key):
            return follow(*plan, operands)
        calls.clear()
        result = run(self, other, _semantic=interpreter.interpreter_semantic)
        if len(calls) == 1 and not builder.options.sanitize_overflow:
            method, left, right, *rest, handle = calls[0]
            plan = method, left, right, rest, result.type
            if handle is result.handle and np.array_equal(follow(*plan, operands).handle.data, handle.data):
                plans[key] = plan
        return result

    return operate


if os.environ.get("TRITON_INTERPRET") == "1":
    spare_repeated_work()
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
