"""The `sweep:` mapping of a recipe, and the runs that it describes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..training import Recipe, merge_recipes


@dataclass(frozen=True)
class SweepRecipe:
    """The `sweep:` mapping of a recipe."""

    #: name -> what the variant changes in `model` and `training`; the first one is what the others are compared with
    variants: dict[str, Any]
    seeds: list[int]  #: seeds of the initialisation, the order of the data, and generated documents
    tasks: list[str] | None = None  #: tasks of `dcformer eval` that score every model; `None`: losses alone
    limit: int | None = None  #: documents of each task; `None`: all
    only: list[str] | None = None  #: variants to run now
    published: dict[str, float] | None = None  #: variant -> published perplexity, a column of the table

    def __post_init__(self):
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"sweep.seeds must be one or more different integers, got {self.seeds}.")
        for name, change in self.variants.items():
            if not re.fullmatch(r"\w[\w.+-]*", name):
                raise ValueError(f"sweep.variants holds {name!r}; a name is of letters, digits and . _ + - alone.")
            if not set(change or {}) <= {"model", "training"}:
                raise ValueError(f"sweep.variants.{name} may change model and training alone, got {list(change)}.")
        for name in (*(self.only or ()), *(self.published or ())):
            if name not in self.variants:
                raise ValueError(f"sweep names {name!r}; its variants are {', '.join(self.variants)}.")

    def chosen(self, runs: list[Run]) -> list[Run]:
        """Those of its runs that are to be done now."""
        return [run for run in runs if self.only is None or run.variant in self.only]


@dataclass(frozen=True)
class Run:
    """One variant with one seed; `recipe` is all that `train` needs."""

    variant: str
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        """Name for people."""
        return f"{self.variant}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Output folder."""
        return Path(self.recipe.output)


def plan_sweep(recipe: Recipe) -> tuple[SweepRecipe, list[Run]]:
    """
    Read the sweep of a recipe and plan all of its runs, in the order in which they start: seeds are the outer loop, so
    that a sweep which is stopped has comparable runs of every variant.

    Raises:
        ValueError: if the recipe has no sweep or no evaluation, or a variant makes no valid recipe or model.
    """
    from omegaconf import OmegaConf

    if recipe.sweep is None:
        raise ValueError(f"The recipe {recipe.name!r} has no sweep; give it a mapping sweep with variants and seeds.")
    sweep = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SweepRecipe), recipe.sweep))
    if not sweep.tasks and recipe.data.evaluation is None:
        raise ValueError("A sweep needs data.evaluation or sweep.tasks, or there is nothing to compare; add one.")
    shared = replace(recipe, sweep=None).to_mapping()
    variants = {
        name: Recipe.from_mapping(merge_recipes(shared, change or {})) for name, change in sweep.variants.items()
    }
    return sweep, [
        Run(variant, seed, _with_seed(own, recipe, variant, seed))
        for seed in sweep.seeds
        for variant, own in variants.items()
    ]


def _with_seed(own: Recipe, recipe: Recipe, variant: str, seed: int) -> Recipe:
    output = str(Path(recipe.output) / variant / f"seed-{seed}")
    return replace(own, name=f"{recipe.name}, {variant}, seed {seed}", output=output, seed=seed)
