"""The tables of where every array of a JAX checkpoint goes, which both directions of a conversion read.

A row names an array with its axes, and a parameter with the order of the same axes. `{sub}` is the sub-block inside a
block of n layers; layer l lives in block l // n, sub-block l % n. The axis that stacks the blocks (1 in MaxText, 0 in
PAX) is not listed; where MaxText does not stack them, block i is in `decoder.layers_{i}` instead of `decoder.layers`.

Source: the authors' MaxText fork (layers/dcformer.py, dc_attentions.py) and their PAX reader.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..configuration_dcformer import DCFormerConfig
from .arrays import Source
from .plan import Part, listed


@dataclass(frozen=True)
class Row:
    """An array of a JAX checkpoint and the parameter that it fills."""

    array: str
    axes: str
    parameter: str
    order: str = ""  #: the axes in the order of the parameter; empty for the same
    part: str | None = None  #: the part of the parameter that it fills, if not all
    pick: tuple[str, int] | None = None  #: the entry of a fused array that the row takes, as axis and index

    @property
    def per_layer(self) -> bool:
        return "{sub}" in self.array

    def stored_axes(self, stack_axis: int | None) -> list[str]:
        """The axes of the array, with `block` where layers are stacked along an axis."""
        axes = self.axes.split()
        if self.per_layer and stack_axis is not None:
            axes.insert(stack_axis, "block")
        return axes


_BLOCK = re.compile(r"(?<=^decoder\.layers)_(\d+)(?=\.)")  # the number of a block in the name of an array
_SUB = re.compile(r"(?<=_)\d+(?=\.)")  # that of a sub-block, without the block's
_QKV, _COMPOSE = "self_attn.qkv_proj.weight", "self_attn.compose"
_STATIC = "group head_of_group head_out"
_LOW_RANK = "group branch inner two_ranks head_of_group"

_ATTENTION = "decoder.layers.self_attention_{sub}"
_OPERATOR = f"{_ATTENTION}.AttentionOp_0"
# Below `params.`.
MAXTEXT_ROWS = (
    Row("token_embedder.embedding", "vocab embed", "model.embed_tokens.weight"),
    Row("decoder.decoder_norm.scale", "embed", "model.norm.weight"),
    Row("decoder.logits_dense.kernel", "embed vocab", "lm_head.weight", "vocab embed"),
    Row("decoder.layers.pre_self_attention_layer_norm_{sub}.scale", "embed", "input_layernorm.weight"),
    Row("decoder.layers.post_self_attention_layer_norm_{sub}.scale", "embed", "post_attention_layernorm.weight"),
    Row(f"{_ATTENTION}.query.kernel", "embed head channel", _QKV, "head channel embed", part="query"),
    Row(f"{_ATTENTION}.key.kernel", "embed kv_head channel", _QKV, "kv_head channel embed", part="key"),
    Row(f"{_ATTENTION}.value.kernel", "embed kv_head channel", _QKV, "kv_head channel embed", part="value"),
    Row(f"{_ATTENTION}.qkv_proj.kernel", "embed three head channel", _QKV, "three head channel embed"),
    Row(f"{_ATTENTION}.out.kernel", "head channel embed", "self_attn.o_proj.weight", "embed head channel"),
    Row(f"{_ATTENTION}.q_norm.scale", "channel", "self_attn.q_norm.weight"),
    Row(f"{_ATTENTION}.k_norm.scale", "channel", "self_attn.k_norm.weight"),
    Row(f"{_OPERATOR}.dyn_w_proj.dw1.kernel", "embed group branch inner", f"{_COMPOSE}.hidden_weight"),
    Row(f"{_OPERATOR}.dyn_w_proj.qkw", _LOW_RANK, f"{_COMPOSE}.low_rank_weight"),
    Row(f"{_OPERATOR}.dyn_w_proj.dd.kernel", "embed group gate", f"{_COMPOSE}.gate_weight"),
    Row(f"{_OPERATOR}.pre_proj.w", _STATIC, f"{_COMPOSE}.static_weight", part="pre"),
    Row(f"{_OPERATOR}.post_proj.w", _STATIC, f"{_COMPOSE}.static_weight", part="post"),
    Row("decoder.layers.mlp_{sub}.wi_0.kernel", "embed mlp", "mlp.gate_proj.weight", "mlp embed"),
    Row("decoder.layers.mlp_{sub}.wi_1.kernel", "embed mlp", "mlp.up_proj.weight", "mlp embed"),
    Row("decoder.layers.mlp_{sub}.wi.kernel", "embed two mlp", "mlp.gate_proj.weight", "mlp embed", pick=("two", 0)),
    Row("decoder.layers.mlp_{sub}.wi.kernel", "embed two mlp", "mlp.up_proj.weight", "mlp embed", pick=("two", 1)),
    Row("decoder.layers.mlp_{sub}.wo.kernel", "mlp embed", "mlp.down_proj.weight", "embed mlp"),
)

# Below `state.mdl_vars.params.lm.`.
_PAX_LAYER = "transformer.repeat.sub.x_layers_{sub}"
_PAX_ATTENTION, _PAX_MLP = f"{_PAX_LAYER}.self_attention", f"{_PAX_LAYER}.ff_layer"
PAX_ROWS = (
    Row("embedding_lookup.emb_var", "vocab embed", "model.embed_tokens.weight"),
    Row("final_ln.scale", "embed", "model.norm.weight"),
    Row("softmax.logits_ffn.linear.w", "embed vocab", "lm_head.weight", "vocab embed"),
    Row(f"{_PAX_LAYER}.layer_norm.scale", "embed", "input_layernorm.weight"),
    Row(f"{_PAX_MLP}.layer_norm.scale", "embed", "post_attention_layernorm.weight"),
    Row(f"{_PAX_ATTENTION}.query.w", "embed head channel", _QKV, "head channel embed", part="query"),
    Row(f"{_PAX_ATTENTION}.key.w", "embed kv_head channel", _QKV, "kv_head channel embed", part="key"),
    Row(f"{_PAX_ATTENTION}.value.w", "embed kv_head channel", _QKV, "kv_head channel embed", part="value"),
    # Unlike MaxText's `out`, already in the order of the parameter.
    Row(f"{_PAX_ATTENTION}.post.w", "embed head channel", "self_attn.o_proj.weight"),
    Row(f"{_PAX_ATTENTION}.q_norm.scale", "channel", "self_attn.q_norm.weight"),
    Row(f"{_PAX_ATTENTION}.k_norm.scale", "channel", "self_attn.k_norm.weight"),
    Row(f"{_PAX_ATTENTION}.dyn_w_proj.dw1", "embed group branch inner", f"{_COMPOSE}.hidden_weight"),
    Row(f"{_PAX_ATTENTION}.dyn_w_proj.qkw", _LOW_RANK, f"{_COMPOSE}.low_rank_weight"),
    Row(f"{_PAX_ATTENTION}.dyn_w_proj.dd", "embed group gate", f"{_COMPOSE}.gate_weight"),
    Row(f"{_PAX_MLP}.ffn_layer1_gate.linear.w", "embed mlp", "mlp.gate_proj.weight", "mlp embed"),
    Row(f"{_PAX_MLP}.ffn_layer1.linear.w", "embed mlp", "mlp.up_proj.weight", "mlp embed"),
    Row(f"{_PAX_MLP}.ffn_layer2.linear.w", "mlp embed", "mlp.down_proj.weight", "embed mlp"),
    Row(f"{_PAX_MLP}.mgate_layer.linear.w", "embed mlp_gate", "mlp.gate_mix.weight", "mlp_gate embed"),
)


def axis_sizes(config: DCFormerConfig) -> dict[str, int]:
    """Length of every axis that the tables name."""
    heads_of_group = config.num_attention_heads // config.compose_groups
    return {
        "vocab": config.vocab_size,
        "embed": config.hidden_size,
        "mlp": config.intermediate_size,
        "mlp_gate": config.mlp_gate_dim or 0,
        "head": config.num_attention_heads,
        "kv_head": config.num_key_value_heads,
        "channel": config.head_dim,
        "group": config.compose_groups,
        "head_of_group": heads_of_group,
        "head_out": heads_of_group,
        "branch": 4,  # pre-query, pre-key, post-query, post-key
        "inner": 2 * config.compose_rank * heads_of_group,
        "two_ranks": 2 * config.compose_rank,
        "gate": 4 * heads_of_group,
        "two": 2,
        "three": 3,
    }


def array_shape(row: Row, sizes: dict[str, int], stack_axis: int | None, blocks: int) -> tuple[int, ...]:
    """Shape of a row's array, which stacks so many blocks."""
    return tuple((sizes | {"block": blocks})[axis] for axis in row.stored_axes(stack_axis))


