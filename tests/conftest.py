"""Fixtures shared by all tests: where the reference data is, and a clean random state."""

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest


# What a shell, a launcher or a cloud has set would change what is computed, or which servers are asked.
OF_OTHERS = ("ACCELERATE_", "AWS_", "DCFORMER_NATIVE", "GOOGLE_", "HF_", "LOCAL_", "MASTER_", "RANK", "WORLD_SIZE")
for name in filter(lambda name: name.startswith(OF_OTHERS), [*os.environ]):
    del os.environ[name]
# Libraries look at these when they are imported. Neither is the Hub asked nor the user's cache of it, and servers of
# tests are not asked through a proxy.
HUB_CACHE = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
os.environ |= {"HF_HOME": HUB_CACHE.name, "HF_HUB_OFFLINE": "1", "NO_PROXY": "localhost,127.0.0.1"}
os.environ["no_proxy"] = os.environ["NO_PROXY"]
# Whether there is a GPU is asked without starting CUDA, which forked processes could not use, nor be without.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import killable
import torch
import transformers
from packaging.version import Version


# Without a GPU, Triton's interpreter runs the kernels; it looks at this when a kernel is defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser):
    parser.addoption("--all-pages", action="store_true", help="run the examples of every page of docs/")


def pytest_configure(config):
    # On tensors as small as these a second thread costs more than it saves, many times more on a busy machine.
    torch.set_num_threads(1)
    # A forked process lacks the threads of torch's pool, and torch makes a new one where it is first asked for: two
    # threads that load weights and ask at once end with "Invalid thread pool!".
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def pytest_collection_modifyitems(items):
    """The longest test comes first; those of what the oldest Transformers that is promised lacks are skipped."""
    # Where Triton's cache is empty it takes a minute, for which other workers would wait at the end.
    items.sort(key=lambda item: item.path.name != "test_kernels_compilation.py")
    for item in items:
        marker = item.get_closest_marker("newer_transformers")
        if marker is not None and Version(transformers.__version__) < Version("5.24"):
            item.add_marker(pytest.mark.skip(reason=f"Transformers {transformers.__version__}: {marker.args[0]}"))


def pytest_collection_finish():
    # Trainers collect garbage at their ends, among all that the libraries have made while they were imported.
    gc.collect()
    gc.freeze()
    killable.fork_idle_copy()


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect():
    """Nor do they look again at what earlier modules have imported, which would take longer than most tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def unhurried_disk():
    """Nothing waits until the disk has written, thousands of times; tests of the order of writing see the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        if tensorstore := sys.modules.get("tensorstore"):
            opened, settings = tensorstore.open, {"file_io_sync": False}
            context = tensorstore.Context
            patch.setattr(tensorstore, "open", lambda spec, **given: opened(spec, context=context(settings), **given))
        yield


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    """The folder of weights and logits of the authors' code, which tests/reference/README.md describes."""
    folder = tmp_path_factory.mktemp("golden")
    shutil.unpack_archive(Path(__file__).parent / "reference" / "golden.tar.gz", folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of benchmark data and of the paper's tables; tests that need it are skipped where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("DCFORMER_FIXTURES", default))
    if not (folder / "benchdata").is_dir():
        pytest.skip(f"no benchmark data in {folder}; set DCFORMER_FIXTURES to the folder that holds benchdata/")
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(fixtures, tmp_path_factory) -> str:
    """GPT-NeoX's tokenizer beside a configuration of ours with 512 positions."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(fixtures / "benchdata" / "tokenizer" / "20B_tokenizer.json", folder / "tokenizer.json")
    (folder / "config.json").write_text('{"model_type": "dcformer", "max_position_embeddings": 512}')
    return str(folder)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="session")
def data_dir(fixtures) -> str:
    """Evaluation data, a folder per task."""
    return str(fixtures / "benchdata")
