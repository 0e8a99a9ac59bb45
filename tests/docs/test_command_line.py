"""docs/command_line.md: its first command prints what the page says."""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from dcformer.cli import app


PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")


def test_the_first_command_prints_what_the_page_says_and_does_not_repeat_itself():
    command, said = re.search(r"```bash\n(dcformer generate [^\n]*)\n```\n\n(.*?)\. ", PAGE, re.S).groups()
    printed = CliRunner().invoke(app, shlex.split(command)[1:], catch_exceptions=False).stdout
    lines = [line for line in printed.splitlines() if line]
    assert lines == re.findall(r"`(#.*?)`", said) and len(set(lines)) == len(lines) > 1
