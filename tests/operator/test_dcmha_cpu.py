"""The CPU form's buffers, tiles, threads, gradients and precision, and what composed attention costs."""

import functools
import weakref

import pytest
import torch
from operator_inputs import (
    FORMS,
    Inputs,
    attend,
    boolean_mask,
    left_padding,
    make_inputs,
    sixteen_bit_attention,
    value_and_gradients,
    visible_keys,
)
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcformer import dcmha_cpu, dcmha_cpu_compose
from dcformer.dcmha import Visibility, composed_attention, composed_attention_reference


# float64 against float64, as in test_dcmha.
EXACT = {"rtol": 1e-11, "atol": 1e-11}

PROBLEMS = {
    "causal": {},
    "window": {"sliding_window": 5, "chunk_size": 8},
    "left_padding": {"attention_mask": left_padding(2, 4, 20, 20), "chunk_size": 7},
    "boolean_mask": {"attention_mask": boolean_mask(2, 4, 20, 20), "is_causal": False},
}
any_problem = pytest.mark.parametrize("options", PROBLEMS.values(), ids=PROBLEMS)
any_groups = pytest.mark.parametrize("groups", [1, 2], ids="{}_groups".format)


@any_problem
@any_groups
def test_results_do_not_depend_on_what_the_buffers_held(groups, options, monkeypatch):
    inputs = make_inputs(groups=groups)
    expected, expected_gradients = value_and_gradients(composed_attention, inputs, **options)
    take = dcmha_cpu.Workspace.take

    def poisoned_take(workspace, name, *shape, dtype):
        take(workspace, name, *shape, dtype=dtype)
        workspace.buffers[name].fill_(torch.nan)
        return take(workspace, name, *shape, dtype=dtype)

    monkeypatch.setattr(dcmha_cpu.Workspace, "take", poisoned_take)
    output, gradients = value_and_gradients(composed_attention, inputs, **options)
    assert torch.equal(output, expected)
    assert all(torch.equal(gradients[name], expected_gradients[name]) for name in gradients)


@pytest.mark.parametrize("queries", [1, 3, 4], ids="{}_queries_a_tile".format)
@any_problem
@any_groups
def test_results_do_not_depend_on_how_many_queries_a_tile_holds(groups, options, queries, monkeypatch):
    inputs = make_inputs(heads=8, key_value_heads=2, groups=groups)
    expected, expected_gradients = value_and_gradients(composed_attention, inputs, **options)
    monkeypatch.setattr(dcmha_cpu, "_ELEMENTS_PER_TILE", queries * 2 * 8 * 20)
    output, gradients = value_and_gradients(composed_attention, inputs, **options)
    assert_close(output, expected, **EXACT)
    assert_close(gradients, expected_gradients, **EXACT)


@pytest.mark.parametrize("count", [1, 2, 3], ids="{}_partial_sums".format)
@any_groups
def test_results_do_not_depend_on_the_number_of_partial_sums(groups, count, monkeypatch):
    inputs = make_inputs(heads=6, groups=groups)
    expected, expected_gradients = value_and_gradients(composed_attention, inputs)
    monkeypatch.setattr(dcmha_cpu_compose, "_PARTIAL_SUMS", count)
    output, gradients = value_and_gradients(composed_attention, inputs)
    assert_close(output, expected, **EXACT)
    assert_close(gradients, expected_gradients, **EXACT)


@any_problem
def test_results_do_not_depend_on_how_keys_and_values_lie_in_memory(options, monkeypatch):
    inputs = make_inputs(key_value_heads=2)
    expected, expected_gradients = value_and_gradients(composed_attention, inputs, **options)
    monkeypatch.setattr(dcmha_cpu, "_QUERIES_THAT_PAY_FOR_COLUMNS", 1)
    output, gradients = value_and_gradients(composed_attention, inputs, **options)
    assert_close(output, expected, **EXACT)
    assert_close(gradients, expected_gradients, **EXACT)


def recorded_ranges(monkeypatch, name: str) -> list[tuple[int, int, int, int]]:
    """What the named method of the problem will yield: (start, stop) of queries, (first, last) of keys."""
    ranges = []
    method = getattr(dcmha_cpu._Problem, name)

    def recorded(problem, *arguments):
        found = list(method(problem, *arguments))
        ranges.extend(found)
        return found

    monkeypatch.setattr(dcmha_cpu._Problem, name, recorded)
    return ranges


