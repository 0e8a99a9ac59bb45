"""Nothing is trusted unseen: whether a Triton form may be chosen on this machine, found out once and kept.

A verdict is about a device with its driver, the versions of Triton, torch and this package with its kernels, and a
case: sizes, switches, type, and whether it is training, prefill or decoding. The first call of a case has its results
checked and its time taken; the verdict goes to a file in the user's cache folder, for all processes to come.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

import torch

from .cases import DECODE, Case
from .verdict_file import KnownVerdicts, Machine, Verdict, locked, read_verdicts, save_verdict


logger = logging.getLogger(__name__)

# By how much a Triton form has to be faster than the torch form. One query has too little to do for a wide margin.
NEEDED_SPEEDUP = 1.3
NEEDED_SPEEDUP_OF_DECODING = 1.0

_Result = TypeVar("_Result")


class Correctness(NamedTuple):
    """The largest error, relative to what is usual in the tensor, and the largest that is allowed."""

    error: float
    allowed: float


class Times(NamedTuple):
    """Milliseconds of a call in the Triton form and in the torch form that would be chosen otherwise."""

    triton: float
    torch: float


# What finds them out for a case.
Check = Callable[[Case], Correctness]
Measure = Callable[[Case], Times]


def needed_speedup(case: Case) -> float:
    return NEEDED_SPEEDUP_OF_DECODING if case.kind == DECODE else NEEDED_SPEEDUP


def judge(case: Case, check: Check, measure: Measure) -> Verdict:
    """
    The verdict on a case.

    A form that raises is one that cannot be used, whatever it raises: that is what is found out here. Only where memory
    runs out, which says nothing about the form, is the verdict not to be kept.
    """
    try:
        correctness = check(case)
        # Written so that NaN is wrong.
        if not correctness.error <= correctness.allowed:
            problem = f"its results are wrong here (error {correctness.error:.1e}, allowed {correctness.allowed:.1e})"
            return Verdict(problem, *correctness)
        times = measure(case)
    except torch.OutOfMemoryError:
        return Verdict("the device has too little free memory to check it", is_final=False)
    except Exception as error:
        first_line = str(error).strip().split("\n")[0]
        return Verdict(f"it failed here: {type(error).__name__}: {first_line}"[:500])
    problem = None
    if not times.triton * needed_speedup(case) <= times.torch:
        problem = (
            f"it is not fast enough here ({times.triton:.3g} ms against {times.torch:.3g} ms of the torch form, which "
            f"it has to be {needed_speedup(case):g} times faster than)"
        )
    return Verdict(problem, *correctness, *times)


class Verdicts:
    """
    The verdicts that this process knows.

    Args:
        check, measure: Find out correctness and times of a case, on the current device.
    """

    def __init__(self, check: Check, measure: Measure):
        self._check = check
        self._measure = measure
        self._known: KnownVerdicts = {}
        self._lock = threading.RLock()

    def known(self, machine: Machine, case: Case) -> Verdict | None:
        """The verdict on a case if there is one, found out by this process or another one."""
        if (machine, case) not in self._known:
            with self._lock:
                # What this process found out itself stays, even where it cannot be written down.
                self._known = read_verdicts() | self._known
        return self._known.get((machine, case))

    def find_out(self, machine: Machine, case: Case, on_device: Callable[[], AbstractContextManager]) -> Verdict:
        """
        The verdict on a case, after a check if there is none yet. Of several processes that ask at once, one checks.

        Args:
            on_device: Makes the context in which the check runs.
        """
        if (verdict := self._known.get((machine, case))) is not None:
            return verdict
        with self._lock, locked():
            verdict = self.known(machine, case)
            if verdict is not None:
                return verdict

            def find() -> Verdict:
                with on_device():
                    return judge(case, self._check, self._measure)

            verdict = in_fresh_thread(find)
            self._known[machine, case] = verdict
            if verdict.is_final:
                save_verdict(machine, case, verdict)
        if verdict.problem is not None:
            logger.warning(
                "Composed attention runs without its Triton form for %s on %s: %s. If that is a fault of the form, "
                "report it to the authors of dcformer with what `dcformer bench --explain` prints.",
                describe(case),
                machine.device,
                verdict.problem,
            )
        return verdict

    def forget(self) -> None:
        """What this process knows; the file stays."""
        with self._lock:
            self._known = {}


def describe(case: Case) -> str:
    """A case in a few words."""
    return f"{case.kind} with {case.heads} heads of {case.channels} channels in {case.dtype}"


def describe_verdict(case: Case, verdict: Verdict) -> list[str]:
    """The figures of a verdict, a line each."""
    lines = []
    if verdict.error is not None:
        lines.append(f"error against float64: {verdict.error:.1e}, allowed {verdict.allowed:.1e}")
    if verdict.milliseconds is not None and verdict.torch_milliseconds is not None:
        speedup = verdict.torch_milliseconds / verdict.milliseconds
        lines.append(
            f"{verdict.milliseconds:.3g} ms against {verdict.torch_milliseconds:.3g} ms of the torch form: "
            f"{speedup:.2f} times as fast, {needed_speedup(case):g} needed"
        )
    return lines


def in_fresh_thread(function: Callable[[], _Result]) -> _Result:
    """
    The result of a function that is called outside of whatever surrounds the caller: modes of autograd and autocast,
    hooks on saved tensors as gradient checkpointing sets them, default devices. All of these belong to a thread.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="dcformer-verdict")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


__all__ = [
    "Correctness",
    "Times",
    "Verdict",
    "Verdicts",
    "describe",
    "describe_verdict",
    "judge",
    "needed_speedup",
]
