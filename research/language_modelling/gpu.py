"""Train the models of the recipe `gpu` within some minutes of one GPU, and record them while they run.

python -m research.language_modelling.pack --code FOLDER                           # once, where the text is
python -m research.language_modelling.gpu --output code-0.json                     # both models, seed 0
python -m research.language_modelling.gpu --output code-1.json --set sweep.seeds=[1]
python -m research.language_modelling.report --results FOLDER                      # of one or more such files

Every shape of model first makes short runs, one for each learning rate: they compile, tell which rate is the better one
and how long a step takes. The minutes that are left decide how long the runs may be; all get the same share of what the
recipe says, and a schedule that ends with them.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, get_cosine_with_min_lr_schedule_with_warmup, set_seed

from dcformer.common.files import write_atomically
from dcformer.experiments import Run, plan_sweep
from dcformer.training import Recipe, flops_per_token, load_recipe, resolve_precision
from dcformer.training.data import RowOrder
from dcformer.training.optimizer import build_optimizer
from dcformer.training.recipe import build_config
from dcformer.training.throughput import TrainingClock

from .breakdown import token_losses
from .pack import check


RATES = (1e-3, 2e-3)
SHORT = 150  # steps of the runs that compare learning rates
_WARM = 10  # steps before a step is timed
_RESERVED = 20.0  # seconds for the last evaluations
_LEAST_SHARE = 0.1  # of the steps of a recipe; shorter runs say nothing
_ENDS = (4, 16, 64, 256, 1024)  # of ranges of positions, in the record


class Learner:
    """One shape of model, which is compiled once and trained several times, each time from new weights."""

    def __init__(self, recipe: Recipe, vocabulary: int, device: torch.device):
        self.vocabulary, self.device = vocabulary, device
        self.model = self._initial(recipe).to(device)
        training = recipe.training
        self.forward = torch.compile(self.model, mode=training.compile_mode) if training.compile else self.model
        half = resolve_precision(training.precision) == "bf16"
        self.autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=half)
        self.rate, self.step_seconds = training.learning_rate, 0.0  # `choose_rate` sets both
        self.flops_per_token = flops_per_token(self.model.config, recipe.data.sequence_length)

    def _initial(self, recipe: Recipe) -> torch.nn.Module:
        config = build_config(recipe.model, vocab_size=self.vocabulary)
        set_seed(recipe.seed)
        options = {key: recipe.model[key] for key in ("attn_implementation",) if key in recipe.model}
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)

    def choose_rate(self, recipe: Recipe, rates: Sequence[float], rows: dict[str, Tensor]) -> dict[str, float]:
        """Compare learning rates in short runs: rate -> evaluation loss. Sets `rate` and `step_seconds`."""
        losses, steps = {}, min(SHORT, recipe.training.steps)
        for rate in rates:
            began = time.monotonic()
            *_, outcome = self.train(recipe, steps, rate, rows)
            losses[rate], self.step_seconds = outcome["evaluation_loss"], outcome["step_seconds"]
            said = f"{recipe.name}, {steps} steps at {rate:g} in {time.monotonic() - began:.0f} s"
            print(f"{said}: {self.step_seconds:.4f} s a step, evaluation loss {losses[rate]:.4f}", flush=True)
        self.rate = min(losses, key=losses.__getitem__)
        return {f"{rate:g}": loss for rate, loss in losses.items()}

    def train(
        self, recipe: Recipe, steps: int, rate: float, rows: dict[str, Tensor], deadline: float = math.inf
    ) -> Iterator[dict[str, Any]]:
        """
        Train new weights, and give the outcome so far at every record.

        Args:
            recipe: Its seed, batch and optimiser are taken; `steps` and `rate` stand for those that it has.
            steps: Optimiser steps, over which the learning rate rises and falls.
            rate: Highest learning rate.
            rows: `train` and `validation`, each tokens (rows, length) on the device; every pass takes the training rows
                in another order.
            deadline: Time of `time.monotonic` after which the run stops early, at the next record.

        Yields:
            `steps` that were made, `seconds` of training, `step_seconds` of a step once warm, `train_loss` and
            `evaluation_loss`, the last ones; `losses`, pairs of a step and the mean training loss since the last pair;
            `curve`, as `sweeps.evaluation_curve`.

        Raises:
            ValueError: if the batch does not divide into passes.
            FloatingPointError: if the loss is no longer finite.
        """
        length = recipe.data.sequence_length
        training = replace(recipe.training, learning_rate=rate)
        passes, batch_rows = training.accumulation_steps(length, 1), training.batch_tokens // length
        self.model.load_state_dict(self._initial(recipe).state_dict())
        optimizer = build_optimizer(self.model, training)
        schedule = get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, int(steps * training.warmup_ratio), steps, min_lr_rate=training.final_learning_rate_ratio
        )
        order = torch.tensor(list(RowOrder(len(rows["train"]), steps * batch_rows, recipe.seed)), device=self.device)
        outcome: dict[str, Any] = {"steps": 0, "losses": []}
        outcome["curve"] = {key: [] for key in ("step", "flops", "seconds", "loss")}
        total, warm, warm_steps = torch.zeros((), device=self.device), 0.0, min(_WARM, steps // 2)
        clock = TrainingClock()
        for step, numbers in enumerate(order.split(batch_rows), start=1):
            for tokens in rows["train"][numbers].long().chunk(passes):  # (rows of a pass, length)
                with self.autocast():
                    loss = self.forward(input_ids=tokens, labels=tokens, use_cache=False).loss / passes
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step == warm_steps:
                clock.lap()
                warm = clock.seconds
            evaluates = step % training.evaluation_steps == 0 or step == steps
            if not evaluates and step % training.logging_steps != 0:
                continue
            clock.lap()
            is_late = time.monotonic() > deadline
            mean = total.item() / (step - outcome["steps"])
            total.zero_()
            if not math.isfinite(mean):
                raise FloatingPointError(f"The loss became {mean} by step {step}, at a rate of {rate:g}; lower it.")
            outcome |= {"steps": step, "seconds": clock.seconds, "train_loss": mean}
            if step > warm_steps:
                outcome["step_seconds"] = (clock.seconds - warm) / (step - warm_steps)
            outcome["losses"].append([step, mean])
            if evaluates or is_late:
                outcome["evaluation_loss"] = self.losses(rows["validation"]).mean().item()
                flops = float(step * training.batch_tokens * self.flops_per_token)
                for key, value in zip(outcome["curve"], (step, flops, clock.seconds, outcome["evaluation_loss"])):
                    outcome["curve"][key].append(value)
            yield outcome
            if is_late:
                return
            clock.start()

    def losses(self, rows: Tensor, batch: int = 64) -> Tensor:
        """Loss in nats of every token but the first of each row: (rows, length - 1)."""
        with self.autocast():
            return torch.cat([token_losses(self.model, part.long()) for part in rows.split(batch)])


def read_rows(file: Path, length: int, device: torch.device) -> Tensor:
    """Packed tokens in rows of one length, without what is left at the end: (rows, length), int32."""
    tokens = np.frombuffer(lzma.decompress(file.read_bytes()), dtype="<u2").astype(np.int32)
    rows = len(tokens) // length
    if rows == 0:
        raise ValueError(f"{str(file)!r} has {len(tokens):,} tokens, less than a row of {length:,}; pack more text.")
    return torch.from_numpy(tokens[: rows * length]).view(rows, length).to(device)


def by_position(losses: Tensor) -> dict[str, list[float]]:
    """Sums of losses (rows, length - 1) by the position of a token: name of the range -> [tokens, sum]."""
    starts = (1, *_ENDS)
    parts = {f"below {end}": losses[:, start - 1 : end - 1].double() for start, end in zip(starts, _ENDS)}
    return {name: [part.numel(), part.sum().item()] for name, part in parts.items() if part.numel()}


def run(recipe: Recipe, output: Path, minutes: float, rates: Sequence[float] = RATES) -> dict[str, Any]:
    """
    Train the chosen runs of a recipe, and write `output` anew at every record.

    Args:
        recipe: Its `data.source` lies beside the other files of `pack`.
        output: JSON like those of `sweeps.record`; `rates` besides, variant -> rate -> evaluation loss of a short run.
            A run has no `test` until it is finished, and never one if it was stopped early.
        minutes: What all of it may take.
        rates: Learning rates; every shape of model is trained at the one that is best in its short runs.

    Returns:
        What was written.

    Raises:
        FileExistsError: if there is such a file.
        ValueError: if the packed text is damaged or too short, or the minutes are too few.
    """
    deadline = time.monotonic() + 60 * minutes - _RESERVED
    if output.exists():
        raise FileExistsError(f"{str(output)!r} is there; give another --output.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(recipe.data.source).parent
    manifest = check(folder)
    rows = {name: read_rows(folder / f"{name}.xz", recipe.data.sequence_length, device) for name in manifest["tokens"]}
    sweep, planned = plan_sweep(recipe)
    runs = sweep.chosen(planned)
    results = {
        "recipe": {key: value for key, value in recipe.to_mapping().items() if key != "output"},
        "text_sha256": manifest["files"]["train.xz"]["sha256"],
        "torch": torch.__version__,
        "rates": {},
        "runs": [],
    }

    def write() -> None:
        write_atomically(output, json.dumps(results, indent=1) + "\n")

    output.parent.mkdir(parents=True, exist_ok=True)
    learners: dict[str, Learner] = {}  # by the shape of model
    for item in runs:
        if (shape := _shape(item)) not in learners:
            learners[shape] = Learner(item.recipe, manifest["vocabulary"], device)
            results["rates"][item.variant] = learners[shape].choose_rate(item.recipe, rates, rows)
            write()
    needed = sum(item.recipe.training.steps * learners[_shape(item)].step_seconds for item in runs)
    left = deadline - time.monotonic()
    share = min(1.0, 0.97 * left / needed)
    print(f"The runs take {needed:.0f} s; there is time for {share:.0%} of their steps.", flush=True)
    if share < _LEAST_SHARE:
        raise ValueError(
            f"Of {minutes:g} minutes {left:.0f} s are left for runs of {needed:.0f} s; give more --minutes."
        )
    for item in runs:
        record: dict[str, Any] = {"variant": item.variant, "seed": item.seed}
        results["runs"].append(record)
        learner, steps = learners[_shape(item)], math.ceil(share * item.recipe.training.steps)
        for outcome in learner.train(item.recipe, steps, learner.rate, rows, deadline):
            record.update(_described(outcome, item, learner, steps))
            write()
        if outcome["steps"] == steps:
            losses = learner.losses(rows["test"])
            positions = by_position(losses)
            record["test"] = {"loss": losses.mean().item(), "tokens": losses.numel(), "positions": positions}
            write()
        said = f"{item.name}, {outcome['steps']:,} of {steps:,} steps at {learner.rate:g} in {outcome['seconds']:.0f} s"
        print(f"{said}: evaluation loss {outcome['evaluation_loss']:.4f}", flush=True)
    return results


def _shape(item: Run) -> str:
    return json.dumps(item.recipe.model, sort_keys=True)


def _described(outcome: dict[str, Any], item: Run, learner: Learner, steps: int) -> dict[str, Any]:
    """The outcome of a run, with the keys of those that `sweeps.record` writes."""
    keys = ("steps", "seconds", "train_loss", "evaluation_loss")
    tokens = outcome["steps"] * item.recipe.training.batch_tokens
    training = {key: outcome[key] for key in keys if key in outcome} | {
        "planned_steps": steps,
        "tokens": tokens,
        "flops": float(tokens * learner.flops_per_token),
        "learning_rate": learner.rate,
        "precision": resolve_precision(item.recipe.training.precision),
        "device": torch.cuda.get_device_name() if learner.device.type == "cuda" else "CPU",
    }
    parameters = learner.model.num_parameters()
    return {"parameters": parameters, "training": training} | {key: outcome[key] for key in ("losses", "curve")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--minutes", type=float, default=8.5, help="what it may take (default: 8.5)")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates to choose from")
    parser.add_argument("--data", type=Path, help="folder of the packed text (default: as the recipe has it)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of dcformer train")
    arguments = parser.parse_args()
    changes = list(arguments.set)
    if (data := arguments.data) is not None:
        changes += [f"data.source={data / 'train.xz'}", f"data.evaluation.source={data / 'validation.xz'}"]
        changes.append(f"tokenizer={data / 'tokenizer'}")
    recipe = load_recipe(str(Path(__file__).parent / "recipes" / "gpu.yaml"), changes)
    run(recipe, arguments.output, arguments.minutes, arguments.rates)


if __name__ == "__main__":
    main()
