"""examples/dcformer_tour.ipynb runs from top to bottom, and is committed without what it prints."""

import re
from pathlib import Path

import nbformat


FILE = Path(__file__).parents[2] / "examples" / "dcformer_tour.ipynb"


def test_the_tour_runs_and_shows_what_it_says(capsys, monkeypatch):
    import matplotlib

    matplotlib.use("agg")
    monkeypatch.chdir(FILE.parent)
    cells = [cell for cell in nbformat.read(FILE, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.id for cell in cells if cell.outputs or cell.execution_count is not None] == []
    namespace = {"__name__": "__main__"}
    for cell in cells:
        exec(compile(cell.source, f"{FILE.name} {cell.id}", "exec"), namespace)
    text = capsys.readouterr().out
    composed, plain = (float(loss) for loss in re.findall(r"-tiny: (\S+) nats", text))
    assert composed < plain
    before, after = (
        [float(number) for number in re.findall(r"-?\d\.\d+", re.search(rf"rows {when}: .*", text).group())]
        for when in ("before", "after")
    )
    assert set(before) == {1.0} and max(abs(total - 1) for total in after) > 0.1
    assert "hidden keys: 0.0" in text
    first, last = (float(loss) for loss in re.search(r"loss (\S+) -> (\S+)", text).groups())
    assert last < first - 1
