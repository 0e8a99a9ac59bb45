"""Training: recipes in YAML, a thin layer over `transformers.Trainer`, and runs that can be stopped at any moment."""

from .recipe import (
    DataRecipe,
    Recipe,
    StageRecipe,
    TokenizerRecipe,
    TrainingRecipe,
    first_difference,
    load_recipe,
    merge_recipes,
    packaged_recipes,
)
from .run import fingerprint_inputs, plan_run, train
from .run_plan import RunPlan
from .throughput import flops_per_token, peak_flops, resolve_precision, visible_pairs


__all__ = ["DataRecipe", "Recipe", "RunPlan", "StageRecipe", "TokenizerRecipe", "TrainingRecipe"]
__all__ += ["fingerprint_inputs", "first_difference", "load_recipe", "merge_recipes", "packaged_recipes"]
__all__ += ["plan_run", "train"]
__all__ += ["flops_per_token", "peak_flops", "resolve_precision", "visible_pairs"]
