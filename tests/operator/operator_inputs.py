"""Inputs, masks and cases for the tests of composed attention, and the implementations that are held to them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dcformer.dcmha import ComposeSide, ComposeWeights, Visibility, compose, composed_attention


# The implementations, each with the number types in which it is held to the reference.
FORMS = {
    "plain": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "native": (torch.float32, torch.bfloat16, torch.float16),
}
BRANCHES = ("static", "query_low_rank", "query_gate", "key_low_rank", "key_gate")


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor with a name that says where it stands, such as `pre.query`."""
        named = {"query": self.query, "key": self.key, "value": self.value}
        for stage_name, stage in (("pre", self.pre), ("post", self.post)):
            if stage is None:
                continue
            named[f"{stage_name}.static"] = stage.static
            for side_name, side in (("query", stage.query), ("key", stage.key)):
                named[f"{stage_name}.{side_name}"] = None if side is None else side.factors
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """The same structure with `function` applied to every tensor."""
        new = {name: function(tensor) for name, tensor in self.tensors().items()}

        def stage(name):
            old = getattr(self, name)
            if old is None:
                return None
            query, key = (
                None if getattr(old, side) is None else ComposeSide(factors=new[f"{name}.{side}"])
                for side in ("query", "key")
            )
            return ComposeWeights(query, key, new.get(f"{name}.static"), old.groups)

        return Inputs(new["query"], new["key"], new["value"], stage("pre"), stage("post"))

    def to(self, dtype: torch.dtype) -> "Inputs":
        return self.map(lambda tensor: tensor.to(dtype))

    def leaves(self) -> "Inputs":
        """Copies that ask for gradients."""
        return self.map(lambda tensor: tensor.detach().clone().requires_grad_())


