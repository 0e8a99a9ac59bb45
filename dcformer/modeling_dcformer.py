"""DCFormer and DCPythia: decoders with Dynamically Composable Multi-Head Attention (ICML 2024).

The architecture is that of OLMo 3 (with fused qkv as in Phi-3, parallel residual and partial rotary embedding as in
GPT-NeoX), except that attention scores are mixed across heads before the softmax, and attention weights after it. With
composition switched off the same classes are the paper's Transformer baselines, and use sdpa or FlashAttention.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import modeling_layers
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .compose_dcformer import ComposeProjection, make_compose, update_cache, widen_cache_rows
from .configuration_dcformer import DCFormerConfig, DCPythiaConfig
from .dcmha import PREFIX, checked_implementation, composed_attention_forward, compute_fused
from .hub_dcformer import AUTHORS_BUFFERS, ComposingModel, register_model
from .inputs_dcformer import (
    CACHE_NAME,
    check_positions,
    checked_ids,
    checked_labels,
    make_masks,
    older_cache,
    takes_older_cache_name,
)
from .types_dcformer import Projected
from .visibility_dcformer import Visibility


class DCFormerRMSNorm(nn.RMSNorm):
    """The RMS norm in the wider type of input and weight, which differ under autocast."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if hidden_states.dtype != weight.dtype:
            dtype = torch.promote_types(hidden_states.dtype, weight.dtype)
            hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
        return functional.rms_norm(hidden_states, self.normalized_shape, weight, self.eps)


def at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def make_norm(config: DCFormerConfig) -> nn.Module:
    norm_class = nn.LayerNorm if config.norm_type == "layer_norm" else DCFormerRMSNorm
    return norm_class(config.hidden_size, eps=config.norm_eps)


