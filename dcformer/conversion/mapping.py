"""The tables of where every array of a JAX checkpoint goes, which both directions of a conversion read.

A row names an array with its axes, and a parameter with the order of the same axes. `{sub}` is the sub-block inside a
block of n layers; layer l lives in block l // n, sub-block l % n. The axis that stacks the blocks (1 in MaxText, 0 in
PAX) is not listed.

Source: the authors' MaxText fork (layers/dcformer.py, dc_attentions.py) and their PAX reader.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..configuration_dcformer import DCFormerConfig
from .plan import Part


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


_SUB = re.compile(r"(?<=_)\d+(?=\.)")  # the number of a sub-block in the name of an array
_QKV, _COMPOSE = "self_attn.qkv_proj.weight", "self_attn.compose"
_STATIC = "group head_of_group head_out"
_LOW_RANK = "group branch inner two_ranks head_of_group"

_ATTENTION = "self_attention_{sub}"
_OPERATOR = f"{_ATTENTION}.AttentionOp_0"
# Below `params.`; rows with {sub} stand below `decoder.layers` (stacked) or `decoder.layers_{i}` (not).
MAXTEXT_ROWS = (
    Row("token_embedder.embedding", "vocab embed", "model.embed_tokens.weight"),
    Row("decoder.decoder_norm.scale", "embed", "model.norm.weight"),
    Row("decoder.logits_dense.kernel", "embed vocab", "lm_head.weight", "vocab embed"),
    Row("pre_self_attention_layer_norm_{sub}.scale", "embed", "input_layernorm.weight"),
    Row("post_self_attention_layer_norm_{sub}.scale", "embed", "post_attention_layernorm.weight"),
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
    Row("mlp_{sub}.wi_0.kernel", "embed mlp", "mlp.gate_proj.weight", "mlp embed"),
    Row("mlp_{sub}.wi_1.kernel", "embed mlp", "mlp.up_proj.weight", "mlp embed"),
    Row("mlp_{sub}.wi.kernel", "embed two mlp", "mlp.gate_proj.weight", "mlp embed", pick=("two", 0)),
    Row("mlp_{sub}.wi.kernel", "embed two mlp", "mlp.up_proj.weight", "mlp embed", pick=("two", 1)),
    Row("mlp_{sub}.wo.kernel", "mlp embed", "mlp.down_proj.weight", "embed mlp"),
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
    """Shape of a row's array; layers that are stacked add an axis of `blocks` at `stack_axis`."""
    shape = [sizes[axis] for axis in row.axes.split()]
    if row.per_layer and stack_axis is not None:
        shape.insert(stack_axis, blocks)
    return tuple(shape)


def find_rows(rows: tuple[Row, ...], name: str) -> tuple[list[Row], int]:
    """The rows that are for an array, and its sub-block, 0 if it is in no layer."""
    number, general = _SUB.search(name), _SUB.sub("{sub}", name, count=1)
    return [row for row in rows if row.array == general], int(number[0]) if number else 0


def check_shape(name: str, shape: tuple[int, ...], row: Row, expected: tuple[int, ...], where: str) -> None:
    if shape != expected:
        raise ValueError(
            f"{name} has shape {shape} in {where}, but by the configuration and the other arrays it must be {expected} "
            f"({row.axes})."
        )


def parts_of(
    row: Row, array: str, sizes: dict[str, int], layers: Sequence[int], stack_axis: int | None
) -> Iterator[tuple[str, Part]]:
    """
    Each parameter that a row fills from an array, and the part of the array; `layers` are those that it stacks, or the
    only one that it is of.
    """
    axes = row.axes.split()
    region = {axis: (0, sizes[axis]) for axis in axes}
    words = "as is" if row.order in ("", row.axes) else f"{row.axes} -> {row.order}"
    if row.pick is not None:
        axis, index = row.pick
        region[axis] = (index, index + 1)
        words += f", {axis} = {index}"
    if row.part is not None:
        words += f", as its {row.part} part"
    if row.per_layer and stack_axis is not None:
        axes.insert(stack_axis, "block")
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
