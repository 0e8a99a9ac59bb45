"""Decoding in Triton against the reference in float64, in Triton's interpreter where there is no GPU."""

from typing import Any, NamedTuple

import pytest
import torch
from operator_inputs import DEVICE, DYNAMIC, KEY_WISE, QUERY_WISE, Inputs, make_inputs
from reference import reference_attention
from torch import Tensor
from triton.runtime import interpreter

from dcformer.compose_dcformer import pack, unpack
from dcformer.dcmha import AttentionInputs, Visibility
from dcformer.kernels.call import Call
from dcformer.kernels.triton import attention_decode as decode_module
from dcformer.kernels.triton.attention_decode import composed_decode


pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Sums of float32 in another order, and outputs rounded to 11 bits, relative to the largest output.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3}


class Step(NamedTuple):
    """Sizes of a step over full rows beside batch 1 and channels of 16, and its mask."""

    shape: dict[str, Any]
    mask: dict[str, Any] = {}
    dtype: torch.dtype = torch.float32


STEPS = {
    "Q2-S63-H3-D80-win32": Step({"heads": 3, "queries": 2, "keys": 63, "channels": 80}, {"sliding_window": 32}),
    "Q1-S40-H24-groups3": Step({"heads": 24, "queries": 1, "keys": 40, "groups": 3}),
    "Q2-S33-H4-kv2-D24-groups2": Step(
        {"heads": 4, "key_value_heads": 2, "queries": 2, "keys": 33, "channels": 24, "groups": 2}
    ),
    "Q5-S20-H2-kv1": Step({"heads": 2, "key_value_heads": 1, "queries": 5}),
    "Q3-S40-H2-win1": Step({"heads": 2, "queries": 3, "keys": 40}, {"sliding_window": 1}),
    "Q2-S40-H3-win9-bidirectional": Step(
        {"heads": 3, "queries": 2, "keys": 40}, {"sliding_window": 9, "is_causal": False}
    ),
    "Q5-S3-H2": Step({"heads": 2, "queries": 5, "keys": 3}),
    "Q2-H3-D3-values5": Step({"heads": 3, "queries": 2, "channels": 3, "value_channels": 5}),
    "float16-rank1": Step({"queries": 2, "rank": 1}, {}, torch.float16),
    "rank4-no-pre": Step({"queries": 2, "rank": 4, "pre": None}),
    "static-before-in-2-groups": Step({"queries": 2, "pre": ("static",), "post": None, "groups": 2}),
    "query-wise-and-key-wise": Step({"queries": 2, "pre": QUERY_WISE, "post": KEY_WISE}),
    "B2-padding": Step({"batch": 2, "queries": 4}, {"padding": torch.arange(20) >= torch.tensor([[18], [0]])}),
    "B2-boolean": Step(
        {"batch": 2, "queries": 2}, {"is_causal": False, "dense": torch.rand(2, 1, 2, 20).round().bool()}
    ),
    "added": Step({"queries": 2}, {"dense": torch.linspace(-3, 3, 40).view(1, 1, 2, 20)}),
}


def inputs_of(shape: dict[str, Any], dtype: torch.dtype = torch.float32) -> Inputs:
    sizes = {"batch": 1, "heads": 2, "channels": 16, "keys": 20, **shape}
    return make_inputs(**sizes).map(lambda tensor: tensor.to(DEVICE, dtype))


def decode(inputs: Inputs, mask: Visibility | None = None, **options: Any) -> Tensor:
    mask = mask or Visibility(inputs.query.shape[2], inputs.key.shape[2])
    call = Call.of(AttentionInputs(*inputs, inputs.query.shape[3] ** -0.5, mask.to(DEVICE)))
    return composed_decode(call, **{name: on_device(option) for name, option in options.items()})


def on_device(option: Any) -> Any:
    return option.to(DEVICE) if isinstance(option, Tensor) else option


