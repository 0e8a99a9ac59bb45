"""examples/dcformer_tour.ipynb runs from top to bottom, and is committed without what it prints."""

import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient


ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "dcformer_tour.ipynb"


@pytest.fixture(scope="module")
def ran():
    """The notebook after a run by this interpreter, with the package of this checkout."""
    notebook = nbformat.read(FILE, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import sys; print(sys.executable, dcformer.__file__, sep='\\n')"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT))
        patched.setenv("OMP_NUM_THREADS", "1")
        # Without kernels that are installed elsewhere under the same name.
        manager = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
        place = {"metadata": {"path": str(FILE.parent)}}
        try:
            NotebookClient(notebook, km=manager, timeout=300, resources=place).execute()
        finally:
            run_sync(manager.shutdown_kernel)(now=True)  # the client ends only kernels of its own managers
    return notebook


def printed(notebook) -> str:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def test_it_is_committed_without_outputs():
    cells = [cell for cell in nbformat.read(FILE, as_version=4).cells if cell.cell_type == "code"]
    assert len(cells) > 5
    assert [cell.id for cell in cells if cell.outputs or cell.execution_count is not None] == []


def test_it_runs_with_this_interpreter_and_this_checkout(ran):
    interpreter, package = printed(ran).split()[-2:]
    assert interpreter == sys.executable
    assert Path(package) == ROOT / "dcformer" / "__init__.py"


def test_both_models_read_the_question(ran):
    shares = [int(share) for share in re.findall(r"-tiny: (\d+) % right", printed(ran))]
    assert len(shares) == 2 and min(shares) >= 90


def test_attention_is_shown_before_and_after_composition(ran):
    text = printed(ran)
    before, after = (
        [float(number) for number in re.findall(r"-?\d\.\d+", re.search(rf"rows {when}: .*", text).group())]
        for when in ("before", "after")
    )
    assert before == [1.0] * 4 and max(abs(total - 1) for total in after) > 0.1
    assert "hidden keys: 0.0" in text
    pictures = [
        output for cell in ran.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 2


def test_some_steps_of_training_lower_the_loss(ran):
    first, last = (float(loss) for loss in re.search(r"loss (\S+) -> (\S+)", printed(ran)).groups())
    assert last < first - 1


def test_its_links_lead_somewhere():
    for cell in nbformat.read(FILE, as_version=4).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)]+)\)", cell.source):
                assert (FILE.parent / target).exists(), target
