"""MaxText checkpoints to plans: the arrays of an orbax checkpoint, matched with the parameters of a model."""

from __future__ import annotations

import os
from pathlib import Path

from ..leaves import Leaf
from ..mapping import MAXTEXT_ROWS, axis_sizes, part_offset, piece_for
from ..plan import UNUSED_FILE, Plan, complete
from .contents import Contents
from .maxtext_architecture import MaxTextTree, infer_config, parameter_root, read_tree
from .maxtext_yaml import TrainConfig
from .orbax import open_orbax


# Top-level entries of a training state that are no parameters.
_TRAINING_STATE = {
    "opt_state": "optimizer state",
    "step": "step counter, in the report",
    "rng": "random state",
    "dropout_rng": "random state",
}


def plan_maxtext(
    source: str | os.PathLike,
    *,
    step: int | None = None,
    train_config: str | os.PathLike | None = None,
    dtype: str = "keep",
) -> Plan:
    """
    Plan the conversion of a MaxText checkpoint.

    Args:
        source: Run, step or item folder; local, `gs://` or `s3://`.
        step (`int`, *optional*): Step of a run folder. None: the latest.
        train_config (*optional*): The run's training YAML, for what the arrays cannot tell.
        dtype (`str`): dtype of the parameters; `"keep"` for that of each array.

    Raises:
        FileNotFoundError, ValueError: if the checkpoint cannot be converted whole; the message says why.
    """
    train = TrainConfig(None if train_config is None else Path(train_config))
    checkpoint = open_orbax(source, step)
    where = checkpoint.store.location
    names = checkpoint.names()
    root = parameter_root(names, where)
    ignored: dict[str, str] = {}
    leaves: dict[str, Leaf] = {}
    for name in names:
        state = name.split(".")[0]
        if state in _TRAINING_STATE and not (root and name.startswith(root)):
            ignored[name] = _TRAINING_STATE[state]
        elif name.startswith(root):
            leaves[name] = checkpoint.leaf(name)
        else:
            raise ValueError(f"{where} holds {name!r}, which is neither below {root!r} nor optimizer state.")
    tree = read_tree(leaves, root, where, _stack_axis(train))
    config, origins = infer_config(tree, train)
    plan = Plan(
        config,
        leaves,
        [],
        checkpoint.source(f"MaxText ({checkpoint.format})") | {"layers_per_block": tree.layers_per_block},
        ignored=ignored,
        origins=origins,
        training=train.values,
    )
    plan.ignored.update({f"item {item}/": "another item of the step" for item in checkpoint.other_items})
    _add_pieces(plan, tree)
    for key in ("query_wise", "key_wise"):
        if train.get(key, (bool,), True) is False:
            plan.ignored[f"{key}: false in {train.name}"] = "the authors' JAX code does not read this key"
    return complete(plan, dtype)


def _stack_axis(train: TrainConfig) -> int:
    axis = train.get("param_scan_axis", (int,), 1)
    if axis not in (0, 1):
        raise ValueError(f"param_scan_axis in {str(train.path)!r} must be 0 or 1, got {axis}.")
    return axis


def _add_pieces(plan: Plan, tree: MaxTextTree) -> None:
    """Every piece, parameter kind by parameter kind, so that what fills one parameter is read together."""
    config, sizes = plan.config, axis_sizes(plan.config)
    n = tree.layers_per_block
    order = {row: position for position, row in enumerate(MAXTEXT_ROWS)}
    for name, entry in sorted(tree.entries.items(), key=lambda item: (order[item[1].rows[0]], item[1].sub, item[0])):
        if not config.composes_heads and ".AttentionOp_0." in name:
            plan.unused.append(name)
            plan.ignored[name] = f"pre_compose and post_compose are off; kept in {UNUSED_FILE} for the way back"
            continue
        for row in entry.rows:
            if not row.per_layer:
                plan.pieces.append(piece_for(row, name, row.parameter, sizes))
                continue
            blocks = range(tree.sizes["block"]) if entry.block is None else [entry.block]
            for block in blocks:
                parameter = f"model.layers.{block * n + entry.sub}.{row.parameter}"
                stack_index = block if entry.block is None else 0
                plan.pieces.append(piece_for(row, name, parameter, sizes, tree.stack_axis, stack_index))
    if config.composes_heads and config.compose_static and not (config.compose_pre and config.compose_post):
        # JAX has no static matrix for a stage that is off; ours holds both, and never reads that one.
        half = part_offset("post", sizes)
        span = (0, half) if not config.compose_pre else (half, 2 * half)
        for layer in range(config.num_hidden_layers):
            plan.zeros[f"model.layers.{layer}.self_attn.compose.static_weight"] = [span]


def maxtext_contents(source: str | os.PathLike, step: int | None = None) -> Contents:
    """
    What an orbax checkpoint stores.

    Args:
        source, step: As in [`plan_maxtext`].

    Raises:
        FileNotFoundError, ValueError: if there is no checkpoint or its arrays cannot be listed.
    """
    checkpoint = open_orbax(source, step)
    contents = Contents(f"orbax ({checkpoint.format})", checkpoint.store.location, {}, checkpoint.step)
    contents.skipped_steps = checkpoint.skipped_steps
    for name in checkpoint.names():
        top = name.split(".")[0]
        if top == "opt_state":
            contents.optimizer.append(name)
        elif top in _TRAINING_STATE:
            contents.state.append(name)
        else:
            contents.leaves[name] = checkpoint.leaf(name)
    return contents
