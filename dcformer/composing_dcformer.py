"""Which ways of computing attention a model may use: all of Transformers', or only those that can compose heads."""

from transformers.modeling_utils import PreTrainedModel

from .dcmha import checked_implementation


class ComposingModel(PreTrainedModel):
    # These never see other heads' scores, so they cannot compose; plain models switch them on below.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """As the base class for plain models; composing models accept what can mix heads, and nothing else."""
        if not self.config.composes_heads:
            self._supports_sdpa = self._supports_flash_attn = self._supports_flex_attn = True
            return super().get_correct_attn_implementation(requested_attention, is_init_check)
        return checked_implementation(requested_attention or "eager")


__all__ = ["ComposingModel"]
