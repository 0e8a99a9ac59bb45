"""Looking inside a model: what its attention heads do before and after they are composed."""

from .attention import AttentionInputs, LayerAttention, attention_inputs, layer_attention


__all__ = ["AttentionInputs", "LayerAttention", "attention_inputs", "layer_attention"]
