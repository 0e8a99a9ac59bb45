"""The implementations that the tests of the operator are run with."""

import contextlib

import pytest
from operator_inputs import library_of


@pytest.fixture(scope="module")
def form(request):
    """The name of an implementation, of which that of C++ has the code of one instruction set."""
    name, _, instruction_set = request.param.partition("-")
    with library_of(instruction_set) if instruction_set else contextlib.nullcontext():
        yield name
