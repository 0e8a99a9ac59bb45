"""Names of models as tables and plots print them."""

from __future__ import annotations

import re
from collections.abc import Iterable


def short_names(models: Iterable[str]) -> dict[str, str]:
    """What tables call models: paths lose the folders that no other model needs to be told apart."""
    models = list(models)
    names = {}
    for model in models:
        parts = [part for part in re.split(r"[/\\]", model) if part]
        is_path = bool(re.match(r"[/\\.~]|[A-Za-z]:", model)) and parts
        candidates = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)] if is_path else []
        others = [other.replace("\\", "/").rstrip("/") for other in models if other != model]
        unique = (
            name for name in candidates if not any(other == name or other.endswith("/" + name) for other in others)
        )
        names[model] = next(unique, model)
    return names
