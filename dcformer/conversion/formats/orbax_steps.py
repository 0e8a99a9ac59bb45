"""Which step of a run folder to read: orbax's names of step folders, and what tells a finished one from the others.

orbax names a step `300`, or `PREFIX_300` throughout a run, padded with zeros if so asked. While it writes, the folder
or an item in it ends in `.orbax-checkpoint-tmp`; where it writes `commit_success.txt`, a step without was interrupted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..plan import listed
from ..stores import Store


Found = TypeVar("Found")

TEMPORARY = ".orbax-checkpoint-tmp"
_COMMITTED = "commit_success.txt"
_NAME = re.compile(rf"(?:(.+)_)?([0-9]+)({re.escape(TEMPORARY)}.*)?", re.DOTALL)


@dataclass
class _Folder:
    """A folder with the name of a step."""

    name: str
    prefix: str
    step: int
    is_temporary: bool


@dataclass
class ChosenStep(Generic[Found]):
    """
    Attributes:
        step (`int`): Its number.
        found: What was opened there.
        skipped: Later steps that are not whole, with the reason.
    """

    step: int
    found: Found
    skipped: dict[str, str]


def step_number(name: str) -> int | None:
    """The step that a finished folder is named by, if it is."""
    folder = _parse(name)
    return None if folder is None or folder.is_temporary else folder.step


def _parse(name: str) -> _Folder | None:
    match = _NAME.fullmatch(name)
    return None if match is None else _Folder(name, match[1] or "", int(match[2]), match[3] is not None)


def choose_step(store: Store, step: int | None, open_folder: Callable[[str], Found | None]) -> ChosenStep | None:
    """
    The step that was asked for, or the latest one that is whole.

    Args:
        store (`Store`): The run folder.
        step (`int`, *optional*): None: the latest.
        open_folder: Opens the folder of a given name; returns None if it is no checkpoint.

    Returns:
        The step; None if this is no folder of steps.

    Raises:
        FileNotFoundError: if there is no such step.
        ValueError: if it is not whole, none is, or it cannot be told which folders are steps.
    """
    folders = [folder for name in store.children() if (folder := _parse(name)) is not None and store.is_folder(name)]
    folders = _of_one_naming(store, folders, step, open_folder)
    if not folders:
        return None
    whole, reasons = _by_number(store, folders)
    if step is not None and step not in whole and step not in reasons:
        known = listed([str(number) for number in sorted(whole, reverse=True)], most=12)
        raise FileNotFoundError(f"{store.location!r} has no step {step}; there are {known or 'none that are whole'}.")
    for number in [step] if step is not None else sorted({*whole, *reasons}, reverse=True):
        found = open_folder(whole[number]) if number in whole else None
        if found is not None:
            later = {str(other): reasons[other] for other in sorted(reasons) if other > number and step is None}
            return ChosenStep(number, found, later)
        if number in whole:
            reasons[number] = _what_is_there(store.below(whole[number]))
    if step is not None:
        others = listed([str(number) for number in sorted(whole, reverse=True) if number != step], most=12)
        advice = f"choose another with --step ({others})" if others else "there is no other"
        raise ValueError(f"Step {step} in {store.location!r} is incomplete: {reasons[step]}; {advice}.")
    words = [f"{number} ({reasons[number]})" for number in sorted(reasons, reverse=True)]
    raise ValueError(
        f"{store.location!r} has no complete step: {listed(words)}; wait for the run to finish one or give another run."
    )


def _of_one_naming(
    store: Store, folders: list[_Folder], step: int | None, open_folder: Callable[[str], Found | None]
) -> list[_Folder]:
    """
    The folders of the run's own naming: bare numbers if there are any, else those of the one prefix under which there
    are checkpoints. A copy such as `backup_9999` beside them is none of the run's steps.
    """
    by_prefix: dict[str, list[_Folder]] = defaultdict(list)
    for folder in folders:
        by_prefix[folder.prefix].append(folder)
    if "" in by_prefix:
        return by_prefix[""]
    checkpoints = {
        prefix: [folder for folder in group if folder.is_temporary or open_folder(folder.name) is not None]
        for prefix, group in by_prefix.items()
    }
    finished = [f for group in checkpoints.values() for f in group if not f.is_temporary]
    prefixes = {folder.prefix for folder in finished if step is None or folder.step == step}
    if len(prefixes) > 1:
        raise ValueError(
            f"{store.location!r} holds steps under several names, {listed(sorted(f.name for f in finished), most=8)}, "
            "and it cannot be told which are the run's; give the folder of one step."
        )
    prefixes = prefixes or {prefix for prefix, group in checkpoints.items() if group}
    return [folder for prefix in sorted(prefixes) for folder in by_prefix[prefix]]


def _by_number(store: Store, folders: list[_Folder]) -> tuple[dict[int, str], dict[int, str]]:
    """The finished steps' folders, and why the others are not finished, by number."""
    finished: dict[int, str] = {}
    for folder in folders:
        if folder.is_temporary:
            continue
        if folder.step in finished:
            raise ValueError(
                f"{store.location!r} holds step {folder.step} twice, as {finished[folder.step]!r} and as "
                f"{folder.name!r}; give the folder of one."
            )
        finished[folder.step] = folder.name
    reasons = {
        folder.step: f"only {folder.name}, which was being written, is there"
        for folder in folders
        if folder.is_temporary and folder.step not in finished
    }
    committed = [number for number, name in finished.items() if store.has(f"{name}/{_COMMITTED}")]
    for number in list(finished):
        # Versions of orbax that leave this file out on local disks may have written the first steps of a run.
        is_older = store.is_local and committed and number < min(committed)
        if committed and number not in committed and not is_older:
            reasons[number] = f"{_COMMITTED} is missing, which other steps have, so it was interrupted"
            del finished[number]
    return finished, reasons


def _what_is_there(store: Store) -> str:
    """Why a step's folder is no checkpoint."""
    names = store.children()
    temporary = [name for name in names if TEMPORARY in name]
    if temporary:
        return f"only {listed(temporary)}, which was being written, is there"
    if not names:
        return "it is empty"
    return f"it holds no _METADATA, manifest.ocdbt or zarr arrays, only {listed(names)}"
