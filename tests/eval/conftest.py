"""Fixtures that all tests of evaluations share."""

import functools
import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def templates_compiled_once():
    """lm-eval compiles every template anew for every document."""
    if importlib.util.find_spec("lm_eval") is None:
        yield
        return
    from lm_eval.utils import env

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env, "from_string", functools.cache(env.from_string))
        yield