@dataclass(frozen=True)
class Entry:
    """An array of a checkpoint that is in a table."""

    shape: tuple[int, ...]
    rows: list[Row]
    sub: int  #: its sub-block, 0 outside the layers
    block: int | None  #: the only one that it is of; `None` if it stacks them, or is outside the layers


def find_entries(table: Sequence[Row], source: Source, kind: str) -> dict[str, Entry]:
    """The arrays of a checkpoint of a kind, in the order of its table, below the root where the embedding is."""
    suffix, where = table[0].array, source.location
    roots = [name.removesuffix(suffix) for name in source.arrays if name.endswith(suffix)]
    if len(roots) != 1:
        names = sorted([*source.arrays, *source.training_state])
        raise ValueError(
            f"{where} is not a {kind} DCFormer checkpoint: it has {len(roots)} arrays named {suffix} outside the "
            f"optimizer; it holds {listed(names) or 'nothing'}."
        )
    entries: dict[str, Entry] = {}
    for name, array in source.arrays.items():
        if not name.startswith(roots[0]):
            raise ValueError(f"{where} holds {name!r}, neither below {roots[0]!r} nor optimizer state.")
        below = name.removeprefix(roots[0])
        block, in_stack = _BLOCK.search(below), _BLOCK.sub("", below)
        sub, general = _SUB.search(in_stack), _SUB.sub("{sub}", in_stack, count=1)
        if rows := [row for row in table if row.array == general]:
            entries[name] = Entry(array.shape, rows, int(sub[0]) if sub else 0, int(block[1]) if block else None)
    if unknown := sorted(source.arrays.keys() - entries.keys()):
        raise ValueError(f"{where} holds arrays that a DCFormer does not have: {listed(unknown)}.")
    return dict(sorted(entries.items(), key=lambda item: (table.index(item[1].rows[0]), item[1].sub, item[0])))


