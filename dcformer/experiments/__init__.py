"""Experiments: many runs of one recipe, and their results over seeds."""

from .runner import finish_run, run_sweep
from .seeds import SeedComparison, compare_seeds, seed_interval
from .sweep_recipe import Run, SweepRecipe, plan_sweep
from .sweep_report import compare_variants, plot_sweep, print_report, summarise


__all__ = ["Run", "SweepRecipe", "finish_run", "plan_sweep", "run_sweep"]
__all__ += ["compare_variants", "plot_sweep", "print_report", "summarise"]
__all__ += ["SeedComparison", "compare_seeds", "seed_interval"]
