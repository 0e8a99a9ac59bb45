"""The worked example of docs/conversion.md runs."""

import re
from pathlib import Path


DOCS = Path(__file__).parents[2] / "docs" / "conversion.md"


def test_the_worked_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    exec(compile(example, str(DOCS), "exec"), {})
    assert (tmp_path / "back" / "README.md").is_file()
