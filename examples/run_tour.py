"""Run dcformer_tour.ipynb and store what it prints and draws in it: python examples/run_tour.py"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient


FILE = Path(__file__).with_name("dcformer_tour.ipynb")


def run() -> nbformat.NotebookNode:
    """The notebook with fresh outputs, and without what depends on the machine: times, versions, remarks of imports."""
    notebook = nbformat.read(FILE, as_version=4)
    metadata = notebook.metadata.copy()
    resources = {"metadata": {"path": str(FILE.parent)}}
    NotebookClient(
        notebook, kernel_name="python3", record_timing=False, coalesce_streams=True, resources=resources
    ).execute()
    notebook.metadata = metadata
    imports = next(cell for cell in notebook.cells if cell.cell_type == "code")
    imports.outputs = []
    return notebook


if __name__ == "__main__":
    nbformat.write(run(), FILE)
