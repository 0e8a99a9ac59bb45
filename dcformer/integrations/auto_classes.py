"""The Auto classes of Transformers, by which checkpoints are loaded."""

from transformers import AutoConfig, AutoTokenizer, GPTNeoXTokenizer
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

from .. import modeling_dcformer, modeling_dcvit
from ..configuration_dcformer import DCFormerConfig, DCPythiaConfig
from ..hub_dcformer import register_model
from ..modeling_dcvit import DCViTConfig


def register_auto_classes() -> None:
    """Register configurations, models, tokenizers and image processors under our model types."""
    for config in (DCFormerConfig, DCPythiaConfig, DCViTConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for model in (*modeling_dcformer.MODELS, *modeling_dcvit.MODELS):
        register_model(model)
    for config in (DCFormerConfig, DCPythiaConfig):
        AutoTokenizer.register(config, GPTNeoXTokenizer, exist_ok=True)
    # By name, as Transformers does for its models: the classes themselves would bring Pillow or torchvision.
    processors = {"torchvision": "ViTImageProcessor", "pil": "ViTImageProcessorPil"}
    IMAGE_PROCESSOR_MAPPING.register(DCViTConfig, processors, exist_ok=True)
