"""The public names of the package; importing them registers the models with the Auto classes of Transformers."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from .common.architectures import add_to_transformers
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
from .modeling_dcformer import DCFormerForCausalLM, DCFormerModel, DCPythiaForCausalLM, DCPythiaModel
from .pretrained import pretrained_path


for _config, _model, _causal_lm in (
    (DCFormerConfig, DCFormerModel, DCFormerForCausalLM),
    (DCPythiaConfig, DCPythiaModel, DCPythiaForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)
    AutoTokenizer.register(_config, GPTNeoXTokenizer, exist_ok=True)

__all__ = [
    "ComposeSide",
    "ComposeWeights",
    "DCFormerConfig",
    "DCFormerForCausalLM",
    "DCFormerModel",
    "DCPythiaConfig",
    "DCPythiaForCausalLM",
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

_public: list[object] = [globals()[_name] for _name in __all__]
_classes = [value for value in _public if isinstance(value, type)]
add_to_transformers([_class for _class in _classes if issubclass(_class, PreTrainedConfig | PreTrainedModel)])