def test_a_tile_holds_no_more_elements_than_allowed(monkeypatch):
    allowed = 1000
    monkeypatch.setattr(dcmha_cpu, "_ELEMENTS_PER_TILE", allowed)
    tiles = recorded_ranges(monkeypatch, "tiles")
    composed_attention(*make_inputs(batch=2, heads=4, queries=20))
    assert [(start, stop) for start, stop, *_ in tiles] == [(0, 6), (6, 12), (12, 18), (18, 20)]
    assert all(2 * 4 * (stop - start) * (last - first) <= allowed for start, stop, first, last in tiles)


def test_long_rows_make_the_blocks_shorter(monkeypatch):
    monkeypatch.setattr(dcmha_cpu, "_ELEMENTS_PER_BLOCK", 4 * 2 * 100 * 20)
    inputs = make_inputs(queries=100)
    blocks = recorded_ranges(monkeypatch, "blocks")
    output = composed_attention(*inputs)
    assert [stop - start for start, stop, *_ in blocks] == [20, 20, 20, 20, 20]
    assert_close(output, composed_attention_reference(*inputs), **EXACT)


@pytest.mark.parametrize("threads", [1, 2, 3], ids="{}_threads".format)
@any_problem
@any_groups
def test_results_do_not_depend_on_how_many_threads_share_the_blocks(groups, options, threads, monkeypatch):
    inputs = make_inputs(queries=40, groups=groups) if "attention_mask" not in options else make_inputs(groups=groups)
    options = {**options, "chunk_size": 6}
    expected, expected_gradients = value_and_gradients(composed_attention_reference, inputs, **without_chunks(options))
    monkeypatch.setattr(dcmha_cpu, "_ELEMENTS_PER_THREAD", 1)
    monkeypatch.setattr(dcmha_cpu, "available_threads", lambda: threads)
    shares = []
    run_shares = dcmha_cpu.run_shares
    monkeypatch.setattr(dcmha_cpu, "run_shares", lambda work, given: shares.append(given) or run_shares(work, given))
    output, gradients = value_and_gradients(composed_attention, inputs, **options)
    assert [len(given) for given in shares] == [threads, threads]
    assert_close(output, expected, **EXACT)
    assert_close(gradients, expected_gradients, **EXACT)


@pytest.mark.parametrize(("threads", "lengths"), [(1, [32, 8]), (2, [16, 16, 8]), (4, [16, 16, 8])], ids=str)
def test_every_thread_gets_blocks_where_the_queries_allow(threads, lengths, monkeypatch):
    monkeypatch.setattr(dcmha_cpu, "_ELEMENTS_PER_THREAD", 1)
    monkeypatch.setattr(dcmha_cpu, "available_threads", lambda: threads)
    blocks = recorded_ranges(monkeypatch, "blocks")
    composed_attention(*make_inputs(queries=40))
    assert [stop - start for start, stop, *_ in blocks] == lengths


def without_chunks(options: dict) -> dict:
    return {name: value for name, value in options.items() if name != "chunk_size"}


GRADCHECKS = {
    "chunked": ("chunked", {"queries": 3, "keys": 4}, {}),
    "vectorised_recomputed_in_chunks": ("chunked", {"queries": 3}, {"chunk_size": 2}),
    "vectorised_window": ("chunked", {"queries": 3}, {"sliding_window": 2, "chunk_size": 2}),
    "cpu": ("cpu", {"queries": 16}, {}),
    "cpu_in_chunks": ("cpu", {"queries": 17}, {"sliding_window": 5, "chunk_size": 6}),
}


@pytest.mark.parametrize(("form", "shape", "options"), GRADCHECKS.values(), ids=GRADCHECKS)
def test_gradients_equal_finite_differences(form, shape, options):
    inputs = make_inputs(batch=1, heads=2, key_value_heads=1, channels=2, rank=1, **shape).leaves()
    names = list(inputs.tensors())

    def function(*tensors):
        given = dict(zip(names, tensors))
        by_identity = {id(tensor): given[name] for name, tensor in inputs.tensors().items()}
        return attend(form, *inputs.map(lambda tensor: by_identity[id(tensor)]), **options)

    # The fast mode checks one random direction: enough for the CPU form's hundreds of inputs.
    assert torch.autograd.gradcheck(function, tuple(inputs.tensors().values()), fast_mode=form == "cpu")


