"""Docstrings say what something is or does, in words that can be quoted alone."""

import ast
import re
from pathlib import Path


ROOT = Path(__file__).parents[2]
FOLDERS = ("dcformer", "benchmarks", "research", "scripts")
# A docstring begins with none of these words.
OPENINGS = "of as and likewise from by for with if in also where which what how whether when like to on at then or"
BAD = re.compile(rf"(?:the same|{'|'.join(OPENINGS.split())})\b", re.IGNORECASE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_docstrings_begin_with_a_verb_or_a_noun():
    offenders = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text is not None and (BAD.match(text) or not re.match(r"[A-Z`(\[{\d]", text)):
                line = node.body[0].lineno
                offenders.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0] if text else ''}")
    assert not offenders, "\n".join(offenders)
