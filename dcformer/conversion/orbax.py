"""Finding and opening orbax checkpoints: which step, which item, which arrays. Nothing of JAX is needed.

orbax writes a run folder with one folder per step, named `300` or `PREFIX_300`; in it one folder per item (`state` in
the authors' runs, `default` before May 2024, none when a single tree is saved); in that, every array in zarr 2 or zarr
3, each in a folder named by its dotted path, or all inside one OCDBT database. While it writes, the folder of the step
or item ends in `.orbax-checkpoint-tmp`; where it writes `commit_success.txt`, a step without that file was interrupted.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..common.files import check_relative
from .arrays import Source, SourceArray, from_numpy
from .plan import listed
from .settings import naming
from .stores import Store, import_tensorstore, reading


_TEMPORARY = ".orbax-checkpoint-tmp"
_COMMITTED = "commit_success.txt"
_STEP = re.compile(r"(?:(.+)_)?(\d+)", re.DOTALL)
# The file beside an array that shows its format, and tensorstore's name of the format.
_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}
# Items are tried in this order when a step holds several with parameters.
_ITEM_ORDER = {"state": 0, "default": 1, "items": 2, "params": 3}
# Entries of `_METADATA` that are not arrays.
_CONTAINERS = ("Dict", "None", "List", "Tuple")
_EMBEDDINGS = ("token_embedder", "embedding_lookup")


@dataclass(frozen=True)
class OrbaxItem:
    """One item of one step."""

    store: Store  #: the folder that was given
    folder: str  #: below it, with a slash at the end; empty if it is the item
    run: str = ""  #: folder of the run, if the item lies in one; so are the next three
    step_folder: str = ""
    prefix: str = ""  #: of the step folder's name
    step: int | None = None
    other_items: Sequence[str] = ()  #: of the step, not read
    skipped_steps: Mapping[str, str] = field(default_factory=dict)  #: later ones that are not whole, with the reason

    @property
    def name(self) -> str:
        return self.folder.rstrip("/").rsplit("/", 1)[-1]

    @property
    def location(self) -> str:
        return f"{self.store.location}/{self.folder}".rstrip("/")

    @cached_property
    def is_ocdbt(self) -> bool:
        return f"{self.folder}manifest.ocdbt" in self.store.names

    def _spec(self, path: str) -> dict[str, Any]:
        if self.is_ocdbt:
            return {"driver": "ocdbt", "base": self.store.spec(self.folder), "path": path}
        return self.store.spec(self.folder + path)

    @cached_property
    def _drivers(self) -> dict[str, str]:
        """Driver of every stored array."""
        if self.is_ocdbt:
            with reading(f"The database of arrays in {self.location}"):
                keys = import_tensorstore().KvStore.open(self._spec("")).result().list().result()
            files = [key.decode() for key in keys]
        else:
            files = [name.removeprefix(self.folder) for name in self.store.names if name.startswith(self.folder)]
        stored = [file.rpartition("/") for file in files]
        return {array: _DRIVERS[last] for array, _, last in stored if array and last in _DRIVERS}

    @cached_property
    def _declared(self) -> tuple[list[str], bool]:
        """The arrays that `_METADATA` declares, and whether it says that all of their chunks are stored."""
        names: list[str] = []
        if (content := self.store.read(f"{self.folder}_METADATA")) is None:
            return names, False
        with naming(f"{self.location}/_METADATA", ValueError, LookupError, TypeError, AttributeError):
            metadata = json.loads(content)
            for entry in metadata["tree_metadata"].values():
                value = entry.get("value_metadata", {})
                if not value.get("skip_deserialize") and value.get("value_type") not in _CONTAINERS:
                    names.append(check_relative(".".join(str(key["key"]) for key in entry["key_metadata"])))
            return names, bool(metadata.get("store_array_data_equal_to_fill_value"))

    @cached_property
    def names(self) -> list[str]:
        """All arrays, those that `_METADATA` declares and those that are stored, sorted."""
        return sorted({*self._declared[0], *self._drivers})

    @property
    def has_parameters(self) -> bool:
        return any(part in name for name in self.names for part in _EMBEDDINGS)

    def source(self, kind: str, training_state: re.Pattern[str]) -> Source:
        """The arrays as a checkpoint of a kind, without those of the training state, known by their names."""
        stored = f"{'OCDBT, ' if self.is_ocdbt else ''}{'zarr 3' if 'zarr3' in self._drivers.values() else 'zarr 2'}"
        state = [name for name in self.names if training_state.fullmatch(name)]
        return Source(
            f"{kind} ({stored})",
            self.location,
            self.open([name for name in self.names if name not in state]),
            self.store.stamps(self.folder),
            self.step,
            state,
            self.other_items,
            self.run,
            facts={"skipped_steps": self.skipped_steps} if self.skipped_steps else {},
        )

    def open(self, names: list[str]) -> dict[str, SourceArray]:
        """Arrays by name. Only their metadata are read."""
        specs = {name: {"driver": self._drivers.get(name, "zarr"), "kvstore": self._spec(f"{name}/")} for name in names}
        opened = dict(self._results({name: import_tensorstore().open(spec, read=True) for name, spec in specs.items()}))
        counting = {name: array.storage_statistics(query_fully_stored=True) for name, array in opened.items()}
        arrays = {}
        for name, statistics in self._results(counting):
            if not statistics.fully_stored and self._declared[1]:
                raise ValueError(f"Chunks of {name} in {self.location} are missing; copy the checkpoint again.")
            arrays[name] = self._array(name, opened[name], statistics.fully_stored)
        return arrays

    def _results(self, futures: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, future in futures.items():
            with reading(f"{name} in {self.location}"):
                result = future.result()
            yield name, result

    def _array(self, name: str, array: Any, is_whole: bool) -> SourceArray:
        dtype = getattr(torch, array.dtype.name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} in {self.location} is {array.dtype.name}, which torch does not have.")
        chunk = tuple(array.chunk_layout.read_chunk.shape or ())

        @reading(f"{name} in {self.location}")
        def load(slices: tuple[slice, ...]) -> Tensor:
            return from_numpy(array[slices].read().result())

        return SourceArray(name, f"{self.location}/{name}", tuple(array.shape), dtype, chunk, load, is_whole)


def open_orbax(location: str | os.PathLike, step: int | None = None) -> OrbaxItem:
    """Find the checkpoint that a location means."""
    store = Store(location)
    items, unfinished = _find_items(store)
    if not items:
        raise ValueError(
            f"{str(location)!r} holds no complete orbax checkpoint: no _METADATA, manifest.ocdbt or zarr arrays"
            + (f"; unfinished steps: {sorted(unfinished)}." if unfinished else ".")
        )
    # A copy such as `backup_9999` beside steps that are bare numbers is not one of the run's.
    if any(item.step is not None and not item.prefix for item in items):
        items = [item for item in items if not item.prefix]
    wanted = {(item.run, item.prefix) for item in items if item.step is not None and step in (None, item.step)}
    if len(wanted) > 1:
        runs = ", ".join(sorted(f"{run}/{prefix}" for run, prefix in wanted))
        raise ValueError(f"{str(location)!r} holds steps of several runs, {runs}; give the folder of one.")
    by_step: dict[int | None, list[OrbaxItem]] = {}
    for item in items:
        by_step.setdefault(item.step, []).append(item)
    skipped = dict.fromkeys(unfinished - by_step.keys(), "it was being written") | _uncommitted(store, items)
    whole = sorted(by_step.keys() - skipped.keys(), key=lambda number: -1 if number is None else number)
    if step is not None and step not in whole:
        there = listed([str(number) for number in whole], most=12)
        raise FileNotFoundError(f"{str(location)!r} has no complete step {step}; there are: {there or 'none'}.")
    for number in [step] if step is not None else reversed(whole):
        candidates = sorted(by_step[number], key=lambda item: (_ITEM_ORDER.get(item.name, len(_ITEM_ORDER)), item.name))
        if len(folders := sorted({item.step_folder for item in candidates})) > 1:
            raise ValueError(f"{str(location)!r} holds step {number} twice, {folders}; give the folder of one.")
        chosen = next((item for item in candidates if item.has_parameters), None)
        if chosen is None and step is None and number is not None and len(whole) > 1:
            skipped[number] = "it holds no parameters"
            continue
        chosen = chosen or candidates[0]
        others = [item.name for item in candidates if item is not chosen]
        later = [n for n in sorted(skipped) if n > number] if number is not None and step is None else []
        return replace(chosen, other_items=others, skipped_steps={str(n): skipped[n] for n in later})
    raise ValueError(f"{str(location)!r} has no complete step: {skipped}.")


def _find_items(store: Store) -> tuple[list[OrbaxItem], set[int]]:
    """All items that are not being written, and the numbers of steps with one that is."""
    folders, unfinished = set(), set()
    for name in store.names:
        *above, file = name.split("/")
        temporary = next((i for i, part in enumerate(above) if _TEMPORARY in part), None)
        if temporary is not None:
            parts = [part.split(_TEMPORARY)[0] for part in above[max(0, temporary - 1) : temporary + 1]]
            unfinished |= {int(match[2]) for part in parts if (match := _STEP.fullmatch(part))}
        elif file in ("_METADATA", "manifest.ocdbt"):
            folders.add("/".join(above))
        elif file in _DRIVERS and above:
            folders.add("/".join(above[:-1]))
    items = []
    for folder in sorted(folders):
        if folder.rsplit("/", 1)[-1].startswith("ocdbt.process_"):
            continue
        item = OrbaxItem(store, f"{folder}/" if folder else "")
        parent, _, last = item.location.rpartition("/")
        for run, name in ((parent, last), parent.rpartition("/")[::2]):
            if match := _STEP.fullmatch(name):
                item = replace(item, run=run, step_folder=f"{run}/{name}", prefix=match[1] or "", step=int(match[2]))
                break
        items.append(item)
    return items, unfinished


def _uncommitted(store: Store, items: list[OrbaxItem]) -> dict[int, str]:
    """Steps that lack the file which marks complete steps, where others have it."""
    names = {f"{store.location}/{name}" for name in store.names if name.endswith(_COMMITTED)}
    steps = {item.step: item.step_folder for item in items if item.step is not None}
    committed = {step for step, folder in steps.items() if f"{folder}/{_COMMITTED}" in names}
    # Versions of orbax that leave this file out on local disks may have written the first steps of a run.
    expected = {step for step in steps if committed and not (store.is_local and step < min(committed))}
    return dict.fromkeys(expected - committed, f"{_COMMITTED} is missing, which other steps have")
