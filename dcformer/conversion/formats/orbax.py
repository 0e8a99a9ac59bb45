"""Finding and listing orbax checkpoints: which step, which item, which arrays. Nothing of JAX is needed.

orbax writes a run folder with one folder per step; in it one folder per item (`state` in the authors' runs, `default`
before May 2024, none when a tree is saved on its own); in that, every leaf as a zarr array, in a folder of its own
named by its dotted path, or all of them inside one OCDBT database.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...common.json_text import parse_json
from ..stores import Store, first_sentence, import_tensorstore
from .orbax_steps import TEMPORARY, choose_step, step_number
from .zarr_array import ZarrLeaf


# Items are tried in this order when a step holds several with parameters.
_ITEM_ORDER = ("state", "default", "items", "params")


@dataclass
class OrbaxCheckpoint:
    """
    One item of one step.

    Attributes:
        store (`Store`): The item's folder.
        step (`int`, *optional*): Number of the step folder it lies in.
        other_items: Further items of the step, which are not read.
        skipped_steps: Later steps of the run that are not whole, with the reason.
    """

    store: Store
    step: int | None = None
    other_items: list[str] = field(default_factory=list)
    skipped_steps: dict[str, str] = field(default_factory=dict)

    @cached_property
    def is_ocdbt(self) -> bool:
        return self.store.has("manifest.ocdbt")

    @property
    def format(self) -> str:
        zarr3 = any(file == "zarr.json" for files in self._files.values() for file in files)
        return f"{'OCDBT, ' if self.is_ocdbt else ''}{'zarr 3' if zarr3 else 'zarr 2'}"

    def source(self, format: str) -> dict[str, Any]:
        """What a report says of where the arrays come from."""
        source = {"format": format, "location": self.store.location, "step": self.step}
        return source | ({"skipped_steps": self.skipped_steps} if self.skipped_steps else {})

    @cached_property
    def declared(self) -> list[str]:
        """Names of the arrays that the item's `_METADATA` lists, if it has one."""
        if not self.store.has("_METADATA"):
            return []
        where = self.store.describe("_METADATA")
        try:
            entries = parse_json(self.store.read("_METADATA"))["tree_metadata"].values()
            return [
                ".".join(str(key["key"]) for key in entry["key_metadata"])
                for entry in entries
                if not entry.get("value_metadata", {}).get("skip_deserialize", False)
                and entry.get("value_metadata", {}).get("value_type") not in ("Dict", "None", "List", "Tuple")
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where} is not valid JSON of orbax; copy the checkpoint again.") from error

    @cached_property
    def _files(self) -> dict[str, list[str]]:
        """Array -> its files."""
        if self.is_ocdbt:
            grouped: dict[str, list[str]] = {}
            for key in self._ocdbt_keys():
                name, _, file = key.partition("/")
                grouped.setdefault(name, []).append(file)
            return grouped
        folders = [name for name in self.store.children() if self.store.is_folder(name)]
        listed = {name: self.store.names(name) for name in folders}
        declared = set(self.declared)
        return {
            name: files
            for name, files in listed.items()
            if name in declared or ".zarray" in files or "zarr.json" in files or name.startswith("params.")
        }

    @cached_property
    def _kvstore(self):
        tensorstore = import_tensorstore()
        return self.store.result(tensorstore.KvStore.open({"driver": "ocdbt", "base": self.store.spec()}))

    def _ocdbt_keys(self) -> list[str]:
        try:
            return [key.decode() for key in self.store.result(self._kvstore.list())]
        except ValueError as error:
            raise ValueError(self._damaged_database(error)) from error

    def _damaged_database(self, error: Exception) -> str:
        reason = first_sentence(error)
        return f"The OCDBT database in {self.store.location} cannot be read: {reason}; copy the checkpoint again."

    def names(self) -> list[str]:
        """All arrays, the declared and the stored ones, sorted."""
        return sorted({*self._files, *self.declared})

    def leaf(self, name: str) -> ZarrLeaf:
        """
        Raises:
            ValueError: if the array is declared but not there, or its metadata are damaged.
        """
        if name not in self._files:
            raise ValueError(
                f"{self.store.describe(name)} is missing although {self.store.describe('_METADATA')} lists it; copy "
                "the checkpoint again."
            )

        def read_file(file: str) -> bytes:
            if not self.is_ocdbt:
                return self.store.read(f"{name}/{file}")
            try:
                return bytes(self.store.result(self._kvstore.read(f"{name}/{file}")).value)
            except ValueError as error:
                raise ValueError(self._damaged_database(error)) from error

        return ZarrLeaf(name, self.store, name, self._files[name], ocdbt=self.is_ocdbt, read_file=read_file)


