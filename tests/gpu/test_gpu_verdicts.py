"""Verdicts on Triton forms: found out once, kept for other processes, and believed only if all went well."""

import dataclasses
import json
import logging
import math
import multiprocessing
import threading
from contextlib import nullcontext

import pytest
import torch
from stand_ins import make_inputs, stand_ins

from dcformer import Visibility, composed_attention, dcmha
from dcformer.dcmha import explain_choice
from dcformer.dcmha_chunked import chunked_attention
from dcformer.gpu import automatic, verdict_file
from dcformer.gpu.cases import Case, StageSwitches, case_of
from dcformer.gpu.checks import Examination, largest_error
from dcformer.gpu.explanation import explain_lines
from dcformer.gpu.triton_form import triton_attention
from dcformer.gpu.verdict_file import Machine, Verdict, read_verdicts, save_verdict, verdict_path
from dcformer.gpu.verdicts import Correctness, Times, Verdicts, judge


__all__ = ["stand_ins"]

BOTH_SIDES = StageSwitches(1, True, 1, True, True)
CASE = Case("prefill", "float32", 4, 2, 8, 8, 1, BOTH_SIDES, BOTH_SIDES)
MACHINE = Machine("NVIDIA H100", "550.54", "3.9.0", "2.13.0", "1.0 with kernels 01234567")
RIGHT = Correctness(1e-6, 1e-4)
FASTER = Times(1.0, 2.0)
FOUND = Verdict(None, *RIGHT, *FASTER)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of this test's own, and nothing said before."""
    monkeypatch.setenv("DCFORMER_CACHE", str(tmp_path / "cache"))
    verdict_file._warn_once.cache_clear()
    automatic._log_once.cache_clear()
    return tmp_path / "cache"


def answers(correctness=RIGHT, times=FASTER):
    """Check and measurement with a given result, which count their calls in `cases`."""
    cases = []

    def result(value):
        def function(case):
            cases.append(case)
            if isinstance(value, Exception):
                raise value
            return value

        return function

    return result(correctness), result(times), cases


@pytest.mark.parametrize(
    ("correctness", "times", "kind", "problem"),
    [
        (RIGHT, Times(1.0, 1.31), "prefill", None),
        (RIGHT, Times(1.0, 1.29), "training", "not fast enough here (1 ms against 1.29 ms of the torch form"),
        (RIGHT, Times(1.0, 1.0), "decode", None),
        (RIGHT, Times(1.01, 1.0), "decode", "not fast enough here"),
        (RIGHT, Times(math.nan, 1.0), "prefill", "not fast enough here"),
        (Correctness(2e-4, 1e-4), FASTER, "prefill", "its results are wrong here (error 2.0e-04, allowed 1.0e-04)"),
        (Correctness(math.nan, 1e-4), FASTER, "prefill", "its results are wrong here (error nan"),
        (RuntimeError("PTX failed\nat line 7"), FASTER, "prefill", "it failed here: RuntimeError: PTX failed"),
        (RIGHT, RuntimeError("no clock"), "prefill", "it failed here: RuntimeError: no clock"),
    ],
    ids=["faster", "slower", "decode-as-fast", "decode-slower", "no-time", "wrong", "nan", "raises", "timing-raises"],
)
def test_only_what_is_right_and_fast_enough_is_used(correctness, times, kind, problem):
    check, measure, _ = answers(correctness, times)
    verdict = judge(CASE._replace(kind=kind), check, measure)
    assert verdict.is_final
    if problem is None:
        assert verdict == Verdict(None, *correctness, *times)
    else:
        assert problem in verdict.problem
        assert "\n" not in verdict.problem


def test_what_is_wrong_is_not_timed():
    check, measure, cases = answers(Correctness(1.0, 1e-4))
    judge(CASE, check, measure)
    assert len(cases) == 1


