"""Training: recipes in YAML, a thin layer over `transformers.Trainer`, and runs that can be stopped at any moment."""

from .recipe import Recipe, TrainingRecipe, load_recipe, packaged_recipes
from .run import train


__all__ = ["Recipe", "TrainingRecipe", "load_recipe", "packaged_recipes", "train"]
