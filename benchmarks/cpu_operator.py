"""Rows of the CPU table for the operator: prompts, their gradients, decoding steps and packed documents."""

import dataclasses

import torch

from dcformer.bench import operands, roofline

from . import attention, common
from .cpu_options import CPU, Options, probes, rates, type_name
from .results import Findings, Row, Time, time_ratio


SHAPES = ((32, 80), (16, 64))
WINDOW = 256
# Shape -> the time that is wanted, as a multiple of sdpa's, for a causal prompt of 1024 in float32.
FORWARD_TARGETS = {(32, 80): 1.4, (16, 64): 1.3}
TRAINING_TARGET = 1.8
THREADS_TARGET = 1.7
BFLOAT16_TARGET = 1.5
PACKED_TARGET = 1.3
_TARGET_LENGTH = 1024
_PACKED_LENGTH, _DOCUMENT = 2048, 256
# From here on the authors' formulation takes seconds, with gradients also gigabytes.
_AUTHORS_LENGTH, _AUTHORS_TRAINING_LENGTH = 2048, 1024


def forward(options: Options) -> Findings:
    """float32 and bfloat16, against sdpa and the authors' formulation, and two threads against one."""
    findings = Findings()
    lengths = (_TARGET_LENGTH,) if options.is_quick else (512, 1024, 2048, 4096)
    for shape in SHAPES:
        for length in lengths:
            for window in (None,) if options.is_quick else (None, WINDOW):
                findings.add(_forward(options, shape, length, window))
    return findings


def _forward(options: Options, shape: tuple[int, int], length: int, window: int | None) -> Findings:
    calls = {}
    for dtype in (dtypes := measured_dtypes()):
        of = operands.prompt_operands(*shape, length, CPU, dtype)
        made = attention.forward_calls(of, window, with_authors=length <= _AUTHORS_LENGTH)
        calls.update({(name, type_name(dtype)): call for name, call in made.items()})
        calls.update(probes(dtype))
    with torch.no_grad():
        timings = options.interleave(calls)
    is_target = length == _TARGET_LENGTH and window is None
    findings = Findings()
    for dtype in dtypes:
        for threads in options.threads:
            names = (name for name, of_type, *_ in calls if of_type == type_name(dtype))
            by_name = {name: timings[name, type_name(dtype), threads] for name in names}
            target = FORWARD_TARGETS[shape] if is_target and dtype == torch.float32 else None
            case = _case(shape, length, window, dtype)
            found = rates(timings, dtype, threads)
            work = attention.forward_work(*shape, length, window, dtype)
            findings.add(_compared("forward", case, threads, by_name, target, roofline.composition_bounds(work, found)))
            if length == _TARGET_LENGTH and window is None:
                findings.rates[f"{type_name(dtype)}, {threads} threads, H {shape[0]}"] = found._asdict()
    findings.rows += _thread_rows(options, shape, length, window, timings)
    findings.rows += _bfloat16_rows(options, shape, length, window, timings)
    return findings


def _compared(
    section: str,
    case: str,
    threads: int,
    timings: dict[str, common.Timing],
    target: float | None,
    added: dict[str, float],
) -> Findings:
    """All times, the one of "composed" against every other; `added` is what the composition must add to sdpa's."""
    ours = timings["composed"]
    findings = Findings([Time(section, case, name, threads, timing) for name, timing in timings.items()])
    for peer, timing in timings.items():
        if peer == "composed":
            continue
        least = {form: (timings["sdpa"].minimum + seconds) / timing.minimum for form, seconds in added.items()}
        wanted = target if peer == "sdpa" else None
        findings.rows.append(
            Row(section, case, f"time / {peer}", threads, **time_ratio(ours, timing), target=wanted, bounds=least)
        )
    return findings


def _least(shape, length, window, dtype, timings, threads) -> dict[str, float]:
    """Seconds that the composed operator must take: sdpa's and what the composition adds, by form."""
    work = attention.forward_work(*shape, length, window, dtype)
    added = roofline.composition_bounds(work, rates(timings, dtype, threads))
    plain = timings["sdpa", type_name(dtype), threads].minimum
    return {form: plain + seconds for form, seconds in added.items()}


def _thread_rows(options: Options, shape, length, window, timings) -> list[Row]:
    """How much faster two threads are than one, for ours and for sdpa."""
    rows = []
    if not {1, 2} <= set(options.threads):
        return rows
    for dtype in measured_dtypes():
        case, name = _case(shape, length, window, dtype), type_name(dtype)
        one, two = (_least(shape, length, window, dtype, timings, threads) for threads in (1, 2))
        is_target = length == _TARGET_LENGTH and window is None and dtype == torch.float32
        for peer in ("composed", "sdpa"):
            is_ours = peer == "composed"
            rows.append(
                Row(
                    "two threads",
                    case,
                    f"{peer}: speed / one thread",
                    2,
                    **time_ratio(timings[peer, name, 1], timings[peer, name, 2]),
                    target=THREADS_TARGET if is_target and is_ours else None,
                    more_is_better=True,
                    bounds={form: one[form] / two[form] for form in one} if is_ours else {},
                )
            )
    return rows


