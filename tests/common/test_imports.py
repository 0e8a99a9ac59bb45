"""Imports inside the package go in one direction, by public names, and without circles."""

import ast
import functools
import importlib
from pathlib import Path

import dcformer


PACKAGE = Path(dcformer.__file__).parent
# Parts import only those of lower floors. Only vLLM imports the plugin.
FLOORS = (
    ("common", "pretrained"),
    ("model",),  # the files that travel with a checkpoint, and those beside them
    ("kernels", "integrations"),
    ("public",),
    ("loading", "model_card"),
    ("conversion", "analysis", "head_tasks"),
    ("eval",),
    ("generation", "serving", "cards"),
    ("training", "demo"),
    ("experiments",),
    ("cli", "vllm"),
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__main__.py" and path != PACKAGE / "__init__.py"
}


@functools.cache
def imported(module):
    """Modules of the package that one of them imports anywhere in its text, except only for annotations."""
    others = set()
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    tests = (node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    for_annotations = {id(inner) for node in tests for inner in ast.walk(node)}
    folder = module.split(".")[: None if MODULES[module].name == "__init__.py" else -1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in for_annotations:
            base = [*folder[: len(folder) - node.level + 1], *(node.module.split(".") if node.module else [])]
            names = {".".join([*base, name.name]) for name in node.names} | {".".join(base)}
            if len(base) == 1:  # a module may be public
                package = importlib.import_module(f"dcformer.{base[0]}")
                names -= {f"{base[0]}.{name}" for name in getattr(package, "__all__", ())}
            others |= (names & MODULES.keys()) - {module}
    return others


def part(module):
    first = module.split(".")[0]
    return first if first in FLOOR else "model"


def test_imports_point_down_and_name_what_is_public():
    for module, other in ((name, other) for name in sorted(MODULES) for other in imported(name)):
        assert part(other) == part(module) or FLOOR[part(other)] < FLOOR[part(module)], f"{module} imports {other}"
        is_inside = "." in other and part(other) not in ("common", part(module))
        assert not is_inside or part(module) in ("cli", "vllm", "public"), f"{module} imports the inside {other}"
        if part(module) == "model" and "." not in module:  # Transformers copies these files, without folders
            assert "." not in other, f"{module} imports {other}"


def test_no_two_files_are_called_alike():
    names = [path.name for path in MODULES.values() if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


def test_there_are_no_circular_imports():
    waiting = {name: {other for other in imported(name) if not name.startswith(f"{other}.")} for name in MODULES}
    while free := [module for module, needed in waiting.items() if not needed]:
        for module in free:
            del waiting[module]
        for needed in waiting.values():
            needed.difference_update(free)
    assert not waiting
