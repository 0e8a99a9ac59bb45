"""The public names of the package, and the list of what importing it changes in other packages."""

from .cache_size import cache_bytes_per_token
from .composing import compose_attention
from .configuration_dcformer import DCFormerConfig, DCPythiaConfig
from .dcmha import (
    Backend,
    composed_attention,
    explain_choice,
    implementations,
    register_backend,
    register_implementation,
)
from .integrations import add_peft_targets, add_tensor_parallel_plan, register_auto_classes
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
from .plain_dcformer import compose
from .pretrained import pretrained_path
from .types_dcformer import AttentionInputs, ComposeSide, ComposeWeights
from .visibility_dcformer import Visibility


# All that importing this package changes in others.
for _integrate in (register_kernels, register_auto_classes, add_tensor_parallel_plan, add_peft_targets):
    _integrate()

__all__ = [
    "AttentionInputs",
    "Backend",
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
    "compose_attention",
    "composed_attention",
    "explain_choice",
    "implementations",
    "pretrained_path",
    "register_backend",
    "register_implementation",
    "set_workspace_bytes",
]
