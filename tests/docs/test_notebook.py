"""examples/dcformer_tour.ipynb runs from top to bottom, and holds what it prints and draws."""

import base64
import io
import re
import runpy
from pathlib import Path

import nbformat
import pytest
from matplotlib import pyplot
from matplotlib.image import imread


FILE = Path(__file__).parents[2] / "examples" / "dcformer_tour.ipynb"
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
DEPRECATED = re.compile(r"^\[transformers\].*\n", re.MULTILINE)  # what older versions say of newer ones


def printed(notebook) -> list[str]:
    """What each code cell prints, on stdout and, which should be nothing, on stderr."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [DEPRECATED.sub("", "".join(output.get("text", "") for output in cell.outputs)) for cell in cells]


def drawings(notebook) -> list:
    """(height, width, channels) of each picture, from 0 to 1."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output.data["image/png"] for output in outputs if output.output_type == "display_data"]
    return [imread(io.BytesIO(base64.b64decode(picture))) for picture in pictures]


def test_the_tour_runs_and_prints_what_is_stored(capsys, monkeypatch):
    """In this process, since another one takes longer to import the libraries than to run it."""
    stored, shown = nbformat.read(FILE, as_version=4), []
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(pyplot.get_fignums()))
    namespace, fresh = {}, []
    for cell in stored.cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, str(FILE), "exec"), namespace)
            captured = capsys.readouterr()
            fresh.append(captured.out + DEPRECATED.sub("", captured.err))
    pyplot.close("all")
    for old, new in zip(printed(stored)[1:], fresh[1:], strict=True):
        assert NUMBER.sub("#", old) == NUMBER.sub("#", new)
        numbers = [[float(number.replace(",", "")) for number in NUMBER.findall(text)] for text in (old, new)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=0.02)  # others round otherwise
    assert len(drawings(stored)) == 2 and shown == [[1], [1, 2]]


def test_what_the_tour_prints_and_draws_is_stored_without_what_depends_on_the_machine(tmp_path):
    code = "import sys; print('a remark', file=sys.stderr)", "print(sum([1, 2]))"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in code])
    nbformat.write(notebook, tmp_path / FILE.name)
    run = runpy.run_path(str(FILE.with_name("run_tour.py")))["run"]
    run.__globals__["FILE"] = tmp_path / FILE.name
    fresh = run()
    assert printed(fresh) == ["", "3\n"] and fresh.metadata == {}


def test_the_stored_outputs_say_and_draw_what_the_text_says_and_come_from_no_certain_machine():
    stored = nbformat.read(FILE, as_version=4)
    text = "".join(printed(stored))
    composed, plain = (float(loss) for loss in re.findall(r"-tiny: (\S+) nats", text))
    assert composed < plain
    before, after = (
        [float(number) for number in re.findall(r"-?\d+\.\d+", re.search(rf"rows {when}: .*", text).group())]
        for when in ("before", "after")
    )
    assert set(before) == {1.0} and max(abs(total - 1) for total in after) > 0.1
    assert "largest masked weight: 0.0" in text
    first, last = (float(loss) for loss in re.search(r"loss (\S+) -> (\S+)", text).groups())
    assert last < first - 1
    outputs = [output for cell in stored.cells for output in cell.get("outputs", [])]
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert not re.search(r"(?i)warning|site-packages|/(?:home|root|tmp|work|usr)/", text)
    assert FILE.stat().st_size < 300_000
    assert set(stored.metadata) == {"kernelspec", "language_info"}
    assert [cell.id for cell in stored.cells if cell.metadata] == []
    figure = drawings(stored)[0][..., :3]  # every map is drawn, with blue above zero
    height, width = figure.shape[0] // 2, figure.shape[1] // 4
    for row in range(2):
        for column in range(4):
            part = figure[row * height : (row + 1) * height, column * width : (column + 1) * width]
            redness = part[..., 0] - part[..., 2]
            assert (redness < -0.05).sum() > 200 and ((redness > 0.05).sum() > 200) == (row == 1), (row, column)
