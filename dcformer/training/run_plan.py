"""The size of a run before it starts: its model, its work, and the time that a few measured steps promise."""

import copy
import sys
import tempfile
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from rich.filesize import decimal
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.processes import count_processes
from ..dcmha import explain_choice
from ..loading import choose_device
from ..modeling_dcformer import DCFormerAttention
from .optimizer import build_optimizer
from .recipe import Recipe
from .throughput import flops_per_token, peak_flops, resolve_precision
from .trainer import RecipeTrainer, training_arguments


# Shares of a GPU's peak: layers of the 405M model have reached 0.11 of an H100's, those of 6.9B 0.33 (docs/gpu.md).
LEAST_SHARE, MOST_SHARE = 0.1, 0.4
_MEASURED_FLOPS = 1e12  # seconds on a CPU; a dry run takes as many steps, but three at least


@dataclass(frozen=True)
class RunPlan:
    """Figures of a run before it starts; `None` stands for what was not read or not measured."""

    parameters: int  #: of the model, those of composition among them
    compose_parameters: int  #: of composition
    trained_parameters: int  #: as `training.trainable` says
    vocab_size: int  #: rows of the embedding
    steps: int  #: optimiser steps of the whole run
    batch_tokens: int  #: tokens of a step, over all processes
    sequence_length: int  #: tokens of a row
    flops: float  #: of the whole run, as [`flops_per_token`] counts them
    processes: int  #: of `torchrun` or `accelerate launch`
    device: str  #: name of a process's GPU, or the type of another device
    precision: str  #: `"bf16"` or `"fp32"`
    attention: str  #: the implementation that training chooses
    memory_bytes: int  #: of a process: parameters, gradients and optimiser states, all float32
    rows: int | None = None  #: of training data
    evaluation_rows: int | None = None  #: of evaluation data
    step_seconds: float | None = None  #: of a step
    evaluation_seconds: float | None = None  #: of one evaluation
    seconds: float | None = None  #: of all steps and evaluations; reading data and saving checkpoints is not counted
    peak_memory_bytes: int | None = None  #: measured: of this process's GPU, on CPUs of the process

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.describe_work(), self.describe_data(), self.describe_time())))

    def describe_work(self) -> str:
        """Describe the model, the training, the device and the memory, a line each."""
        is_known = peak_flops(self.precision, self.device) is not None
        count, gpu = (self.processes, self.device) if is_known else (1, "H100")
        hours = self.flops / (count * (peak_flops(self.precision, gpu) or 1.0) * 3600)
        estimate = f"{hours / MOST_SHARE:.2g} to {hours / LEAST_SHARE:.2g} hours on {count} x {gpu}"
        estimate += f" at {MOST_SHARE:.0%} to {LEAST_SHARE:.0%} of its peak"
        return (
            f"Model: {self.parameters:,} parameters ({self.compose_parameters:,} of composition), "
            f"{self.trained_parameters:,} of them trained; vocabulary of {self.vocab_size:,}\n"
            f"Training: {self.steps:,} steps of {self.batch_tokens:,} tokens ({self.steps * self.batch_tokens:,}), "
            f"{self.flops:.3g} FLOPs{': ' + estimate if is_known or hours > 0.01 else ''}\n"
            f"Device: {self.device}, processes: {self.processes}, {self.precision}, attention: {self.attention}\n"
            f"Memory of a process: {decimal(self.memory_bytes)} for parameters, gradients and optimiser states, and "
            "activations besides"
        )

    def describe_data(self) -> str:
        """Describe the rows that have been read, a line each for training and evaluation."""
        return "\n".join(
            f"{name}: {rows:,} rows of {self.sequence_length:,} tokens, {rows * self.sequence_length:,} with padding"
            for name, rows in (("Data", self.rows), ("Evaluation", self.evaluation_rows))
            if rows is not None
        )

    def describe_time(self) -> str:
        """Describe in a line what was measured, if it was."""
        if self.seconds is None or self.peak_memory_bytes is None:
            return ""
        evaluation = "" if self.evaluation_seconds is None else f", an evaluation {self.evaluation_seconds:.3g} s"
        return (
            f"Time: about {timedelta(seconds=round(self.seconds))}, besides reading data and saving; measured: a step "
            f"takes {self.step_seconds:.3g} s{evaluation}, peak memory {decimal(self.peak_memory_bytes)}"
        )


