"""Recipes that train in a second: a model of two narrow layers on a few generated documents."""

from pathlib import Path
from typing import Any

import pytest

from dcformer.training import Recipe, merge_recipes


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TRAINING = {"max_steps": 6, "batch_tokens": 64, "per_device_batch_size": 2, "learning_rate": 3e-3, "report_to": "none"}
TINY_RECIPE = {
    "name": "tiny",
    "model": SIZES | {"sliding_window": 6},
    "tokenizer": "head_tasks",
    "data": {"source": "head_tasks", "documents": 40, "sequence_length": 16, "evaluation": {"documents": 4}},
    "training": TRAINING | {"logging_steps": 2, "evaluation_steps": 4, "save_steps": 3},
}


@pytest.fixture(scope="module", autouse=True)
def without_curves(request):
    """Drawing the losses takes longer than most runs of these tests; a module with DRAWS_CURVES looks at the file."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "DRAWS_CURVES", False):
            patch.setattr("dcformer.training.run.plot_losses", lambda *_: None)
        yield


def tiny_mapping(output: Path | str, **sections: Any) -> dict:
    """The mapping of a tiny recipe, with sections such as `training={"max_steps": 9}` merged into it."""
    return merge_recipes(TINY_RECIPE, {"output": str(output), **sections})


def tiny_recipe(output: Path | str, **sections: Any) -> Recipe:
    return Recipe.from_mapping(tiny_mapping(output, **sections))


def deterministic(records: list[dict]) -> list[dict]:
    """Records of a log without what depends on the speed of the machine."""
    timed = ("tokens_per_second", "seconds", "mfu", "eval_runtime")
    return [{key: value for key, value in record.items() if key not in timed} for record in records]
