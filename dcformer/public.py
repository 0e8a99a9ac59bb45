"""The public names of the package; importing them registers the models with the Auto classes of Transformers."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GPTNeoXTokenizer,
)

from .configuration_dcformer import DCFormerConfig, DCPythiaConfig
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
from .pretrained import pretrained_path


AUTO_CLASSES = {
    AutoModel: (DCFormerModel, DCPythiaModel),
    AutoModelForCausalLM: (DCFormerForCausalLM, DCPythiaForCausalLM),
    AutoModelForSequenceClassification: (DCFormerForSequenceClassification, DCPythiaForSequenceClassification),
    AutoModelForTokenClassification: (DCFormerForTokenClassification, DCPythiaForTokenClassification),
    AutoModelForQuestionAnswering: (DCFormerForQuestionAnswering, DCPythiaForQuestionAnswering),
}
for _config in (DCFormerConfig, DCPythiaConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoTokenizer.register(_config, GPTNeoXTokenizer, exist_ok=True)
for _auto_class, _models in AUTO_CLASSES.items():
    for _model in _models:
        _auto_class.register(_model.config_class, _model, exist_ok=True)

__all__ = [
    "ComposeSide",
    "ComposeWeights",
    "DCFormerConfig",
    "DCFormerForCausalLM",
    "DCFormerForQuestionAnswering",
    "DCFormerForSequenceClassification",
    "DCFormerForTokenClassification",
    "DCFormerModel",
    "DCPythiaConfig",
    "DCPythiaForCausalLM",
    "DCPythiaForQuestionAnswering",
    "DCPythiaForSequenceClassification",
    "DCPythiaForTokenClassification",
    "DCPythiaModel",
    "Visibility",
    "cache_bytes_per_token",
    "compose",
    "composed_attention",
    "composed_attention_reference",
    "implementations",
    "pretrained_path",
    "register_implementation",
]