@pytest.mark.parametrize("form", FORMS)
def test_autocast_changes_nothing(form):
    inputs = make_inputs().to(torch.float32)

    def autocast_forward(*arguments, **options):
        with torch.autocast("cpu", torch.bfloat16):
            return attend(form, *arguments, **options)

    output, gradients = value_and_gradients(autocast_forward, inputs, chunk_size=8)
    expected, expected_gradients = value_and_gradients(functools.partial(attend, form), inputs, chunk_size=8)
    assert torch.equal(output, expected)
    assert all(torch.equal(gradients[name], expected_gradients[name]) for name in gradients)


def test_a_backward_pass_inside_autocast_changes_nothing():
    inputs = make_inputs().to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _, gradients = value_and_gradients(composed_attention, inputs)
    _, expected = value_and_gradients(composed_attention, inputs)
    assert all(torch.equal(gradients[name], expected[name]) for name in gradients)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations inside it made and that still live; `peak` is the largest count."""

    def __init__(self, inputs: Inputs):
        super().__init__()
        self.live = self.peak = 0
        self.seen = weakref.WeakSet(tensor.untyped_storage() for tensor in inputs.tensors().values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, size: int) -> None:
        self.live -= size


def peak_bytes(function, inputs: Inputs, *, backward: bool = False, **options) -> int:
    with torch.set_grad_enabled(backward):
        inputs = inputs.leaves() if backward else inputs
        with LiveBytes(inputs) as memory:
            output = function(*inputs, **options)
            if backward:
                torch.autograd.grad(output, list(inputs.tensors().values()), torch.ones_like(output))
    return memory.peak


def long_inputs(length: int, heads: int) -> Inputs:
    return make_inputs(batch=1, heads=heads, queries=length, channels=16).to(torch.float32)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("form", FORMS)
def test_peak_memory_grows_linearly_with_the_length(form, backward):
    short, long = (
        peak_bytes(functools.partial(attend, form), long_inputs(length, 2), backward=backward, chunk_size=64)
        for length in (512, 1024)
    )
    assert 1.5 < long / short < 2.5


def test_peak_memory_of_the_default_chunks_grows_linearly_with_the_length():
    short, long = (peak_bytes(composed_attention, long_inputs(length, 16)) for length in (1024, 2048))
    assert 1.5 < long / short < 2.5


def test_peak_memory_is_an_eighth_of_the_reference():
    inputs = long_inputs(1024, 16)
    assert 8 * peak_bytes(composed_attention, inputs) <= peak_bytes(composed_attention_reference, inputs)


class MatmulWork(TorchDispatchMode):
    """Sums the multiplications of all matrix products inside it."""

    def __init__(self):
        super().__init__()
        self.multiplications = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.multiplications += result.numel() * args[0].shape[-1]
        return result


def multiplications(form: str, length: int, **options) -> int:
    with MatmulWork() as work:
        attend(form, *long_inputs(length, 2), **options)
    return work.multiplications


@pytest.mark.parametrize("form", FORMS)
def test_a_window_spares_the_work_of_the_keys_out_of_sight(form):
    window = multiplications(form, 1024, sliding_window=64, chunk_size=64)
    assert 0 < window < multiplications(form, 1024, chunk_size=64) / 4


@pytest.mark.parametrize("form", FORMS)
def test_the_work_of_a_window_grows_linearly_with_the_length(form):
    short, long = (multiplications(form, length, sliding_window=64) for length in (1024, 2048))
    assert long < 2.2 * short


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_row_spares_the_work_of_other_documents(form):
    ids = torch.arange(8).repeat_interleave(128)[None]
    packed = multiplications(form, 1024, attention_mask=Visibility(1024, 1024, sequence_ids=ids), chunk_size=64)
    assert packed <= 1.3 * 8 * multiplications(form, 128, chunk_size=64)


@pytest.mark.parametrize("scaling", [0.25, 0.3], ids="scaling_{}".format)
def test_bfloat16_error_is_at_most_twice_that_of_plain_eager_attention(scaling):
    inputs = make_inputs(queries=256, heads=8, channels=32).to(torch.bfloat16)
    visible = visible_keys(256, 256, is_causal=True, sliding_window=None)
    scaled = inputs._replace(query=inputs.query * (scaling * 32**0.5))  # what it computes with its own scaling
    exact = composed_attention_reference(*inputs.to(torch.float64), scaling=scaling)
    error = (attend("cpu", *inputs, scaling=scaling) - exact).pow(2).mean()
    assert error <= 4 * (sixteen_bit_attention(scaled, visible) - exact).pow(2).mean()
