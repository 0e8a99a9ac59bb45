"""The `sweep:` mapping of a recipe, and the runs that it describes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ..training import Recipe, merge_recipes


@dataclass(frozen=True)
class SweepRecipe:
    """The `sweep:` mapping of a recipe."""

    #: name -> changes to `model` and `training`; the others are compared with the first one
    variants: dict[str, Any]
    seeds: list[int]  #: seeds of the initialisation, the order of the data, and generated documents
    tasks: list[str] | None = None  #: tasks of `dcformer eval` that score every model; `None`: losses alone
    limit: int | None = None  #: documents per task; `None`: all
    only: list[str] | None = None  #: variants to run now
    published: dict[str, float] | None = None  #: variant -> published perplexity, a column of the table

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"sweep.seeds must be one or more different integers, got {self.seeds}.")
        for name, change in self.variants.items():
            if not re.fullmatch(r"\w[\w.+-]*", name):
                raise ValueError(f"sweep.variants holds {name!r}; a name consists of letters, digits and . _ + -.")
            if not isinstance(change or {}, dict) or not {*(change or {})} <= {"model", "training"}:
                raise ValueError(f"sweep.variants.{name} may change model and training only, got {change}.")
        for name in (*(self.only or ()), *(self.published or ())):
            if name not in self.variants:
                raise ValueError(f"sweep names {name!r}; its variants are {', '.join(self.variants)}.")

    def chosen(self, runs: list[Run]) -> list[Run]:
        """The runs of the variants that `only` names; all without it."""
        return [run for run in runs if self.only is None or run.variant in self.only]


@dataclass(frozen=True)
class Run:
    """A variant with a seed; `recipe` is all that `train` needs."""

    variant: str
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        """The name of the run in messages."""
        return f"{self.variant}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """The output folder of the run."""
        return Path(self.recipe.output)


def plan_sweep(recipe: Recipe) -> tuple[SweepRecipe, list[Run]]:
    """
    Read the sweep of a recipe and plan its runs, in the order in which they start: seeds are the outer loop, so that a
    sweep that is stopped has comparable runs of every variant.

    Raises:
        ValueError: if the recipe has no sweep or no evaluation, or a variant makes no valid recipe or model.
    """
    from omegaconf import OmegaConf

    if recipe.sweep is None:
        raise ValueError(f"The recipe {recipe.name!r} has no sweep; give it a mapping sweep with variants and seeds.")
    merged = OmegaConf.merge(OmegaConf.structured(SweepRecipe), recipe.sweep)
    sweep = cast(SweepRecipe, OmegaConf.to_object(merged))
    if not sweep.tasks and recipe.data.evaluation is None:
        raise ValueError("A sweep needs data.evaluation or sweep.tasks, or there is nothing to compare; add one.")
    shared = replace(recipe, sweep=None).to_mapping()
    variants = {
        name: Recipe.from_mapping(merge_recipes(shared, change or {})) for name, change in sweep.variants.items()
    }
    runs = []
    for seed in sweep.seeds:
        for name, variant in variants.items():
            output = str(Path(recipe.output) / name / f"seed-{seed}")
            changed = replace(variant, name=f"{recipe.name}, {name}, seed {seed}", output=output, seed=seed)
            runs.append(Run(name, seed, changed))
    return sweep, runs
