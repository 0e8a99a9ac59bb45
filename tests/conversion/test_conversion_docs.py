"""docs/conversion.md: its mapping tables are the code's, and its worked example runs."""

import re
from pathlib import Path

import pytest

from dcformer.conversion.mapping import MAXTEXT_ROWS, PAX_ROWS


DOCS = Path(__file__).parents[2] / "docs" / "conversion.md"


def rendered(rows) -> str:
    lines = ["| array | axes | parameter | its axes |", "|---|---|---|---|"]
    for row in rows:
        array = row.array.replace("{sub}", "{s}")
        parameter = row.parameter + (f" ({row.part})" if row.part else "")
        axes = row.axes + (f" ({row.pick[0]} = {row.pick[1]})" if row.pick else "")
        lines.append(f"| `{array}` | {axes} | {parameter} | {row.order or 'as is'} |")
    return "\n".join(lines)


@pytest.mark.parametrize("name, rows", [("maxtext", MAXTEXT_ROWS), ("pax", PAX_ROWS)])
def test_the_tables_are_the_codes(name, rows):
    shown = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- /{name} -->", DOCS.read_text(), re.S).group(1)
    assert shown == rendered(rows)


def test_the_worked_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    exec(compile(example, str(DOCS), "exec"), {})
    assert (tmp_path / "back" / "README.md").is_file()
