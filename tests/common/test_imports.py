"""Imports inside the package point one way, and there is no circle between its files."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dcformer


PACKAGE = Path(dcformer.__file__).parent
# Lower rooms know nothing of higher ones. Entry points that only start a command may stand anywhere.
FLOORS = {
    "common": 0,
    "pretrained": 0,
    "operator and model": 1,
    "kernels": 2,
    "public": 3,
    "conversion": 4,
    "eval": 4,
    "analysis": 4,
    "head_tasks": 5,
    "generation": 5,
    "cards": 5,
    "serving": 5,
    "training": 6,
    "demo": 6,
    "bench": 7,
    "experiments": 7,
    "cli": 8,
    # vLLM finds it by its entry point; nothing imports it.
    "vllm": 9,
}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__main__.py" and path != PACKAGE / "__init__.py"
}


def imported_modules(module: str) -> Iterator[str]:
    """The modules of the package that one of them imports anywhere in its text, but for annotations alone."""
    path = MODULES[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_annotations = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    folder = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level == 0 or id(node) in for_annotations:
            continue
        base = folder[: len(folder) - node.level + 1] + (node.module.split(".") if node.module else [])
        for name in node.names:
            target = ".".join([*base, name.name])
            found = target if target in MODULES else ".".join(base)
            if found in MODULES and found != module:
                yield found


def room(module: str) -> str:
    first = module.split(".")[0]
    return first if first in FLOORS else "operator and model"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_import_points_up(module):
    own = room(module)
    for other in imported_modules(module):
        assert FLOORS[room(other)] < FLOORS[own] or room(other) == own, f"{module} imports {other}"


def test_no_file_imports_itself_by_way_of_others():
    waiting = {module: set(imported_modules(module)) for module in MODULES}
    while free := [module for module, needed in waiting.items() if not needed]:
        for module in free:
            del waiting[module]
        for needed in waiting.values():
            needed.difference_update(free)
    assert not waiting


def test_files_beside_the_model_import_nothing_of_a_folder():
    """Transformers copies them beside a checkpoint, without folders."""
    for module in (module for module in MODULES if "." not in module and room(module) == "operator and model"):
        assert all(room(other) == "operator and model" for other in imported_modules(module)), module
