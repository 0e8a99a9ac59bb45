"""DCFormer and DCPythia of vLLM's layers, under the names that the Transformers models have."""

import itertools
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.sequence import IntermediateTensors

from ..compose_dcformer import ComposeProjection, make_compose, pack
from ..configuration_dcformer import DCFormerConfig
from ..hub_dcformer import authors_patterns
from ..modeling_dcformer import DCFormerPreTrainedModel, DCFormerRotaryEmbedding, apply_rotary_pos_emb, at_least_float32
from ..parallel_dcformer import DIMENSION_OF_GROUPS, shards_heads
from .attention_backend import ComposedAttention


def make_norm(config: DCFormerConfig) -> nn.Module:
    """Make the normalisation of a hidden state, as the configuration says."""
    norm_class = nn.LayerNorm if config.norm_type == "layer_norm" else RMSNorm
    return norm_class(config.hidden_size, eps=config.norm_eps)


class DCFormerAttention(nn.Module):
    """
    The attention of one layer, which stores the factors of composition beside keys and values. Where the processes
    cannot share the heads, each computes a part of the projections, gathers the rest, and attends with all heads.
    """

    def __init__(self, config: DCFormerConfig, layer_idx: int, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        world_size = get_tensor_model_parallel_world_size()
        ranks = world_size if shards_heads(config, world_size) else 1
        self.head_dim = config.head_dim
        heads, key_value_heads = config.num_attention_heads, config.num_key_value_heads
        self.num_heads, self.num_key_value_heads = heads // ranks, key_value_heads // ranks
        key_value_size = self.num_key_value_heads * self.head_dim
        self.qkv_sizes = [self.num_heads * self.head_dim, key_value_size, key_value_size]
        linear: dict[str, Any] = {"bias": config.attention_bias, "quant_config": vllm_config.quant_config}
        named = {**linear, "prefix": f"{prefix}.qkv_proj"}
        if ranks == world_size:
            self.qkv_proj = QKVParallelLinear(config.hidden_size, self.head_dim, heads, key_value_heads, **named)
        else:
            self.qkv_proj = ColumnParallelLinear(config.hidden_size, sum(self.qkv_sizes), gather_output=True, **named)
        linear |= {"prefix": f"{prefix}.o_proj", "input_is_parallel": ranks == world_size}
        self.o_proj = RowParallelLinear(heads * self.head_dim, config.hidden_size, **linear)
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, eps=config.qk_norm_eps) if config.qk_norm else None for _ in range(2)
        )
        self.compose = make_compose(config, ranks)
        window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        options: dict[str, Any] = {"num_kv_heads": self.num_key_value_heads, "per_layer_sliding_window": window}
        options |= {"cache_config": vllm_config.cache_config, "prefix": f"{prefix}.attn"}
        if self.compose is None:
            self.attn: nn.Module = Attention(self.num_heads, self.head_dim, self.head_dim**-0.5, **options)
        else:
            if ranks > 1:
                _load_groups_of_this_rank(self.compose)
            channels = config.compose_cache_channels
            self.attn = ComposedAttention(self.num_heads, self.head_dim, *channels, self.compose, **options)

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        """(tokens, hidden) in and out; cosine and sine are (tokens, 1, rotary size)."""
        tokens = hidden_states.shape[0]
        projected, _ = self.qkv_proj(hidden_states)
        query, key, value = (
            states.reshape(tokens, -1, self.head_dim) for states in projected.split(self.qkv_sizes, dim=-1)
        )  # (tokens, heads, head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query.contiguous()), self.k_norm(key.contiguous())
        # From here on every token is a sequence: (tokens, heads, 1, head_dim).
        query, key, value = query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
        if position_embeddings is not None:
            cos, sin = (each.unsqueeze(1) for each in position_embeddings)
            query, key = (apply_rotary_pos_emb(states, cos, sin) for states in (query, key))
        if self.compose is None:
            output = self.attn(query.reshape(tokens, -1), key.reshape(tokens, -1), value.reshape(tokens, -1))
        else:
            pre, post = self.compose(hidden_states.unsqueeze(1))
            query_factors = [stage.query.factors for stage in (pre, post) if stage is not None and stage.query]
            query = torch.cat((query, *query_factors), dim=-1)
            key, value = (
                pack(states, None if stage is None else stage.key) for states, stage in ((key, pre), (value, post))
            )
            output = self.attn(query.squeeze(2), key.squeeze(2), value.squeeze(2))
        return self.o_proj(output)[0]


def _load_groups_of_this_rank(compose: ComposeProjection) -> None:
    """Load only the groups of heads that this process computes."""

    def load(parameter: nn.Parameter, loaded: Tensor, dimension: int) -> None:
        default_weight_loader(parameter, _of_this_rank(loaded, dimension))

    for name, parameter in compose.named_parameters():
        set_weight_attrs(parameter, {"weight_loader": partial(load, dimension=DIMENSION_OF_GROUPS[name])})


def _of_this_rank(tensor: Tensor, dimension: int) -> Tensor:
    return tensor.chunk(get_tensor_model_parallel_world_size(), dim=dimension)[get_tensor_model_parallel_rank()]


