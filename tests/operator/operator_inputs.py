"""Inputs for the tests of composed attention, the operator entry by entry, and a way to choose its form.

`explicit_attention` follows equations 3 to 8 pair by pair of query and key, each with its own heads x heads map and an
explicit list of visible keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dcformer.dcmha import ComposeSide, ComposeWeights, compose, composed_attention, explain_choice
from dcformer.dcmha_reference import composition_map


BRANCHES = ("static", "query_low_rank", "query_gate", "key_low_rank", "key_gate")
FORMS = ("chunked", "cpu")


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


def explicit_compose(attention: Tensor, weights: ComposeWeights | None) -> Tensor:
    """Equation 7 with one explicit map per pair of query and key."""
    composed = torch.empty_like(attention)
    batches, heads, queries, keys = attention.shape
    for b in range(batches):
        for t in range(queries):
            for s in range(keys):
                composed[b, :, t, s] = attention[b, :, t, s] @ composition_map(weights, heads, b, t, s)
    return composed


def visible_keys(
    queries: int, keys: int, *, is_causal: bool, sliding_window: int | None, query_offset: int | None = None
) -> Tensor:
    """(query, key) boolean: what causality and window let through, pair by pair."""
    offset = keys - queries if query_offset is None else query_offset
    visible = torch.zeros(queries, keys, dtype=torch.bool)
    for t in range(queries):
        for s in range(keys):
            age = t + offset - s
            in_window = sliding_window is None or -sliding_window < age < sliding_window
            visible[t, s] = in_window and (age >= 0 or not is_causal)
    return visible


def explicit_attention(inputs: Inputs, visible: Tensor, bias: Tensor | None = None) -> Tensor:
    """
    Equations 3 to 8 for float64 inputs.

    Args:
        visible (`Tensor`): Boolean, broadcasts to (batch, heads, query, key).
        bias (`Tensor`, *optional*): Added to the composed scores; broadcasts likewise.
    """
    query, key, value, pre, post = inputs
    shared = query.shape[1] // key.shape[1]
    key_of_head = [key[:, head // shared] for head in range(query.shape[1])]
    value_of_head = [value[:, head // shared] for head in range(query.shape[1])]
    scores = [query[:, h] @ key_of_head[h].mT / query.shape[-1] ** 0.5 for h in range(query.shape[1])]
    scores = explicit_compose(torch.stack(scores, dim=1), pre)
    if bias is not None:
        scores = scores + bias
    exponentials = torch.where(visible, scores.exp(), 0.0)
    sums = exponentials.sum(-1, keepdim=True)
    weights = torch.where(sums > 0, exponentials / sums.clamp(min=1e-300), 0.0)
    weights = explicit_compose(weights, post)
    return torch.stack([weights[:, h] @ value_of_head[h] for h in range(query.shape[1])], dim=1)


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
    mask: Callable[[int, int, int, int], Tensor] | None = None

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


MASKED_CASES = {
    "causal": Case(),
    "bidirectional": Case(options={"is_causal": False}),
    "window_1": Case(options={"sliding_window": 1}),
    "window_5": Case(options={"sliding_window": 5}),
    "window_beyond_the_length": Case(options={"sliding_window": 50}),
    "bidirectional_window_5": Case(options={"is_causal": False, "sliding_window": 5}),
    "fewer_queries_than_keys": Case({"queries": 17, "keys": 29}),
    "fewer_queries_than_keys_window_5": Case({"queries": 17, "keys": 29}, {"sliding_window": 5}),
    "fewer_queries_than_keys_bidirectional_window_5": Case(
        {"queries": 17, "keys": 29}, {"is_causal": False, "sliding_window": 5}
    ),
    "more_queries_than_keys": Case({"queries": 24, "keys": 15}),
    "more_queries_than_keys_bidirectional": Case({"queries": 24, "keys": 15}, {"is_causal": False}),
    "left_padding": Case(mask=left_padding),
    "left_padding_window_5": Case(options={"sliding_window": 5}, mask=left_padding),
    "right_padding": Case(mask=right_padding),
    "right_padding_bidirectional": Case(options={"is_causal": False}, mask=right_padding),
    "boolean_mask": Case(mask=boolean_mask),
    "boolean_mask_bidirectional": Case({"queries": 17, "keys": 29}, {"is_causal": False}, boolean_mask),
    "boolean_mask_for_all_rows": Case(options={"sliding_window": 9}, mask=shared_boolean_mask),
    "float_mask": Case(mask=float_mask),
    "float_mask_bidirectional": Case({"queries": 17, "keys": 29}, {"is_causal": False}, float_mask),
}
SHAPED_CASES = {
    "grouped_query": Case({"key_value_heads": 2}),
    "multi_query": Case({"key_value_heads": 1}, {"sliding_window": 5}),
    "wide_values": Case({"value_channels": 7}),
    "narrow_values_grouped_query": Case({"value_channels": 1, "key_value_heads": 2}),
    "scaling": Case(options={"scaling": 0.3}),
    "rank_1": Case({"rank": 1}),
    "rank_4": Case({"rank": 4}),
    "one_head": Case({"heads": 1}),
    "two_groups": Case({"groups": 2}),
    "groups_of_one_head": Case({"groups": 4}),
    "two_groups_grouped_query": Case({"heads": 6, "key_value_heads": 3, "groups": 2}),
    "pre_only": Case({"post": None}),
    "post_only": Case({"pre": None}),
    "neither": Case({"pre": None, "post": None}, {"sliding_window": 5}),
    "no_branches": Case({"pre": (), "post": ()}),
    "static_only": Case({"pre": ("static",), "post": ("static",), "groups": 2}),
    "query_wise_only": Case({"pre": ("query_low_rank", "query_gate"), "post": ("query_low_rank", "query_gate")}),
    "key_wise_only": Case({"pre": ("key_low_rank", "key_gate"), "post": ("key_low_rank", "key_gate")}),
    "low_rank_only": Case({"pre": ("query_low_rank", "key_low_rank"), "post": ("query_low_rank", "key_low_rank")}),
    "gates_only": Case({"pre": ("query_gate", "key_gate"), "post": ("query_gate", "key_gate")}),
    "query_gate_and_key_gate_apart": Case({"pre": ("query_gate",), "post": ("key_gate",)}),
    "length_16": Case({"queries": 16}),
    "length_17": Case({"queries": 17}),
    "length_63_chunks_of_16": Case({"queries": 63}, {"chunk_size": 16}),
    "length_63_window_20_chunks_of_10": Case({"queries": 63}, {"chunk_size": 10, "sliding_window": 20}),
    "length_111_chunks_of_25": Case({"queries": 111}, {"chunk_size": 25}),
    "chunks_of_1": Case({"queries": 16}, {"chunk_size": 1, "sliding_window": 3}),
    "chunks_of_7_left_padding": Case(options={"chunk_size": 7}, mask=left_padding),
    "chunks_of_7_boolean_mask": Case(options={"chunk_size": 7}, mask=boolean_mask),
    "chunks_of_7_float_mask": Case(options={"chunk_size": 7, "is_causal": False}, mask=float_mask),
    "chunks_of_7_more_queries_than_keys": Case({"queries": 24, "keys": 15}, {"chunk_size": 7}),
}
# The form for CPUs takes 16 queries or more, and masks that are the same for all heads.
VECTORISED_CASES = {
    "length_2_of_9_window_5": Case({"queries": 2, "keys": 9}, {"sliding_window": 5}),
    "length_15": Case({"queries": 15}),
    "boolean_mask_per_head": Case(mask=boolean_mask_per_head),
    "boolean_mask_per_head_chunks_of_7": Case(options={"chunk_size": 7}, mask=boolean_mask_per_head),
    "float_mask_per_head": Case(mask=float_mask_per_head),
    "float_mask_per_head_window_5": Case(options={"sliding_window": 5}, mask=float_mask_per_head),
}
ONE_QUERY_CASES = {
    "one_key": Case({"queries": 1}),
    "of_9": Case({"queries": 1, "keys": 9}),
    "of_9_window_5": Case({"queries": 1, "keys": 9}, {"sliding_window": 5}),
    "left_padding": Case({"queries": 1, "keys": 9}, mask=left_padding),
    "float_mask": Case({"queries": 1, "keys": 9}, {"is_causal": False}, float_mask),
    "boolean_mask_per_head": Case({"queries": 1, "keys": 9}, {"is_causal": False}, boolean_mask_per_head),
    "grouped_query": Case({"queries": 1, "keys": 9, "key_value_heads": 2, "value_channels": 5}),
    "two_groups_grouped_query": Case({"queries": 1, "keys": 9, "heads": 6, "key_value_heads": 3, "groups": 2}),
    "rank_4": Case({"queries": 1, "keys": 9, "rank": 4}),
    "pre_only": Case({"queries": 1, "keys": 9, "post": None}),
    "post_only": Case({"queries": 1, "keys": 9, "pre": None}),
    "neither": Case({"queries": 1, "keys": 9, "pre": None, "post": None}),
    "static_only_two_groups": Case({"queries": 1, "keys": 9, "pre": ("static",), "post": ("static",), "groups": 2}),
    "low_rank_only": Case(
        {
            "queries": 1,
            "keys": 9,
            "pre": ("query_low_rank", "key_low_rank"),
            "post": ("query_low_rank", "key_low_rank"),
        }
    ),
    "query_gate_and_key_gate_apart": Case({"queries": 1, "keys": 9, "pre": ("query_gate",), "post": ("key_gate",)}),
    "query_wise_before_key_wise_after": Case(
        {"queries": 1, "keys": 9, "pre": ("query_low_rank", "query_gate"), "post": ("key_low_rank", "key_gate")}
    ),
}


def attend(form: str, *arguments, **options) -> Tensor:
    """`composed_attention` in one of its implementations, whatever it would choose itself."""
    return composed_attention(*arguments, implementation=form, **options)


def choice_of(case: Case) -> str:
    """The implementation that `composed_attention` chooses for a case."""
    inputs, options = case.build()
    options.pop("chunk_size", None)
    return explain_choice(*inputs, **options)[-1][0]


def value_and_gradients(function, inputs: Inputs, **options) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of `function` and the gradients of all inputs for one fixed random output gradient."""
    leaves = inputs.leaves()
    output = function(*leaves, **options)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
    named = leaves.tensors()
    return output.detach(), dict(zip(named, torch.autograd.grad(output, list(named.values()), cotangent)))
