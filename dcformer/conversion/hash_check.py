"""Checking weights against the SHA-256 hashes that a conversion noted in `conversion_report.json`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..common.digests import file_digest
from .formats.safetensors_file import list_safetensors
from .formats.transformers_folder import local_folder, weight_files
from .leaves import Leaf
from .pieces import PART_BYTES, Box, dtype_name
from .plan import UNUSED_FILE, Plan
from .report_file import REPORT_FILE, read_report
from .tensor_bytes import as_bytes


_OTHER_HASH = f"has another SHA-256 than in {REPORT_FILE}"
_NOT_LISTED = f"is not in {REPORT_FILE}"
_ADVICE = (
    f"the weights were damaged, or changed after the conversion. Copy them again, or remove {REPORT_FILE} if they were "
    "changed on purpose"
)


@dataclass(frozen=True)
class HashProblem:
    """One thing that is not as the report says: its file, its tensor (empty if it is the file) and what is wrong."""

    file: str
    tensor: str
    problem: str


@dataclass
class HashCheck:
    """
    Attributes:
        folder (`str`): What was checked.
        checked (`int`), nbytes (`int`): How many tensors (of a MaxText checkpoint: files) were hashed, and their bytes.
        unit (`str`): `"tensors"` or `"files"`.
        problems: All that is not as the report says.
    """

    folder: str
    checked: int = 0
    nbytes: int = 0
    unit: str = "tensors"
    problems: list[HashProblem] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return not self.problems


def verify_hashes(
    folder: str | os.PathLike, *, progress: Callable[[int], Callable[[int], None]] = lambda total: lambda nbytes: None
) -> HashCheck:
    """
    Check every tensor of a converted folder against the SHA-256 in its `conversion_report.json`.

    Args:
        folder: A converted Transformers folder, a name on the Hub that is one, or the folder that
            [`convert_to_maxtext`] wrote, whose files are checked.
        progress: Called with the number of bytes to read; returns a function that is called with every part done.

    Returns:
        [`HashCheck`] with everything that differs, is missing, is cut short or is not in the report.

    Raises:
        FileNotFoundError: if there is no such folder, or no report in it.
        ValueError: if the report is damaged or lists no hashes.
    """
    folder = local_folder(folder)
    report = read_report(folder)
    if report is None:
        raise FileNotFoundError(
            f"{str(folder)!r} has no {REPORT_FILE} with hashes to check: dcformer did not convert it. Give a second "
            "checkpoint to compare it with."
        )
    if "tensors" not in report and isinstance(report.get("files"), dict):
        return _check_files(folder, report["files"], progress)
    expected = _expected_tensors(report)
    if not expected:
        raise ValueError(
            f"{folder / REPORT_FILE} lists no hashes: an older version of dcformer wrote it. Convert the checkpoint "
            "again, or give a second one to compare it with."
        )
    found, problems = _headers(folder, expected)
    unsound = {problem.tensor for problem in problems}
    leaves = [leaf for name, leaf in found.items() if name in expected and name not in unsound]
    advance = progress(sum(leaf.nbytes for leaf in leaves))

    def check(leaf: Leaf) -> None:
        if _digest(leaf, advance) != expected[leaf.name]["sha256"]:
            problems.append(HashProblem(Path(leaf.where).name, leaf.name, _OTHER_HASH))

    _in_threads(check, leaves)
    problems += _other_files(folder, report)
    problems.sort(key=lambda problem: (problem.file, problem.tensor))
    return HashCheck(str(folder), len(leaves), sum(leaf.nbytes for leaf in leaves), problems=problems)


def _other_files(folder: Path, report: dict[str, Any]) -> list[HashProblem]:
    """What is wrong with the files beside the weights; reports of earlier versions do not list them."""
    files = report.get("files", {})
    problems = []
    for name, digest in files.items() if isinstance(files, dict) else ():
        if digest is None:
            continue
        path = folder / Path(name).name
        if not path.is_file():
            problems.append(HashProblem(name, "", "is missing"))
        elif file_digest(path) != digest:
            problems.append(HashProblem(name, "", _OTHER_HASH))
    return problems


def check_run_files(item: Path) -> None:
    """
    Check the files of a MaxText item against the report in its run folder, if `to-maxtext` wrote one there.

    Raises:
        ValueError: if a file is missing or has changed.
    """
    run = item.parent.parent
    files = (read_report(run) or {}).get("files")
    if not isinstance(files, dict):
        return
    below = f"{item.relative_to(run).as_posix()}/"
    for problem in _check_files(
        run, {name: digest for name, digest in files.items() if name.startswith(below)}
    ).problems:
        raise ValueError(_refusal("A file", run / problem.file, problem.problem))


def check_while_reading(plan: Plan, folder: Path) -> None:
    """
    Let a plan refuse weights that are not those of the `conversion_report.json` beside them, if there is one: what the
    headers tell at once, the bytes as they are read.

    Raises:
        ValueError: if a tensor is missing, of another shape or dtype, or not in the report.
    """
    expected = {
        name: record
        for name, record in _expected_tensors(read_report(folder) or {}).items()
        if record["file"] != UNUSED_FILE
    }
    if not expected:
        return
    for problem in _differences(expected, plan.leaves):
        raise ValueError(_refusal(problem.tensor, folder / problem.file, problem.problem))
    plan.leaves.update({name: CheckedLeaf(leaf, expected[name]["sha256"]) for name, leaf in plan.leaves.items()})


def check_kept(leaves: dict[str, Leaf], folder: Path) -> dict[str, Leaf]:
    """The arrays of `unused_leaves.safetensors`, which are checked when read where the folder's report has hashes."""
    expected = _expected_tensors(read_report(folder) or {})
    return {
        name: CheckedLeaf(leaf, expected[name]["sha256"]) if name in expected else leaf for name, leaf in leaves.items()
    }


