"""Which modules of these models PEFT adapts if its user names none.

PEFT keeps one table a method, from model types to names of modules, to which nobody outside it can add but by importing
it. So the entries are made at the moment that PEFT looks: it asks the configuration for its values (`to_dict`) right
before it reads a table. Where PEFT is not in use nothing is imported and nothing happens.
"""

import re
import sys
from typing import Any


# GPT-NeoX fuses its projections as these models do, so PEFT's choice for it is the choice here, under our names.
_MODEL_OF_THE_SAME_LAYOUT = "gpt_neox"
_NAMES = {
    "query_key_value": "qkv_proj",
    "dense": "o_proj",
    "dense_h_to_4h": "up_proj",
    "dense_4h_to_h": "down_proj",
}
# PEFT has no choice for GPT-NeoX here; these are the norms that it tunes in Llama.
_NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
_TABLE = re.compile(r"TRANSFORMERS_MODELS_TO_\w+_MODULES_MAPPING")
_TABLE_OF_NORMS = "TRANSFORMERS_MODELS_TO_LNTUNING_TARGET_MODULES_MAPPING"


def register_peft_targets(model_type: str) -> None:
    """
    Add a model type to PEFT's tables, if PEFT has been imported; entries that are there already stay.

    Args:
        model_type: Of a configuration in this package.
    """
    constants = sys.modules.get("peft.utils.constants")
    for name, table in vars(constants).items() if constants else ():
        if not _TABLE.fullmatch(name):
            continue
        if name == _TABLE_OF_NORMS:
            table.setdefault(model_type, list(_NORMS))
        elif targets := _translated(table.get(_MODEL_OF_THE_SAME_LAYOUT)):
            table.setdefault(model_type, targets)


def _translated(targets: Any) -> list[str] | None:
    """Our names for modules of GPT-NeoX; None if one has no counterpart, since half a choice would be another one."""
    if not isinstance(targets, list) or not all(name in _NAMES for name in targets):
        return None
    return [_NAMES[name] for name in targets]