def lay_out(
    entries: Mapping[str, Entry], sizes: dict[str, int], layers: int, per_block: int, stack_axis: int | None, where: str
) -> list[tuple[str, Part]]:
    """Each parameter that the arrays of a checkpoint fill, and the part of the array; ValueError for a wrong shape."""
    parts: list[tuple[str, Part]] = []
    for name, entry in entries.items():
        expected = array_shape(entry.rows[0], sizes, stack_axis, layers // per_block)
        if entry.shape != expected:
            raise ValueError(
                f"{name} has shape {entry.shape} in {where}, but by the configuration and the other arrays it must be "
                f"{expected} ({entry.rows[0].axes})."
            )
        first = entry.sub + per_block * (entry.block or 0)
        in_array = range(first, layers, per_block) if entry.block is None else [first]
        parts += [pair for row in entry.rows for pair in parts_of(row, name, sizes, in_array, stack_axis)]
    return parts


def parts_of(
    row: Row, array: str, sizes: dict[str, int], layers: Sequence[int], stack_axis: int | None
) -> Iterator[tuple[str, Part]]:
    """
    Each parameter that a row fills from an array, and the part of the array; `layers` are those that it stacks, or the
    only one that it is of.
    """
    axes = row.stored_axes(stack_axis)
    region = {axis: (0, sizes[axis]) for axis in row.axes.split()}
    words = "as is" if row.order in ("", row.axes) else f"{row.axes} -> {row.order}"
    if row.pick is not None:
        axis, index = row.pick
        region[axis] = (index, index + 1)
        words += f", {axis} = {index}"
    if row.part is not None:
        words += f", as its {row.part} part"
    order = tuple(axes.index(axis) for axis in (row.order or row.axes).split())
    for block, prefix in enumerate([f"model.layers.{layer}." for layer in layers] if row.per_layer else [""]):
        region["block"] = (block, block + 1)
        part = Part(array, tuple(region[axis] for axis in axes), order, part_offset(row.part, sizes), words)
        yield prefix + row.parameter, part


def part_offset(part: str | None, sizes: dict[str, int]) -> int:
    """First element of a part of a parameter: rows of qkv_proj are query | key | value, static_weight is pre, post."""
    row = sizes["channel"] * sizes["embed"]
    offsets = {
        None: 0,
        "query": 0,
        "key": sizes["head"] * row,
        "value": (sizes["head"] + sizes["kv_head"]) * row,
        "pre": 0,
        "post": sizes["group"] * sizes["head_of_group"] * sizes["head_out"],
    }
    return offsets[part]
