"""Where every array of a JAX checkpoint goes, as data. Both directions of a conversion read these tables.

A row names an array with its axes and a parameter with the order of the same axes. `{sub}` is the sub-block inside a
block of n layers; layer l lives in block l // n, sub-block l % n. The axis that stacks the blocks (1 in MaxText, 0 in
PAX) is not listed. `part` says which part of a parameter an array fills where it does not fill it all, and `pick` which
entry of a fused array the row takes.

Source: the authors' MaxText fork (layers/dcformer.py, dc_attentions.py) and their PAX reader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .pieces import Piece


@dataclass(frozen=True)
class Row:
    leaf: str
    axes: str
    parameter: str
    order: str
    part: str | None = None
    pick: tuple[str, int] | None = None

    @property
    def per_layer(self) -> bool:
        return "{sub}" in self.leaf

    def matches(self, leaf: str) -> int | None:
        """The sub-block of a leaf name that this row is for (0 for a row without one), or None."""
        match = re.fullmatch(re.escape(self.leaf).replace(r"\{sub\}", r"(?P<sub>\d+)"), leaf)
        if match is None:
            return None
        return int(match.group("sub")) if self.per_layer else 0


_OPERATOR = "self_attention_{sub}.AttentionOp_0"
# Below `params.`; rows with {sub} stand below `decoder.layers` (stacked) or `decoder.layers_{i}` (not).
MAXTEXT_ROWS = (
    Row("token_embedder.embedding", "vocab embed", "model.embed_tokens.weight", "vocab embed"),
    Row("decoder.decoder_norm.scale", "embed", "model.norm.weight", "embed"),
    Row("decoder.logits_dense.kernel", "embed vocab", "lm_head.weight", "vocab embed"),
    Row("pre_self_attention_layer_norm_{sub}.scale", "embed", "input_layernorm.weight", "embed"),
    Row("post_self_attention_layer_norm_{sub}.scale", "embed", "post_attention_layernorm.weight", "embed"),
    Row(
        "self_attention_{sub}.query.kernel",
        "embed head channel",
        "self_attn.qkv_proj.weight",
        "head channel embed",
        part="query",
    ),
    Row(
        "self_attention_{sub}.key.kernel",
        "embed kv_head channel",
        "self_attn.qkv_proj.weight",
        "kv_head channel embed",
        part="key",
    ),
    Row(
        "self_attention_{sub}.value.kernel",
        "embed kv_head channel",
        "self_attn.qkv_proj.weight",
        "kv_head channel embed",
        part="value",
    ),
    Row(
        "self_attention_{sub}.qkv_proj.kernel",
        "embed three head channel",
        "self_attn.qkv_proj.weight",
        "three head channel embed",
    ),
    Row("self_attention_{sub}.out.kernel", "head channel embed", "self_attn.o_proj.weight", "embed head channel"),
    Row("self_attention_{sub}.q_norm.scale", "channel", "self_attn.q_norm.weight", "channel"),
    Row("self_attention_{sub}.k_norm.scale", "channel", "self_attn.k_norm.weight", "channel"),
    Row(
        f"{_OPERATOR}.dyn_w_proj.dw1.kernel",
        "embed group slot inner",
        "self_attn.compose.hidden_weight",
        "embed group slot inner",
    ),
    Row(
        f"{_OPERATOR}.dyn_w_proj.qkw",
        "group slot inner two_ranks head_of_group",
        "self_attn.compose.low_rank_weight",
        "group slot inner two_ranks head_of_group",
    ),
    Row(f"{_OPERATOR}.dyn_w_proj.dd.kernel", "embed group gate", "self_attn.compose.gate_weight", "embed group gate"),
    Row(
        f"{_OPERATOR}.pre_proj.w",
        "group head_of_group head_out",
        "self_attn.compose.static_weight",
        "group head_of_group head_out",
        part="pre",
    ),
    Row(
        f"{_OPERATOR}.post_proj.w",
        "group head_of_group head_out",
        "self_attn.compose.static_weight",
        "group head_of_group head_out",
        part="post",
    ),
    Row("mlp_{sub}.wi_0.kernel", "embed mlp", "mlp.gate_proj.weight", "mlp embed"),
    Row("mlp_{sub}.wi_1.kernel", "embed mlp", "mlp.up_proj.weight", "mlp embed"),
    Row("mlp_{sub}.wi.kernel", "embed two mlp", "mlp.gate_proj.weight", "mlp embed", pick=("two", 0)),
    Row("mlp_{sub}.wi.kernel", "embed two mlp", "mlp.up_proj.weight", "mlp embed", pick=("two", 1)),
    Row("mlp_{sub}.wo.kernel", "mlp embed", "mlp.down_proj.weight", "embed mlp"),
)

# Below `state.mdl_vars.params.lm.`; rows with {sub} stand below `transformer.repeat.sub.x_layers_{sub}`.
_PAX_LAYER = "transformer.repeat.sub.x_layers_{sub}"
PAX_ROWS = (
    Row("embedding_lookup.emb_var", "vocab embed", "model.embed_tokens.weight", "vocab embed"),
    Row("final_ln.scale", "embed", "model.norm.weight", "embed"),
    Row("softmax.logits_ffn.linear.w", "embed vocab", "lm_head.weight", "vocab embed"),
    Row(f"{_PAX_LAYER}.layer_norm.scale", "embed", "input_layernorm.weight", "embed"),
    Row(f"{_PAX_LAYER}.ff_layer.layer_norm.scale", "embed", "post_attention_layernorm.weight", "embed"),
    Row(
        f"{_PAX_LAYER}.self_attention.query.w",
        "embed head channel",
        "self_attn.qkv_proj.weight",
        "head channel embed",
        part="query",
    ),
    Row(
        f"{_PAX_LAYER}.self_attention.key.w",
        "embed kv_head channel",
        "self_attn.qkv_proj.weight",
        "kv_head channel embed",
        part="key",
    ),
    Row(
        f"{_PAX_LAYER}.self_attention.value.w",
        "embed kv_head channel",
        "self_attn.qkv_proj.weight",
        "kv_head channel embed",
        part="value",
    ),
    # Unlike MaxText's `out`, already in the order of the parameter.
    Row(
        f"{_PAX_LAYER}.self_attention.post.w",
        "embed head channel",
        "self_attn.o_proj.weight",
        "embed head channel",
    ),
    Row(f"{_PAX_LAYER}.self_attention.q_norm.scale", "channel", "self_attn.q_norm.weight", "channel"),
    Row(f"{_PAX_LAYER}.self_attention.k_norm.scale", "channel", "self_attn.k_norm.weight", "channel"),
    Row(
        f"{_PAX_LAYER}.self_attention.dyn_w_proj.dw1",
        "embed group slot inner",
        "self_attn.compose.hidden_weight",
        "embed group slot inner",
    ),
    Row(
        f"{_PAX_LAYER}.self_attention.dyn_w_proj.qkw",
        "group slot inner two_ranks head_of_group",
        "self_attn.compose.low_rank_weight",
        "group slot inner two_ranks head_of_group",
    ),
    Row(
        f"{_PAX_LAYER}.self_attention.dyn_w_proj.dd",
        "embed group gate",
        "self_attn.compose.gate_weight",
        "embed group gate",
    ),
    Row(f"{_PAX_LAYER}.ff_layer.ffn_layer1_gate.linear.w", "embed mlp", "mlp.gate_proj.weight", "mlp embed"),
    Row(f"{_PAX_LAYER}.ff_layer.ffn_layer1.linear.w", "embed mlp", "mlp.up_proj.weight", "mlp embed"),
    Row(f"{_PAX_LAYER}.ff_layer.ffn_layer2.linear.w", "mlp embed", "mlp.down_proj.weight", "embed mlp"),
    Row(f"{_PAX_LAYER}.ff_layer.mgate_layer.linear.w", "embed mlp_gate", "mlp.gate_mix.weight", "mlp_gate embed"),
)


def axis_sizes(config) -> dict[str, int]:
    """Length of every axis that the tables name, for a configuration."""
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
        "slot": 4,
        "inner": 2 * config.compose_rank * heads_of_group,
        "two_ranks": 2 * config.compose_rank,
        "gate": 4 * heads_of_group,
        "two": 2,
        "three": 3,
    }


def leaf_shape(row: Row, sizes: dict[str, int], stack_axis: int | None, blocks: int) -> tuple[int, ...]:
    """Shape of a row's array; layers that are stacked add an axis of `blocks` at `stack_axis`."""
    shape = [sizes[axis] for axis in row.axes.split()]
    if row.per_layer and stack_axis is not None:
        shape.insert(stack_axis, blocks)
    return tuple(shape)