def make_weights(
    *,
    batch: int = 2,
    heads: int = 4,
    queries: int = 20,
    keys: int | None = None,
    rank: int = 2,
    groups: int = 1,
    branches: tuple[str, ...] = BRANCHES,
    seed: int = 0,
) -> ComposeWeights:
    """Random float64 weights of one composition with these branches switched on."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    sides = []
    for name, length in (("query", queries), ("key", queries if keys is None else keys)):
        w1 = w2 = gate = None
        if f"{name}_low_rank" in branches:
            w1, w2 = normal(batch, heads, length, rank), heads**-0.5 * normal(batch, heads, length, rank)
        if f"{name}_gate" in branches:
            gate = normal(batch, heads, length).tanh()
        sides.append(None if w1 is None and gate is None else ComposeSide(w1, w2, gate))
    static = 0.3 * normal(groups, heads // groups, heads // groups) if "static" in branches else None
    return ComposeWeights(*sides, static, groups)


def make_inputs(
    *,
    batch: int = 2,
    heads: int = 4,
    key_value_heads: int | None = None,
    queries: int = 20,
    keys: int | None = None,
    channels: int = 3,
    value_channels: int | None = None,
    rank: int = 2,
    groups: int = 1,
    pre: tuple[str, ...] | None = BRANCHES,
    post: tuple[str, ...] | None = BRANCHES,
    seed: int = 0,
) -> Inputs:
    """Random float64 inputs; `pre` and `post` name the branches of each composition, None leaves it out."""
    generator = torch.Generator().manual_seed(1000 + seed)
    keys = queries if keys is None else keys
    key_value_heads = key_value_heads or heads

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    sizes = {"batch": batch, "heads": heads, "queries": queries, "keys": keys, "rank": rank, "groups": groups}
    return Inputs(
        normal(batch, heads, queries, channels),
        normal(batch, key_value_heads, keys, channels),
        normal(batch, key_value_heads, keys, value_channels or channels),
        None if pre is None else make_weights(**sizes, branches=pre, seed=2000 + seed),
        None if post is None else make_weights(**sizes, branches=post, seed=3000 + seed),
    )


def sixteen_bit_attention(inputs: Inputs, visible: Tensor) -> Tensor:
    """What a plain eager implementation computes in 16 bit, as the authors do: the softmax alone is in float32."""
    query, key, value, pre, post = inputs
    scores = compose(query @ key.mT * query.shape[-1] ** -0.5, pre)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = scores.float().softmax(-1).to(query.dtype)
    return compose(weights, post).masked_fill(~visible, 0.0) @ value


class Case(NamedTuple):
    """Shapes, options and mask of one call; the mask is made from (batch, heads, queries, keys)."""

    shape: dict = {}
    options: dict = {}
    mask: Callable[[int, int, int, int], Tensor | Visibility] | None = None

    def build(self) -> tuple[Inputs, dict]:
        inputs = make_inputs(**self.shape)
        options = dict(self.options)
        if self.mask is not None:
            options["attention_mask"] = self.mask(*inputs.query.shape[:3], inputs.key.shape[2])
        return inputs, options


def left_padding(batch: int, heads: int, queries: int, keys: int) -> Tensor:
    mask = torch.ones(batch, keys, dtype=torch.long)
    mask[0, :4] = 0
    return mask


def right_padding(batch: int, heads: int, queries: int, keys: int) -> Tensor:
    return left_padding(batch, heads, queries, keys).flip(1)


def boolean_mask(batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """A different mask for each batch row, the same for all heads."""
    return torch.rand(batch, 1, queries, keys, generator=torch.Generator().manual_seed(5)) > 0.4


def shared_boolean_mask(batch: int, heads: int, queries: int, keys: int) -> Tensor:
    return boolean_mask(1, heads, queries, keys)


def boolean_mask_per_head(batch: int, heads: int, queries: int, keys: int) -> Tensor:
    return torch.rand(batch, heads, queries, keys, generator=torch.Generator().manual_seed(6)) > 0.4


def float_mask(batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """Finite additions, float32 minimum and -inf side by side."""
    generator = torch.Generator().manual_seed(7)
    mask = torch.randn(batch, 1, queries, keys, generator=generator)
    draw = torch.rand(batch, 1, queries, keys, generator=generator)
    return mask.masked_fill(draw < 0.2, torch.finfo(torch.float32).min).masked_fill(draw > 0.8, -torch.inf)


def float_mask_per_head(batch: int, heads: int, queries: int, keys: int) -> Tensor:
    return float_mask(batch * heads, 1, queries, keys).view(batch, heads, queries, keys)


def documents(batch: int, heads: int, queries: int, keys: int) -> Visibility:
    """Two documents in a row, which end elsewhere in every row."""
    ends = 4 + 3 * torch.arange(batch)[:, None]
    return Visibility(queries, keys, sequence_ids=(torch.arange(keys) >= ends).long())


def both(*branches: str) -> dict:
    return {"pre": branches, "post": branches}


CASES = {
    "causal": Case(),
    "bidirectional": Case(options={"is_causal": False}),
    "window_1": Case(options={"sliding_window": 1}),
    "window_5": Case(options={"sliding_window": 5}),
    "window_beyond_the_length": Case(options={"sliding_window": 50}),
    "bidirectional_window_5": Case(options={"is_causal": False, "sliding_window": 5}),
    "fewer_queries_than_keys_window_5": Case({"queries": 17, "keys": 29}, {"sliding_window": 5}),
    "more_queries_than_keys": Case({"queries": 24, "keys": 15}),
    "more_queries_than_keys_bidirectional": Case({"queries": 24, "keys": 15}, {"is_causal": False}),
    "left_padding": Case(mask=left_padding),
    "right_padding_bidirectional": Case(options={"is_causal": False}, mask=right_padding),
    "boolean_mask": Case(mask=boolean_mask),
    "boolean_mask_for_all_rows": Case(options={"sliding_window": 9}, mask=shared_boolean_mask),
    "boolean_mask_per_head": Case(mask=boolean_mask_per_head),
    "float_mask": Case(mask=float_mask),
    "float_mask_bidirectional": Case({"queries": 17, "keys": 29}, {"is_causal": False}, float_mask),
    "float_mask_per_head_window_5": Case(options={"sliding_window": 5}, mask=float_mask_per_head),
    "documents": Case(mask=documents),
    "batch_of_1": Case({"batch": 1}),
    "batch_of_3": Case({"batch": 3}, mask=left_padding),
    "grouped_query": Case({"key_value_heads": 2}),
    "multi_query": Case({"key_value_heads": 1}, {"sliding_window": 5}),
    "wide_values": Case({"value_channels": 7}),
    "scaling": Case(options={"scaling": 0.3}),
    "rank_1": Case({"rank": 1}),
    "rank_3": Case({"rank": 3}),
    "rank_4": Case({"rank": 4}),
    "one_head": Case({"heads": 1}),
    "two_groups": Case({"groups": 2}),
    "groups_of_one_head": Case({"groups": 4}),
    "two_groups_grouped_query": Case({"heads": 6, "key_value_heads": 3, "groups": 2}),
    "pre_only": Case({"post": None}),
    "post_only": Case({"pre": None}),
    "neither": Case({"pre": None, "post": None}, {"sliding_window": 5}),
    "no_branches": Case(both()),
    "static_only": Case({**both("static"), "groups": 2}),
    "query_wise_only": Case(both("query_low_rank", "query_gate")),
    "key_wise_only": Case(both("key_low_rank", "key_gate")),
    "low_rank_only": Case(both("query_low_rank", "key_low_rank")),
    "gates_only": Case(both("query_gate", "key_gate")),
    "query_gate_and_key_gate_apart": Case({"pre": ("query_gate",), "post": ("key_gate",)}),
    "one_key": Case({"queries": 1}),
    "one_query": Case({"queries": 1, "keys": 29}),
    "one_query_left_padding": Case({"queries": 1, "keys": 29}, mask=left_padding),
    "one_query_float_mask": Case({"queries": 1, "keys": 29}, {"is_causal": False}, float_mask_per_head),
    "one_query_grouped_query": Case({"queries": 1, "keys": 29, "heads": 6, "key_value_heads": 3, "groups": 2}),
    "one_query_static_only": Case({"queries": 1, "keys": 29, **both("static")}),
    "one_query_query_wise_before_key_wise_after": Case(
        {"queries": 1, "keys": 29, "pre": ("query_low_rank", "query_gate"), "post": ("key_low_rank", "key_gate")}
    ),
    "two_queries_window_5": Case({"queries": 2, "keys": 29}, {"sliding_window": 5}),
    "five_queries": Case({"queries": 5, "keys": 29, "key_value_heads": 2}, mask=left_padding),
    "length_7": Case({"queries": 7}),
    "length_63_chunks_of_16": Case({"queries": 63}, {"chunk_size": 16}),
    "length_63_window_20_chunks_of_10": Case({"queries": 63}, {"chunk_size": 10, "sliding_window": 20}),
    "length_111_left_padding": Case({"queries": 111}, mask=left_padding),
    "length_200_window_70": Case({"queries": 200}, {"sliding_window": 70}),
    "chunks_of_1": Case({"queries": 16}, {"chunk_size": 1, "sliding_window": 3}),
    "chunks_of_7_boolean_mask": Case(options={"chunk_size": 7}, mask=boolean_mask),
    "chunks_of_7_float_mask": Case(options={"chunk_size": 7, "is_causal": False}, mask=float_mask),
    "chunks_of_7_documents": Case(options={"chunk_size": 7}, mask=documents),
    "chunks_of_7_more_queries_than_keys": Case({"queries": 24, "keys": 15}, {"chunk_size": 7}),
}


def attend(form: str, *arguments, **options) -> Tensor:
    """`composed_attention` in one of its implementations, whatever it would choose itself."""
    return composed_attention(*arguments, implementation=form, **options)


def value_and_gradients(function, inputs: Inputs, **options) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of `function` and the gradients of all inputs for one fixed random output gradient."""
    leaves = inputs.leaves()
    output = function(*leaves, **options)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
    named = leaves.tensors()
    return output.detach(), dict(zip(named, torch.autograd.grad(output, list(named.values()), cotangent)))