def test_a_verdict_is_found_once_and_known_to_other_processes():
    check, measure, cases = answers()
    first = Verdicts(check, measure)
    assert first.known(MACHINE, CASE) is None
    for _ in range(2):
        assert first.find_out(MACHINE, CASE, nullcontext) == FOUND
    assert cases == [CASE, CASE]  # a check and a measurement
    another = Verdicts(*answers(RuntimeError("asked again"))[:2])
    assert another.known(MACHINE, CASE) == FOUND
    assert another.find_out(MACHINE, CASE, nullcontext) == FOUND


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Machine)])
def test_a_verdict_is_of_one_machine_with_its_versions(field):
    save_verdict(MACHINE, CASE, FOUND)
    verdicts = Verdicts(*answers()[:2])
    assert verdicts.known(dataclasses.replace(MACHINE, **{field: "another"}), CASE) is None
    assert verdicts.known(MACHINE, CASE) == FOUND


@pytest.mark.parametrize("problem", ["wrong", "slower"])
def test_a_form_that_is_not_used_is_reported_once(problem, caplog):
    correctness, times = (Correctness(1.0, 1e-4), FASTER) if problem == "wrong" else (RIGHT, Times(2.0, 1.0))
    for _ in range(2):
        Verdicts(*answers(correctness, times)[:2]).find_out(MACHINE, CASE, nullcontext)
    (message,) = caplog.messages
    assert message.startswith(
        "Composed attention runs without its Triton form for prefill with 4 heads of 8 channels in float32 on NVIDIA "
    )
    assert "report it to the authors of dcformer with what `dcformer bench --explain` prints" in message


def test_a_lack_of_memory_is_not_kept(cache):
    full = Verdicts(*answers(torch.OutOfMemoryError("no memory"))[:2])
    assert "too little free memory" in full.find_out(MACHINE, CASE, nullcontext).problem
    assert not verdict_path().exists()
    assert Verdicts(*answers()[:2]).find_out(MACHINE, CASE, nullcontext) == FOUND


def damaged_files():
    whole = {"format": 1, "verdicts": []}
    entry = {"machine": dataclasses.asdict(MACHINE), "case": CASE._asdict(), "verdict": {"problem": 7}}
    return {
        "empty": "",
        "cut-off": '{"format": 1, "verd',
        "another-kind": "[1, 2]",
        "no-format": "{}",
        "missing-fields": json.dumps(whole | {"verdicts": [{}]}),
        "strange-verdict": json.dumps(whole | {"verdicts": [entry]}, default=lambda x: x._asdict()),
        "not-text": b"\xff\xfe\x00",
    }


@pytest.mark.parametrize("damage", damaged_files())
def test_a_damaged_file_is_replaced_with_one_warning(damage, cache, caplog):
    content = damaged_files()[damage]
    cache.mkdir()
    verdict_path().write_bytes(content if isinstance(content, bytes) else content.encode())
    verdicts = Verdicts(*answers()[:2])
    assert verdicts.find_out(MACHINE, CASE, nullcontext) == FOUND
    assert read_verdicts() == {(MACHINE, CASE): FOUND}
    (message,) = caplog.messages
    assert "cannot be read" in message


def test_a_file_of_a_later_format_is_left_out_of_account(cache, caplog):
    cache.mkdir()
    verdict_path().write_text('{"format": 2, "judgements": 3}')
    assert read_verdicts() == {}
    assert caplog.messages == []


