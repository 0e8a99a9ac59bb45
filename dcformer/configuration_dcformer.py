# Copyright 2026 The dcformer authors. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Configurations of DCFormer and DCPythia (Dynamically Composable Multi-Head Attention, ICML 2024).

One class covers, by values alone, the published models, the plain Transformer baselines with the same windows,
Talking-Heads attention and every ablation of the paper's Tables 9 and 10. The key names of the authors' own
`config.json` are translated on reading; only the names below are ever saved.
"""

import copy
import difflib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional, ParamSpec, TypeAlias, TypeGuard, TypeVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import is_torchdynamo_compiling

from .peft_targets import register_peft_targets
from .presets_dcformer import PRESETS
from .sharing_dcformer import SharedConfig


# The authors' key -> ours, where the value carries over unchanged.
_RENAMED_KEYS = {
    "dim": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "block_size": "max_position_embeddings",
    "window_size": "sliding_window",
    "use_qk_norm": "qk_norm",
    "use_parallel_residual": "parallel_residual",
}
# Settings of the authors' run-time code which say nothing about the model.
_DROPPED_KEYS = ("q_chunk_size", "is_training", "use_gradient_checkpointing", "prefill_pad")
# The authors' keys that have no single field of ours.
_TRANSLATED_KEYS = (
    "n_local_heads",
    "use_linear_bias",
    "query_wise",
    "use_dcmha",
    "mgate",
    "mgate_dim",
    "rope_base",
    "rotary_pct",
    "window_type",
)
# Share of equal characters from which an unknown key counts as one of ours, misspelt: a letter or two are wrong.
_MISSPELT = 0.9
# Cached rows are multiples of so many channels, which keeps them 16-byte aligned in 16-bit types.
CACHE_ROW_ALIGNMENT = 8
_SWITCHES = ("use_linear_bias", "query_wise", "use_dcmha", "mgate")
# Sizes past which no model is, but with which a computation would take forever or overflow.
_LARGEST_SIZES = {
    "vocab_size": 2**27,
    "hidden_size": 2**27,
    "intermediate_size": 2**27,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "max_position_embeddings": 2**31,
    "compose_rank": 2**10,
    "compose_groups": 2**16,
}
# The authors' classes, which their config.json names, and what they are here.
_AUTHORS_CLASSES = {"DCFormer": "DCFormerForCausalLM", "DCPythia": "DCPythiaForCausalLM"}
# A file that holds one of these was written by the authors' configuration class.
_AUTHORS_MARKERS = ("dim", "n_layer", "n_head", "block_size")
# One period of each named pattern; None is the authors' default and means the same as "LG".
_WINDOW_PATTERNS = {None: "LG", "LG": "LG", "LGLL": "LGLL", "LGL6": "LGLLLLLL"}
_ABOUT_A_PRESET = ("model_type", "description")
_LAYER_TYPES = {"L": "sliding_attention", "G": "full_attention"}


_Arguments = ParamSpec("_Arguments")
_Class = TypeVar("_Class", bound=type)
_Config = TypeVar("_Config", bound="DCFormerConfig")
_Value = TypeVar("_Value")

if TYPE_CHECKING:
    # A field that may be given as None, but which `__post_init__` fills in: who reads it need not ask for None.
    _FilledIn: TypeAlias = _Value | Any
else:
    _FilledIn = Optional

_inherited_per_layer_config: Any = PreTrainedConfig.per_layer_config  # a property, which type checkers misread
# torch.compile follows this function, but neither `super()` nor the property to it.
_layers_of = _inherited_per_layer_config.fget


def _choices(values: Iterable[object]) -> str:
    return ", ".join(repr(value) for value in values)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _raises_value_error(method: Callable[_Arguments, _Value]) -> Callable[_Arguments, _Value]:
    """`@strict` wraps what its validators raise in an error that is no ValueError; give users the cause itself."""

    @functools.wraps(method)
    def wrapper(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Value:
        try:
            return method(*args, **kwargs)
        except StrictDataclassError as error:
            raise ValueError(str(error.__cause__ or error)) from error
        except KeyError as error:  # what Transformers raises for a missing entry of rope_parameters
            raise ValueError(str(error.args[0])) from error

    return wrapper


def with_value_errors(cls: _Class) -> _Class:
    """Class decorator, above `@strict`: what its validation finds is raised as a plain ValueError."""
    for name in ("__init__", "validate"):
        setattr(cls, name, _raises_value_error(getattr(cls, name)))
    return cls


@with_value_errors
@strict
class DCFormerConfig(SharedConfig, PreTrainedConfig):
    r"""
    Configuration of a DCFormer model. The defaults are those of DCFormer++ 2.8B.

    Args:
        vocab_size (`int`, defaults to 50257): Rows of the token embedding.
        hidden_size (`int`, defaults to 2560): Width of the residual stream.
        intermediate_size (`int`, defaults to 6912): Width of the MLP's inner layer.
        num_hidden_layers (`int`, defaults to 32): Number of decoder layers.
        num_attention_heads (`int`, defaults to 32): Query heads; composition mixes these.
        num_key_value_heads (`int`, *optional*): Key/value heads (grouped-query attention). None: one per query head.
        head_dim (`int`, *optional*): Channels per head. None: `hidden_size // num_attention_heads`.
        hidden_act (`str`, defaults to `"silu"`): Activation of the MLP.
        mlp_type (`str`, defaults to `"gated"`): `"gated"` (SwiGLU with silu) or `"plain"` (two matrices).
        mlp_gate_dim (`int`, *optional*): Number of slices of the inner layer which a softmax over the input scales
            (the authors' `mgate`; 44 in the 8B model). None: no such gate.
        norm_type (`str`, defaults to `"rms_norm"`): `"rms_norm"`, or `"layer_norm"` (with bias).
        norm_eps (`float`, defaults to 1e-6): Epsilon of the block norms and the final norm.
        parallel_residual (`bool`, defaults to `False`): Attention and MLP read the same residual, as in GPT-NeoX.
        attention_bias, mlp_bias (`bool`, default to `False`): Biases of the linear layers.
        qk_norm (`bool`, defaults to `True`): RMS norm of queries and keys, per head, before RoPE.
        qk_norm_eps (`float`, defaults to 1e-6): Its epsilon. JAX runs use `normalization_layer_epsilon`, mostly 1e-5.
        max_position_embeddings (`int`, defaults to 2048): Longest sequence the model was trained on.
        position_embedding_type (`str`, defaults to `"rope"`): `"rope"`, or `"learned"` absolute positions (the
            GPT-3 style Transformer baseline of section 4.1).
        rope_parameters (`dict`, *optional*): `rope_theta` (10000), `rope_type` ("default") and
            `partial_rotary_factor` (1.0).
        sliding_window (`int`, *optional*, defaults to 256): Keys that a sliding layer sees, the query's own included.
        layer_types (`list[str]`, *optional*): `"sliding_attention"` or `"full_attention"` per layer. None: alternating,
            sliding first; all full if `sliding_window` is None.
        attention_dropout (`float`, defaults to 0.0): Dropout on the composed attention weights.
        initializer_range (`float`, defaults to 0.02): Standard deviation of the linear layers and embeddings. The
            composition parameters follow section 4 of the paper instead.
        oov_policy (`str`, defaults to `"error"`): What happens to token ids outside the embedding: `"error"` raises
            ValueError, `"clamp"` takes the nearest row (as the authors' JAX code does), `"pad"` adds rows up to the
            next multiple of 128 when a checkpoint is loaded (each the mean of the rows that exist).
        compose_rank (`int`, defaults to 2): R, the rank of the dynamic projections.
        compose_groups (`int`, defaults to 1): Groups of heads that compose among themselves only (section 3.2).
        compose_activation (`str`, defaults to `"gelu"`): Activation of the dynamic projections. `"gelu"` (erf) in the
            published torch models, `"gelu_pytorch_tanh"` in JAX.
        compose_norm_eps (`float`, defaults to 1e-6): Epsilon of the RMS norm over heads of W_q1 and W_k1.
        compose_pre, compose_post (`bool`, default to `True`): Compose scores before, weights after the softmax.
        compose_query, compose_key (`bool`, default to `True`): Query-wise and key-wise branches.
        compose_low_rank, compose_gate (`bool`, default to `True`): Low-rank projections (branches 2 and 4) and gates
            (branches 3 and 5).
        compose_static (`bool`, defaults to `False`): Static projection (branch 1); alone it is Talking-Heads attention.

    With every composition switched off the model is a plain multi-head Transformer and runs through sdpa or
    FlashAttention.

    Raises:
        ValueError: for a value that no model can have; the message names the field, the value and what is allowed.

    Source: section 3, section 4 and appendix D of the paper; the authors' `configuration_dcformer.py` for the keys.

    Example:

    ```python
    >>> from dcformer import DCFormerConfig, DCFormerForCausalLM

    >>> config = DCFormerConfig.from_preset("dcformer-405m", num_hidden_layers=2)
    >>> model = DCFormerForCausalLM(config)
    ```
    """

    model_type = "dcformer"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "dim": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_local_heads": "num_key_value_heads",
        "block_size": "max_position_embeddings",
        "window_size": "sliding_window",
    }
    # Every rank composes over all heads, so the heads are gathered again after the projection; compose parameters are
    # replicated.
    base_model_tp_plan = {
        "layers.*.self_attn.qkv_proj": "colwise_gather_output",
        "layers.*.self_attn.o_proj": "rowwise_split_input",
        "layers.*.mlp.gate_proj": "colwise_gather_output",
        "layers.*.mlp.up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    default_theta = 10000.0

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

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_misspelt_keys(kwargs)
        kwargs = self._translate_authors_keys(kwargs)
        self._validate_sizes("num_hidden_layers", "num_attention_heads", "hidden_size")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads > 0:
            if self.hidden_size % self.num_attention_heads != 0:
                raise ValueError(
                    f"num_attention_heads must divide hidden_size ({self.hidden_size}) unless head_dim is given, "
                    f"got {self.num_attention_heads}."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = self._pattern_to_layer_types("LG")
        if self.rope_parameters is not None:
            self.rope_parameters = dict(self.rope_parameters)  # the base class fills in what is missing, in place
        if self.mlp_type == "plain":
            plan = {name: style for name, style in self.base_model_tp_plan.items() if "gate_proj" not in name}
            self.base_model_tp_plan = plan  # of the instance, and never saved
        super().__post_init__(**kwargs)

    def __setattr__(self, key: str, value: Any) -> None:
        # `from_pretrained(folder, rope_parameters=...)` replaces the dictionary to scale the context; what it does not
        # name must not fall back to the defaults of another architecture.
        if key == "rope_parameters" and value is not None and (old := self.__dict__.get(key)):
            kept = {name: old[name] for name in ("rope_theta", "partial_rotary_factor") if name in old}
            value = {**kept, **value}
        super().__setattr__(key, value)

    def _refuse_misspelt_keys(self, kwargs: dict) -> None:
        """Transformers takes keys that it does not know for attributes; one that is nearly ours would be lost so."""
        known = {
            *type(self).__dataclass_fields__,
            *_RENAMED_KEYS,
            *_DROPPED_KEYS,
            *_TRANSLATED_KEYS,
            "rope_theta",
            "rope_scaling",
            "partial_rotary_factor",
            "torch_dtype",
            "auto_map",
        }
        for key in kwargs:
            if key in known or key.startswith("_") or hasattr(PreTrainedConfig, key):
                continue
            if near := difflib.get_close_matches(key, known, n=1, cutoff=_MISSPELT):
                raise ValueError(f"{key!r} is not a field of {type(self).__name__}; did you mean {near[0]!r}?")

    def _pattern_to_layer_types(self, pattern: str) -> list[str]:
        """Repeat one period such as "LGLL" over the layers; without a window every layer is full."""
        if self.sliding_window is None:
            pattern = "G"
        return [_LAYER_TYPES[pattern[i % len(pattern)]] for i in range(self.num_hidden_layers)]

    def _translate_authors_keys(self, kwargs: dict) -> dict:
        """Turn the keys of the authors' `config.json` into ours; a file of theirs also brings their defaults."""
        for key in _SWITCHES:
            if not isinstance(kwargs.get(key), bool | None):
                raise ValueError(f"{key} must be true or false, got {kwargs[key]!r}.")
        if any(key in kwargs for key in _AUTHORS_MARKERS):
            self._apply_authors_defaults(kwargs)
            for key in _DROPPED_KEYS:
                kwargs.pop(key, None)
            # It names the authors' code; only for a copy of this file beside a checkpoint does it name this code.
            if not type(self).__module__.startswith("transformers_modules"):
                kwargs.pop("auto_map", None)
        # Tools look up the class of a checkpoint by this name, in Transformers (see public.py).
        classes: list[str] | None = getattr(self, "architectures", None)
        if classes is not None:
            self.architectures = [_AUTHORS_CLASSES.get(name, name) for name in classes]
        for authors_key, key in _RENAMED_KEYS.items():
            if authors_key in kwargs:
                self._set_translated(authors_key, key, kwargs.pop(authors_key))
        if "n_local_heads" in kwargs:
            heads = kwargs.pop("n_local_heads")
            self._set_translated("n_local_heads", "num_key_value_heads", None if heads == -1 else heads)
        if "use_linear_bias" in kwargs:
            self.attention_bias = self.mlp_bias = kwargs.pop("use_linear_bias")
        if kwargs.pop("query_wise", False):
            self.compose_key = False
        if not kwargs.pop("use_dcmha", True):
            self.compose_pre = self.compose_post = False
        mgate, mgate_dim = kwargs.pop("mgate", None), kwargs.pop("mgate_dim", None)
        if mgate:
            self.mlp_gate_dim = mgate_dim if mgate_dim is not None else 44
        if "rope_base" in kwargs:
            kwargs.setdefault("rope_theta", kwargs.pop("rope_base"))
        if "rotary_pct" in kwargs:
            kwargs.setdefault("partial_rotary_factor", kwargs.pop("rotary_pct"))
        if "window_type" in kwargs:
            window_type = kwargs.pop("window_type")
            if not isinstance(window_type, str | None) or window_type not in _WINDOW_PATTERNS:
                raise ValueError(
                    f"window_type must be one of {_choices(_WINDOW_PATTERNS)}, got {window_type!r}; "
                    "for another pattern list every layer in layer_types."
                )
            if self.layer_types is None:
                self.layer_types = self._pattern_to_layer_types(_WINDOW_PATTERNS[window_type])
        if self.intermediate_size is None:
            self.intermediate_size = self._default_intermediate_size()
        return kwargs

    def _apply_authors_defaults(self, kwargs: dict) -> None:
        """What the authors' class assumes for keys that their file leaves out, where it is not our default."""
        kwargs.setdefault("use_qk_norm", False)
        # Their RoPE base changed together with the 8B model, whose files are the only ones to hold these keys.
        kwargs.setdefault("rope_base", 500000 if "mgate" in kwargs or "prefill_pad" in kwargs else 10000)
        # Their DCFormer files carry LLaMA's special tokens (1, 2) beside the GPT-NeoX vocabulary, where 0 ends a text
        # and 2 is "!": generation would stop at the first exclamation mark.
        if self.vocab_size == 50257 and (self.bos_token_id, self.eos_token_id) == (1, 2):
            self.bos_token_id = self.eos_token_id = 0

    def _set_translated(self, authors_key: str, key: str, value: Any) -> None:
        current = getattr(self, key)
        if current != getattr(type(self), key) and current != value:
            raise ValueError(
                f"{authors_key}={value!r} and {key}={current!r} name the same setting and disagree; give one of them."
            )
        setattr(self, key, value)

    def _default_intermediate_size(self) -> int:
        """4 x width, or for a gated MLP two thirds of that rounded up to a multiple of 256, as the authors' class."""
        if self.mlp_type == "plain":
            return 4 * self.hidden_size
        return -(-int(8 * self.hidden_size / 3) // 256) * 256

    @property
    def composes_heads(self) -> bool:
        """Whether any composition is on. If not, the model is plain multi-head attention."""
        dynamic = (self.compose_query or self.compose_key) and (self.compose_low_rank or self.compose_gate)
        return (self.compose_pre or self.compose_post) and (dynamic or self.compose_static)

    @property
    def compose_cache_channels(self) -> tuple[int, int]:
        """Channels for compose weights in a cached key row and in a cached value row, per key/value head."""
        numbers = 0
        if self.compose_key:
            numbers = 2 * self.compose_rank * self.compose_low_rank + self.compose_gate
        numbers *= self.num_attention_heads // self.num_key_value_heads
        padded = -(-numbers // CACHE_ROW_ALIGNMENT) * CACHE_ROW_ALIGNMENT
        return padded * self.compose_pre, padded * self.compose_post

    @property
    def per_layer_config(self) -> Sequence[PreTrainedConfig]:
        """
        As the base class, except that a layer's `head_dim` counts the channels for compose weights too: from it
        Transformers sizes the rows of static caches that are allocated before their first use.
        """
        layers = _layers_of(self)
        channels = max(self.compose_cache_channels)
        # A compiled graph cannot copy a configuration, but makes only dynamic caches, which are as wide as their rows.
        if channels == 0 or self.is_heterogeneous or is_torchdynamo_compiling():
            return layers
        return _CachedLayers(self, layers, channels)

    @per_layer_config.setter
    def per_layer_config(self, value: Any) -> None:
        _inherited_per_layer_config.fset(self, value)

    @property
    def per_layer_attributes(self) -> set[str] | None:
        """As the base class, with `head_dim` where `per_layer_config` says something else of it."""
        if self.is_heterogeneous or max(self.compose_cache_channels) == 0:
            return super().per_layer_attributes
        return {"head_dim"}

    def to_dict(self) -> dict[str, Any]:
        """As the base class. PEFT calls it before it looks for the modules that it adapts, see peft_targets.py."""
        register_peft_targets(self.model_type)
        return super().to_dict()

    @classmethod
    def presets(cls) -> list[str]:
        """Names that `from_preset` accepts for this class, sorted."""
        return sorted(name for name, values in PRESETS.items() if values["model_type"] == cls.model_type)

    @classmethod
    def from_preset(cls: type[_Config], name: str, **overrides: Any) -> _Config:
        """
        The configuration of a published shape.

        Args:
            name (`str`): One of `presets()`, for example `"dcformer-2.8b"`.
            overrides: Configuration fields that replace the preset's.

        Raises:
            ValueError: if there is no preset of that name for this class.

        Source: Tables 2, 3 and 6 of the paper and the authors' published `config.json` files.
        """
        if name not in (names := cls.presets()):
            raise ValueError(f"There is no {cls.model_type} preset {name!r}; choose one of {_choices(names)}.")
        # Copied, since a configuration keeps the lists and dictionaries that it is given.
        values = copy.deepcopy({key: PRESETS[name][key] for key in PRESETS[name] if key not in _ABOUT_A_PRESET})
        return cls(**{**values, **overrides})

    def validate_architecture(self) -> None:
        """Part of `@strict` validation: values that no model can have."""
        self._validate_sizes()
        self._validate_numbers()
        self._validate_choices()
        self._validate_heads()
        self._validate_composition()
        self._validate_positions()

    def _validate_sizes(self, *names: str) -> None:
        for name in names or _LARGEST_SIZES:
            if not 1 <= getattr(self, name) <= _LARGEST_SIZES[name]:
                largest = _LARGEST_SIZES[name]
                raise ValueError(f"{name} must be at least 1 and at most {largest:,}, got {getattr(self, name)}.")

    def _validate_numbers(self) -> None:
        for name in ("norm_eps", "qk_norm_eps", "compose_norm_eps"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must not be negative and must be at most 1, got {getattr(self, name)}.")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and not -1 <= token < _LARGEST_SIZES["vocab_size"]:
                    raise ValueError(f"{name} must be the number of a token, got {token}.")
        if self.is_encoder_decoder:
            raise ValueError("is_encoder_decoder must be false, got true: these models are decoders.")
        if not 0 <= self.initializer_range < math.inf:
            raise ValueError(f"initializer_range must be finite and not negative, got {self.initializer_range}.")
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"attention_dropout must be in [0, 1), got {self.attention_dropout}.")
        if self.mlp_gate_dim is not None and (self.mlp_gate_dim < 1 or self.intermediate_size % self.mlp_gate_dim != 0):
            raise ValueError(
                f"mlp_gate_dim must divide intermediate_size ({self.intermediate_size}), got {self.mlp_gate_dim}; "
                "use None for no gate."
            )

    def _validate_choices(self) -> None:
        choices = {
            "mlp_type": ("gated", "plain"),
            "norm_type": ("rms_norm", "layer_norm"),
            "position_embedding_type": ("rope", "learned"),
            "oov_policy": ("error", "clamp", "pad"),
            "compose_activation": ("gelu", "gelu_pytorch_tanh"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {_choices(allowed)}, got {getattr(self, name)!r}.")

    def _validate_heads(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads ({self.num_attention_heads}), "
                f"got {self.num_key_value_heads}."
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window must be at least 1 (the query's own key), got {self.sliding_window}; "
                "use None for full attention."
            )
        for i, layer_type in enumerate(self.layer_types):
            if layer_type not in _LAYER_TYPES.values():
                raise ValueError(
                    f"layer_types[{i}] must be one of {_choices(_LAYER_TYPES.values())}, got {layer_type!r}."
                )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must name every one of the {self.num_hidden_layers} layers (num_hidden_layers), "
                f"got {len(self.layer_types)} entries."
            )
        if self.sliding_window is None and "sliding_attention" in self.layer_types:
            raise ValueError(
                "sliding_window is None but layer_types holds 'sliding_attention'; give a window of at least 1, "
                "or use 'full_attention' in every layer."
            )

    def _validate_composition(self) -> None:
        if self.num_attention_heads % self.compose_groups != 0:
            raise ValueError(
                f"compose_groups must divide num_attention_heads ({self.num_attention_heads}), "
                f"got {self.compose_groups}."
            )

    def _validate_positions(self) -> None:
        if self.position_embedding_type != "rope":
            return
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            raise ValueError(
                f"rope_parameters['rope_type'] must be one of {_choices(['default', *sorted(ROPE_INIT_FUNCTIONS)])}, "
                f"got {rope_type!r}."
            )
        factor = self.rope_parameters.get("partial_rotary_factor", 1.0)
        if not _is_number(factor) or not 0 < factor <= 1:
            raise ValueError(f"rope_parameters['partial_rotary_factor'] must be in (0, 1], got {factor!r}.")
        theta = self.rope_parameters.get("rope_theta")
        if not _is_number(theta) or not 1 < theta < math.inf:
            raise ValueError(f"rope_parameters['rope_theta'] must be a positive number above 1, got {theta!r}.")
        rotary_dim = int(self.head_dim * factor)
        if rotary_dim < 2 or rotary_dim % 2 != 0:
            raise ValueError(
                f"The rotary size int(head_dim * partial_rotary_factor) must be even and at least 2, got {rotary_dim} "
                f"(head_dim {self.head_dim}, partial_rotary_factor {factor})."
            )


@with_value_errors
@strict
class DCPythiaConfig(DCFormerConfig):
    r"""
    Configuration of a DCPythia model: the Pythia architecture with composed attention and query/key norm. All fields
    are those of [`DCFormerConfig`]; the defaults are those of DCPythia-2.8B.

    Source: section 4.2 of the paper.
    """

    model_type = "dcpythia"

    intermediate_size: _FilledIn[int] = 10240
    hidden_act: str = "gelu"
    mlp_type: str = "plain"
    norm_type: str = "layer_norm"
    norm_eps: float | int = 1e-5
    parallel_residual: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        kwargs.setdefault("partial_rotary_factor", 0.25)
        return super().convert_rope_params_to_dict(**kwargs)


class _CachedLayers(Sequence):
    """`per_layer_config` with wider heads; by layer type, as RoPE asks, with the heads as they are."""

    def __init__(self, config: DCFormerConfig, layers: Sequence, channels: int):
        self._layers: Any = layers  # also by layer type, which no `Sequence` is
        self._layer = copy.copy(config)
        self._layer.__dict__["head_dim"] = config.head_dim + channels

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int | str | slice) -> Any:
        if isinstance(index, str):
            return self._layers[index]
        if isinstance(index, slice):
            return [self._layer] * len(range(*index.indices(len(self))))
        self._layers[index]  # an index out of range ends an iteration
        return self._layer


__all__ = ["DCFormerConfig", "DCPythiaConfig"]
