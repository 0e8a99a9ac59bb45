"""Measure the seconds of a training step of every model of the study, in turns on one machine, and record them.

python -m research.language_modelling.speed         # a minute of one CPU core, which should have no other work

The report counts seconds by it, since the runs may come from several machines, or have had other work beside them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measure import Timer, device_name
from dcformer import DCFormerForCausalLM
from dcformer.experiments import plan_sweep
from dcformer.training import Recipe, load_recipe, resolve_precision
from dcformer.training.optimizer import build_optimizer
from dcformer.training.recipe import build_config

from .prepare import VOCABULARY


FOLDER = Path(__file__).parent


def training_step(recipe: Recipe, device: torch.device) -> Callable[[], None]:
    """A step on random tokens, in one pass, as `dcformer train` takes it."""
    model = DCFormerForCausalLM(build_config(recipe.model, vocab_size=VOCABULARY)).to(device)
    optimizer, training = build_optimizer(model, recipe.training), recipe.training
    rows = training.batch_tokens // recipe.data.sequence_length
    tokens = torch.randint(VOCABULARY, (rows, recipe.data.sequence_length), device=device)  # (batch, length)
    half = resolve_precision(training.precision) == "bf16"

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDER / "results", help="folder to record in")
    folder = parser.parse_args().results
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    recipe = load_recipe(str(FOLDER / "recipes" / "code.yaml"), ["sweep.seeds=[0]"])
    steps = {run.variant: training_step(run.recipe, device) for run in plan_sweep(recipe)[1]}
    found = {name: timing.median for name, timing in Timer(device, seconds=60)(steps).items()}
    device_used = f"{device_name(device)}, {resolve_precision(recipe.training.precision)}"
    folder.mkdir(parents=True, exist_ok=True)
    record = {"device": device_used, "torch": torch.__version__, "seconds": found}
    (folder / "speed.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
