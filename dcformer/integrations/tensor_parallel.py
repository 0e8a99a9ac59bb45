"""Tensor parallelism of Transformers: the style by which processes share the heads of an attention layer."""

from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from ..configuration_dcformer import DCFormerConfig
from ..parallel_dcformer import AttentionByHeads


STYLE = "dcformer_attention"


def add_tensor_parallel_plan() -> None:
    """
    Register the style of `parallel_dcformer`, and name it in the plan of the configurations, in place of the plan by
    which every process computes all heads and which code beside a checkpoint keeps.
    """
    ALL_PARALLEL_STYLES.register(STYLE, AttentionByHeads())
    mlp = {name: style for name, style in DCFormerConfig.base_model_tp_plan.items() if ".mlp." in name}
    DCFormerConfig.base_model_tp_plan = {"layers.*.self_attn": STYLE, **mlp}