class DCFormerRotaryEmbedding(nn.Module):
    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self, config: DCFormerConfig, device: torch.device | None = None):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        inv_freq, self.attention_scaling = self.compute_rope_parameters(device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def compute_rope_parameters(self, device: torch.device | None = None) -> tuple[Tensor, float]:
        functions = {"default": self.compute_default_rope_parameters, **ROPE_INIT_FUNCTIONS}
        return functions[self.rope_type](self.config, device)

    @staticmethod
    def compute_default_rope_parameters(
        config: DCFormerConfig, device: torch.device | None = None, **kwargs: Any
    ) -> tuple[Tensor, float]:
        """Inverse frequencies (rotary size / 2,) in float32, and the factor of sine and cosine."""
        rotary_dim = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> "DCFormerRotaryEmbedding":
        # `model.half()` would round the frequencies, and with them every angle, and `model.to_empty()` leaves them
        # undefined: rebuild them in float32 instead, and forget for which lengths they were scaled.
        was_meta = self.inv_freq.is_meta
        super()._apply(function, recurse)
        if (was_meta or self.inv_freq.dtype != torch.float32) and not self.inv_freq.is_meta:
            self.inv_freq, self.attention_scaling = self.compute_rope_parameters(self.inv_freq.device)
            self.original_inv_freq = self.inv_freq.clone()
            self.max_seq_len_cached = self.original_max_seq_len
            self.__dict__.pop("long_inv_freq", None)
        return self

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each (batch, length, rotary size), in at least float32."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        angles = position_ids[..., None].to(dtype) * self.inv_freq.to(device=x.device, dtype=dtype)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def apply_rotary_pos_emb(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """
    Rotate the first channels of (batch, heads, length, channels), as many as (batch, 1, length, rotary size) of cos and
    sin; keep the rest.
    """
    if cos.shape[-1] < states.shape[-1]:
        rotary, rest = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
        return torch.cat((apply_rotary_pos_emb(rotary, cos, sin), rest), dim=-1)
    rotated, (first, second) = states * cos, states.chunk(2, dim=-1)
    return (rotated + torch.cat((-second, first), dim=-1) * sin).to(states.dtype)


# Attention maps of a layer, (batch, heads, query, key): scores are scaled but not masked, weights are masked.
ATTENTION_MAPS = ("scores", "composed_scores", "weights", "composed_weights")


def hooked_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention that passes its maps through the modules of the layer that have their names, which run their hooks."""
    implementation = str(module.config._attn_implementation)
    if "flash" in implementation or "flex" in implementation:
        raise ValueError(f"Maps are not computed with attn_implementation={implementation!r}; use sdpa.")
    if implementation == "sdpa" and attention_mask is None and 1 < query.shape[2] < key.shape[2]:
        # Transformers leaves out the mask of the first tokens in a static cache: they are its first rows.
        attention_mask = Visibility(query.shape[2], key.shape[2], is_causal=module.is_causal, query_offset=0)
    kwargs["observe"] = lambda name, attention: getattr(module, name)(attention)
    return composed_attention_forward(module, query, key, value, attention_mask, **kwargs)


class DCFormerAttention(nn.Module):
    """Grouped-query attention; where a layer composes, `compose` computes from the same input how to mix the heads."""

    def __init__(self, config: DCFormerConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = getattr(config, "is_causal", True)
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        query_size = self.num_heads * self.head_dim
        key_value_size = self.num_key_value_heads * self.head_dim
        self.qkv_sizes = [query_size, key_value_size, key_value_size]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.qkv_sizes), bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = DCFormerRMSNorm(self.head_dim, config.qk_norm_eps)
            self.k_norm = DCFormerRMSNorm(self.head_dim, config.qk_norm_eps)
        self.composes_heads = config.composes_heads  # in this layer or another, as the masks are made for
        self.compose = make_compose(config) if config.composes_layer(layer_idx) else None
        # To be hooked or replaced: from then on the layer computes its maps and passes them through all of them.
        for name in ATTENTION_MAPS:
            self.add_module(name, nn.Identity())

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | Visibility | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if "past_key_values" in kwargs:
            cache = older_cache(past_key_values=kwargs.pop("past_key_values"))
        implementation = self.config._attn_implementation
        # "eager", the default, is not registered there: it has a backend chosen.
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, composed_attention_forward)
        if self.has_observers():
            interface = hooked_attention_forward
        # (batch, heads, length, channels) each
        query, key, value, pre, post = self.project(hidden_states, position_embeddings, implementation)
        if cache is not None and self.composes_heads:
            key, value, pre, post = update_cache(cache, self.layer_idx, key, value, pre, post)
        elif cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if self.composes_heads:
            kwargs.update(pre=pre, post=post)
        output, weights = interface(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.flatten(2)), weights  # (batch, length, hidden)

    def has_observers(self) -> bool:
        """True if somebody hooks or has replaced one of the modules that stand for the attention maps."""
        for name in ATTENTION_MAPS:
            part: Any = self._modules.get(name)
            if not isinstance(part, nn.Identity) or part._forward_hooks or part._forward_pre_hooks:
                return True
            if part._backward_hooks or part._backward_pre_hooks:
                return True
        return False

    def project(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        implementation: str | None = None,
    ) -> Projected:
        """Queries, keys and values, (batch, heads, length, channels), and the weights that compose their heads."""
        pre = post = rotated = None
        compose, device = self.compose, hidden_states.device
        uses_kernels = (implementation or self.config._attn_implementation) != f"{PREFIX}plain"
        if uses_kernels and compose is not None:
            fused = compute_fused("projection", device, self, hidden_states, position_embeddings)
            if fused is not None:
                return fused
        projected = self.qkv_proj(hidden_states)
        projected = projected.view(*hidden_states.shape[:-1], -1, self.head_dim)  # (batch, length, all heads, channels)
        numbers = self.num_heads, self.num_key_value_heads, self.num_key_value_heads
        query, key, value = projected.split_with_sizes(numbers, dim=2)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if uses_kernels:
            norms = self.q_norm, self.k_norm
            rotated = compute_fused("rotation", device, query, key, norms, position_embeddings)
        query, key = self.rotate(query, key, position_embeddings) if rotated is None else rotated
        if compose is not None:
            pre, post = compose(hidden_states, fused=uses_kernels)
        return query, key, value, pre, post

    def rotate(self, query: Tensor, key: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor]:
        """Queries and keys, (batch, heads, length, channels), normalised if the layer has norms, and rotated."""
        dtype, q_norm, k_norm = query.dtype, self.q_norm, self.k_norm
        if q_norm is not None and k_norm is not None:  # of rows as they lie in memory
            query = q_norm(query.transpose(1, 2)).transpose(1, 2)
            key = k_norm(key.transpose(1, 2)).transpose(1, 2)
        if position_embeddings is not None:
            cos, sin = (each.unsqueeze(1) for each in position_embeddings)  # (batch, 1, length, rotary size)
            query, key = apply_rotary_pos_emb(query, cos, sin), apply_rotary_pos_emb(key, cos, sin)
        # Under autocast these give float32, and backends take one type.
        return query.to(dtype), key.to(dtype)