def _bfloat16_rows(options: Options, shape, length, window, timings) -> list[Row]:
    """How much faster bfloat16 is than float32, where it is measured."""
    is_target = length == _TARGET_LENGTH and window is None
    rows = []
    if torch.bfloat16 not in measured_dtypes():
        return rows
    for threads in options.threads:
        full, half = (
            _least(shape, length, window, dtype, timings, threads) for dtype in (torch.float32, torch.bfloat16)
        )
        rows.append(
            Row(
                "bfloat16",
                _case(shape, length, window, torch.bfloat16),
                "speed / float32",
                threads,
                **time_ratio(timings["composed", "float32", threads], timings["composed", "bfloat16", threads]),
                target=BFLOAT16_TARGET if is_target else None,
                more_is_better=True,
                bounds={form: full[form] / half[form] for form in full},
            )
        )
    return rows


def measured_dtypes() -> tuple[torch.dtype, ...]:
    """bfloat16 only where the processor has products of it, by what Linux says: elsewhere one alone takes seconds."""
    has_products = {"amx_bf16", "avx512_bf16", "bf16", "svebf16"} & common.processor_flags()
    return (torch.float32, torch.bfloat16) if has_products else (torch.float32,)


def backward(options: Options) -> Findings:
    """Forward and backward, with the gradients of the factors too."""
    findings = Findings()
    for shape in SHAPES:
        for length in (_TARGET_LENGTH,) if options.is_quick else (512, 1024, 2048):
            for window in (None,) if options.is_quick else (None, WINDOW):
                of = operands.prompt_operands(*shape, length, CPU, torch.float32)
                calls = attention.training_calls(of, window, with_authors=length <= _AUTHORS_TRAINING_LENGTH)
                timings = options.interleave(
                    {**{(name,): call for name, call in calls.items()}, **probes(torch.float32)}
                )
                work = attention.forward_work(*shape, length, window, torch.float32)
                target = TRAINING_TARGET if length == _TARGET_LENGTH and window is None else None
                for threads in options.threads:
                    by_name = {name: timings[name, threads] for name in calls}
                    found = roofline.composition_bounds(work, rates(timings, torch.float32, threads))
                    # Once forward, and twice backward: the gradients of the scores and of the factors.
                    added = {form: 3 * seconds for form, seconds in found.items()}
                    case = _case(shape, length, window, torch.float32)
                    findings.add(_compared("forward and backward", case, threads, by_name, target, added))
    return findings


def decode_operator(options: Options) -> Findings:
    """One query against 1024 keys, whose factors are read from rows of the cache."""
    findings = Findings()
    for shape in (*SHAPES, (12, 64), (6, 128)):
        for dtype in (torch.float32, torch.bfloat16):
            calls = attention.step_calls(operands.step_operands(*shape, 1024, CPU, dtype))
            with torch.no_grad():
                timings = options.interleave({(name,): call for name, call in calls.items()})
            case = _case(shape, 1024, None, dtype)
            for threads in options.threads:
                by_name = {name: timings[name, threads] for name in calls}
                findings.add(_compared("one query", case, threads, by_name, None, {}))
    return findings


def packed(options: Options) -> Findings:
    """A row of documents against the same documents as rows of a batch, and against one after another."""
    findings = Findings()
    for shape in SHAPES:
        calls = attention.packed_calls(*shape, _PACKED_LENGTH, _DOCUMENT, CPU, torch.float32)
        with torch.no_grad():
            timings = options.interleave({(name,): call for name, call in calls.items()})
        case = f"float32, H {shape[0]} D {shape[1]}, T {_PACKED_LENGTH} of {_PACKED_LENGTH // _DOCUMENT} documents"
        for threads in options.threads:
            findings.times += [Time("packed", case, name, threads, timings[name, threads]) for name in calls]
            for peer in ("batch", "one by one"):
                ratio = time_ratio(timings["packed", threads], timings[peer, threads])
                row = Row("packed", case, f"time / {peer}", threads, **ratio, target=PACKED_TARGET)
                findings.rows.append(dataclasses.replace(row, bounds={"same pairs": 1.0}))
    return findings


def _case(shape: tuple[int, int], length: int, window: int | None, dtype: torch.dtype) -> str:
    mask = "causal" if window is None else f"window {window}"
    return f"{type_name(dtype)}, H {shape[0]} D {shape[1]}, T {length}, {mask}"