class CheckedLeaf(Leaf):
    """A tensor that is not read unless its bytes have the right SHA-256."""

    def __init__(self, leaf: Leaf, sha256: str):
        self.name, self.shape, self.dtype, self.chunk_shape = leaf.name, leaf.shape, leaf.dtype, leaf.chunk_shape
        self.where = leaf.where
        self._leaf, self._sha256, self._is_checked = leaf, sha256, False

    def fingerprint(self) -> list:
        return [*self._leaf.fingerprint(), self._sha256]

    def read(self, box: Box) -> Tensor:
        values = self._leaf.read(box)
        if not self._is_checked:
            is_whole = tuple(box) == self.whole()
            digest = hashlib.sha256(as_bytes(values)).hexdigest() if is_whole else _digest(self._leaf)
            if digest != self._sha256:
                raise ValueError(_refusal(self.name, Path(self.where), _OTHER_HASH))
            self._is_checked = True
        return values


def _refusal(tensor: str, path: Path, problem: str) -> str:
    return f"{tensor} in {path} {problem}: {_ADVICE}."


def _expected_tensors(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The report's entries with a hash, by tensor."""
    return {
        record["parameter"]: record for record in report.get("tensors", []) if isinstance(record.get("sha256"), str)
    }


def _headers(folder: Path, expected: dict[str, dict[str, Any]]) -> tuple[dict[str, Leaf], list[HashProblem]]:
    """Every tensor of the weight files, and what is wrong with files and headers."""
    reported = {record["file"] for record in expected.values()}
    for name in reported:
        if Path(name).name != name:
            raise ValueError(f"{folder / REPORT_FILE} names the file {name!r}, which is not in its own folder.")
    trouble = ""
    try:
        loaded = {path.name for path in weight_files(folder)}
    except (FileNotFoundError, ValueError) as error:
        loaded, trouble = reported, str(error)
    found: dict[str, Leaf] = {}
    problems, broken = [], set()
    for name in sorted({*loaded, *reported, UNUSED_FILE}):
        path = folder / name
        if not path.is_file():
            if name in reported:
                problems.append(HashProblem(name, "", "is missing"))
                broken.add(name)
            continue
        if name not in loaded and name != UNUSED_FILE:
            problems.append(HashProblem(name, "", "is not loaded, since the index of the weights does not name it"))
        try:
            leaves = list_safetensors(path)
        except ValueError as error:
            problems.append(HashProblem(name, "", str(error)))
            broken.add(name)
            continue
        for leaf in leaves:
            if leaf.name in found:
                problems.append(HashProblem(name, leaf.name, f"is in {Path(found[leaf.name].where).name} too"))
            found[leaf.name] = leaf
    if trouble and not broken:
        problems.append(HashProblem("", "", trouble))
    wanted = {name: record for name, record in expected.items() if name in found or record["file"] not in broken}
    return found, problems + _differences(wanted, found)


def _differences(expected: dict[str, dict[str, Any]], found: dict[str, Leaf]) -> list[HashProblem]:
    """What the headers tell: tensors that are missing, not in the report, or of another shape or dtype."""
    problems = []
    for name, record in expected.items():
        if name not in found:
            problems.append(HashProblem(record["file"], name, "is missing"))
            continue
        leaf = found[name]
        here, noted = (dtype_name(leaf.dtype), list(leaf.shape)), (record.get("dtype"), record.get("shape"))
        if here != noted:
            words = f"is {here[0]} {here[1]}, but {noted[0]} {noted[1]} in {REPORT_FILE}"
            problems.append(HashProblem(Path(leaf.where).name, name, words))
    for name in found:
        if name not in expected:
            problems.append(HashProblem(Path(found[name].where).name, name, _NOT_LISTED))
    return problems


def _check_files(
    folder: Path, files: dict[str, str], progress: Callable = lambda total: lambda nbytes: None
) -> HashCheck:
    """A MaxText checkpoint: its files, and whether its step holds others."""
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{folder / REPORT_FILE} names the file {name!r}, which is not in its own folder.")
    there = {name: folder / name for name in files if (folder / name).is_file()}
    problems = [HashProblem(name, "", "is missing") for name in files if name not in there]
    advance = progress(sum(path.stat().st_size for path in there.values()))

    def check(name: str) -> None:
        if file_digest(there[name], advance) != files[name]:
            problems.append(HashProblem(name, "", _OTHER_HASH))

    _in_threads(check, there)
    for step in {Path(name).parts[0] for name in files if len(Path(name).parts) > 1}:
        below = [path.relative_to(folder).as_posix() for path in (folder / step).rglob("*") if path.is_file()]
        problems += [HashProblem(name, "", _NOT_LISTED) for name in below if name not in files]
    problems.sort(key=lambda problem: problem.file)
    return HashCheck(str(folder), len(there), sum(path.stat().st_size for path in there.values()), "files", problems)


def file_digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, by its path relative to it, sorted."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = _in_threads(file_digest, files)
    return {path.relative_to(folder).as_posix(): digest for path, digest in zip(files, digests)}


def _in_threads(function: Callable, things: Iterable) -> list:
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(function, things))


def _digest(leaf: Leaf, advance: Callable[[int], None] = lambda nbytes: None) -> str:
    """The SHA-256 of a tensor's bytes, read row by row."""
    digest = hashlib.sha256()
    for box in _rows(leaf):
        values = leaf.read(box)
        digest.update(as_bytes(values))
        advance(values.nbytes)
    return digest.hexdigest()


def _rows(leaf: Leaf) -> Iterator[Box]:
    """Boxes of whole rows, one after the other, each of about as many bytes as are hashed at a time."""
    if not leaf.shape or not leaf.nbytes:
        yield leaf.whole()
        return
    step = max(1, PART_BYTES * leaf.shape[0] // leaf.nbytes)
    for start in range(0, leaf.shape[0], step):
        yield ((start, min(start + step, leaf.shape[0])), *leaf.whole()[1:])
