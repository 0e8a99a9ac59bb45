"""MaxText checkpoints: the architecture (arrays, training YAML, defaults), and where each array goes."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..configuration_dcformer import DCFormerConfig
from .arrays import Source
from .mapping import MAXTEXT_ROWS, Entry, axis_sizes, find_entries, lay_out, part_offset
from .orbax import open_orbax
from .plan import UNUSED_FILE, Checkpoint, Layout, Origin, Part, group_parts
from .settings import read_yaml, refuse_misspelt
from .stores import Store


# Beside the steps of a run; `convert_to_maxtext` writes it.
TRAIN_CONFIG_FILE = "train_config.yml"
SCAN_AXIS = 1  # along which layers are stacked, unless the YAML says otherwise
# Windows of the authors' configurations by the number of layers in a block; None is full attention.
_DEFAULT_WINDOWS = {1: [None], 2: [256, None], 4: [256, None, 256, 256], 8: [256, None, *[256] * 6]}
# Top-level entries of a training state that are not parameters.
_STATE = {"opt_state": "optimizer state", "step": "step counter, in the report"}
_STATE |= dict.fromkeys(("rng", "dropout_rng"), "random state")
# Keys of a training YAML that are read besides those that `_check_yaml` compares with the arrays, and others of MaxText
# and its forks that look like them.
_READ = {"window_size", "normalization_layer_epsilon", "max_target_length", "param_scan_axis", "global_parameter_scale"}
_READ |= {"pre_compose", "post_compose", "static_proj", "query_wise", "key_wise", "normalize_embedding_logits"}
_ALIKE = {"base_moe_mlp_dim", "eval_max_target_length", "global_num_kv_heads", "mlp_activations_limit"}
_ALIKE |= {"mtp_use_compose", "use_qk_norm", "v_head_dim"}
_STAGES = ("pre", "post")
_DYNAMIC = ("dyn_w_proj.dw1.kernel", "dyn_w_proj.qkw", "dyn_w_proj.dd.kernel")
_KNOWN, _JAX = "the checkpoint's arrays", "the authors' JAX code"
_DEFAULT = "default of the authors' configs; pass --train-config to be sure"
# Further keys, with all that can be converted.
_ONLY = {"num_experts": 1, "use_untrainable_positional_embedding": False, "trainable_position_size": -1}


@dataclass(frozen=True)
class _Tree:
    """The arrays of the parameters by full name, the length of every axis, and how the layers are stored."""

    entries: dict[str, Entry]
    sizes: dict[str, int]
    num_layers: int
    layers_per_block: int
    stack_axis: int | None

    def has(self, suffix: str) -> bool:
        return any(name.endswith(suffix) for name in self.entries)

    @property
    def static(self) -> dict[str, bool]:
        """True for each stage that has a static matrix."""
        return {stage: self.has(f"{stage}_proj.w") for stage in _STAGES}


def open_maxtext(source: str | os.PathLike, step: int | None = None) -> Source:
    """The arrays of an orbax checkpoint, of whatever model; arguments and errors as of [`convert_maxtext`]."""
    return open_orbax(source, step).source("orbax", re.compile(rf"({'|'.join(_STATE)})(\..*)?"))


def read_maxtext(source: Source, train_config: str | os.PathLike | None = None) -> Checkpoint:
    """The model of a MaxText checkpoint; arguments and errors as of [`convert_maxtext`]."""
    path, train = str(train_config), {}
    if train_config is not None:
        train = read_yaml(path)
    elif source.run and (content := Store(source.run).read(TRAIN_CONFIG_FILE)) is not None:
        train = read_yaml(path := f"{source.run}/{TRAIN_CONFIG_FILE}", content)
    tree = _read_tree(source, train.get("param_scan_axis", SCAN_AXIS))
    by_arrays = _infer_config(tree, {"window_size": [None] * tree.layers_per_block}, path)
    _check_yaml(tree, _config_of(by_arrays), train, path)
    origins = _infer_config(tree, train, os.path.basename(path))
    config = _config_of(origins)
    facts = {**source.facts, "layers_per_block": tree.layers_per_block}
    known = replace(source, format=source.format.replace("orbax", "MaxText"), training=train, facts=facts)
    return Checkpoint(known, config, origins, _lay_out(tree, config, known))


def _read_tree(source: Source, scan_axis: int) -> _Tree:
    """Sort the arrays into the table and measure the model."""
    entries, where = find_entries(MAXTEXT_ROWS, source, "MaxText"), source.location
    in_layers = [entry for entry in entries.values() if entry.rows[0].per_layer]
    numbered = [entry.block for entry in in_layers if entry.block is not None]
    if not in_layers or 0 < len(numbered) < len(in_layers):
        raise ValueError(f"{where} must hold either decoder.layers or decoder.layers_0, ..., not both or none.")
    per_block = 1 + max(entry.sub for entry in in_layers)
    axis = None if numbered else scan_axis
    sizes = _measure({name: entries[name] for name in source.arrays}, axis)
    blocks = 1 + max(numbered) if numbered else sizes["block"]
    return _Tree(entries, sizes, blocks * per_block, per_block, axis)


def _measure(entries: Mapping[str, Entry], stack_axis: int | None) -> dict[str, int]:
    """Read the length of every axis off the shapes; whether all agree is checked when the configuration is known."""
    sizes: dict[str, int] = {}
    for name, entry in entries.items():
        axes, shape = entry.rows[0].stored_axes(stack_axis), entry.shape
        if len(axes) != len(shape):
            raise ValueError(f"{name} has shape {shape} instead of {len(axes)} axes ({', '.join(axes)}).")
        for axis, size in zip(axes, shape):
            sizes.setdefault(axis, size)
    if "head" not in sizes:
        raise ValueError("There is no attention below decoder; it may be of another architecture.")
    lost = [suffix for suffix in _DYNAMIC if not any(name.endswith(suffix) for name in entries)]
    if 0 < len(lost) < len(_DYNAMIC):
        raise ValueError(f"The dynamic composition is incomplete: no layer has {', '.join(lost)}.")
    return sizes


def _config_of(origins: list[Origin]) -> DCFormerConfig:
    return DCFormerConfig(**{origin.field: origin.value for origin in origins})


def _infer_config(tree: _Tree, train: Mapping[str, Any], file: str) -> list[Origin]:
    """The configuration with the semantics of the JAX run, by the arrays, the values of the training YAML, defaults."""
    sizes, n = tree.sizes, tree.layers_per_block

    def known(**values: Any) -> list[Origin]:
        return [Origin(name, value, _KNOWN) for name, value in values.items()]

    def choose(name: str, key: str, default: Any, read: Callable[[Any], Any] = lambda value: value) -> Origin:
        if key in train:
            return Origin(name, read(train[key]), f"{key} in {file}")
        return Origin(name, default, _DEFAULT, True)

    windows = choose("sliding_window", "window_size", _DEFAULT_WINDOWS.get(n), lambda windows: windows or [None])
    _check_windows(windows.value, n)
    layer_types = ["full_attention" if window is None else "sliding_attention" for window in windows.value]
    window = next((window for window in windows.value if window is not None), None)
    eps = choose("norm_eps", "normalization_layer_epsilon", 1e-5, float)  # YAML takes 1e-5 for text
    is_low_rank, is_static = tree.has("dyn_w_proj.qkw"), any(tree.static.values())
    stages = known(**{f"compose_{stage}": is_there for stage, is_there in tree.static.items()})
    if not is_static:
        stages = [choose(f"compose_{stage}", f"{stage}_compose", True) for stage in _STAGES]
    return [
        *known(
            vocab_size=sizes["vocab"],
            hidden_size=sizes["embed"],
            intermediate_size=sizes["mlp"],
            num_hidden_layers=tree.num_layers,
            num_attention_heads=sizes["head"],
            num_key_value_heads=sizes.get("kv_head", sizes["head"]),
            head_dim=sizes["channel"],
            qk_norm=tree.has("q_norm.scale"),
            tie_word_embeddings=not tree.has("logits_dense.kernel"),
        ),
        replace(windows, value=window),
        replace(windows, field="layer_types", value=layer_types * (tree.num_layers // n)),
        eps,
        Origin("qk_norm_eps", eps.value, "as norm_eps: the JAX code has one epsilon for both"),
        Origin("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}, _JAX),
        choose("max_position_embeddings", "max_target_length", 2048, _longest_input),
        *(known(compose_rank=sizes["two_ranks"] // 2, compose_groups=sizes["group"]) if is_low_rank else ()),
        *known(compose_low_rank=is_low_rank, compose_gate=tree.has("dyn_w_proj.dd.kernel"), compose_static=is_static),
        *stages,
        Origin("compose_activation", "gelu_pytorch_tanh", _JAX),
    ]


def _longest_input(length: int) -> int:
    """The length of an input: a power of two and one token more counts the last token, which is only a target."""
    return length - 1 if length > 3 and (length - 1) & (length - 2) == 0 else length


def _check_windows(windows: Any, n: int) -> None:
    """Raise ValueError unless these can be the windows of a block of n layers; None is full attention."""
    if windows is None:
        raise ValueError(f"Blocks of {n} layers have no default windows; pass --train-config with window_size.")
    if not isinstance(windows, list) or len(windows) != n or len({w for w in windows if w is not None}) > 1:
        raise ValueError(
            f"window_size must list one window length or null for each of the {n} layers of a block, with a single "
            f"length in all, got {windows!r}."
        )


def run_settings(
    config: DCFormerConfig, layers_per_block: int, *, scan_layers: bool, fused_qkv: bool, fused_mlp: bool
) -> dict[str, Any]:
    """The training YAML of a run whose arrays are laid out so."""
    length, composes, types = config.max_position_embeddings, config.composes_heads, config.layer_types or []
    return {
        "decoder_block": "dcformer",
        "mlp_activations": ["silu", "linear"],
        "logits_via_embedding": config.tie_word_embeddings,
        "base_emb_dim": config.hidden_size,
        "base_num_query_heads": config.num_attention_heads,
        "base_num_kv_heads": config.num_key_value_heads,
        "base_mlp_dim": config.intermediate_size,
        **{key: getattr(config, key) for key in ("head_dim", "vocab_size", "qk_norm")},
        "normalization_layer_epsilon": config.norm_eps,
        # Without a scan, MaxText counts blocks here.
        "base_num_decoder_layers": config.num_hidden_layers // (1 if scan_layers else layers_per_block),
        "num_layers_per_block": layers_per_block,
        "param_scan_axis": SCAN_AXIS,
        "window_size": [config.sliding_window if "sliding" in kind else None for kind in types[:layers_per_block]],
        "static_proj": composes and config.compose_static,
        **{f"{stage}_compose": composes and getattr(config, f"compose_{stage}") for stage in _STAGES},
        # The authors count the last token, which is only a target.
        "max_target_length": length + 1 if length > 2 and length & (length - 1) == 0 else length,
        "scan_layers": scan_layers,
        "fused_qkv": fused_qkv,
        "fused_mlp": fused_mlp,
    }


def _check_yaml(tree: _Tree, config: DCFormerConfig, train: Mapping[str, Any], path: str) -> None:
    """Raise ValueError unless the YAML is that of this run, by its sizes and layout, and has no misspelt key."""
    fused = {"fused_qkv": tree.has("qkv_proj.kernel"), "fused_mlp": tree.has(".wi.kernel")}
    settings = run_settings(config, tree.layers_per_block, scan_layers=tree.stack_axis is not None, **fused)
    facts = {key: fact for key, fact in settings.items() if key not in _READ} | _ONLY
    facts |= {key.removeprefix("base_"): fact for key, fact in facts.items()}
    refuse_misspelt(train, _READ | facts.keys(), _ALIKE, path)
    is_scaled = train.get("global_parameter_scale", 1) != 1
    for key, fact in facts.items():
        value = train.get(key)
        if value is not None and value != fact and not (is_scaled and key.startswith("base_")):
            raise ValueError(
                f"{key} is {value!r} in {path!r}, but must be {fact!r} for this checkpoint; give the YAML of this run "
                "(--train-config)."
            )
    _check_composition(tree, train)
    if config.tie_word_embeddings and train.get("normalize_embedding_logits", True):
        raise ValueError(
            "The run shares embedding and output matrix and divides its logits by sqrt(emb_dim) "
            "(normalize_embedding_logits, true by default), which no Transformers model does."
        )


def _check_composition(tree: _Tree, train: Mapping[str, Any]) -> None:
    """The arrays of the composition must be those that the switches of the YAML ask for."""
    is_static = any(tree.static.values())
    keys = ("static_proj", "pre_compose", "post_compose")
    switches = {key: train[key] for key in keys if train.get(key) is not None}
    wrong = []
    for stage, is_there in tree.static.items():
        # JAX has no static matrix for a stage that is off.
        composes = switches.get(f"{stage}_compose", is_there or not is_static)
        if is_there != (composes and switches.get("static_proj", is_static)):
            wrong.append(f"{'has' if is_there else 'lacks'} {stage}_proj.w")
    if not tree.has("dyn_w_proj.qkw") and (switches.get("pre_compose") or switches.get("post_compose")):
        wrong += [f"lacks {name}" for name in _DYNAMIC]
    if wrong:
        stated = ", ".join(f"{key}: {value}" for key, value in switches.items())
        raise ValueError(
            f"The training YAML says {stated}, but the checkpoint {', '.join(wrong)}; give the YAML of this run."
        )


def _lay_out(tree: _Tree, config: DCFormerConfig, source: Source) -> Layout:
    """Every part, parameter kind by parameter kind, so that parameters of one array are written together."""
    sizes = axis_sizes(config)
    ignored = {f"item {item}/": "another item of the step" for item in source.other_items}
    ignored |= {name: _STATE[name.split(".")[0]] for name in source.training_state}
    for key in ("query_wise", "key_wise"):
        if source.training.get(key) is False:
            ignored[f"{key}: false in the training YAML"] = "the authors' JAX code does not read this key"
    unused = [name for name in tree.entries if not config.composes_heads and ".AttentionOp_0." in name]
    why = f"pre_compose and post_compose are off; kept in {UNUSED_FILE} for conversion back to MaxText"
    used = {name: entry for name, entry in tree.entries.items() if name not in unused}
    parts = lay_out(used, sizes, tree.num_layers, tree.layers_per_block, tree.stack_axis, source.location)
    parts += [(name, Part.all_of(source.arrays[name])) for name in unused]
    return Layout(group_parts(parts), ignored | dict.fromkeys(unused, why), _zeros(config, sizes), unused)


def _zeros(config: DCFormerConfig, sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """JAX has no static matrix for a stage that is off; ours holds both, and never reads that one."""
    if not config.composes_heads or not config.compose_static or (config.compose_pre and config.compose_post):
        return {}
    half = part_offset("post", sizes)
    where = (half, 2 * half) if config.compose_pre else (0, half)
    return {f"model.layers.{layer}.self_attn.compose.static_weight": where for layer in range(config.num_hidden_layers)}