class DCFormerMLP(nn.Module):
    """Gated or plain MLP; with `mlp_gate_dim`, a softmax over the input scales slices of the inner layer."""

    def __init__(self, config: DCFormerConfig):
        super().__init__()
        self.gate_proj = None
        if config.mlp_type == "gated":
            self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.gate_mix = None
        if config.mlp_gate_dim is not None:
            self.gate_mix = nn.Linear(config.hidden_size, config.mlp_gate_dim, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        inner = self.up_proj(hidden_states)  # (batch, length, intermediate)
        inner = self.act_fn(inner) if self.gate_proj is None else self.act_fn(self.gate_proj(hidden_states)) * inner
        if self.gate_mix is not None:
            shares = at_least_float32(self.gate_mix(hidden_states)).softmax(dim=-1).to(inner.dtype)
            inner = (inner.view(*shares.shape, -1) * shares.unsqueeze(-1)).flatten(-2)
        return self.down_proj(inner)


class DCFormerDecoderLayer(modeling_layers.GradientCheckpointingLayer):
    def __init__(self, config: DCFormerConfig, layer_idx: int):
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.input_layernorm = make_norm(config)
        self.self_attn = DCFormerAttention(config, layer_idx)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = DCFormerMLP(config)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | Visibility | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:
        states = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(
            states, position_embeddings=position_embeddings, attention_mask=attention_mask, **kwargs
        )
        after = hidden_states + attended
        return after + self.mlp(self.post_attention_layernorm(hidden_states if self.parallel_residual else after))


class DCFormerPreTrainedModel(ComposingModel):
    config: DCFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DCFormerDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _can_record_outputs = {"hidden_states": DCFormerDecoderLayer, "attentions": DCFormerAttention}
    _keys_to_ignore_on_load_unexpected = AUTHORS_BUFFERS

    def __init__(self, config: DCFormerConfig):
        config.validate_choices()
        super().__init__(config)

    def make_decoder(self) -> "DCFormerModel":
        """The model without a head. Transformers' heads ask `AutoModel` for it, which does not know copies of this."""
        return (DCPythiaModel if self.config.model_type == "dcpythia" else DCFormerModel)(self.config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ComposeProjection):
            module.reset_parameters()


class DCFormerModel(DCFormerPreTrainedModel):
    """The decoder, without a head."""

    def __init__(self, config: DCFormerConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = self.rotary_emb = None
        if config.position_embedding_type == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        else:
            self.rotary_emb = DCFormerRotaryEmbedding(config)
        self.layers = nn.ModuleList(DCFormerDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @takes_older_cache_name
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids (`Tensor`, *optional*): (batch, length) token ids; either these or `inputs_embeds`.
            attention_mask (`Tensor`, *optional*): (batch, past + length), 0 for padding on either side; or
                (batch or 1, heads or 1, length, past + length), boolean with True for visible or floating point, added
                to the scores, which alone decides what is visible; or a dict of such masks by layer type.
            position_ids (`Tensor`, *optional*): (batch, length) or (1, length). None: consecutive after the cache.
                Without mask and cache, positions that restart separate packed documents.
            cache (`Cache`, *optional*): Any Transformers cache; `past_key_values` is its name before Transformers 5.24.
            inputs_embeds (`Tensor`, *optional*): (batch, length, hidden).
            use_cache (`bool`, *optional*): Create a cache if none is given.

        Raises:
            ValueError: for a token id without an embedding row (`oov_policy="error"`), and for lengths of mask,
                positions and cache that do not fit the input.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(checked_ids(input_ids, self.embed_tokens, self.config))
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if self.config.composes_heads:  # Transformers does not ask the model about attention kernels from the Hub
            checked_implementation(self.config._attn_implementation)
            if cache is not None:
                widen_cache_rows(cache, self.config)
        if position_ids is not None:
            check_positions(position_ids, tuple(inputs_embeds.shape[:2]), attention_mask, cache is not None)
        elif kwargs.get("cu_seq_lens_q") is not None or kwargs.get("seq_idx") is not None:
            raise ValueError("cu_seq_lens_q and seq_idx do not separate documents; give position_ids that restart.")

        kwargs["output_attentions"] = kwargs.get("output_attentions") or self.config.output_attentions
        layer_ids = self.layers_here()
        if not isinstance(masks := attention_mask, dict):
            masks = make_masks(self.config, layer_ids, inputs_embeds, attention_mask, cache, position_ids)
        if position_ids is None:
            past_length = 0 if cache is None else cache.get_seq_length(*layer_ids[:1])
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_length)[None]

        hidden_states = inputs_embeds
        if self.embed_positions is not None and (input_ids is not None or 0 in layer_ids):
            hidden_states = hidden_states + self.embed_positions(position_ids)
        position_embeddings = None if self.rotary_emb is None else self.rotary_emb(hidden_states, position_ids)
        kwargs |= {"position_embeddings": position_embeddings, "position_ids": position_ids, CACHE_NAME: cache}
        # Assisted generation with early exit lowers `num_hidden_layers` while it drafts.
        for layer, layer_type in zip(self.layers, self.config.layer_types[: self.config.num_hidden_layers]):
            hidden_states = layer(hidden_states, attention_mask=masks[layer_type], **kwargs)
        return BaseModelOutputWithPast(self.norm(hidden_states), cache)

    def layers_here(self) -> list[int]:
        """Indices of the layers that this process computes; identities stand for those of other pipeline stages."""
        layers = zip(range(self.config.num_hidden_layers), self.layers)
        return [number for number, layer in layers if not isinstance(layer, nn.Identity)]


class DCFormerForCausalLM(DCFormerPreTrainedModel, GenerationMixin):
    """The decoder with an output layer: the language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: DCFormerConfig):
        super().__init__(config)
        self.model = self.make_decoder()
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @takes_older_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """
        Compute logits, and with labels their loss; the other arguments are those of [`DCFormerModel.forward`].

        Args:
            labels (`Tensor`, *optional*): (batch, length), shifted inside; -100 is left out of the loss.
                `num_items_in_batch` as a further argument divides the summed loss by that number of tokens.
            logits_to_keep (`int` or `Tensor`, defaults to 0): Compute logits for this number of last positions, or for
                positions with these indices; 0 for all.

        Returns:
            `CausalLMOutputWithPast`: logits (batch, kept length, vocabulary), the cache, and with labels the loss.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            ignored, kwargs["labels"] = kwargs.get("ignore_index", -100), labels
            for name in [name for name in ("labels", "shift_labels") if kwargs.get(name) is not None]:
                kwargs[name] = checked_labels(kwargs[name], logits, self.config, ignored)
            loss = self.loss_function(logits=logits, vocab_size=self.config.vocab_size, **kwargs)
        cache = getattr(outputs, CACHE_NAME)
        return CausalLMOutputWithPast(loss, logits, cache, outputs.hidden_states, outputs.attentions)

    @takes_older_cache_name
    def create_masks_for_generate(
        self,
        inputs_embeds: Tensor,
        attention_mask: Any,
        cache: Cache | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The masks of a static cache by layer type, which `generate` makes outside the compiled graph."""
        layer_ids = next(part for part in self.modules() if isinstance(part, DCFormerModel)).layers_here()
        return make_masks(self.config, layer_ids, inputs_embeds, attention_mask, cache, position_ids)

    def _get_static_cache_init_shape(self) -> Any:
        """Heads and channels of a static cache's rows, with room for the key-wise weights."""
        attention = next((part for part in self.modules() if isinstance(part, DCFormerAttention)), None)
        if attention is None or super()._get_static_cache_init_shape() is None:
            return None
        return attention.num_key_value_heads, self.config.per_layer_config[0].head_dim


class DCFormerForSequenceClassification(modeling_layers.GenericForSequenceClassification, DCFormerPreTrainedModel):
    """The decoder with a linear classifier, without bias, on the last token of each row that is not padding."""

    def __init__(self, config: DCFormerConfig):
        DCFormerPreTrainedModel.__init__(self, config)
        self.num_labels, self.model = config.num_labels, self.make_decoder()
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class DCFormerForTokenClassification(modeling_layers.GenericForTokenClassification, DCFormerPreTrainedModel):
    """The decoder with dropout (`config.classifier_dropout`, 0.1) and a linear classifier on every token."""

    def __init__(self, config: DCFormerConfig):
        DCFormerPreTrainedModel.__init__(self, config)
        self.num_labels, self.model = config.num_labels, self.make_decoder()
        self.dropout = nn.Dropout(0.1 if (rate := getattr(config, "classifier_dropout", None)) is None else rate)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class DCFormerForQuestionAnswering(modeling_layers.GenericForQuestionAnswering, DCFormerPreTrainedModel):
    """The decoder with a linear layer that scores every token as the start and the end of the answer."""

    def __init__(self, config: DCFormerConfig):
        DCFormerPreTrainedModel.__init__(self, config)
        self.model, self.qa_outputs = self.make_decoder(), nn.Linear(config.hidden_size, 2)
        self.post_init()


class DCPythiaModel(DCFormerModel):
    """The decoder of the Pythia architecture (section 4.2 of the paper)."""

    config: DCPythiaConfig


class DCPythiaForCausalLM(DCFormerForCausalLM, GenerationMixin):
    """The language model of the Pythia architecture (section 4.2 of the paper)."""

    config: DCPythiaConfig


class DCPythiaForSequenceClassification(DCFormerForSequenceClassification):
    """[`DCFormerForSequenceClassification`] on the Pythia architecture."""

    config: DCPythiaConfig


class DCPythiaForTokenClassification(DCFormerForTokenClassification):
    """[`DCFormerForTokenClassification`] on the Pythia architecture."""

    config: DCPythiaConfig


class DCPythiaForQuestionAnswering(DCFormerForQuestionAnswering):
    """[`DCFormerForQuestionAnswering`] on the Pythia architecture."""

    config: DCPythiaConfig


MODELS: list[Any] = [DCFormerModel, DCFormerForCausalLM, DCFormerForSequenceClassification]
MODELS += [DCFormerForTokenClassification, DCFormerForQuestionAnswering, DCPythiaModel, DCPythiaForCausalLM]
MODELS += [DCPythiaForSequenceClassification, DCPythiaForTokenClassification, DCPythiaForQuestionAnswering]
__all__ = ["DCFormerPreTrainedModel", *(model.__name__ for model in MODELS)]

if __name__.startswith("transformers_modules."):  # a copy of this file beside a checkpoint, which nobody else registers
    for _model in MODELS:
        register_model(_model)