def open_orbax(location, step: int | None = None) -> OrbaxCheckpoint:
    """
    Find the checkpoint that a location means.

    Args:
        location: A run folder (or the one above its `checkpoints`), a step folder or an item folder; local or remote.
        step (`int`, *optional*): The step to take from a run folder. None: the latest that is complete.

    Raises:
        FileNotFoundError: if the location or the step does not exist.
        ValueError: if there is no orbax checkpoint there.
    """
    store = Store(location)
    found = _as_item(store) or _as_step(store) or _as_run(store, step)
    if found is None and store.is_folder("checkpoints"):
        found = _as_run(store.below("checkpoints"), step)
    if found is None:
        raise ValueError(
            f"{str(location)!r} is not an orbax checkpoint: it holds no _METADATA, manifest.ocdbt or zarr arrays and "
            "no step folders; give the run's checkpoints folder, one step or one item of it."
        )
    if step is not None and found.step != step:
        raise FileNotFoundError(f"{str(location)!r} is step {found.step}, not {step}; give the run's folder.")
    return found


def _is_item(store: Store) -> bool:
    if store.has("_METADATA") or store.has("manifest.ocdbt"):
        return True
    return any(store.has(f"{name}/{file}") for name in store.children() for file in (".zarray", "zarr.json"))


def _as_item(store: Store) -> OrbaxCheckpoint | None:
    if not _is_item(store):
        return None
    steps = [number for part in store.parts[:-3:-1] if (number := step_number(part)) is not None]
    return OrbaxCheckpoint(store, steps[0] if steps else None)


def _as_step(store: Store) -> OrbaxCheckpoint | None:
    """A step folder: its item with parameters."""
    items = [name for name in store.children() if store.is_folder(name) and step_number(name) is None]
    items = [name for name in items if TEMPORARY not in name and _is_item(store.below(name))]
    if not items:
        return None
    items.sort(key=lambda name: (_ITEM_ORDER.index(name) if name in _ITEM_ORDER else len(_ITEM_ORDER), name))
    candidates = [OrbaxCheckpoint(store.below(name), step_number(store.name)) for name in items]
    chosen = next((candidate for candidate in candidates if _has_parameters(candidate)), candidates[0])
    chosen.other_items = [name for name in items if name != chosen.store.name]
    return chosen


def _as_run(store: Store, step: int | None) -> OrbaxCheckpoint | None:
    """A run folder: the step asked for, or the latest complete one."""

    def open_folder(name: str) -> OrbaxCheckpoint | None:
        below = store.below(name)
        found = _as_step(below) or _as_item(below)
        if found is None or _has_parameters(found):
            return found
        # Its parameters may be in the item that was being written.
        return None if any(TEMPORARY in item for item in below.children()) else found

    chosen = choose_step(store, step, open_folder)
    if chosen is None:
        return None
    chosen.found.step, chosen.found.skipped_steps = chosen.step, chosen.skipped
    return chosen.found


def _has_parameters(checkpoint: OrbaxCheckpoint) -> bool:
    return any("token_embedder" in name or "embedding_lookup" in name for name in checkpoint.names())
