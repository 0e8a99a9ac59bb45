"""Model classes where tools look them up by name: among the attributes of Transformers.

TRL's trainers, `transformers serve` and pipelines that are given a path take the class that its config.json names from
there. Registration with the Auto classes does not reach them.
"""

import sys
from collections.abc import Iterable
from types import ModuleType


def add_to_transformers(classes: Iterable[type]) -> None:
    """Make classes attributes of the module `transformers`, under their own names."""
    modules = {id(module): module for module in _transformers_modules()}
    for module in modules.values():
        for added in classes:
            setattr(module, added.__name__, added)


def _transformers_modules() -> Iterable[ModuleType]:
    # Transformers executes its own __init__.py a second time when it imports its processors. Whoever imported it before
    # then holds another module than those who come after.
    yield sys.modules["transformers"]
    for holder in list(sys.modules.values()):
        held = getattr(holder, "__dict__", {}).get("transformers")
        if isinstance(held, ModuleType) and held.__name__ == "transformers":
            yield held
