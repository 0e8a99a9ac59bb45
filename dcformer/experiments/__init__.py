"""Experiments: many runs of one recipe, their results over seeds, and what these say."""

from .recipe import Run, SweepRecipe, plan_sweep
from .runner import run_sweep


__all__ = ["Run", "SweepRecipe", "plan_sweep", "run_sweep"]