def hold_to_the_reference(output: Tensor, inputs: Inputs, **mask: Any) -> None:
    inputs = inputs.map(lambda tensor: tensor.cpu().double())
    visibility = Visibility(inputs.query.shape[2], inputs.key.shape[2], **mask)
    expected = reference_attention(*inputs, scaling=inputs.query.shape[3] ** -0.5, mask=visibility)[0]
    error = (output.cpu().double() - expected).abs().max()
    assert error <= TOLERANCES[output.dtype] * expected.abs().max()


def seen_of_rows(lengths: Tensor, queries: int, keys: int, window: int | None = None) -> Tensor:
    """(batch, 1, query, key) boolean: causality and window of rows of these lengths."""
    positions = lengths[:, None] - queries + torch.arange(queries)
    age = positions[:, :, None] - torch.arange(keys)
    return ((age >= 0) & (age < (window or keys)))[:, None]


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_output_equals_the_reference(step):
    inputs = inputs_of(step.shape, step.dtype)
    output = decode(inputs, Visibility(inputs.query.shape[2], inputs.key.shape[2], **step.mask))
    assert output.dtype == step.dtype
    hold_to_the_reference(output, inputs, **step.mask)


@pytest.mark.parametrize("heads", [16, 24, 32, 40, 52, 64])
def test_heads_of_published_sizes_equal_the_reference(heads):
    inputs = inputs_of({"heads": heads, "queries": 1, "channels": 4, "value_channels": 34, "keys": 37})
    hold_to_the_reference(decode(inputs), inputs)


def test_many_tiles_in_one_part_equal_the_reference(monkeypatch):
    monkeypatch.setattr(decode_module, "_MOST_PROGRAMS", 1)
    inputs = inputs_of({"queries": 1, "keys": 300})
    hold_to_the_reference(decode(inputs), inputs)


