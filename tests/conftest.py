"""Fixtures shared by all tests: where the reference data is, and a clean random state."""

import os
from pathlib import Path

import pytest
import torch


def pytest_configure(config):
    # On tensors as small as these a second thread costs more than it saves, many times more on a busy machine.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of reference data; tests that need it are skipped where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("DCFORMER_FIXTURES", default))
    if not (folder / "golden").is_dir():
        pytest.skip(f"no reference data in {folder}; set DCFORMER_FIXTURES to the folder that holds golden/")
    return folder
