"""The `sweep:` mapping of a recipe, and the runs that it describes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..common.quoting import quoted
from ..training.fields import check_keys, check_range, read_fields
from ..training.recipe import LARGEST_SEED, Recipe, merged


# What a variant may change; all of them train on the same data.
_VARIANT_KEYS = ("model", "training")
_MOST_DOCUMENTS = 10**7


@dataclass(frozen=True)
class SweepRecipe:
    """
    The `sweep:` mapping of a recipe.

    Attributes:
        variants (`dict`): Name -> what it changes, a mapping with `model` and `training`, merged into the recipe. The
            first one is what the others are compared with.
        seeds (`list[int]`): Seeds of the initialisation, the order of the data, and generated documents.
        evaluation (`str`, *optional*): `"head_tasks"`: accuracy on the head tasks; otherwise only losses.
        evaluation_documents (`int`, defaults to 1000): Held-out documents that the evaluation scores.
        data_dir (`str`, *optional*): Folder that holds `synthetic/` with the authors' texts; fetched if not given.
        only (`list[str]`, *optional*): Variants to run now.
        published (`dict`, *optional*): Variant -> published perplexity, of which the order is compared with ours.
        pairs (`list[list[str]]`, *optional*): [model, baseline] of variants, whose costs of equal quality are compared.
    """

    variants: dict
    seeds: list
    evaluation: Literal["head_tasks"] | None = None
    evaluation_documents: int = 1000
    data_dir: str | None = None
    only: list | None = None
    published: dict | None = None
    pairs: list | None = None

    @classmethod
    def from_mapping(cls, values: dict) -> SweepRecipe:
        """
        Raises:
            ValueError: for an unknown or missing key or a wrong value, which the message quotes.
        """
        for key, example in (("seeds", "[0, 1, 2]"), ("only", "[static]"), ("pairs", "[[model, baseline]]")):
            if isinstance(values, dict) and values.get(key) is not None and not isinstance(values[key], list):
                raise ValueError(f"sweep.{key} must be a list such as {example}, got {quoted(values[key])}.")
        if isinstance(values, dict) and "processes" in values:
            raise ValueError(
                f"sweep.processes is no longer a key of a recipe, got {quoted(values['processes'])}; remove it: the "
                "runs of a sweep follow one another."
            )
        return read_fields(cls, values, "sweep")

    def __post_init__(self):
        for seed in self.seeds:
            if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
                raise ValueError(f"sweep.seeds must hold integers of at least 0, got {quoted(seed)}.")
            check_range("sweep.seeds", seed, 0, LARGEST_SEED)
        for key in ("seeds", "variants"):
            if not getattr(self, key):
                raise ValueError(f"sweep.{key} must not be empty, got {quoted(getattr(self, key))}.")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"sweep.seeds must differ from each other, got {quoted(self.seeds)}.")
        check_range("sweep.evaluation_documents", self.evaluation_documents, 1, _MOST_DOCUMENTS)
        for name, change in self.variants.items():
            if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]*", name):
                raise ValueError(
                    f"sweep.variants holds {quoted(name)}; a name must be of letters, digits and . _ + - alone."
                )
            if not isinstance(change, dict | None):
                raise ValueError(f"sweep.variants.{name} must be a mapping of what it changes, got {quoted(change)}.")
            check_keys(change or {}, _VARIANT_KEYS, f"sweep.variants.{name}")
        for key in ("only", "published"):
            for name in getattr(self, key) or ():
                if name not in list(self.variants):
                    raise ValueError(f"sweep.{key} names {quoted(name)}; the variants are {', '.join(self.variants)}.")
        for pair in self.pairs or ():
            if not isinstance(pair, list) or len(pair) != 2 or pair[0] == pair[1]:
                raise ValueError(f"sweep.pairs must hold pairs such as [model, baseline], got {quoted(pair)}.")
            for name in pair:
                if name not in list(self.variants):
                    raise ValueError(f"sweep.pairs names {quoted(name)}; the variants are {', '.join(self.variants)}.")
        for name, value in (self.published or {}).items():
            if not isinstance(value, int | float):
                raise ValueError(f"sweep.published.{name} must be a number, got {quoted(value)}.")


@dataclass(frozen=True)
class Run:
    """One variant with one seed; `recipe` is all that `train` needs."""

    variant: str
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.recipe.output)


def plan_sweep(recipe: Recipe) -> tuple[SweepRecipe, list[Run]]:
    """
    The sweep of a recipe and all of its runs, in the order in which they are started.

    Raises:
        ValueError: if the recipe has no sweep or no evaluation, or a variant makes no valid recipe or model.
    """
    if recipe.sweep is None:
        raise ValueError(f"The recipe {recipe.name!r} has no sweep; give it a mapping sweep with variants and seeds.")
    sweep = SweepRecipe.from_mapping(recipe.sweep)
    if sweep.evaluation is None and recipe.data.evaluation is None:
        raise ValueError("A sweep needs data.evaluation or sweep.evaluation, or there is nothing to compare; add one.")
    # What a seed moves needs no check of the model again.
    checked = {variant: make_run(recipe, sweep, variant, sweep.seeds[0]) for variant in sweep.variants}
    return sweep, [
        Run(variant, seed, replace(run.recipe, **_own_values(recipe, variant, seed)))
        for seed in sweep.seeds
        for variant, run in checked.items()
    ]


def make_run(recipe: Recipe, sweep: SweepRecipe, variant: str, seed: int) -> Run:
    """One run of a sweep, as `plan_sweep`; the seed may be any."""
    values = replace(recipe, sweep=None).to_mapping()
    own = _own_values(recipe, variant, seed)
    try:
        result = Recipe.from_mapping(merged(merged(values, sweep.variants[variant] or {}), own))
    except ValueError as error:
        raise ValueError(f"sweep.variants.{variant}: {error}") from error
    return Run(variant, seed, result)


def _own_values(recipe: Recipe, variant: str, seed: int) -> dict[str, Any]:
    """What a recipe of a run has of its own, whatever its variant changes."""
    return {
        "name": f"{recipe.name}, {variant}, seed {seed}",
        "output": str(Path(recipe.output) / variant / f"seed-{seed}"),
        "seed": seed,
    }