def test_an_unwritable_folder_is_no_hindrance(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DCFORMER_CACHE", str(tmp_path / "file" / "folder"))
    check, measure, cases = answers()
    verdicts = Verdicts(check, measure)
    for kind in ("prefill", "decode", "prefill"):
        assert verdicts.find_out(MACHINE, CASE._replace(kind=kind), nullcontext) == FOUND
    assert len(cases) == 4
    assert sum("cannot be written" in message for message in caplog.messages) == 1


def save_one(heads, start):
    start.wait()
    Verdicts(lambda case: RIGHT, lambda case: FASTER).find_out(MACHINE, CASE._replace(heads=heads), nullcontext)


def test_processes_that_write_at_once_lose_nothing():
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    processes = [context.Process(target=save_one, args=(heads, start)) for heads in (4, 8, 12, 16)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(case.heads for _, case in read_verdicts()) == [4, 8, 12, 16]


def test_threads_that_ask_at_once_check_once():
    check, measure, cases = answers()
    verdicts = Verdicts(check, measure)
    threads = [threading.Thread(target=verdicts.find_out, args=(MACHINE, CASE, nullcontext)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cases == [CASE, CASE]


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("DCFORMER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert verdict_path() == tmp_path / "dcformer" / "verdicts.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert verdict_path() == tmp_path / ".cache" / "dcformer" / "verdicts.json"


def examination(form=triton_attention, times=(1.0, 2.0)):
    times = iter(times)
    return Examination(form, chunked_attention, lambda call: next(times), device="cpu")


KINDS = {
    "prefill": CASE,
    "prefill-window-bfloat16": CASE._replace(dtype="bfloat16", has_window=True),
    "bidirectional": CASE._replace(is_causal=False),
    "training": CASE._replace(kind="training", groups=2),
    "decode": CASE.as_decoding(),
    "query-wise-only": CASE._replace(pre=StageSwitches(2, False, 0, False), post=StageSwitches()),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_right_form_passes_its_check(name, stand_ins):
    correctness = examination().check(KINDS[name])
    assert correctness.error <= correctness.allowed
    if KINDS[name].kind == "decode":
        assert (stand_ins.forward, stand_ins.decode) == (0, 6)
    else:
        assert (stand_ins.forward > 0, stand_ins.backward > 0) == (True, KINDS[name].kind == "training")


def of_nan(output):
    output = output.clone()
    output[0, 1, 5, 2] = math.nan
    return output


FAULTS = {
    "scaled": lambda output: output * 1.01,
    "one-row": lambda output: output * (torch.arange(output.shape[2]) != output.shape[2] - 1)[:, None],
    "swapped-heads": lambda output: output.flip(1),
    "nan": of_nan,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_form_fails_its_check(fault, stand_ins):
    def wrong(*arguments, **options):
        return FAULTS[fault](triton_attention(*arguments, **options))

    correctness = examination(wrong).check(CASE)
    assert not correctness.error <= correctness.allowed


def test_a_wrong_gradient_fails_its_check(stand_ins):
    def wrong(query, key, *others, **options):
        return triton_attention(query, key.detach() + 0.9 * (key - key.detach()), *others, **options)

    correctness = examination(wrong).check(CASE._replace(kind="training"))
    assert not correctness.error <= correctness.allowed


def test_a_form_that_ignores_the_mask_fails_its_check(stand_ins):
    def wrong(*arguments, scaling, mask):
        mask = Visibility(mask.query_length, mask.key_length, is_causal=mask.is_causal, padding=mask.padding)
        return triton_attention(*arguments, scaling=scaling, mask=mask)

    for case in (CASE, CASE.as_decoding()):
        assert examination(wrong).check(case).error > 0.1


def test_runs_that_differ_fail_the_check(stand_ins):
    noise = iter(range(100))

    def unsteady(*arguments, **options):
        return triton_attention(*arguments, **options) + next(noise) * 1e-6

    with pytest.raises(ValueError, match="two runs on the same inputs give different results"):
        examination(unsteady).check(CASE)


def test_a_result_of_another_shape_is_an_error():
    with pytest.raises(ValueError, match=r"has shape \(2, 3\) instead of \(2, 4\)"):
        largest_error(torch.zeros(2, 3), torch.zeros(2, 4))


def test_both_forms_are_timed_with_the_same_call(stand_ins):
    results = []

    def timer(call):
        results.append(call())
        return float(len(results))

    case = CASE.as_decoding()
    assert Examination(triton_attention, chunked_attention, timer, device="cpu").measure(case) == Times(1.0, 2.0)
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)


@pytest.fixture
def as_on_a_gpu(monkeypatch, stand_ins):
    """The automatic choice treats the CPU as it treats a GPU, with verdicts of the test's own."""

    def prepare(correctness=RIGHT, times=FASTER):
        check, measure, cases = answers(correctness, times)
        form = dataclasses.replace(dcmha._TABLE["triton"], automatic_on="cpu")
        monkeypatch.setitem(dcmha._TABLE, "triton", form)
        monkeypatch.setattr(automatic, "verdicts", Verdicts(check, measure))
        monkeypatch.setattr(automatic, "machine", lambda index: MACHINE)
        monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
        return cases

    return prepare


def chosen(inputs, **options):
    return explain_choice(*inputs, **options)[-1][0]


def test_the_automatic_choice_takes_a_form_that_is_right_and_faster(as_on_a_gpu, stand_ins):
    cases = as_on_a_gpu()
    inputs = make_inputs(20)
    composed_attention(*inputs)
    assert stand_ins.forward == 1
    assert chosen(inputs) == "triton"
    assert cases == [CASE, CASE, CASE.as_decoding(), CASE.as_decoding()]
    composed_attention(*make_inputs(1, 30))
    assert stand_ins.decode == 1
    composed_attention(*make_inputs(20, needs_gradient=True))
    assert len(cases) == 6
    assert cases[-1] == CASE._replace(kind="training")


@pytest.mark.parametrize("problem", ["wrong", "slower", "raises"])
def test_the_automatic_choice_falls_back_and_says_so_once(problem, as_on_a_gpu, stand_ins, caplog):
    correctness = {"wrong": Correctness(1.0, 1e-4), "raises": RuntimeError("PTX failed")}.get(problem, RIGHT)
    as_on_a_gpu(correctness, Times(2.0, 1.0))
    inputs = make_inputs(1, 20)
    for _ in range(3):
        composed_attention(*inputs)
    assert (stand_ins.forward, stand_ins.decode) == (0, 0)
    assert chosen(inputs) == "one_query"
    assert len(caplog.messages) == 1


def test_what_cannot_run_falls_back_and_says_so_once(as_on_a_gpu, caplog):
    cases = as_on_a_gpu()
    inputs = make_inputs(20, dtype=torch.float64)
    for _ in range(2):
        composed_attention(*inputs)
    assert cases == []
    assert caplog.messages == [
        "Composed attention runs without its Triton form: it takes float32, bfloat16 and float16, not float64."
    ]


def test_an_explicit_choice_asks_for_no_verdict(as_on_a_gpu, stand_ins):
    cases = as_on_a_gpu(Correctness(1.0, 1e-4))
    composed_attention(*make_inputs(20), implementation="triton")
    assert (cases, stand_ins.forward) == ([], 1)


def compiled_attention(is_dynamic=True):
    torch._dynamo.reset()
    return torch.compile(composed_attention, fullgraph=True, dynamic=is_dynamic, backend="eager")


def test_a_graph_takes_the_verdict_that_is_known(as_on_a_gpu, stand_ins):
    cases = as_on_a_gpu()
    inputs = make_inputs(20)
    composed_attention(*inputs)
    checks = len(cases)
    compiled_attention()(*inputs)
    compiled_attention()(*make_inputs(1, 20))
    assert (stand_ins.forward, stand_ins.decode) == (2, 1)
    assert len(cases) == checks


def test_a_graph_without_a_verdict_runs_without_the_form_and_says_so_once(as_on_a_gpu, stand_ins, caplog):
    cases = as_on_a_gpu()
    with caplog.at_level(logging.WARNING, logger="dcformer"):
        for queries in (20, 40):
            compiled_attention(is_dynamic=False)(*make_inputs(queries))
    assert (cases, stand_ins.forward) == ([], 0)
    (message,) = (message for message in caplog.messages if "Triton" in message)
    assert "was not checked yet for prefill with 4 heads of 8 channels in float32" in message
    assert "run the model once before it is compiled" in message


def test_a_check_runs_outside_of_what_surrounds_the_call(as_on_a_gpu, monkeypatch, stand_ins):
    """Else gradient checkpointing would count the tensors that the check saves."""
    modes = []

    def check(case):
        leaf = torch.ones(2, requires_grad=True)
        modes.append((leaf.exp().requires_grad, torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        return RIGHT

    as_on_a_gpu()
    monkeypatch.setattr(automatic, "verdicts", Verdicts(check, lambda case: FASTER))
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor), lambda tensor: tensor)
    with hooks, torch.inference_mode(), torch.autocast("cpu"):
        explain_choice(*make_inputs(20))
    assert modes == [(True, False, False)] * 2
    assert packed == []


def test_a_backward_pass_checks_nothing(as_on_a_gpu, stand_ins):
    """The check's own backward pass would wait for the one that it interrupts."""
    cases = as_on_a_gpu()
    inputs = make_inputs(20)
    leaf = torch.ones(1, requires_grad=True)

    def attend(gradient):
        composed_attention(*inputs)

    leaf.register_hook(attend)
    (leaf * 2).backward()
    assert (cases, stand_ins.forward) == ([], 0)


def test_a_case_is_told_by_sizes_and_switches_but_not_by_lengths():
    inputs = make_inputs(20)
    case = case_of(*inputs, Visibility(20, 20))
    assert case == CASE
    assert case_of(*make_inputs(33), Visibility(33, 33, padding=torch.ones(2, 33))) == case
    assert case_of(*inputs, Visibility(20, 20, sliding_window=7)).has_window
    without_static = (*inputs[:4], inputs[4]._replace(static=None))
    assert case_of(*without_static, Visibility(20, 20)).post == BOTH_SIDES._replace(static=False)


def test_the_driver_version_is_read_from_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(automatic, "_DRIVER", tmp_path / "version")
    for line in ("x86_64 Kernel Module  535.129.03  Thu Oct 19", "Open Kernel Module for x86_64  535.129.03  Release"):
        (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX {line}\n")
        assert automatic._driver_version() == "535.129.03"


def test_the_choice_on_a_cpu_is_explained_in_lines(stand_ins):
    lines = explain_lines(4, 2, 8, 20, 20, 7, torch.float32, "cpu", False)
    assert lines[0] == (
        "20 queries and 20 keys, 4 heads of 8 channels (2 of keys and values), a window of 7, float32, no gradients, "
        "on cpu"
    )
    assert lines[1] == "chosen: cpu"
    assert lines[2].startswith("  one_query: not chosen, it takes a single query")
    assert any(line.startswith("  triton: only by its name; ") for line in lines)


def test_the_verdict_is_explained_with_its_figures(as_on_a_gpu, monkeypatch):
    as_on_a_gpu(RIGHT, Times(2.0, 1.0))
    from dcformer.gpu import explanation

    arguments = make_inputs(20)
    automatic.find_out(None, CASE)
    monkeypatch.setattr(explanation, "verdicts", automatic.verdicts)
    monkeypatch.setattr(explanation, "machine", lambda index: MACHINE)
    lines = explanation._verdict_lines(arguments, Visibility(20, 20), torch.device("cuda", 0))
    assert "is not chosen, it is not fast enough here" in lines[0]
    assert lines[1:] == [
        "  error against float64: 1.0e-06, allowed 1.0e-04",
        "  2 ms against 1 ms of the torch form: 0.50 times as fast, 1.3 needed",
        "  found out with driver 550.54, Triton 3.9.0, torch 2.13.0, dcformer 1.0 with kernels 01234567",
    ]


def test_a_sizes_mistake_is_explained():
    with pytest.raises(ValueError, match="key_value_heads must divide the 4 heads, got 3"):
        explain_lines(4, 3, 8, 20, 20, None, torch.float32, "cpu", False)
