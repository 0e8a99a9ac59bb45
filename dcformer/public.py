"""The public names of the package; importing them registers the models with the Auto classes of Transformers."""

from typing import Any

from transformers import AutoConfig, AutoTokenizer, GPTNeoXTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

from .common.architectures import add_to_transformers
from .configuration_dcformer import DCFormerConfig, DCPythiaConfig
from .configuration_dcvit import DCViTConfig
from .dcmha import (
    ComposeSide,
    ComposeWeights,
    compose,
    composed_attention,
    implementations,
    register_implementation,
)
from .dcmha_cache import cache_bytes_per_token
from .dcmha_mask import Visibility
from .kernels import register as register_kernels
from .kernels.workspace import set_workspace_bytes
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
from .modeling_dcvit import DCViTForImageClassification, DCViTModel
from .module import DCMultiheadAttention
from .pretrained import pretrained_path
from .sharing_dcformer import AUTO_CLASSES


register_kernels()
for _config in (DCFormerConfig, DCPythiaConfig, DCViTConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
for _config in (DCFormerConfig, DCPythiaConfig):
    AutoTokenizer.register(_config, GPTNeoXTokenizer, exist_ok=True)

# By name, as Transformers does for its own models: the classes themselves would bring Pillow or torchvision.
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

_public: list[Any] = [globals()[_name] for _name in __all__]
_classes = [value for value in _public if isinstance(value, type)]
_models: list[Any] = [_class for _class in _classes if issubclass(_class, PreTrainedModel)]
for _model in _models:
    _ending = _model.__name__.removeprefix(_model.config_class.__name__.removesuffix("Config"))
    _auto_class, _ = AUTO_CLASSES[_ending]
    getattr(modeling_auto, _auto_class).register(_model.config_class, _model, exist_ok=True)
add_to_transformers([_class for _class in _classes if issubclass(_class, PreTrainedConfig | PreTrainedModel)])
