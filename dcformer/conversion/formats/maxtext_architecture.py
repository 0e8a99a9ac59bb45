"""The architecture of a MaxText run: from the tree of its arrays, its training YAML, and documented defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ...common.quoting import quoted
from ...configuration_dcformer import DCFormerConfig
from ..leaves import Leaf
from ..mapping import MAXTEXT_ROWS, Row
from ..plan import Origin, listed
from .maxtext_yaml import TrainConfig


# Windows of the authors' configurations by the number of layers in a block; None is full attention.
DEFAULT_WINDOWS = {
    1: [None],
    2: [256, None],
    4: [256, None, 256, 256],
    8: [256, None, 256, 256, 256, 256, 256, 256],
}
DEFAULT_EPSILON = 1e-5
_UNSTACKED = re.compile(r"decoder\.layers_(\d+)\.(.+)")
_STACKED = "decoder.layers."
_ADVICE = "pass --train-config to be sure"
_FIXED_SIZES = {"slot": 4, "two": 2, "three": 3}


@dataclass
class TreeEntry:
    """One array and the rows of the table that are for it."""

    leaf: Leaf
    rows: list[Row]
    sub: int
    block: int | None  # None: stacked


@dataclass
class MaxTextTree:
    """
    Attributes:
        root (`str`): What every parameter's name starts with, `"params."` as a rule.
        entries: The arrays below it, by full name.
        sizes: Length of every axis the tables name, and `"block"`, the number of stacked blocks.
        layers_per_block, num_layers (`int`): n and L.
        stack_axis (`int`, *optional*): Axis that stacks the blocks; None for a tree without a scan.
    """

    root: str
    entries: dict[str, TreeEntry]
    layers_per_block: int
    num_layers: int
    stack_axis: int | None
    sizes: dict[str, int] = field(default_factory=dict)

    def has(self, suffix: str) -> bool:
        return any(name.endswith(suffix) for name in self.entries)


def parameter_root(names: list[str], where: str) -> str:
    """The prefix of all parameters, found by the embedding's name."""
    suffix = MAXTEXT_ROWS[0].leaf
    roots = [name[: -len(suffix)] for name in names if name.endswith(suffix) and not name.startswith("opt_state")]
    if len(roots) != 1:
        found = f"{len(roots)} arrays" if roots else "no array"
        raise ValueError(
            f"{where} is not a MaxText DCFormer checkpoint: it has {found} named {suffix} outside the optimizer; it "
            f"holds {listed(names) or 'nothing'}."
        )
    return roots[0]


def read_tree(leaves: dict[str, Leaf], root: str, where: str, stack_axis: int) -> MaxTextTree:
    """
    Sort a checkpoint's arrays into the table and measure the model.

    Args:
        leaves: The arrays below `root`, by full name.
        stack_axis (`int`): Where a scan puts its axis (`param_scan_axis`).

    Raises:
        ValueError: for arrays that no row is for, and for shapes that contradict each other.
    """
    entries, unknown = {}, []
    for name, leaf in leaves.items():
        below, block = name.removeprefix(root), None
        in_layer = True
        if match := _UNSTACKED.fullmatch(below):
            block, below = int(match.group(1)), match.group(2)
        elif below.startswith(_STACKED):
            below = below.removeprefix(_STACKED)
        else:
            in_layer = False
        matching = [
            (row, sub) for row in MAXTEXT_ROWS if row.per_layer == in_layer and (sub := row.matches(below)) is not None
        ]
        if matching:
            rows = [row for row, _ in matching]
            entries[name] = TreeEntry(leaf, rows, matching[0][1], block)
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"{where} holds arrays that a DCFormer does not have: {listed(sorted(unknown))}; it may be of another "
            "architecture or a newer layout."
        )
    in_layers = [entry for entry in entries.values() if entry.rows[0].per_layer]
    blocks = {entry.block for entry in in_layers if entry.block is not None}
    is_stacked = any(entry.block is None for entry in in_layers)
    if not in_layers or (is_stacked and blocks):
        raise ValueError(f"{where} must hold either decoder.layers or decoder.layers_0, ..., not both or none.")
    tree = MaxTextTree(root, entries, 1 + max(entry.sub for entry in in_layers), 0, None)
    if is_stacked:
        tree.stack_axis = stack_axis
    _measure(tree)
    tree.num_layers = (tree.sizes["block"] if is_stacked else 1 + max(blocks)) * tree.layers_per_block
    return tree


