"""MaxText checkpoints to plans: the architecture (arrays, training YAML, defaults), and where each array goes."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..configuration_dcformer import DCFormerConfig
from .arrays import SourceArray
from .mapping import MAXTEXT_ROWS, Row, add_parts, array_shape, axis_sizes, check_shape, find_rows, part_offset
from .orbax import open_orbax
from .plan import UNUSED_FILE, Origin, Plan, complete, listed
from .settings import read_yaml, refuse_misspelt


# Beside the steps of a run; `convert_to_maxtext` writes it.
TRAIN_CONFIG_FILE = "train_config.yml"
# Windows of the authors' configurations by the number of layers in a block; None is full attention.
DEFAULT_WINDOWS = {1: [None], 2: [256, None], 4: [256, None, 256, 256], 8: [256, None, *[256] * 6]}
# Top-level entries of a training state that are not parameters.
TRAINING_STATE = {"opt_state": "optimizer state", "step": "step counter, in the report"}
TRAINING_STATE |= dict.fromkeys(("rng", "dropout_rng"), "random state")
_SIZES = ("emb_dim", "mlp_dim", "num_query_heads", "num_kv_heads", "num_decoder_layers")
# Keys of a training YAML that are read besides those that `_check_against_tree` compares with the arrays, and others of
# MaxText and its forks that look like them.
_READ = {"window_size", "normalization_layer_epsilon", "max_target_length", "param_scan_axis", "global_parameter_scale"}
_READ |= {"pre_compose", "post_compose", "static_proj", "query_wise", "key_wise", "normalize_embedding_logits"}
_ALIKE = {"base_moe_mlp_dim", "eval_max_target_length", "global_num_kv_heads", "mlp_activations_limit"}
_ALIKE |= {"mtp_use_compose", "use_qk_norm", "v_head_dim"}
_IN_LAYER = re.compile(r"decoder\.layers(?:_(\d+))?\.(.+)")
_DYNAMIC = ("dyn_w_proj.dw1.kernel", "dyn_w_proj.qkw", "dyn_w_proj.dd.kernel")
_KNOWN, _JAX = "the checkpoint's arrays", "the authors' JAX code"
_DEFAULT = "default of the authors' configs; pass --train-config to be sure"


@dataclass
class _Entry:
    """One array and the rows of the table that are for it; `block` is None if it stacks the layers."""

    array: SourceArray
    rows: list[Row]
    sub: int
    block: int | None


@dataclass
class _Tree:
    """The arrays of the parameters by full name, the length of every axis, and how the layers are stored."""

    entries: dict[str, _Entry]
    layers_per_block: int
    stack_axis: int | None
    num_layers: int = 0
    sizes: dict[str, int] = field(default_factory=dict)

    def has(self, suffix: str) -> bool:
        return any(name.endswith(suffix) for name in self.entries)


def plan_maxtext(
    source: str | os.PathLike,
    *,
    step: int | None = None,
    train_config: str | os.PathLike | None = None,
    dtype: str = "keep",
) -> Plan:
    """The plan of a MaxText checkpoint; arguments and errors as of [`convert_maxtext`]."""
    checkpoint, path, content = open_orbax(source, step), str(train_config), None
    if train_config is None:
        path, content = f"{checkpoint.run}/{TRAIN_CONFIG_FILE}", checkpoint.read_beside(TRAIN_CONFIG_FILE)
    train = {} if train_config is None and content is None else read_yaml(path, content)
    root = _root(checkpoint.names, checkpoint.location)
    ignored, names = {f"item {item}/": "another item of the step" for item in checkpoint.other_items}, []
    for name in checkpoint.names:
        state = name.split(".")[0]
        if state in TRAINING_STATE and not (root and name.startswith(root)):
            ignored[name] = TRAINING_STATE[state]
        elif name.startswith(root):
            names.append(name)
        else:
            raise ValueError(f"{checkpoint.location} holds {name!r}, neither below {root!r} nor optimizer state.")
    for key in ("query_wise", "key_wise"):
        if train.get(key) is False:
            ignored[f"{key}: false in the training YAML"] = "the authors' JAX code does not read this key"
    arrays = checkpoint.open(names)
    tree = _read_tree(arrays, root, checkpoint.location, train.get("param_scan_axis", 1))
    config, origins = _infer_config(tree, train, path)
    plan = Plan(
        config,
        arrays,
        checkpoint.source("MaxText") | {"layers_per_block": tree.layers_per_block},
        checkpoint.store.stamps(checkpoint.folder),
        ignored=ignored,
        origins=origins,
        training=train,
        beside=Path(checkpoint.run) if checkpoint.run and checkpoint.store.is_local else None,
    )
    _add_parts(plan, tree)
    return complete(plan, dtype)


def _root(names: list[str], where: str) -> str:
    """The prefix of all parameters, which is that of the embedding."""
    suffix = MAXTEXT_ROWS[0].array
    roots = [name[: -len(suffix)] for name in names if name.endswith(suffix) and not name.startswith("opt_state")]
    if len(roots) != 1:
        raise ValueError(
            f"{where} is not a MaxText DCFormer checkpoint: it has {len(roots)} arrays named {suffix} outside the "
            f"optimizer; it holds {listed(names) or 'nothing'}."
        )
    return roots[0]


def _read_tree(arrays: dict[str, SourceArray], root: str, where: str, stack_axis: int) -> _Tree:
    """Sort the arrays into the table and measure the model."""
    entries, unknown = {}, []
    for name, array in arrays.items():
        below, block = name.removeprefix(root), None
        if in_layer := _IN_LAYER.fullmatch(below):
            block, below = None if in_layer[1] is None else int(in_layer[1]), in_layer[2]
        rows, sub = find_rows(MAXTEXT_ROWS, below)
        if rows and rows[0].per_layer == bool(in_layer):
            entries[name] = _Entry(array, rows, sub, block)
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(f"{where} holds arrays that a DCFormer does not have: {listed(sorted(unknown))}.")
    in_layers = [entry for entry in entries.values() if entry.rows[0].per_layer]
    blocks = {entry.block for entry in in_layers}
    if not blocks or (None in blocks and len(blocks) > 1):
        raise ValueError(f"{where} must hold either decoder.layers or decoder.layers_0, ..., not both or none.")
    per_block = 1 + max(entry.sub for entry in in_layers)
    tree = _Tree(entries, per_block, stack_axis if None in blocks else None)
    _measure(tree)
    count = tree.sizes["block"] if None in blocks else 1 + max(block for block in blocks if block is not None)
    tree.num_layers = count * per_block
    return tree


def _measure(tree: _Tree) -> None:
    """Read the length of every axis off the shapes; whether all agree is checked when the configuration is known."""
    for name, entry in tree.entries.items():
        axes, shape = entry.rows[0].axes.split(), entry.array.shape
        if entry.rows[0].per_layer and tree.stack_axis is not None:
            axes.insert(tree.stack_axis, "block")
        if len(axes) != len(shape):
            raise ValueError(f"{name} has shape {shape} instead of {len(axes)} axes ({', '.join(axes)}).")
        for axis, size in zip(axes, shape):
            tree.sizes.setdefault(axis, size)
    if "head" not in tree.sizes:
        raise ValueError("There is no attention below decoder; it may be of another architecture.")
    lost = [name for name in _DYNAMIC if not tree.has(name)]
    if 0 < len(lost) < len(_DYNAMIC):
        raise ValueError(f"The dynamic composition is incomplete: no layer has {', '.join(lost)}.")


def _infer_config(tree: _Tree, train: dict[str, Any], path: str) -> tuple[DCFormerConfig, list[Origin]]:
    """
    The configuration with the semantics of the JAX run, and where each value comes from; `train` holds the values of
    the training YAML, and must agree with the arrays.
    """
    sizes, file = tree.sizes, os.path.basename(path)
    origins: list[Origin] = []

    def put(name: str, value: Any, origin: str, is_default: bool = False) -> None:
        origins.append(Origin(name, value, origin, is_default))

    def choose(name: str, key: str, default: Any, read: Callable[[Any], Any] = lambda value: value) -> None:
        if key in train:
            put(name, read(train[key]), f"{key} in {file}")
        else:
            put(name, default, _DEFAULT, True)

    _check_against_tree(tree, train, path)
    put("vocab_size", sizes["vocab"], _KNOWN)
    put("hidden_size", sizes["embed"], _KNOWN)
    put("intermediate_size", sizes["mlp"], _KNOWN)
    put("num_hidden_layers", tree.num_layers, _KNOWN)
    put("num_attention_heads", sizes["head"], _KNOWN)
    put("num_key_value_heads", sizes.get("kv_head", sizes["head"]), _KNOWN)
    put("head_dim", sizes["channel"], _KNOWN)
    put("qk_norm", tree.has("q_norm.scale"), _KNOWN)
    put("tie_word_embeddings", not tree.has("logits_dense.kernel"), _KNOWN)
    windows, origin, is_default = _windows(tree, train, file)
    layer_types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    put("sliding_window", next((window for window in windows if window is not None), None), origin, is_default)
    put("layer_types", layer_types * (tree.num_layers // tree.layers_per_block), origin, is_default)
    # YAML takes 1e-5 for text.
    choose("norm_eps", "normalization_layer_epsilon", 1e-5, float)
    put("qk_norm_eps", origins[-1].value, "as norm_eps: the JAX code has one epsilon for both")
    put("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}, _JAX)
    choose("max_position_embeddings", "max_target_length", 2048, _longest_input)
    if tree.has("dyn_w_proj.qkw"):
        put("compose_rank", sizes["two_ranks"] // 2, _KNOWN)
        put("compose_groups", sizes["group"], _KNOWN)
    put("compose_low_rank", tree.has("dyn_w_proj.qkw"), _KNOWN)
    put("compose_gate", tree.has("dyn_w_proj.dd.kernel"), _KNOWN)
    static = {stage: tree.has(f"{stage}_proj.w") for stage in ("pre", "post")}
    put("compose_static", any(static.values()), _KNOWN)
    for stage, is_there in static.items():
        if any(static.values()):
            put(f"compose_{stage}", is_there, _KNOWN)
        else:
            choose(f"compose_{stage}", f"{stage}_compose", True)
    put("compose_activation", "gelu_pytorch_tanh", _JAX)
    return DCFormerConfig(**{origin.field: origin.value for origin in origins}), origins


def _longest_input(length: int) -> int:
    """The length of an input: a power of two and one token more counts the last token, which is only a target."""
    return length - 1 if length > 3 and (length - 1) & (length - 2) == 0 else length


def _windows(tree: _Tree, train: dict[str, Any], file: str) -> tuple[list[int | None], str, bool]:
    """Window of every layer of a block (None: full attention), where they come from, and whether by default."""
    n = tree.layers_per_block
    if "window_size" in train:
        windows, origin, is_default = train["window_size"] or [None], f"window_size in {file}", False
    elif n in DEFAULT_WINDOWS:
        windows, origin, is_default = DEFAULT_WINDOWS[n], _DEFAULT, True
    else:
        raise ValueError(f"Blocks of {n} layers have no default windows; pass --train-config with window_size.")
    if not isinstance(windows, list) or len(windows) != n or len({w for w in windows if w is not None}) > 1:
        raise ValueError(
            f"window_size must list one window length or null for each of the {n} layers of a block, with a single "
            f"length in all, got {windows!r}."
        )
    return windows, origin, is_default


def _check_against_tree(tree: _Tree, train: dict[str, Any], path: str) -> None:
    """Raise ValueError unless the YAML is that of this run, by its sizes and layout, and has no misspelt key."""
    sizes = tree.sizes
    facts: dict[str, Any] = {
        "vocab_size": sizes["vocab"],
        "head_dim": sizes["channel"],
        "num_layers_per_block": tree.layers_per_block,
        "qk_norm": tree.has("q_norm.scale"),
        "scan_layers": tree.stack_axis is not None,
        "logits_via_embedding": not tree.has("logits_dense.kernel"),
        "fused_qkv": tree.has("qkv_proj.kernel"),
        "fused_mlp": tree.has(".wi.kernel"),
        # All that can be converted.
        "decoder_block": "dcformer",
        "mlp_activations": ["silu", "linear"],
        "num_experts": 1,
        "use_untrainable_positional_embedding": False,
        "trainable_position_size": -1,
        "emb_dim": sizes["embed"],
        "mlp_dim": sizes["mlp"],
        "num_query_heads": sizes["head"],
        "num_kv_heads": sizes.get("kv_head", sizes["head"]),
        # Without a scan, MaxText counts blocks here.
        "num_decoder_layers": tree.num_layers // (1 if tree.stack_axis is not None else tree.layers_per_block),
    }
    facts |= {f"base_{name}": facts[name] for name in _SIZES}
    refuse_misspelt(train, _READ | facts.keys(), _ALIKE, path)
    if train.get("global_parameter_scale", 1) != 1:
        facts = {key: fact for key, fact in facts.items() if not key.startswith("base_")}
    for key, fact in facts.items():
        value = train.get(key)
        if value is not None and value != fact:
            raise ValueError(
                f"{key} is {value!r} in {path!r}, but must be {fact!r} for this checkpoint; give the YAML of this run "
                "(--train-config)."
            )
    _check_composition(tree, train)
    if facts["logits_via_embedding"] and train.get("normalize_embedding_logits", True):
        raise ValueError(
            "The run shares embedding and output matrix and divides its logits by sqrt(emb_dim) "
            "(normalize_embedding_logits, true by default), which no Transformers model does."
        )


def _check_composition(tree: _Tree, train: dict[str, Any]) -> None:
    """The arrays of the composition must be those that the switches of the YAML ask for."""
    static = {stage: tree.has(f"{stage}_proj.w") for stage in ("pre", "post")}
    keys = ("static_proj", "pre_compose", "post_compose")
    switches = {key: train[key] for key in keys if train.get(key) is not None}
    wrong = []
    for stage, is_there in static.items():
        # JAX has no static matrix for a stage that is off.
        composes = switches.get(f"{stage}_compose", is_there or not any(static.values()))
        if is_there != (composes and switches.get("static_proj", any(static.values()))):
            wrong.append(f"{'has' if is_there else 'lacks'} {stage}_proj.w")
    if not tree.has("dyn_w_proj.qkw") and (switches.get("pre_compose") or switches.get("post_compose")):
        wrong += [f"lacks {name}" for name in _DYNAMIC]
    if wrong:
        stated = ", ".join(f"{key}: {value}" for key, value in switches.items())
        raise ValueError(
            f"The training YAML says {stated}, but the checkpoint {', '.join(wrong)}; give the YAML of this run."
        )


def _add_parts(plan: Plan, tree: _Tree) -> None:
    """Every part, parameter kind by parameter kind, so that parameters of one array are written together."""
    config, sizes, n = plan.config, axis_sizes(plan.config), tree.layers_per_block
    order = {row: position for position, row in enumerate(MAXTEXT_ROWS)}
    for name, entry in sorted(tree.entries.items(), key=lambda item: (order[item[1].rows[0]], item[1].sub, item[0])):
        if not config.composes_heads and ".AttentionOp_0." in name:
            plan.unused.append(name)
            plan.ignored[name] = (
                f"pre_compose and post_compose are off; kept in {UNUSED_FILE} for conversion back to MaxText"
            )
            continue
        expected = array_shape(entry.rows[0], sizes, tree.stack_axis, tree.num_layers // n)
        check_shape(name, entry.array.shape, entry.rows[0], expected, plan.source["location"])
        layers = range(entry.sub, tree.num_layers, n) if entry.block is None else [entry.block * n + entry.sub]
        add_parts(plan, entry.rows, name, sizes, layers, tree.stack_axis)
    if config.composes_heads and config.compose_static and not (config.compose_pre and config.compose_post):
        # JAX has no static matrix for a stage that is off; ours holds both, and never reads that one.
        half = part_offset("post", sizes)
        for layer in range(config.num_hidden_layers):
            name = f"model.layers.{layer}.self_attn.compose.static_weight"
            plan.zeros[name] = (half, 2 * half) if config.compose_pre else (0, half)
