"""Model classes among the attributes of Transformers, where TRL, `transformers serve` and pipelines look them up."""

import sys
from collections.abc import Iterable
from types import ModuleType


def add_to_transformers(classes: Iterable[type]) -> None:
    """Make classes attributes of the module `transformers`, under their names."""
    # Transformers executes its __init__.py a second time when it imports its processors: modules that imported it
    # before then hold another module object than those that import it later.
    held = [getattr(holder, "__dict__", {}).get("transformers") for holder in list(sys.modules.values())]
    modules = [module for module in held if isinstance(module, ModuleType) and module.__name__ == "transformers"]
    for module in (sys.modules["transformers"], *modules):
        for added in classes:
            setattr(module, added.__name__, added)
