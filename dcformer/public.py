"""The public names of the package; importing them registers the models with the Auto classes of Transformers."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    GPTNeoXTokenizer,
)
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

from .configuration_dcformer import DCFormerConfig, DCPythiaConfig
from .configuration_dcvit import DCViTConfig
from .dcmha import (
    ComposeSide,
    ComposeWeights,
    compose,
    composed_attention,
    composed_attention_reference,
    implementations,
    register_implementation,
)
from .dcmha_cache import cache_bytes_per_token
from .dcmha_mask import Visibility
from .modeling_dcformer import DCFormerForCausalLM, DCFormerModel, DCPythiaForCausalLM, DCPythiaModel
from .modeling_dcvit import DCViTForImageClassification, DCViTModel
from .module import DCMultiheadAttention
from .pretrained import pretrained_path


for _config, _model, _causal_lm in (
    (DCFormerConfig, DCFormerModel, DCFormerForCausalLM),
    (DCPythiaConfig, DCPythiaModel, DCPythiaForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)
    AutoTokenizer.register(_config, GPTNeoXTokenizer, exist_ok=True)

AutoConfig.register(DCViTConfig.model_type, DCViTConfig, exist_ok=True)
AutoModel.register(DCViTConfig, DCViTModel, exist_ok=True)
AutoModelForImageClassification.register(DCViTConfig, DCViTForImageClassification, exist_ok=True)
# By name, as Transformers does for its own models: the classes themselves would bring Pillow or torchvision.
IMAGE_PROCESSOR_MAPPING.register(
    DCViTConfig, {"torchvision": "ViTImageProcessor", "pil": "ViTImageProcessorPil"}, exist_ok=True
)

__all__ = [
    "ComposeSide",
    "ComposeWeights",
    "DCFormerConfig",
    "DCFormerForCausalLM",
    "DCFormerModel",
    "DCMultiheadAttention",
    "DCPythiaConfig",
    "DCPythiaForCausalLM",
    "DCPythiaModel",
    "DCViTConfig",
    "DCViTForImageClassification",
    "DCViTModel",
    "Visibility",
    "cache_bytes_per_token",
    "compose",
    "composed_attention",
    "composed_attention_reference",
    "implementations",
    "pretrained_path",
    "register_implementation",
]