class DCFormerMLP(nn.Module):
    """The feed-forward network of one layer, with a gate or without."""

    def __init__(self, config: DCFormerConfig, quant_config: QuantizationConfig | None, prefix: str):
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        options: dict[str, Any] = {"bias": config.mlp_bias, "quant_config": quant_config}
        self.act_fn: Any = ACT2FN[config.hidden_act]
        self.is_gated = config.mlp_type == "gated"
        if self.is_gated:
            named = {**options, "prefix": f"{prefix}.gate_up_proj"}
            self.gate_up_proj = MergedColumnParallelLinear(sizes[0], [sizes[1]] * 2, **named)
        else:
            self.up_proj = ColumnParallelLinear(*sizes, prefix=f"{prefix}.up_proj", **options)
        self.down_proj = RowParallelLinear(sizes[1], sizes[0], prefix=f"{prefix}.down_proj", **options)
        self.gate_mix = None
        if config.mlp_gate_dim is not None:
            # A softmax over few numbers: in high precision, and whole in every process.
            self.gate_mix = ReplicatedLinear(sizes[0], config.mlp_gate_dim, bias=False, prefix=f"{prefix}.gate_mix")

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(tokens, hidden) in and out."""
        if not self.is_gated:
            inner = self.act_fn(self.up_proj(hidden_states)[0])  # (tokens, intermediate)
        else:
            gate, inner = self.gate_up_proj(hidden_states)[0].chunk(2, dim=-1)
            inner = self.act_fn(gate) * inner
        if self.gate_mix is not None:
            shares = at_least_float32(self.gate_mix(hidden_states)[0]).softmax(dim=-1).to(inner.dtype)
            shares = _of_this_rank(shares, dimension=-1)
            inner = (inner.view(*shares.shape, -1) * shares.unsqueeze(-1)).flatten(-2)
        return self.down_proj(inner)[0]


class DCFormerDecoderLayer(nn.Module):
    """A layer: attention and feed-forward network, one after the other or side by side."""

    def __init__(self, config: DCFormerConfig, layer_idx: int, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.input_layernorm = make_norm(config)
        self.self_attn = DCFormerAttention(config, layer_idx, vllm_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = make_norm(config)
        self.mlp = DCFormerMLP(config, vllm_config.quant_config, f"{prefix}.mlp")

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        """(tokens, hidden) in and out."""
        attended = self.self_attn(self.input_layernorm(hidden_states), position_embeddings)
        if self.parallel_residual:
            return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@support_torch_compile
class DCFormerModel(nn.Module):
    """The model without its head: token ids become hidden states."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.stage = get_pp_group()
        sizes = config.vocab_size, config.hidden_size
        options: dict[str, Any] = {"quant_config": vllm_config.quant_config, "prefix": f"{prefix}.embed_tokens"}
        self.embed_tokens, self.embed_positions, self.norm = PPMissingLayer(), PPMissingLayer(), PPMissingLayer()
        if self.stage.is_first_rank or (config.tie_word_embeddings and self.stage.is_last_rank):
            self.embed_tokens = VocabParallelEmbedding(*sizes, **options)
        self.rotary_emb = None
        if config.position_embedding_type != "learned":
            self.rotary_emb = DCFormerRotaryEmbedding(config)
        elif self.stage.is_first_rank:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: DCFormerDecoderLayer(config, int(prefix.rpartition(".")[2]), vllm_config, prefix),
            prefix=f"{prefix}.layers",
        )
        if self.stage.is_last_rank:
            self.norm = make_norm(config)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """(tokens, hidden) embeddings of (tokens,) ids."""
        # `oov_policy="clamp"`; by the other policy the renderer refuses such an id with its request.
        return self.embed_tokens(input_ids.clamp(0, self.config.vocab_size - 1))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """
        (tokens,) ids, or (tokens, hidden) embeddings or states of the stage before, at (tokens,) positions -> states
        (tokens, hidden).
        """
        if not self.stage.is_first_rank:
            assert intermediate_tensors is not None
            hidden_states = intermediate_tensors["hidden_states"]
        elif inputs_embeds is None:
            assert input_ids is not None  # vLLM gives one of them
            hidden_states = self.embed_input_ids(input_ids)
        else:
            hidden_states = inputs_embeds
        position_embeddings = None
        if self.rotary_emb is not None:
            position_embeddings = self.rotary_emb(hidden_states, positions.unsqueeze(1))
        elif self.stage.is_first_rank:
            hidden_states = hidden_states + self.embed_positions(positions)
        for layer in itertools.islice(self.layers, self.start_layer, self.end_layer):
            hidden_states = layer(hidden_states, position_embeddings)
        if not self.stage.is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states})
        return self.norm(hidden_states)


class DCFormerForCausalLM(nn.Module, SupportsLoRA, SupportsPP):
    """The language model that vLLM runs for DCFormer and DCPythia."""

    packed_modules_mapping = {"qkv_proj": ["qkv_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.model = DCFormerModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        options: dict[str, Any] = {"quant_config": vllm_config.quant_config, "prefix": maybe_prefix(prefix, "lm_head")}
        self.lm_head = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, **options)
            if config.tie_word_embeddings:
                self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], config.hidden_size
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load our files and the authors', by the table of names that the Transformers model uses."""
        names: dict[str, str | None] = {**authors_patterns(self.config.model_type)}
        names |= dict.fromkeys(DCFormerPreTrainedModel._keys_to_ignore_on_load_unexpected)
        # Files of the authors, and of a model without its head, leave out the first part of a name.
        names[r"^(?!model\.|lm_head\.)"] = "model."
        patterns = {re.compile(pattern): name for pattern, name in names.items()}
        is_gated, is_tied = self.config.mlp_type == "gated", self.config.tie_word_embeddings
        stacked = {".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 1)} if is_gated else {}
        loader = AutoWeightsLoader(self, ignore_unexpected_prefixes=["lm_head."] if is_tied else None)
        mapper = WeightsMapper(orig_to_new_regex=patterns, orig_to_new_stacked=stacked)
        return loader.load_weights(weights, mapper=mapper)
