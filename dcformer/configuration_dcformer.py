# SPDX-License-Identifier: Apache-2.0
"""Configurations of DCFormer and DCPythia (Dynamically Composable Multi-Head Attention, ICML 2024).

One class covers, by values alone, the published models, the plain Transformer baselines with the same windows,
Talking-Heads attention and every ablation of the paper's Tables 9 and 10. `from_dict`, which reads all files, puts
these fields in place of the keys of the authors' `config.json`; the constructor refuses such keys.
"""

import copy
import math
from typing import TYPE_CHECKING, Any, ClassVar, Optional, Self, TypeAlias, TypeVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig


# Cached rows are multiples of this number of channels, which keeps them 16-byte aligned in 16-bit types.
CACHE_ROW_ALIGNMENT = 8
MAX_LAYERS = 4000  # more would only fill the memory with lists and modules

_Value = TypeVar("_Value")

if TYPE_CHECKING:
    # A field that may be given as None, which `__post_init__` replaces.
    _FilledIn: TypeAlias = _Value | Any
else:
    _FilledIn = Optional


def _preset(description: str, width: int, inner: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {"model_type": "dcformer", "description": description, **sizes, "num_attention_heads": heads, **others}


_JAX = {"norm_eps": 1e-05, "qk_norm_eps": 1e-05, "compose_activation": "gelu_pytorch_tanh"}
_AS_JAX = "Table 3; epsilons and GELU as the authors' JAX code trains it"
_LLAMA_TOKENS = {"vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2}
_PYTHIA = {"model_type": "dcpythia"}
# The published shapes by name: `model_type`, a `description` with its source, and the fields that are no defaults.
PRESETS: dict[str, dict[str, Any]] = {
    "dcformer-405m": _preset(f"DCFormer++ 405M, {_AS_JAX}", 1024, 2816, 24, 16, **_JAX),
    "dcformer-834m": _preset(f"DCFormer++ 834M, {_AS_JAX}", 1536, 4096, 24, 24, **_JAX),
    "dcformer-1.4b": _preset(f"DCFormer++ 1.4B, {_AS_JAX}", 2048, 5632, 24, 32, **_JAX),
    "dcformer-2.8b": _preset("DCFormer++ 2.8B, Table 4, as published on the Hub", 2560, 6912, 32, 32),
    "dcformer-6.9b": _preset(
        "DCFormer++ 6.9B, Tables 2, 6 and 10: Pythia 6.9B with SwiGLU and RMS norm", 4096, 11008, 32, 32
    ),
    "dcformer-8b": _preset(
        "DCFormer 8B of the authors' repository: MLP gate, one global layer in four, RoPE base 500,000",
        *(4096, 5632, 48, 32),
        vocab_size=152064,
        mlp_gate_dim=44,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"] * 12,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "dcformer-13b": _preset("DCFormer++ 13B, Table 6: the shape of LLaMA 13B", 5120, 13824, 40, 40, **_LLAMA_TOKENS),
    "dcformer-33b": _preset("DCFormer++ 33B, Table 6: the shape of LLaMA 33B", 6656, 17920, 60, 52, **_LLAMA_TOKENS),
    "dcpythia-2.8b": _preset("DCPythia-2.8B, Table 4; its weights were not published", 2560, 10240, 32, 32, **_PYTHIA),
    "dcpythia-6.9b": _preset("DCPythia-6.9B, Table 4, as published on the Hub", 4096, 16384, 32, 32, **_PYTHIA),
}

# What `validate_architecture` checks: smallest values, half-open ranges, choices, and what a field must divide.
_SMALLEST = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), 1),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings", "mlp_gate_dim"), 1),
    **dict.fromkeys(("compose_rank", "compose_groups"), 1),
    "sliding_window": 2,  # for a window of one key the sliding caches of Transformers keep every key
}
_RANGES = {
    **dict.fromkeys(("norm_eps", "qk_norm_eps", "compose_norm_eps", "attention_dropout"), (0, 1)),
    "initializer_range": (0, math.inf),
}
_CHOICES = {
    "mlp_type": ("gated", "plain"),
    "norm_type": ("rms_norm", "layer_norm"),
    "position_embedding_type": ("rope", "learned"),
    "oov_policy": ("error", "clamp"),
    "compose_activation": ("gelu", "gelu_pytorch_tanh"),
}
_DIVISORS = dict.fromkeys(("num_key_value_heads", "compose_groups"), "num_attention_heads")
_DIVISORS["mlp_gate_dim"] = "intermediate_size"
# The keys of the authors' `config.json`: names by which fields can be read too, other names, switches, and the rest.
READABLE = {"dim": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
READABLE |= {"n_local_heads": "num_key_value_heads", "block_size": "max_position_embeddings"}
READABLE |= {"window_size": "sliding_window"}
RENAMED = READABLE | {"use_qk_norm": "qk_norm", "use_parallel_residual": "parallel_residual"}
RENAMED |= {"rope_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
SWITCHES = {"use_linear_bias": ("attention_bias", "mlp_bias"), "query_wise": ("compose_key",)}
SWITCHES |= {"use_dcmha": ("compose_pre", "compose_post"), "mgate": ("mlp_gate_dim",)}
WINDOW_TYPES = {"LG": "LG", "LGLL": "LGLL", "LGL6": "LGLLLLLL"}  # a letter for a local or global layer, repeated
AUTHORS_KEYS = {*RENAMED, *SWITCHES, "mgate_dim", "window_type"}
AUTHORS_KEYS |= {"q_chunk_size", "is_training", "use_gradient_checkpointing", "prefill_pad"}  # which set nothing


@strict
class DCFormerConfig(PreTrainedConfig):
    r"""
    Configuration of a DCFormer model. The defaults are those of DCFormer++ 2.8B.

    Args:
        vocab_size (`int`, defaults to 50257): Rows of the token embedding.
        hidden_size (`int`, defaults to 2560): Width of the residual stream.
        intermediate_size (`int`, defaults to 6912): Width of the MLP's inner layer.
        num_hidden_layers (`int`, defaults to 32): Number of decoder layers, at most 4000.
        num_attention_heads (`int`, defaults to 32): Query heads; composition mixes these.
        num_key_value_heads (`int`, *optional*): Key/value heads (grouped-query attention). None: one per query head.
        head_dim (`int`, *optional*): Channels per head. None: `hidden_size // num_attention_heads`.
        hidden_act (`str`, defaults to `"silu"`): Activation of the MLP.
        mlp_type (`str`, defaults to `"gated"`): `"gated"` (SwiGLU with silu) or `"plain"` (two matrices).
        mlp_gate_dim (`int`, *optional*): Slices of the inner layer that a softmax over the input scales (44 in the 8B).
        norm_type (`str`, defaults to `"rms_norm"`): `"rms_norm"`, or `"layer_norm"` (with bias).
        norm_eps (`float`, defaults to 1e-6): Epsilon of the block norms and the final norm.
        parallel_residual (`bool`, defaults to `False`): Attention and MLP read the same residual, as in GPT-NeoX.
        attention_bias, mlp_bias (`bool`, default to `False`): Biases of the linear layers.
        qk_norm (`bool`, defaults to `True`): RMS norm of queries and keys, per head, before RoPE.
        qk_norm_eps (`float`, defaults to 1e-6): Its epsilon. JAX runs use `normalization_layer_epsilon`, mostly 1e-5.
        max_position_embeddings (`int`, defaults to 2048): Longest sequence the model was trained on.
        position_embedding_type (`str`, defaults to `"rope"`): `"rope"`, or `"learned"` as in GPT-3 (section 4.1).
        rope_parameters (`dict`, *optional*): `rope_theta` (10000), `rope_type` ("default"), `partial_rotary_factor`.
        sliding_window (`int`, *optional*, defaults to 256): Keys that a sliding layer sees, with its own; 2 or more.
        layer_types (`list[str]`, *optional*): `"sliding_attention"` or `"full_attention"` per layer. None: alternating,
            sliding first; all full if `sliding_window` is None.
        attention_dropout (`float`, defaults to 0.0): Dropout on the composed attention weights.
        initializer_range (`float`, defaults to 0.02): Standard deviation of linear layers and embeddings at the start.
        oov_policy (`str`, defaults to `"error"`): Ids without a row: `"error"` or, as in JAX, `"clamp"` to the nearest.
        compose_rank (`int`, defaults to 2): R, the rank of the dynamic projections.
        compose_groups (`int`, defaults to 1): Groups of heads that compose among themselves only (section 3.2).
        compose_activation (`str`, defaults to `"gelu"`): Of the projections; in JAX it is `"gelu_pytorch_tanh"`.
        compose_norm_eps (`float`, defaults to 1e-6): Epsilon of the RMS norm over heads of W_q1 and W_k1.
        compose_pre, compose_post (`bool`, default to `True`): Compose scores before, weights after the softmax.
        compose_query, compose_key (`bool`, default to `True`): Query-wise and key-wise branches.
        compose_low_rank, compose_gate (`bool`, default to `True`): Low-rank branches (2 and 4) and gates (3 and 5).
        compose_static (`bool`, defaults to `False`): Static projection (branch 1); alone it is Talking-Heads attention.
        compose_layers (`list[int]`, *optional*): Indices of the layers that compose their heads. None: all.

    With every composition switched off the model is a plain Transformer, and uses sdpa or FlashAttention.

    Raises:
        ValueError: for a value that no model can have, or a key of the authors that contradicts one of ours.

    Source: section 3, section 4 and appendix D of the paper; the authors' `configuration_dcformer.py` for the keys.
    """

    model_type = "dcformer"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = READABLE
    # Heads compose with each other, so every process gathers all heads; `parallel_dcformer` divides groups of heads.
    base_model_tp_plan = {
        "layers.*.self_attn.qkv_proj": "colwise_gather_output",
        "layers.*.self_attn.o_proj": "rowwise_split_input",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    default_theta = 10000.0
    default_rope: ClassVar[dict[str, float]] = {}  # where `rope_parameters` says nothing

    vocab_size: int = 50257
    hidden_size: int = 2560
    intermediate_size: _FilledIn[int] = 6912
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: _FilledIn[int] = None
    head_dim: _FilledIn[int] = None
    hidden_act: str = "silu"
    mlp_type: str = "gated"
    mlp_gate_dim: int | None = None
    norm_type: str = "rms_norm"
    norm_eps: float | int = 1e-6
    parallel_residual: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = True
    qk_norm_eps: float | int = 1e-6
    max_position_embeddings: int = 2048
    position_embedding_type: str = "rope"
    rope_parameters: _FilledIn[dict] = None
    sliding_window: int | None = 256
    layer_types: _FilledIn[list[str]] = None
    attention_dropout: float | int = 0.0
    initializer_range: float | int = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    oov_policy: str = "error"
    compose_rank: int = 2
    compose_groups: int = 1
    compose_activation: str = "gelu"
    compose_norm_eps: float | int = 1e-6
    compose_pre: bool = True
    compose_post: bool = True
    compose_query: bool = True
    compose_key: bool = True
    compose_low_rank: bool = True
    compose_gate: bool = True
    compose_static: bool = False
    compose_layers: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for key in sorted(kwargs.keys() & AUTHORS_KEYS):
            raise ValueError(f"{key}={kwargs[key]!r} is a key of the authors' files, for from_dict; give a field.")
        self._validate_sizes()
        if self.intermediate_size is None:
            gated = -(-int(8 * self.hidden_size / 3) // 256) * 256
            self.intermediate_size = 4 * self.hidden_size if self.mlp_type == "plain" else gated
        if self.layer_types is None:
            self.layer_types = _layer_types("G" if self.sliding_window is None else "LG", self.num_hidden_layers)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads != 0:
                heads = f"{self.num_attention_heads}; or give head_dim"
                raise ValueError(f"num_attention_heads must divide hidden_size ({self.hidden_size}), got {heads}.")
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.base_model_tp_plan = self._mlp_plan()
        super().__post_init__(**kwargs)
        self.validate_architecture()  # `@strict` does so too, but raises errors of another class

    def _mlp_plan(self) -> dict[str, str]:
        """The class' tensor parallel plan, for the MLP of this model."""
        plan = dict(type(self).base_model_tp_plan)
        if self.mlp_type == "plain":
            del plan["layers.*.mlp.gate_proj"]
        if self.mlp_gate_dim is not None:  # its slices are scaled where the inner layer is whole
            gathered = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
            plan = {name: gathered.get(style, style) if ".mlp." in name else style for name, style in plan.items()}
        return plan

    @property
    def composes_heads(self) -> bool:
        """True if any composition is on; else the model is plain multi-head attention."""
        dynamic = (self.compose_query or self.compose_key) and (self.compose_low_rank or self.compose_gate)
        return (self.compose_pre or self.compose_post) and (dynamic or self.compose_static)

    def composes_layer(self, layer_idx: int) -> bool:
        """True if the heads of one layer are composed."""
        return self.composes_heads and (self.compose_layers is None or layer_idx in self.compose_layers)

    @property
    def compose_cache_channels(self) -> tuple[int, int]:
        """Extra channels for key-wise weights in the cached keys and values of a composing layer."""
        numbers = self.compose_key * (2 * self.compose_rank * self.compose_low_rank + self.compose_gate)
        numbers *= self.num_attention_heads // self.num_key_value_heads
        padded = -(-numbers // CACHE_ROW_ALIGNMENT) * CACHE_ROW_ALIGNMENT
        return padded * self.compose_pre, padded * self.compose_post

    @PreTrainedConfig.per_layer_config.getter
    def per_layer_config(self) -> Any:
        """The configuration of each layer, by which Transformers allocates caches: `head_dim` is the width of a row."""
        wide = copy.copy(self)
        wide.head_dim += max(self.compose_cache_channels)
        return PreTrainedConfig.per_layer_config.fget(wide)  # Dynamo does not see properties through super()

    @property
    def per_layer_attributes(self) -> set[str]:
        """The fields that older versions of Transformers look up in `per_layer_config`; newer ones look up all."""
        return {"head_dim"}

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Move older keys into `rope_parameters` as the base class does; ValueError where they disagree with it."""
        rope = dict(self.rope_parameters or {})
        stated = {key: kwargs.pop(key, None) for key in ("rope_theta", "partial_rotary_factor")}
        for key, value in (*stated.items(), *(kwargs.pop("rope_scaling", None) or {}).items()):
            ours = "rope_type" if key == "type" else key
            if value is not None and rope.setdefault(ours, value) != value:
                raise ValueError(f"{key}={value!r} and rope_parameters={rope!r} disagree; give one of them.")
        self.rope_parameters = {**self.default_rope, **rope}
        return super().convert_rope_params_to_dict(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration of a file's values, the authors' keys too; keep rotary parameters that are not given."""
        values = _with_fields_for_authors_keys(cls, config_dict)
        if cls.__module__ == __name__ and not __name__.startswith("transformers_modules"):
            values["auto_map"] = {}  # no code: what lies beside the weights is replaced by this package
        if new := kwargs.get("rope_parameters"):
            old, kept = super().from_dict(dict(values)).rope_parameters, ("rope_theta", "partial_rotary_factor")
            kwargs["rope_parameters"] = {key: old[key] for key in kept if key in old} | new
        return super().from_dict(values, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, without an `auto_map` that names no code."""
        return {key: value for key, value in super().to_dict().items() if (key, value) != ("auto_map", {})}

    @classmethod
    def presets(cls) -> list[str]:
        """Names that `from_preset` accepts for this class, sorted."""
        return sorted(name for name, values in PRESETS.items() if values["model_type"] == cls.model_type)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """
        The configuration of a published shape (Tables 2, 3 and 6 of the paper and the authors' `config.json` files).

        Args:
            name (`str`): One of `presets()`, for example `"dcformer-2.8b"`; ValueError for any other.
            overrides: Configuration fields that replace the preset's.
        """
        if name not in (names := cls.presets()):
            raise ValueError(f"There is no {cls.model_type} preset {name!r}; choose one of {', '.join(names)}.")
        values = copy.deepcopy(PRESETS[name])
        del values["model_type"], values["description"]
        return cls(**{**values, **overrides})

    def validate_architecture(self) -> None:
        """Part of `@strict` validation: values that no model can have."""
        self._validate_sizes()
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(self, name) < high:
                raise ValueError(f"{name} must be in [{low}, {high}), got {getattr(self, name)}.")
        self.validate_choices()
        for name, multiple in _DIVISORS.items():
            if (value := getattr(self, name)) is not None and getattr(self, multiple) % value != 0:
                raise ValueError(f"{name} must divide {multiple} ({getattr(self, multiple)}), got {value}.")
        allowed = {"full_attention"} if self.sliding_window is None else {"full_attention", "sliding_attention"}
        if len(self.layer_types) != self.num_hidden_layers or not allowed.issuperset(self.layer_types):
            raise ValueError(
                f"layer_types must name one of {', '.join(sorted(allowed))} for each of the {self.num_hidden_layers} "
                f"layers (sliding_window={self.sliding_window}), got {self.layer_types}."
            )
        if (layers := self.compose_layers) is not None and not {*range(self.num_hidden_layers)} >= {*(layers or [-1])}:
            last = self.num_hidden_layers - 1
            raise ValueError(f"compose_layers must be None for all, or name layers from 0 to {last}, got {layers}.")
        if self.position_embedding_type == "rope":
            self._validate_rotary_sizes()

    def _validate_sizes(self) -> None:
        for name, smallest in _SMALLEST.items():
            value, largest = getattr(self, name), MAX_LAYERS if name == "num_hidden_layers" else 2**31 - 1
            if value is not None and not smallest <= value <= largest:
                raise ValueError(f"{name} must be at least {smallest} and at most {largest}, got {value}.")

    def validate_choices(self) -> None:
        """The part of it that models repeat, for fields that were set after the configuration was made."""
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                to_add = "; to add rows call model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=128)"
                hint = to_add if name == "oov_policy" else ""
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}{hint}.")

    def _validate_rotary_sizes(self) -> None:
        factor, theta = self.rope_parameters.get("partial_rotary_factor", 1.0), self.rope_parameters.get("rope_theta")
        if not isinstance(theta, int | float) or not 1 < theta < math.inf:
            raise ValueError(f"rope_parameters['rope_theta'] must be a number above 1, got {theta!r}.")
        if not isinstance(factor, int | float) or not 0 < factor <= 1:
            raise ValueError(f"rope_parameters['partial_rotary_factor'] must be in (0, 1], got {factor!r}.")
        if (rotary := int(self.head_dim * factor)) < 2 or rotary % 2 != 0:
            raise ValueError(
                f"int(head_dim * partial_rotary_factor) must be even and at least 2, got {rotary} for head_dim "
                f"{self.head_dim} and partial_rotary_factor {factor}."
            )


@strict
class DCPythiaConfig(DCFormerConfig):
    """Configuration of DCPythia: Pythia with composed attention and query/key norm (section 4.2). By default 2.8B."""

    model_type = "dcpythia"
    default_rope: ClassVar[dict[str, float]] = {"partial_rotary_factor": 0.25}

    intermediate_size: _FilledIn[int] = 10240
    hidden_act: str = "gelu"
    mlp_type: str = "plain"
    norm_type: str = "layer_norm"
    norm_eps: float | int = 1e-5
    parallel_residual: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True


def _layer_types(pattern: str, layers: int) -> list[str]:
    """The types of all layers by a repeated pattern of letters: L for local layers, with a window, G for global."""
    names = {"L": "sliding_attention", "G": "full_attention"}
    return [names[pattern[layer % len(pattern)]] for layer in range(layers)]


def _with_fields_for_authors_keys(config_class: type[DCFormerConfig], values: dict[str, Any]) -> dict[str, Any]:
    """The values of a file with fields in place of the authors' keys; ValueError where both are there and disagree."""
    fields = {key: value for key, value in values.items() if key not in AUTHORS_KEYS}

    def now(ours: str) -> Any:
        return fields.get(ours, getattr(config_class, ours, None))

    def put(theirs: str, ours: str, value: Any) -> None:
        stated = fields.get(ours, value)
        if stated != value and (stated, getattr(config_class, ours, None)) != (None, None):
            raise ValueError(f"{theirs}={values[theirs]!r} and {ours}={stated!r} disagree; give one of them.")
        fields[ours] = value

    for theirs, ours in RENAMED.items():
        if theirs in values:
            put(theirs, ours, None if (theirs, values[theirs]) == ("n_local_heads", -1) else values[theirs])
    composes = now("compose_pre") or now("compose_post")
    for theirs, switched in SWITCHES.items():
        if not isinstance(value := values.get(theirs), bool | None):
            raise ValueError(f"{theirs} must be true or false, got {value!r}.")
        if value is not None and not (theirs == "use_dcmha" and value == composes):
            gate_dim = (values.get("mgate_dim") or 44) if value else None
            for ours in switched:
                put(theirs, ours, {"query_wise": not value, "mgate": gate_dim}.get(theirs, value))
    if (window_type := values.get("window_type")) not in {None, *WINDOW_TYPES}:
        raise ValueError(f"window_type must be null, LG, LGLL or LGL6, got {window_type!r}; or give layer_types.")
    if window_type is not None and isinstance(layers := now("num_hidden_layers"), int) and layers <= MAX_LAYERS:
        pattern = "G" if now("sliding_window") is None else WINDOW_TYPES[window_type]
        put("window_type", "layer_types", _layer_types(pattern, layers))
    if values.get("architectures"):  # tools look a class up in Transformers by this name
        classes = {"DCFormer": "DCFormerForCausalLM", "DCPythia": "DCPythiaForCausalLM"}
        fields["architectures"] = [classes.get(name, name) for name in values["architectures"]]
    if values.keys() & {"dim", "n_layer", "n_head", "block_size"}:  # a file of the authors
        fields.setdefault("qk_norm", False)  # their class' default
        rope = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {}), **fields}
        if rope.get("rope_theta") is None and values.keys() & {"mgate", "prefill_pad"}:
            fields["rope_theta"] = 500000  # their base since the 8B model, whose files alone hold these keys
        # Their DCFormer files carry LLaMA's special tokens beside the GPT-NeoX vocabulary, where 0 ends a text and 2 is
        # "!": generation would stop at the first exclamation mark.
        if [now(name) for name in ("vocab_size", "bos_token_id", "eos_token_id")] == [50257, 1, 2]:
            fields["bos_token_id"] = fields["eos_token_id"] = 0
    return fields


__all__ = ["DCFormerConfig", "DCPythiaConfig"]
