"""The adapter for the bridge of TransformerLens: its hooks and its cache see the four maps of every layer."""

from functools import partial

from torch import nn
from transformer_lens import model_bridge as bridge
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import DelegatedAttentionBlockBridge
from transformers import PreTrainedModel

from ..modeling_dcformer import ATTENTION_MAPS


class MapPoint(HookPoint, nn.Identity):
    """A hook point that is still an identity to an attention layer, which computes no map for it without hooks."""


class DCFormerAttentionBridge(bridge.AttentionBridge):
    """An attention layer with a hook point for each map: `hook_scores`, `hook_composed_scores` and so on."""

    supports_split_qkv_fork = False

    def set_original_component(self, original_component: nn.Module) -> None:
        """Replace the maps' modules by hook points; the layer computes a map only if its module has hooks."""
        super().set_original_component(original_component)
        for name in ATTENTION_MAPS:
            point = MapPoint()
            point.pos_dim = -2
            setattr(original_component, name, point)
            setattr(self, f"hook_{name}", point)
        # The names that other models have: the scores before the softmax, and the weights that multiply the values.
        self.hook_attn_scores, self.hook_pattern = self.hook_composed_scores, self.hook_composed_weights


class DCFormerAdapter(bridge.ArchitectureAdapter):
    """Names the modules of DCFormer and DCPythia for TransformerLens; what they compute does not change."""

    supports_compatibility_mode = False  # it folds norms into projections, but compose weights read the norms too
    supports_hf_output_attentions = False

    def prepare_model(self, hf_model: PreTrainedModel) -> None:
        """Map the modules of this model, by its configuration."""
        config = hf_model.config
        config.output_attentions = False  # the bridge asks every forward for them, and they are a map
        self.cfg.normalization_type = "RMS" if config.norm_type == "rms_norm" else "LN"
        self.cfg.default_prepend_bos = False
        norm = partial(bridge.NormalizationBridge, config=self.cfg, use_native_layernorm_autograd=True)
        modules = {
            "ln1": norm("input_layernorm"),
            "attn": DCFormerAttentionBridge(
                "self_attn", self.cfg, submodules={"o": bridge.LinearBridge("o_proj")}, fused_qkv=True
            ),
            "ln2": norm("post_attention_layernorm"),
            "mlp": self._gated_mlp() if config.mlp_type == "gated" else self._ungated_mlp(),
        }
        blocks = DelegatedAttentionBlockBridge("model.layers", submodules=modules)
        if config.parallel_residual:
            del blocks.hook_aliases["hook_resid_mid"]
        self.component_mapping = {"embed": bridge.EmbeddingBridge("model.embed_tokens"), "blocks": blocks}
        self.component_mapping |= {"ln_final": norm("model.norm"), "unembed": bridge.UnembeddingBridge("lm_head")}
        # Set last: the bridges of rotary attention would add hook points of rotated queries and keys, never called.
        self.cfg.positional_embedding_type = "rotary" if config.position_embedding_type == "rope" else "standard"


# `boot_transformers` of TransformerLens 4.3 looks up the architecture here before it loads entry points.
SUPPORTED_ARCHITECTURES |= dict.fromkeys(("DCFormerForCausalLM", "DCPythiaForCausalLM"), DCFormerAdapter)