def test_parts_are_joined_by_whichever_program_comes_last_to_the_same_bits(monkeypatch):
    """Programs come in another order, to tickets whose memory held something else before."""
    inputs = inputs_of({"heads": 3, "queries": 2, "keys": 30, "value_channels": 40})
    expected = decode(inputs)
    hold_to_the_reference(expected, inputs)
    builder, empty = interpreter.interpreter_builder, torch.Tensor.new_empty
    set_grid_idx = builder.set_grid_idx

    def used(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor if tensor.is_floating_point() else tensor.fill_(5)

    def backwards(x, y, z):
        set_grid_idx(builder.grid_dim[0] - 1 - x, y, z)

    monkeypatch.setattr(torch.Tensor, "new_empty", used)
    monkeypatch.setattr(builder, "set_grid_idx", backwards)
    assert torch.equal(decode(inputs), expected)


@pytest.mark.parametrize(
    ("batch", "span"), [(1, 1), (1, 256), (1, 1040), (1, 1100), (1, 2**15), (16, 1040), (200, 900)]
)
@pytest.mark.parametrize(("blocks", "most"), [(1, 256), (4, 66)], ids=["scores", "values"])
def test_programs_fill_a_device_as_far_as_there_are_keys(batch, span, blocks, most):
    """At least two for each three of 132 multiprocessors, but not so many that sums over them take longer."""
    keys, parts, warps = decode_module._split(span, batch * blocks, 32, most)
    tiles = -(-span // keys)
    programs = parts * batch * blocks
    assert parts == tiles or programs >= 88
    assert parts == 1 or (parts <= most and programs <= 1024)
    assert (parts - 1) * -(-tiles // parts) < tiles, "a part without keys"
    assert warps == keys, "one of 32 heads' scores for each thread"


def test_a_thousand_keys_of_one_row_are_shared_out_to_as_many_programs_as_there_are_multiprocessors():
    assert decode_module._split(1040, 1, 32, 256) == (8, 130, 8)


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


@pytest.mark.parametrize(("window", "dtype"), [(None, torch.float32), (9, torch.float16)], ids=["global", "win9"])
def test_rows_of_a_static_cache_are_read_no_further_than_seen(window, dtype):
    inputs = inputs_of({"batch": 3, "heads": 2, "queries": 2, "keys": 40, "pre": DYNAMIC}, dtype)
    lengths = torch.tensor([40, 1, 23])
    rows = in_rows(inputs, slots=50)
    for row, length in enumerate(lengths.tolist()):
        for cached in rows:
            cached[row, :, length:] = float("nan")
            cached[row, :, : max(0, length - 1 - (window or 50))] = float("nan")
    views = from_rows(inputs, rows)
    mask = Visibility(2, 50, sliding_window=window)
    output = decode(views, mask, key_lengths=lengths)
    assert (output[1, :, 0] == 0).all()
    hold_to_the_reference(output, inputs, is_causal=False, dense=seen_of_rows(lengths, 2, 40, window))


def test_masks_of_rows_of_any_length_are_masks_of_slots():
    inputs = inputs_of({"batch": 3, "heads": 4, "key_value_heads": 2, "queries": 2, "keys": 31})
    lengths, padding = torch.tensor([31, 5, 12], dtype=torch.int32), torch.arange(3 * 31).view(3, 31) % 5 > 0
    dense = torch.linspace(-2, 2, 3 * 2 * 31).view(3, 1, 2, 31)
    mask = Visibility(2, 31, sliding_window=11, padding=padding, dense=dense)
    output = decode(from_rows(inputs, in_rows(inputs, slots=31)), mask, key_lengths=lengths)
    seen = seen_of_rows(lengths, 2, 31, 11) & padding[:, None, None]
    hold_to_the_reference(output, inputs, is_causal=False, dense=dense.masked_fill(~seen, -torch.inf))


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "queries", "window", "dtype"),
    [(3, 3, 1, None, torch.float16), (4, 2, 2, 10, torch.float32)],
    ids=["H3-Q1", "H4-kv2-Q2-win10"],
)
def test_shuffled_blocks_equal_the_reference(heads, key_value_heads, queries, window, dtype):
    shape = {"batch": 3, "heads": heads, "key_value_heads": key_value_heads, "queries": queries, "keys": 37}
    inputs = inputs_of({**shape, "channels": 24}, dtype)
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
    width, extra = key_rows.shape[3], heads // key_value_heads * 5
    call = Call.of(AttentionInputs(*inputs, 24**-0.5, Visibility(queries, 37, sliding_window=window)))._replace(
        key=blocks[..., :24],
        value=blocks[..., width : width + 24],
        pre_key=blocks[..., 24 : 24 + extra],
        post_key=blocks[..., width + 24 : width + 24 + extra],
    )
    output = composed_decode(call, lengths.to(DEVICE), table.to(DEVICE))
    assert (output[1] == 0).all()
    hold_to_the_reference(output, inputs, is_causal=False, dense=seen_of_rows(lengths, queries, 37, window))


def test_keys_may_lie_more_than_two_to_the_31_elements_apart(monkeypatch):
    monkeypatch.undo()  # the memory between them is never touched, so that the system does not provide it
    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions())
    inputs = inputs_of({"heads": 2, "queries": 1, "keys": 3, "channels": 8}, torch.float16)
    far = 2**30 + 8
    states = torch.empty(2 * far + 64, dtype=torch.float16, device=DEVICE).as_strided((1, 2, 3, 16), (0, 16, far, 1))
    states[..., :8], states[..., 8:13] = inputs.key, inputs.pre.key.factors
    factors = inputs.pre._replace(key=type(inputs.pre.key)(factors=states[..., 8:13]))
    assert torch.equal(decode(inputs), decode(inputs._replace(key=states[..., :8], pre=factors)))


@pytest.mark.parametrize(
    "options",
    [
        {"key_lengths": torch.tensor([9, 9])},
        {"block_table": torch.zeros(2, 3, dtype=torch.int32)},
    ],
    ids=lambda options: "_and_".join(options),
)
def test_arguments_that_do_not_fit_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        decode(inputs_of({"queries": 2, "keys": 9}), **options)