def _measure(tree: MaxTextTree) -> None:
    """Read every axis length off the shapes; each must be the same wherever it occurs."""
    first: dict[str, TreeEntry] = {}
    tree.sizes.update(_FIXED_SIZES)
    for entry in tree.entries.values():
        axes = entry.rows[0].axes.split()
        if entry.rows[0].per_layer and tree.stack_axis is not None:
            axes.insert(tree.stack_axis, "block")
        leaf = entry.leaf
        if len(axes) != len(leaf.shape):
            raise ValueError(
                f"{leaf.name} has shape {leaf.shape}, which has {len(leaf.shape)} axes instead of {len(axes)} "
                f"({', '.join(axes)})."
            )
        for axis, size in zip(axes, leaf.shape):
            expected = tree.sizes.setdefault(axis, size)
            if size != expected:
                source = first[axis].leaf if axis in first else None
                says = f"{source.name} {source.shape} says {expected}" if source else f"it must be {expected}"
                raise ValueError(
                    f"{leaf.name} has shape {leaf.shape}: its axis {axis!r} is {size}, but {says}; one of the two is "
                    "not from this run, or was swapped."
                )
            first.setdefault(axis, entry)
    sizes = tree.sizes
    if "head" not in sizes:
        raise ValueError(f"There is no attention below {tree.root}decoder; it may be of another architecture.")
    for part in ("dw1.kernel", "qkw", "dd.kernel"):
        if tree.has("dyn_w_proj.dw1.kernel") and not tree.has(f"dyn_w_proj.{part}"):
            raise ValueError(f"The dynamic composition is incomplete: no layer has dyn_w_proj.{part}.")
    group, per_group = sizes.get("group", 1), sizes.get("head_of_group", sizes["head"] // sizes.get("group", 1))
    two_ranks = sizes.get("two_ranks", 4)
    implied = {
        "head": group * per_group,
        "head_out": per_group,
        "gate": 4 * per_group,
        "inner": two_ranks * per_group,
        "two_ranks": 2 * (two_ranks // 2),
    }
    for axis, size in implied.items():
        if sizes.get(axis, size) != size:
            name = first[axis].leaf.name
            raise ValueError(
                f"{name} has shape {first[axis].leaf.shape}: its axis {axis!r} is {sizes[axis]}, but with {group} "
                f"groups of {per_group} heads and rank {two_ranks // 2} it must be {size}."
            )


def infer_config(tree: MaxTextTree, train: TrainConfig) -> tuple[DCFormerConfig, list[Origin]]:
    """
    The configuration with the semantics of the JAX run, and where each value comes from.

    Raises:
        ValueError: if the YAML contradicts the tree or asks for what no DCFormer of ours computes, or if there is no
            YAML and no default.
    """
    sizes, known = tree.sizes, "the checkpoint's arrays"
    values: dict[str, Any] = {}
    origins: list[Origin] = []

    def put(name: str, value, origin: str, is_default: bool = False):
        values[name] = value
        origins.append(Origin(name, value, origin, is_default))

    def choose(name: str, key: str, kinds: tuple[type, ...], default):
        if key in train:
            put(name, train.get(key, kinds), f"{key} in {train.name}")
        else:
            put(name, default, f"default of the authors' configs; {_ADVICE}", True)

    _check_against_tree(tree, train)
    put("vocab_size", sizes["vocab"], known)
    put("hidden_size", sizes["embed"], known)
    put("intermediate_size", sizes["mlp"], known)
    put("num_hidden_layers", tree.num_layers, known)
    put("num_attention_heads", sizes["head"], known)
    put("num_key_value_heads", sizes.get("kv_head", sizes["head"]), known)
    put("head_dim", sizes["channel"], known)
    put("qk_norm", tree.has("q_norm.scale"), known)
    put("tie_word_embeddings", not tree.has("logits_dense.kernel"), known)
    _choose_windows(tree, train, put)
    choose("norm_eps", "normalization_layer_epsilon", (float, int), DEFAULT_EPSILON)
    if not 0 <= values["norm_eps"] < 1:
        raise ValueError(
            f"normalization_layer_epsilon in {str(train.path)!r} must be a small positive number, got "
            f"{values['norm_eps']}."
        )
    put("qk_norm_eps", values["norm_eps"], "as norm_eps: the JAX code has one epsilon for both")
    put("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}, "the authors' JAX code")
    _choose_length(train, put)
    if tree.has("dyn_w_proj.qkw"):
        put("compose_rank", sizes["two_ranks"] // 2, known)
        put("compose_groups", sizes["group"], known)
    dynamic = tree.has("dyn_w_proj.dd.kernel")
    put("compose_low_rank", tree.has("dyn_w_proj.qkw"), known)
    put("compose_gate", dynamic, known)
    static = {stage: tree.has(f"{stage}_proj.w") for stage in ("pre", "post")}
    put("compose_static", any(static.values()), known)
    for stage in ("pre", "post"):
        if any(static.values()):
            put(f"compose_{stage}", static[stage], known)
            if train.get(f"{stage}_compose", (bool,), static[stage]) != static[stage]:
                raise ValueError(
                    f"{stage}_compose in {str(train.path)!r} is {train.values[f'{stage}_compose']}, but the checkpoint "
                    f"{'has' if static[stage] else 'lacks'} {stage}_proj.w; give the YAML of this run."
                )
        else:
            choose(f"compose_{stage}", f"{stage}_compose", (bool,), True)
    put("compose_activation", "gelu_pytorch_tanh", "the authors' JAX code")
    try:
        return DCFormerConfig(**values), origins
    except (ValueError, TypeError, OverflowError) as error:
        where = "The checkpoint" if train.path is None else f"The checkpoint with {str(train.path)!r}"
        raise ValueError(f"{where} is of a model that cannot be: {error}") from error


def _choose_windows(tree: MaxTextTree, train: TrainConfig, put) -> None:
    n = tree.layers_per_block
    if "window_size" in train:
        windows = train.get("window_size", (list, type(None)))
        windows = [None] if windows is None else windows
        bad = [w for w in windows if w is not None and (not isinstance(w, int) or isinstance(w, bool) or w < 1)]
        if bad or len(windows) < n:
            raise ValueError(
                f"window_size in {str(train.path)!r} must list a positive number or null for each of the {n} layers of "
                f"a block, got {quoted(windows)}."
            )
        windows, origin, is_default = windows[:n], f"window_size in {train.name}", False
    elif n in DEFAULT_WINDOWS:
        windows, origin, is_default = DEFAULT_WINDOWS[n], f"default of the authors' configs; {_ADVICE}", True
    else:
        raise ValueError(
            f"Blocks of {n} layers have no default windows; pass --train-config with the run's window_size."
        )
    finite = sorted({window for window in windows if window is not None})
    if len(finite) > 1:
        raise ValueError(
            f"window_size {quoted(windows)} has several window lengths; a DCFormer configuration has one, with "
            "sliding_attention or full_attention per layer."
        )
    layer_types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    put("sliding_window", finite[0] if finite else None, origin, is_default)
    put("layer_types", layer_types * (tree.num_layers // n), origin, is_default)


def _choose_length(train: TrainConfig, put) -> None:
    if "max_target_length" not in train:
        put("max_position_embeddings", 2048, f"default of the authors' configs; {_ADVICE}", True)
        return
    length = train.get("max_target_length", (int,))
    inputs, origin = length, f"max_target_length in {train.name}"
    if (length - 1) & (length - 2) == 0 and length > 3:  # a power of two and one token that is only a target
        inputs, origin = length - 1, f"{origin}, less the token that is only a target"
    put("max_position_embeddings", inputs, origin)


def _check_against_tree(tree: MaxTextTree, train: TrainConfig) -> None:
    """The YAML must be the run's own: what it says of shapes has to hold."""
    sizes = tree.sizes
    scale = train.get("global_parameter_scale", (int,), 1)
    layers = tree.num_layers if tree.stack_axis is not None else tree.num_layers // tree.layers_per_block
    facts = {
        "base_emb_dim": sizes["embed"],
        "base_mlp_dim": sizes["mlp"],
        "base_num_query_heads": sizes["head"],
        "base_num_decoder_layers": layers,
    }
    facts = facts if scale == 1 else {}
    facts |= {
        "vocab_size": sizes["vocab"],
        "head_dim": sizes["channel"],
        "num_layers_per_block": tree.layers_per_block,
        "qk_norm": tree.has("q_norm.scale"),
        "scan_layers": tree.stack_axis is not None,
        "logits_via_embedding": not tree.has("logits_dense.kernel"),
    }
    for key, fact in facts.items():
        value = train.values.get(key, fact)
        if value is not None and value != fact:
            raise ValueError(
                f"{key} is {quoted(value)} in {str(train.path)!r}, but {fact!r} in the checkpoint; give the YAML of "
                "this run."
            )
    allowed = {"decoder_block": "dcformer", "mlp_activations": ["silu", "linear"]}
    for key, value in allowed.items():
        if train.values.get(key, value) != value:
            raise ValueError(
                f"{key} is {quoted(train.values[key])} in {str(train.path)!r}; only {value!r} can be converted."
            )
    if facts["logits_via_embedding"] and train.get("normalize_embedding_logits", (bool,), True):
        raise ValueError(
            "The run shares embedding and output matrix and divides its logits by sqrt(emb_dim) "
            "(normalize_embedding_logits, true unless --train-config says false), which no Transformers model does."
        )