def describe_run(recipe: Recipe, model: PreTrainedModel) -> RunPlan:
    """Describe what a recipe does with a model, which may be on the meta device."""
    training, device, processes = recipe.training, choose_device(), count_processes()
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    groups = build_optimizer(model, training).param_groups
    # AdamW keeps two numbers for a parameter, Muon one.
    states = sum((2 if "betas" in group else 1) * each.numel() for group in groups for each in group["params"])
    tokens = training.steps * training.batch_tokens
    return RunPlan(
        parameters=sum(sizes.values()),
        compose_parameters=sum(size for name, size in sizes.items() if ".compose." in name),
        trained_parameters=trained,
        vocab_size=model.config.vocab_size,
        steps=training.steps,
        batch_tokens=training.batch_tokens,
        sequence_length=recipe.data.sequence_length,
        flops=float(tokens * flops_per_token(model.config, recipe.data.sequence_length)),
        processes=processes,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        precision=resolve_precision(training.precision),
        attention=_chosen_attention(recipe, model, device),
        memory_bytes=4 * (sum(sizes.values()) + trained + states) // (processes if training.fsdp else 1),
    )


def _chosen_attention(recipe: Recipe, model: PreTrainedModel, device: torch.device) -> str:
    """The implementation that a model names, or, if its layers choose one, which that is here."""
    config = copy.copy(model.config)
    if not config.composes_heads or config._attn_implementation != "eager":
        return config._attn_implementation
    index = next(index for index in range(config.num_hidden_layers) if config.composes_layer(index))
    config.hidden_size = config.head_dim  # the choice does not depend on it
    dtype = torch.bfloat16 if resolve_precision(recipe.training.precision) == "bf16" else torch.float32
    with torch.no_grad():
        layer: Any = DCFormerAttention(config, index).to(device, dtype)
        states = torch.zeros(1, recipe.data.sequence_length, config.hidden_size, device=device, dtype=dtype)
        tensors = layer.project(states, None, "dcmha_plain")
    return explain_choice(*tensors, dropout=config.attention_dropout, sliding_window=layer.sliding_window)[-1][0]


def measure_run(
    plan: RunPlan, recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Any, tests: Any
) -> RunPlan:
    """
    Measure steps of one pass, and batches of the evaluation, in a scratch folder; a step of many passes is taken to
    last as many times as long. The model is trained by that.
    """
    batch = recipe.training.per_device_batch_size * plan.processes
    passes = plan.batch_tokens // (batch * plan.sequence_length)
    steps = max(3, min(20, int(_MEASURED_FLOPS * plan.steps * passes / plan.flops)))
    short = replace(recipe.training, batch_tokens=plan.batch_tokens // passes, tokens=None, max_steps=steps)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = replace(recipe, output=scratch, training=replace(short, logging_steps=1))
        arguments = training_arguments(recipe)
        arguments.save_strategy, arguments.eval_strategy, arguments.report_to = "no", "no", []
        trainer = RecipeTrainer(recipe, model, arguments, tokenizer, rows, tests)
        trainer.train()
        first, *_, last = (record["seconds"] for record in trainer.state.log_history)  # much is set up in the first
        step, evaluation = (last - first) / (steps - 1) * passes, None
        if tests is not None:
            tests = trainer.eval_dataset
            trainer.evaluate(tests[:batch])
            evaluation = trainer.evaluate(tests[: batch * steps])["eval_runtime"] * max(1, len(tests) / (batch * steps))
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        import resource  # which Windows lacks

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    seconds = plan.steps * step + -(-plan.steps // recipe.training.evaluation_steps) * (evaluation or 0.0)
    return replace(plan, step_seconds=step, evaluation_seconds=evaluation, seconds=seconds, peak_memory_bytes=peak)
