"""The public names of the package; importing them registers the models with the Auto classes of Transformers."""

import importlib.abc
import importlib.util
import sys
from types import ModuleType
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GPTNeoXTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

from .common.architectures import add_to_transformers
from .compose_dcformer import cache_bytes_per_token
from .configuration_dcformer import DCFormerConfig, DCPythiaConfig
from .dcmha import (
    ComposeSide,
    ComposeWeights,
    Visibility,
    compose,
    composed_attention,
    implementations,
    register_implementation,
)
from .kernels import register as register_kernels
from .kernels import set_workspace_bytes
from .modeling_dcformer import (
    DCFormerForCausalLM,
    DCFormerForQuestionAnswering,
    DCFormerForSequenceClassification,
    DCFormerForTokenClassification,
    DCFormerModel,
    DCPythiaForCausalLM,
    DCPythiaForQuestionAnswering,
    DCPythiaForSequenceClassification,
    DCPythiaForTokenClassification,
    DCPythiaModel,
)
from .modeling_dcvit import DCViTConfig, DCViTForImageClassification, DCViTModel
from .module import DCMultiheadAttention
from .parallel_dcformer import STYLE as STYLE  # puts its style into the tensor parallel plan
from .pretrained import pretrained_path


register_kernels()
for _config in (DCFormerConfig, DCPythiaConfig, DCViTConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
for _config in (DCFormerConfig, DCPythiaConfig):
    AutoTokenizer.register(_config, GPTNeoXTokenizer, exist_ok=True)

# By name, as Transformers does for its models: the classes themselves would bring Pillow or torchvision.
IMAGE_PROCESSOR_MAPPING.register(
    DCViTConfig, {"torchvision": "ViTImageProcessor", "pil": "ViTImageProcessorPil"}, exist_ok=True
)

__all__ = [
    "ComposeSide",
    "ComposeWeights",
    "DCFormerConfig",
    "DCFormerForCausalLM",
    "DCFormerForQuestionAnswering",
    "DCFormerForSequenceClassification",
    "DCFormerForTokenClassification",
    "DCFormerModel",
    "DCMultiheadAttention",
    "DCPythiaConfig",
    "DCPythiaForCausalLM",
    "DCPythiaForQuestionAnswering",
    "DCPythiaForSequenceClassification",
    "DCPythiaForTokenClassification",
    "DCPythiaModel",
    "DCViTConfig",
    "DCViTForImageClassification",
    "DCViTModel",
    "Visibility",
    "cache_bytes_per_token",
    "compose",
    "composed_attention",
    "implementations",
    "pretrained_path",
    "register_implementation",
    "set_workspace_bytes",
]

_classes = [value for value in map(globals().get, __all__) if isinstance(value, type)]
add_to_transformers([_class for _class in _classes if issubclass(_class, PreTrainedConfig | PreTrainedModel)])


_PEFT_TABLES = "peft.utils.constants"


def _add_peft_targets(constants: ModuleType) -> None:
    """
    Add default `target_modules` for our model types: those of GPT-NeoX, which has fused projections too, and for
    LayerNorm tuning all norms. `constants` is PEFT's module of tables, one per method.
    """
    names = {"query_key_value": "qkv_proj", "dense_4h_to_h": "down_proj"}
    for name, table in vars(constants).items():
        if not name.startswith("TRANSFORMERS_MODELS_TO_") or not isinstance(table, dict):
            continue
        targets = [names.get(target) for target in table.get("gpt_neox", ())]
        if "LNTUNING" in name:
            targets = ["input_layernorm", "post_attention_layernorm", "norm"]
        if targets and None not in targets:  # no default where only some of the modules have a counterpart
            for config in (DCFormerConfig, DCPythiaConfig):
                table.setdefault(config.model_type, list(targets))


class _WhenPeftIsImported(importlib.abc.MetaPathFinder):
    """Adds the defaults when PEFT is imported; importing PEFT here would take two seconds."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _PEFT_TABLES:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_add(module: ModuleType) -> None:
            execute(module)
            _add_peft_targets(module)

        spec.loader.exec_module = execute_and_add
        return spec


if _PEFT_TABLES in sys.modules:
    _add_peft_targets(sys.modules[_PEFT_TABLES])
else:
    sys.meta_path.insert(0, _WhenPeftIsImported())
