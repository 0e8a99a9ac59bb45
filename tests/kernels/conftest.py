"""The Triton kernels run in Triton's interpreter where there is no GPU."""

import functools
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch


pytest.importorskip("triton")
from triton.language import core, semantic
from triton.runtime import interpreter


def spare_repeated_work() -> None:
    """
    Spare the interpreter what it does anew at every step of a kernel, which takes half of the time: it puts what works
    on arrays in the language's place, makes types and shapes, compares them, and brings two operands to one type and
    shape. Nothing changes a type or a shape, so that each is made once, and those of two tensors are the same if they
    are one object; types that were left alone once always are, and a number beside a type is always the same tensor.
    """
    convert, converted = semantic.TritonSemantic.binary_op_type_checking_impl, {}
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

    def operands(self, lhs, rhs, *options: bool, **named: bool):
        kinds = [(x.dtype, id(x.shape)) if isinstance(x, core.tensor) else (type(x), repr(x)) for x in (lhs, rhs)]
        key = (*kinds, options, *named.items())
        if key in converted:
            new_lhs, new_rhs = converted[key]
            return lhs if new_lhs is None else new_lhs, rhs if new_rhs is None else new_rhs
        new_lhs, new_rhs = convert(self, lhs, rhs, *options, **named)
        is_left, is_right = new_lhs is lhs, new_rhs is rhs
        if (is_left or not isinstance(lhs, core.tensor)) and (is_right or not isinstance(rhs, core.tensor)):
            converted[key] = None if is_left else new_lhs, None if is_right else new_rhs
        return new_lhs, new_rhs

    scalar = {"shape": core.tuple([]), "numel": core.constexpr(1)}
    core.pointer_type.__hash__ = core.block_type.__hash__ = core.dtype.__hash__
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    semantic.TritonSemantic.broadcast_impl_value = broadcast_unequal
    semantic.TritonSemantic.binary_op_type_checking_impl = operands
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)


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
