"""PEFT: the modules of our models that its methods adapt where `target_modules` is not given."""

import functools
import sys
from typing import Any

from ..configuration_dcformer import DCFormerConfig, DCPythiaConfig


# GPT-NeoX has fused projections too: its modules -> ours.
_LIKE_GPT_NEOX = {"query_key_value": "qkv_proj", "dense_4h_to_h": "down_proj"}
_NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]


def add_peft_targets() -> None:
    """
    Let PEFT find the default modules of our models, whether it is imported before or after this package.

    It has no function for that: it looks into tables of its own, by model type, which do not exist before it is
    imported, and importing it takes two seconds. Just before it looks, it calls `to_dict` of the model's configuration.
    So that method, of our classes, adds our entries if PEFT is imported by then.
    """
    to_dict = DCFormerConfig.to_dict

    @functools.wraps(to_dict)
    def to_dict_for_peft(self: DCFormerConfig) -> dict[str, Any]:
        if (constants := sys.modules.get("peft.utils.constants")) is not None:
            fill_tables(vars(constants))
        return to_dict(self)

    DCFormerConfig.to_dict = to_dict_for_peft  # type: ignore[method-assign]


def fill_tables(tables: dict[str, Any]) -> None:
    """
    Add the modules that correspond to those of GPT-NeoX, and for LayerNorm tuning all norms, to PEFT's tables.

    Args:
        tables: Dicts by model type, one for each method, by their names in `peft.utils.constants`. Entries that are
            there stay; there is no entry where only some of the modules have a counterpart.
    """
    for name, table in list(tables.items()):
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict):
            alike = [_LIKE_GPT_NEOX.get(target) for target in table.get("gpt_neox", ())]
            targets = _NORMS if "LNTUNING" in name else alike
            if targets and None not in targets:
                for config in (DCFormerConfig, DCPythiaConfig):
                    table.setdefault(config.model_type, list(targets))
