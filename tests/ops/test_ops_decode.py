"""Decoding in Triton against the reference in float64, in Triton's interpreter where there is no GPU."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from operator_inputs import BRANCHES, Inputs, make_inputs
from torch import Tensor

from dcformer.dcmha_cache import pack, unpack
from dcformer.dcmha_factors import ComposeWeights
from dcformer.dcmha_mask import Visibility
from dcformer.dcmha_reference import reference_attention
from dcformer.ops.arguments import Composition, Mask
from dcformer.ops.decode import DecodeConfig, composed_decode


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Sums of float32 in another order, relative to the largest output.
EXACT = 2e-6
# Outputs rounded to 11 bits, on tensor cores weights too; largest error seen 6e-4.
SIXTEEN_BITS = 2e-3

# Several blocks and parts for few keys, and few programs, since each takes the interpreter milliseconds.
SMALL = DecodeConfig(score_keys=16, compose_keys=16, value_keys=16, programs=8)

QUERY_WISE = ("query_low_rank", "query_gate")
KEY_WISE = ("key_low_rank", "key_gate")
DYNAMIC = QUERY_WISE + KEY_WISE
SWITCHES = {
    "rank1": {"rank": 1},
    "rank4": {"rank": 4},
    "no-pre": {"pre": None},
    "no-post": {"post": None},
    "neither": {"pre": None, "post": None},
    "static-before-in-2-groups": {"heads": 4, "pre": ("static",), "post": None, "groups": 2},
    "static-after": {"pre": DYNAMIC, "post": ("static",)},
    "query-wise": {"pre": QUERY_WISE, "post": QUERY_WISE},
    "key-wise": {"pre": KEY_WISE, "post": KEY_WISE},
    "gates": {"pre": ("query_gate", "key_gate"), "post": ("key_gate",)},
    "maps": {"pre": ("query_low_rank", "key_low_rank"), "post": ("query_low_rank",)},
    "no-branches": {"pre": (), "post": ()},
}


class Step(NamedTuple):
    """Shapes of the inputs of a decode step over full rows, and its mask."""

    shape: dict[str, Any]
    window: int | None = None
    is_causal: bool = True
    dtype: torch.dtype = torch.float32
    config: DecodeConfig | None = SMALL


STEPS = {
    "B3-Q2-S63-H6-D80-win32": Step({"batch": 3, "heads": 6, "queries": 2, "keys": 63, "channels": 80}, 32),
    "B1-Q1-S63-H9-D32": Step({"heads": 9, "queries": 1, "keys": 63, "channels": 32}),
    "B1-Q1-S9-H24-D16-groups3": Step({"heads": 24, "queries": 1, "keys": 9, "groups": 3}),
    "B1-Q3-S20-H5-D128": Step({"heads": 5, "queries": 3, "keys": 20, "channels": 128}),
    "B1-Q2-S33-H6-kv3-D24-groups2": Step(
        {"heads": 6, "key_value_heads": 3, "queries": 2, "keys": 33, "channels": 24, "groups": 2}
    ),
    "B1-Q8-S20-H2-kv1-D80": Step({"heads": 2, "key_value_heads": 1, "queries": 8, "keys": 20, "channels": 80}),
    "B1-Q8-S40-H2-win1": Step({"heads": 2, "queries": 8, "keys": 40}, 1),
    "B1-Q2-S40-H3-win9-bidirectional": Step({"heads": 3, "queries": 2, "keys": 40}, 9, False),
    "B1-Q1-S1-H3": Step({"heads": 3, "queries": 1, "keys": 1}),
    "B1-Q5-S3-H2": Step({"heads": 2, "queries": 5, "keys": 3}),
    "B1-Q1-S1000-H2-whole-row-in-a-part": Step(
        {"heads": 2, "queries": 1, "keys": 1000}, config=DecodeConfig(128, 4, 128, 4, 128, 4, programs=1)
    ),
    "B1-Q2-S100-H3-values5-default-tiles": Step(
        {"heads": 3, "queries": 2, "keys": 100, "channels": 3, "value_channels": 5}, config=None
    ),
    "float16-B1-Q2-S63-H3-D80-win32": Step(
        {"heads": 3, "queries": 2, "keys": 63, "channels": 80}, 32, dtype=torch.float16
    ),
    "float16-B1-Q2-S40-H4-kv1-D32": Step(
        {"heads": 4, "key_value_heads": 1, "queries": 2, "keys": 40, "channels": 32}, dtype=torch.float16
    ),
    **{name: Step({"heads": 3, "queries": 2, "keys": 20, **switch}) for name, switch in SWITCHES.items()},
}


def inputs_of(shape: dict[str, Any], dtype: torch.dtype = torch.float32) -> Inputs:
    return make_inputs(**{"batch": 1, "channels": 16, **shape}).map(lambda tensor: tensor.to(DEVICE, dtype))


def composition_of(weights: ComposeWeights | None) -> Composition | None:
    if weights is None:
        return None
    query, key = (None if side is None else side.factors for side in (weights.query, weights.key))
    return Composition(query, key, weights.static, weights.groups)


def expected_of(inputs: Inputs, **mask: Any) -> Tensor:
    """By the reference, in float64."""
    inputs = inputs.map(lambda tensor: tensor.cpu().double())
    visibility = Visibility(inputs.query.shape[2], inputs.key.shape[2], **mask)
    return reference_attention(*inputs, scaling=inputs.query.shape[3] ** -0.5, mask=visibility)[0]


def seen_of_rows(lengths: Tensor, queries: int, keys: int, window: int | None = None) -> Tensor:
    """(batch, 1, query, key) boolean: causality and window of rows of these lengths."""
    positions = lengths[:, None] - queries + torch.arange(queries)
    age = positions[:, :, None] - torch.arange(keys)
    return ((age >= 0) & (age < (keys if window is None else window)))[:, None]


def decode(inputs: Inputs, mask: Mask, **options: Any) -> Tensor:
    pre, post = (composition_of(stage) for stage in (inputs.pre, inputs.post))
    options = {"config": SMALL, "scaling": inputs.query.shape[3] ** -0.5, **options}
    mask, options = Mask(*map(on_device, mask)), {name: on_device(option) for name, option in options.items()}
    return composed_decode(inputs.query, inputs.key, inputs.value, pre, post, mask=mask, **options)


def on_device(option: Any) -> Any:
    return option.to(DEVICE) if isinstance(option, Tensor) else option


def assert_close(output: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
    assert (output.cpu().double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch) -> Iterator[None]:
    """Every new tensor that nothing was written to holds NaN, as memory of a GPU may."""

    def poisoned(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            # The test of far strides asks for more than there is.
            return tensor.fill_(float("nan")) if tensor.is_floating_point() and tensor.numel() < 2**20 else tensor

        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    yield


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_output_equals_the_reference(step):
    inputs = inputs_of(step.shape, step.dtype)
    mask = Mask(step.is_causal, step.window, inputs.key.shape[2] - inputs.query.shape[2])
    expected = expected_of(inputs, is_causal=step.is_causal, sliding_window=step.window)
    output = decode(inputs, mask, config=step.config)
    assert output.dtype == step.dtype
    assert_close(output, expected, EXACT if step.dtype == torch.float32 else SIXTEEN_BITS)


def test_queries_that_see_no_key_get_zeros():
    inputs = inputs_of({"batch": 2, "heads": 2, "queries": 4, "keys": 20})
    padding = torch.ones(2, 20, dtype=torch.bool)
    padding[0, :18] = False
    output = decode(inputs, Mask(query_offset=16, padding=padding))
    assert (output[0, :, :2] == 0).all()
    assert_close(output, expected_of(inputs, padding=padding))


@pytest.mark.parametrize("rows", [1, 2])
def test_any_pairs_may_be_visible(rows):
    inputs = inputs_of({"batch": 2, "heads": 2, "queries": 2, "keys": 20})
    visible = torch.rand(20, rows, 1, 2, generator=torch.Generator().manual_seed(5)).movedim(0, 3) > 0.5
    output = decode(inputs, Mask(is_causal=False, visible=visible))
    assert_close(output, expected_of(inputs, is_causal=False, dense=visible))


def in_rows(inputs: Inputs, slots: int) -> tuple[Tensor, Tensor]:
    """Keys and values packed with their factors, (batch, key/value heads, slots, channels), NaN where there is none."""
    packed = []
    for states, stage in ((inputs.key, inputs.pre), (inputs.value, inputs.post)):
        row = pack(states, stage.key)
        rows = row.new_full((*row.shape[:2], slots, row.shape[3]), float("nan"))
        rows[:, :, : row.shape[2]] = row
        packed.append(rows)
    return packed[0], packed[1]


def from_rows(inputs: Inputs, rows: tuple[Tensor, Tensor]) -> Inputs:
    """The inputs with views of rows as keys, values and their factors, as a model reads them from its cache."""
    heads = inputs.query.shape[1]
    key, pre_side = unpack(rows[0], inputs.key.shape[3], inputs.pre.key, heads)
    value, post_side = unpack(rows[1], inputs.value.shape[3], inputs.post.key, heads)
    return Inputs(inputs.query, key, value, inputs.pre._replace(key=pre_side), inputs.post._replace(key=post_side))


@pytest.mark.parametrize("window", [None, 9], ids=["global", "win9"])
def test_rows_of_a_cache_are_read_no_further_than_seen(window):
    inputs = inputs_of({"batch": 3, "heads": 2, "queries": 2, "keys": 40, "pre": DYNAMIC})
    lengths = torch.tensor([40, 1, 23])
    rows = in_rows(inputs, slots=50)
    for row, length in enumerate(lengths.tolist()):
        for cached in rows:
            cached[row, :, length:] = float("nan")
            cached[row, :, : max(0, length - 1 - (window or 50))] = float("nan")
    views = from_rows(inputs, rows)
    assert views.pre.key.factors.data_ptr() == views.key.data_ptr() + views.key.shape[3] * 4
    output = decode(views, Mask(sliding_window=window), key_lengths=lengths)
    seen = seen_of_rows(lengths, 2, 40, window)
    assert (output[1, :, 0] == 0).all()
    assert_close(output, expected_of(inputs, is_causal=False, dense=seen))


@pytest.mark.parametrize("key_value_heads", [4, 2])
def test_a_ring_past_its_wrap_equals_the_whole_row(key_value_heads):
    shape = {"batch": 3, "heads": 4, "key_value_heads": key_value_heads, "queries": 2, "keys": 31}
    inputs = inputs_of(shape)
    lengths, ring_size = torch.tensor([31, 5, 12], dtype=torch.int32), 12
    rings = tuple(
        cached.new_full((3, key_value_heads, ring_size, cached.shape[3]), float("nan"))
        for cached in in_rows(inputs, slots=31)
    )
    for ring, cached in zip(rings, in_rows(inputs, slots=31)):
        for row, length in enumerate(lengths.tolist()):
            for position in range(length):
                ring[row, :, position % ring_size] = cached[row, :, position]
    output = decode(from_rows(inputs, rings), Mask(sliding_window=11), key_lengths=lengths, ring_size=ring_size)
    seen = seen_of_rows(lengths, 2, 31, 11)
    assert_close(output, expected_of(inputs, is_causal=False, dense=seen))


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "queries", "window"),
    [(3, 3, 1, None), (4, 2, 2, 10), (2, 1, 3, None)],
    ids=["H3-Q1", "H4-kv2-Q2-win10", "H2-kv1-Q3"],
)
def test_shuffled_blocks_equal_the_reference(heads, key_value_heads, queries, window):
    shape = {"batch": 3, "heads": heads, "key_value_heads": key_value_heads, "queries": queries, "keys": 37}
    inputs = inputs_of({**shape, "channels": 24})
    lengths, block_size = torch.tensor([37, 0, 18], dtype=torch.int32), 8
    key_rows, value_rows = in_rows(inputs, slots=40)
    rows = torch.cat((key_rows, value_rows), dim=3)  # (batch, key/value heads, slot, channels), as vLLM keeps them
    blocks = rows.new_full((20, key_value_heads, block_size, rows.shape[3]), float("nan"))
    table = torch.full((3, 5), 2**20, dtype=torch.int32)  # no block: reading there would fail
    order = iter(torch.randperm(20, generator=torch.Generator().manual_seed(3)).tolist())
    for row, length in enumerate(lengths.tolist()):
        first = 0 if window is None else max(0, length - queries - window + 1) // block_size
        for stretch in range(first, -(-length // block_size)):
            table[row, stretch] = next(order)
            here = slice(stretch * block_size, min(length, (stretch + 1) * block_size))
            blocks[table[row, stretch], :, : here.stop - here.start] = rows[row, :, here]
    states, extra = 24, heads // key_value_heads * 5
    width = key_rows.shape[3]
    output = composed_decode(
        inputs.query,
        blocks[..., :states],
        blocks[..., width : width + states],
        composition_of(inputs.pre)._replace(key=blocks[..., states : states + extra]),
        composition_of(inputs.post)._replace(key=blocks[..., width + states : width + states + extra]),
        scaling=24**-0.5,
        mask=Mask(sliding_window=window),
        key_lengths=lengths.to(DEVICE),
        block_table=table.to(DEVICE),
        block_size=block_size,
        config=SMALL,
    )
    seen = seen_of_rows(lengths, queries, 37, window)
    assert (output[1] == 0).all()
    assert_close(output, expected_of(inputs, is_causal=False, dense=seen))


def test_factors_of_served_heads_may_lie_as_in_the_cache():
    inputs = inputs_of({"heads": 4, "key_value_heads": 2, "queries": 1, "keys": 20})
    pre, post = composition_of(inputs.pre), composition_of(inputs.post)
    key_rows, value_rows = in_rows(inputs, slots=20)
    outputs = [
        composed_decode(*inputs[:3], *stages, scaling=0.25, mask=Mask(query_offset=19), config=SMALL)
        for stages in (
            (pre, post),
            (pre._replace(key=key_rows[..., 16:26]), post._replace(key=value_rows[..., 16:26])),
        )
    ]
    assert torch.equal(*outputs)


def test_two_runs_are_bit_identical():
    inputs = inputs_of({"heads": 2, "queries": 1, "keys": 20})
    assert torch.equal(*(decode(inputs, Mask(query_offset=19)) for _ in range(2)))


def test_keys_may_lie_more_than_two_to_the_31_elements_apart():
    # The memory between them is never touched, so that the system does not provide it.
    inputs = inputs_of({"heads": 2, "queries": 1, "keys": 3, "channels": 8}, torch.float16)
    far = 2**30 + 8
    memory = torch.empty(2 * far + 64, dtype=torch.float16, device=DEVICE)
    states = memory.as_strided((1, 2, 3, 16), (0, 16, far, 1))
    states[..., :8], states[..., 8:13] = inputs.key, inputs.pre.key.factors
    factors = inputs.pre._replace(key=type(inputs.pre.key)(factors=states[..., 8:13]))
    outputs = [
        decode(strided, Mask(query_offset=2))
        for strided in (inputs, inputs._replace(key=states[..., :8], value=inputs.value, pre=factors))
    ]
    assert torch.equal(*outputs)


WRONG = {
    "queries": ({"queries": 9}, {}, "1 to 8 queries, got 9"),
    "type": ({"dtype": torch.float64}, {}, "query must be float32, bfloat16 or float16, got torch.float64"),
    "documents": ({}, {"mask": Mask(sequence_ids=torch.zeros(1, 9))}, "no packed sequences"),
    "window": ({}, {"mask": Mask(sliding_window=0)}, "sliding_window must be at least 1, got 0"),
    "padding": ({}, {"mask": Mask(padding=torch.ones(1, 8, dtype=torch.bool))}, "padding must be boolean"),
    "visible": ({}, {"mask": Mask(visible=torch.ones(1, 1, 2, 9, dtype=torch.bool))}, "visible must be "),
    "lengths": ({}, {"key_lengths": torch.tensor([9, 9])}, r"key_lengths must be \(batch,\)"),
    "ring": ({}, {"ring_size": 9}, "needs key_lengths"),
    "ring-size": ({}, {"ring_size": 10, "key_lengths": torch.tensor([9])}, "from 1 to the 9 places of a row, got 10"),
    "block-size": ({}, {"block_size": 16}, "give its block_table too"),
    "blocks": ({}, {"block_table": torch.zeros(1, 1, dtype=torch.int32), "block_size": 16}, "blocks of key hold 9"),
    "table": ({}, {"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "block_table must be"),
}


@pytest.mark.parametrize(("shape", "options", "message"), WRONG.values(), ids=WRONG)
def test_arguments_that_do_not_fit_are_refused(shape, options, message):
    shape = {"heads": 2, "queries": 1, "keys": 9, "pre": DYNAMIC, "post": BRANCHES, **shape}
    dtype = shape.pop("dtype", torch.float32)
    with pytest.raises(ValueError, match=message):
        decode(inputs_of(shape, dtype), **{"mask": Mask(query_offset=8), **options})
