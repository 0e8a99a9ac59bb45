"""Small models with weights of ordinary size, so that every branch of the composition moves the logits."""

import math
from pathlib import Path

import torch

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM


#: A trained model that answers questions: the composing one of the study of head tasks.
ANSWERS = str(Path(__file__).parents[1] / "research" / "head_tasks" / "models" / "dcformer")

TINY = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"max_position_embeddings": 64, "sliding_window": 6, "bos_token_id": None, "eos_token_id": None}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
NOT_COMPOSED = {"compose_pre": False, "compose_post": False}
AS_GPT_2 = {"mlp_type": "plain", "hidden_act": "gelu", "norm_type": "layer_norm", "position_embedding_type": "learned"}

# Every architecture that the configuration promises to cover by values alone.
VARIANTS = {
    "dcformer": {},
    "dcpythia": {"model_type": "dcpythia"},
    "mlp_gate_and_one_global_in_four": {
        "mlp_gate_dim": 4,
        "num_hidden_layers": 4,
        "layer_types": [LOCAL, GLOBAL, LOCAL, LOCAL],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "plain_gated_transformer": NOT_COMPOSED,
    "plain_transformer_with_learned_positions": {**NOT_COMPOSED, **AS_GPT_2},
    "talking_heads": {"compose_static": True, "compose_query": False, "compose_key": False},
    "low_rank_only": {"compose_gate": False},
    "gates_only": {"compose_low_rank": False},
    "all_branches": {"compose_static": True},
    "query_wise": {"compose_key": False},
    "key_wise": {"compose_query": False},
    "pre_only": {"compose_post": False},
    "post_only": {"compose_pre": False},
    "rank_1": {"compose_rank": 1},
    "rank_4": {"compose_rank": 4},
    "seven_to_one": {"num_hidden_layers": 8, "layer_types": [LOCAL, GLOBAL] + [LOCAL] * 6},
    "all_global": {"sliding_window": None},
    "grouped": {"compose_groups": 2, "compose_rank": 1},
    "wide_heads": {"head_dim": 12},
    "grouped_query_attention": {"num_key_value_heads": 2},
    "three_to_one": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "compose_groups": 3},
    "no_qk_norm_with_biases": {"qk_norm": False, "attention_bias": True, "mlp_bias": True},
    "one_layer": {"compose_layers": [1]},
    "tanh_gelu": {"compose_activation": "gelu_pytorch_tanh"},
}


def tiny_config(variant: str = "dcformer", **overrides) -> DCFormerConfig:
    values = {**TINY, **VARIANTS[variant], **overrides}
    config_class = DCPythiaConfig if values.pop("model_type", None) == "dcpythia" else DCFormerConfig
    return config_class(**values)


def tiny_model(variant: str = "dcformer", seed: int = 0, **overrides) -> DCFormerForCausalLM:
    """A model in evaluation mode whose weights keep activations near 1 and compose strongly."""
    config = tiny_config(variant, **overrides)
    model_class = DCPythiaForCausalLM if isinstance(config, DCPythiaConfig) else DCFormerForCausalLM
    return strengthened(model_class(config), seed)


def strengthened(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            elif name.endswith("low_rank_weight"):
                parameter.copy_(noise / math.sqrt(parameter.shape[2]))
            elif "compose" in name:
                parameter.copy_(noise / math.sqrt(parameter.shape[0 if "static" not in name else -1]))
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[1]))
    return model.eval()


def random_tokens(batch: int, length: int, vocab_size: int = TINY["vocab_size"], seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


class Wrapper(torch.nn.Module):
    """Stands in the place of a module and calls it, as what steers a model or calibrates its quantisation does."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def wrap(model: torch.nn.Module, names: list[str]) -> None:
    for name in names:
        model.set_submodule(name, Wrapper(model.get_submodule(name)))
