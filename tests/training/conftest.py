"""Fixtures that all tests of training share."""

import pytest
from tiny_recipes import without_curves  # noqa: F401  a fixture of every module here


@pytest.fixture
def brief(tmp_path):
    """Arguments of Transformers' Trainer for a run of two steps."""
    return {
        "output_dir": str(tmp_path),
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
