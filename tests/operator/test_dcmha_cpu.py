"""The head loop's buffers, steps, gradients and precision, and what composed attention costs in memory and work."""

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
    value_and_gradients,
)
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcformer import dcmha_cpu
from dcformer.dcmha import composed_attention, composed_attention_reference


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
    take = dcmha_cpu._Workspace.take

    def poisoned_take(workspace, name, *shape):
        take(workspace, name, *shape)
        workspace.buffers[name].fill_(torch.nan)
        return take(workspace, name, *shape)

    monkeypatch.setattr(dcmha_cpu._Workspace, "take", poisoned_take)
    output, gradients = value_and_gradients(composed_attention, inputs, **options)
    assert torch.equal(output, expected)
    assert all(torch.equal(gradients[name], expected_gradients[name]) for name in gradients)


@pytest.mark.parametrize("heads_at_once", [1, 2, 3], ids="{}_heads_at_once".format)
@any_problem
@any_groups
def test_results_do_not_depend_on_how_many_heads_one_operation_treats(groups, options, heads_at_once, monkeypatch):
    inputs = make_inputs(heads=8, key_value_heads=2, groups=groups)
    expected, expected_gradients = value_and_gradients(composed_attention, inputs, **options)
    monkeypatch.setattr(dcmha_cpu, "_head_blocks", lambda attention: heads_at_once)
    output, gradients = value_and_gradients(composed_attention, inputs, **options)
    assert_close(output, expected, **EXACT)
    assert_close(gradients, expected_gradients, **EXACT)


def test_an_operation_treats_no_more_elements_than_allowed(monkeypatch):
    monkeypatch.setattr(dcmha_cpu, "_ELEMENTS_PER_OPERATION", 3 * 2 * 20 * 20)
    attention = torch.empty(8, 2, 20, 20)
    assert [dcmha_cpu._head_blocks(part) for part in (attention, attention[:2])] == [3, 2]


def test_long_rows_make_the_chunks_shorter(monkeypatch):
    monkeypatch.setattr(dcmha_cpu, "_ELEMENTS_PER_CHUNK", 4 * 2 * 100 * 32)
    inputs = make_inputs(queries=100)
    lengths = []
    scores = dcmha_cpu._Problem.scores

    def recorded_scores(problem, block):
        lengths.append(block[1] - block[0])
        return scores(problem, block)

    monkeypatch.setattr(dcmha_cpu._Problem, "scores", recorded_scores)
    output = composed_attention(*inputs)
    assert lengths == [32, 32, 32, 4]
    assert_close(output, composed_attention_reference(*inputs), **EXACT)


GRADCHECKS = {
    "chunked": ("chunked", {"queries": 3, "keys": 4}, {}),
    "vectorised_recomputed_in_chunks": ("chunked", {"queries": 3}, {"chunk_size": 2}),
    "vectorised_window": ("chunked", {"queries": 3}, {"sliding_window": 2, "chunk_size": 2}),
    "cpu": ("cpu", {"queries": 16}, {}),
    "head_loop_in_chunks": ("cpu", {"queries": 17}, {"sliding_window": 5, "chunk_size": 6}),
}


@pytest.mark.parametrize(("form", "shape", "options"), GRADCHECKS.values(), ids=GRADCHECKS)
def test_gradients_equal_finite_differences(form, shape, options):
    inputs = make_inputs(batch=1, heads=2, key_value_heads=1, channels=2, rank=1, **shape).leaves()
    names = list(inputs.tensors())

    def function(*tensors):
        given = dict(zip(names, tensors))
        by_identity = {id(tensor): given[name] for name, tensor in inputs.tensors().items()}
        return attend(form, *inputs.map(lambda tensor: by_identity[id(tensor)]), **options)

    # The fast mode checks one random direction: enough for the head loop's hundreds of inputs.
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
