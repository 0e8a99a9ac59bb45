"""Train the sweeps of the study, or resume them, and record their results; the text must have been prepared.

python -m research.language_modelling.run                                  # all of them, days of two CPU cores
python -m research.language_modelling.run code --set sweep.seeds=[7]       # some, here with a seed of your own
"""

from pathlib import Path

from dcformer.training import Recipe

from ..sweeps import main
from .breakdown import breakdown


SWEEPS = ("code", "prose", "ablation")


def score(recipe: Recipe, model_folder: Path) -> dict:
    """The breakdown on the test text that lies beside the training text."""
    return breakdown(model_folder, Path(recipe.data.source).parent)


if __name__ == "__main__":
    main(__doc__, Path(__file__).parent, SWEEPS, score)
