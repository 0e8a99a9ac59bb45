"""PEFT: the modules of our models that its methods adapt where `target_modules` is not given."""

import sys
from typing import Any

from ..configuration_dcformer import DCFormerConfig, DCPythiaConfig


# GPT-NeoX has fused projections too: its modules -> ours.
_LIKE_GPT_NEOX = {"query_key_value": "qkv_proj", "dense_4h_to_h": "down_proj"}
_values_of = DCFormerConfig.to_dict
_NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]


def add_peft_targets() -> None:
    """
    Let PEFT find the default modules of our models, whether it is imported before or after this package.

    It has no function for that: it looks into tables of its own, by model type, which do not exist before it is
    imported, and importing it takes two seconds. Just before, it asks the model's configuration for its values. So that
    is where our entries are added.
    """
    DCFormerConfig.to_dict = _to_dict  # type: ignore[method-assign]


def _to_dict(self: DCFormerConfig) -> dict[str, Any]:
    """As the base class; adds our entries to the tables of PEFT if it is imported."""
    if (constants := sys.modules.get("peft.utils.constants")) is not None:
        fill_tables(vars(constants))
    return _values_of(self)


def fill_tables(tables: dict[str, Any]) -> None:
    """
    Add the modules that correspond to those of GPT-NeoX, and for LayerNorm tuning all norms, to PEFT's tables.

    Args:
        tables: Dicts by model type, one for each method, by their names in `peft.utils.constants`. Entries that are
            there stay; there is no entry where only some of the modules have a counterpart.
    """
    for name, table in tables.items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict):
            alike = [_LIKE_GPT_NEOX.get(target) for target in table.get("gpt_neox", ())]
            targets = _NORMS if "LNTUNING" in name else alike
            if targets and None not in targets:
                for config in (DCFormerConfig, DCPythiaConfig):
                    table.setdefault(config.model_type, list(targets))
