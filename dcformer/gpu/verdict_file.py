"""Verdicts on Triton forms in the user's cache folder: one JSON file, shared by all processes."""

import dataclasses
import functools
import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.cache_folder import cache_folder
from ..common.files import write_atomically
from ..common.json_text import parse_json
from ..common.locks import LockHeldError, file_lock
from .cases import Case, StageSwitches


logger = logging.getLogger(__name__)

_FORMAT = 1
# Compiling the torch form for a check can take most of a minute.
_SECONDS_OF_WAITING = 120.0
_SECONDS_BETWEEN_LOOKS = 0.05


@dataclass(frozen=True)
class Machine:
    """
    What else a verdict depends on.

    Args:
        device (`str`): Name of the GPU.
        driver (`str`): Version of its driver.
        triton, torch (`str`): Versions.
        dcformer (`str`): Our version, with a digest of the kernels.
    """

    device: str
    driver: str
    triton: str
    torch: str
    dcformer: str


@dataclass(frozen=True)
class Verdict:
    """
    What was found out about a Triton form.

    Args:
        problem (`str`, *optional*): Why it is not used, as the end of a sentence. None: it is used.
        error, allowed (`float`, *optional*): Its largest error, and what is allowed. None: it gave no results.
        milliseconds, torch_milliseconds (`float`, *optional*): Times of it and of the torch form. None: not taken.
        is_final (`bool`): Whether it is to be kept.
    """

    problem: str | None
    error: float | None = None
    allowed: float | None = None
    milliseconds: float | None = None
    torch_milliseconds: float | None = None
    is_final: bool = True


KnownVerdicts = dict[tuple[Machine, Case], Verdict]


def verdict_path() -> Path:
    return cache_folder() / "verdicts.json"


def read_verdicts() -> KnownVerdicts:
    """All verdicts of the file; none if it is not there, or is damaged, which is said once."""
    path = verdict_path()
    try:
        entries = parse_json(path.read_bytes())
        if entries["format"] != _FORMAT:
            return {}
        return dict(_entry_from_json(entry) for entry in entries["verdicts"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        _warn_once(f"{str(path)!r} cannot be read ({error}), so Triton forms are checked again.")
        return {}


def save_verdict(machine: Machine, case: Case, verdict: Verdict) -> None:
    """Add a verdict to the file. Where that is impossible it is said once, and later processes check again."""
    path = verdict_path()
    known = read_verdicts() | {(machine, case): verdict}
    content = {"format": _FORMAT, "verdicts": [_entry_to_json(*key, known[key]) for key in known]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        _warn_once(f"{str(path)!r} cannot be written ({error}), so every process checks its Triton forms again.")


@contextmanager
def locked() -> Iterator[None]:
    """Keep other processes from checking and writing until the block ends, if the file system can."""
    path = verdict_path().with_suffix(".lock")
    deadline = time.monotonic() + _SECONDS_OF_WAITING
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(file_lock(path))
            except LockHeldError:
                if time.monotonic() < deadline:  # later, rather check twice than wait for ever
                    time.sleep(_SECONDS_BETWEEN_LOOKS)
                    continue
            except OSError:
                pass  # there is no folder to write to; saving will say so
            break
        yield


def _entry_to_json(machine: Machine, case: Case, verdict: Verdict) -> dict[str, Any]:
    stages = {name: getattr(case, name)._asdict() for name in ("pre", "post")}
    found = dataclasses.asdict(verdict)
    del found["is_final"]
    return {"machine": dataclasses.asdict(machine), "case": case._asdict() | stages, "verdict": found}


def _entry_from_json(entry: dict[str, Any]) -> tuple[tuple[Machine, Case], Verdict]:
    case = Case(**entry["case"])
    case = case._replace(pre=StageSwitches(**case.pre), post=StageSwitches(**case.post))
    verdict = Verdict(**entry["verdict"])
    numbers = (verdict.error, verdict.allowed, verdict.milliseconds, verdict.torch_milliseconds)
    if not isinstance(verdict.problem, str | None) or not all(isinstance(number, float | None) for number in numbers):
        raise TypeError("a verdict holds something else than a reason and numbers")
    return (Machine(**entry["machine"]), case), verdict


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