def piece_for(
    row: Row,
    leaf: str,
    parameter: str,
    sizes: dict[str, int],
    stack_axis: int | None = None,
    block: int = 0,
) -> Piece:
    """
    The piece of `leaf` that a row puts into `parameter`.

    Args:
        leaf, parameter (`str`): Full names.
        sizes: Length of every axis, from `axis_sizes`.
        stack_axis (`int`, *optional*): Axis of the leaf that stacks the blocks of layers; None if it has none.
        block (`int`): The block to take from it.
    """
    names = row.axes.split()
    box = [(0, sizes[name]) for name in names]
    if row.pick is not None:
        axis, index = row.pick
        box[names.index(axis)] = (index, index + 1)
    if row.per_layer and stack_axis is not None:
        names.insert(stack_axis, "block")
        box.insert(stack_axis, (block, block + 1))
    order = tuple(names.index(axis) for axis in row.order.split())
    return Piece(leaf, tuple(box), order, parameter, part_offset(row.part, sizes), _in_words(row))


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


def _in_words(row: Row) -> str:
    words = "as is" if row.axes == row.order else f"{row.axes} -> {row.order}"
    if row.pick is not None:
        words += f", {row.pick[0]} = {row.pick[1]}"
    return words if row.part is None else f"{words}, as its {row.part} part"
