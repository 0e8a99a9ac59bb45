"""`transformers.Trainer` with the paper's schedule and weight decay, and a run that can be stopped at any moment.

Added to it: losses averaged over the same steps however often the run was stopped, an evaluation that weighs tokens and
not batches, checkpoints that count only when complete, and an end as soon as a number is no longer finite.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ..common.numbers import exponential
from .checkpoints import checkpoint_folders, mark_complete, read_marker, remove_checkpoint, remove_old, step_of
from .data import IGNORED_LABEL, collate
from .optimizer import build_optimizer
from .order import EndlessStream, RowOrder, WholeBatches
from .recipe import Recipe, TrainingRecipe
from .throughput import Throughput


LOG_FILE = "log.jsonl"
OnProgress = Callable[[int, int, dict[str, float]], None]


def log_lines(records: list[dict[str, Any]]) -> list[str]:
    """Records as lines of the log file."""
    return [json.dumps(record) + "\n" for record in records]


def learning_rate_schedule(optimizer: torch.optim.Optimizer, training: TrainingRecipe, steps: int) -> LambdaLR:
    """
    The learning rates of the authors' JAX code: a linear rise to that of the optimizer, then half a cosine.

    Steps are counted from 0, and the rise has `rise = int(steps * warmup_ratio)` of them. As a share of the optimizer's
    rate, step `t` has `t / rise` before `t == rise`, and from there on, with `end = final_learning_rate_ratio`,

        end + (1 - end) * (1 + cos(pi * (t - rise) / (steps - rise))) / 2

    So the first step of a rise has rate 0 and changes no parameter (the optimizer's moments begin with it), step `rise`
    has the highest rate, and the last step a rate just above `end`, which would be that of the step behind it.

    Args:
        optimizer (`torch.optim.Optimizer`): What the rates are set in.
        training (`TrainingRecipe`): The recipe of the run, of which the ratios of rise and end are used.
        steps (`int`): Steps of the whole run.

    Source: `create_learning_rate_schedule` in the authors' jax/MaxText/max_utils.py, with
    `learning_rate_schedule_steps` for `steps`.
    """
    rise = int(steps * training.warmup_ratio)
    end = training.final_learning_rate_ratio

    def factor(step: int) -> float:
        if step < rise:
            return step / rise
        # A scheduler moves on after the last step too, and the cosine would rise again.
        done = (min(step, steps) - rise) / (steps - rise)
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


def count_answers(predicted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """
    How many answers there are, an answer being labels without a gap, and how many are predicted in all their tokens.

    Args:
        predicted (`LongTensor`): The most probable tokens, (batch, tokens).
        labels (`LongTensor`): The right ones, (batch, tokens), -100 outside of answers.
    """
    scored = labels != IGNORED_LABEL  # (batch, tokens)
    begins = scored.clone()
    begins[:, 1:] &= ~scored[:, :-1]
    number = begins.flatten().cumsum(0).view_as(labels)  # of the answer that a token belongs to
    wrong = number[scored & (predicted != labels)].unique()
    return begins.sum(), begins.sum() - wrong.numel()


def training_arguments(recipe: Recipe, processes: int) -> TrainingArguments:
    """What `transformers.Trainer` is told of a recipe that runs in so many processes."""
    training = recipe.training
    arguments = TrainingArguments(
        output_dir=recipe.output,
        max_steps=training.steps,
        per_device_train_batch_size=training.per_device_batch_size,
        per_device_eval_batch_size=training.per_device_batch_size,
        gradient_accumulation_steps=training.accumulation_steps(recipe.data.sequence_length, processes),
        learning_rate=training.learning_rate,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_epsilon=training.adam_epsilon,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        bf16=training.precision == "bf16",
        torch_compile=training.compile,
        fsdp=True if training.fsdp else None,
        fsdp_config={"version": 2, "state_dict_type": "FULL_STATE_DICT"} if training.fsdp else None,
        ddp_find_unused_parameters=False,
        logging_steps=training.logging_steps,
        logging_nan_inf_filter=False,  # such a loss ends the run
        eval_strategy="steps" if recipe.data.evaluation is not None else "no",
        eval_steps=training.evaluation_steps,
        save_strategy="steps",
        save_steps=training.save_steps,
        save_total_limit=None,  # old checkpoints go only after the new one is complete
        remove_unused_columns=False,
        seed=recipe.seed,
        use_cache=True,  # in the configuration that is saved; training itself runs without
        use_cpu=not torch.accelerator.is_available(),  # without it, several processes on CPUs do not find each other
        dataloader_pin_memory=torch.accelerator.is_available(),
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    # One process drives one device: several GPUs in one process would change the batch.
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    if arguments.device.type == "cpu":
        # accelerate numbers the CPU of several processes, and Transformers 5.17 cannot load a checkpoint to "cpu:0".
        arguments._setup_devices = torch.device("cpu")
    return arguments


class RecipeTrainer(Trainer):
    """
    The trainer of a recipe.

    Args:
        recipe (`Recipe`): What to train, on which data, for how long.
        model (`PreTrainedModel`): Model to train, with float32 parameters.
        arguments (`TrainingArguments`): What `training_arguments` makes of the recipe.
        tokenizer: Saved with every checkpoint.
        train_rows (`Dataset` or `IterableDataset`): Rows of equal length, as `build_datasets` makes them.
        evaluation_rows (`Dataset`, *optional*): Such rows.
        on_progress (`Callable`, *optional*): Called in the first process with steps done, all steps, the last record.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        arguments: TrainingArguments,
        tokenizer: Any,
        train_rows: Any,
        evaluation_rows: Any | None = None,
        on_progress: OnProgress | None = None,
    ):
        self.recipe = recipe
        self.batch_rows = recipe.training.batch_tokens // recipe.data.sequence_length
        self.checkpoint: Path | None = None  # the last one that is complete
        self.damaged: set[Path] = set()  # those after the one that this run is resumed from
        self.rows = len(train_rows) if hasattr(train_rows, "__len__") else None
        if evaluation_rows is not None:
            batch = arguments.per_device_eval_batch_size * arguments.world_size
            evaluation_rows = WholeBatches(evaluation_rows, batch)
        super().__init__(
            model=model,
            args=arguments,
            data_collator=collate,
            train_dataset=train_rows if self.rows is not None else EndlessStream(train_rows),
            eval_dataset=evaluation_rows,
            processing_class=tokenizer,
            callbacks=[_RunCallback(self, on_progress)],
        )
        self.remove_callback(PrinterCallback)
        self.throughput = Throughput(model.config, recipe.data.sequence_length, recipe.training.precision)
        self.timed_step = 0  # where the measured time began
        self.logged_step = 0  # of the last record of a loss
        self.loss_since_log = torch.zeros((), device=arguments.device)  # summed over the steps since then
        # Processes must stop together, and a device should not be waited for; both look only when logging and saving.
        self.checks_every_step = arguments.device.type == "cpu" and arguments.world_size == 1

    def create_accelerator_and_postprocess(self) -> None:
        """As the base class, and with sharded parameters on CPUs too."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp_plugin_args is None or self.is_fsdp_enabled:
            return
        # accelerate takes sharding to be meant for GPUs and their like, and replicates on CPUs without a word.
        from accelerate import FullyShardedDataParallelPlugin, PartialState
        from accelerate.utils import DistributedType

        for state in (PartialState(), self.accelerator.state):  # the second is made from the first now and again
            state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """
        Matrices, embeddings and compose weights; norms and biases are vectors and do not decay.

        The authors' JAX code (`adam_pax` in jax/MaxText/optimizers.py) has no such exception: there the scales of
        norms, which begin at 1, decay towards 0 as well.
        """
        return [name for name, parameter in model.named_parameters() if parameter.dim() > 1]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As the base class, or as `build_optimizer` says where the recipe asks for more than it knows."""
        training = self.recipe.training
        is_plain = training.optimizer == "adamw" and training.compose_learning_rate is None
        if is_plain or self.optimizer is not None:
            return super().create_optimizer(model)
        model = self.model if model is None else model
        self.optimizer = build_optimizer(model, training, self.get_decay_parameter_names(model))
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """As `learning_rate_schedule` says."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = learning_rate_schedule(optimizer, self.recipe.training, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args, **kwargs):
        """As the base class; without a cache, beside which position ids would not separate documents."""
        return super().compute_loss(model, {**inputs, "use_cache": False}, *args, **kwargs)

    def training_step(self, *args, **kwargs) -> Tensor:
        """As the base class, and sums up the loss of the steps for the next record."""
        loss = super().training_step(*args, **kwargs)
        self.loss_since_log += loss
        if self.checks_every_step:
            self.check_finite("loss", loss, self.state.global_step + 1)
        return loss

    def evaluation_loop(
        self,
        dataloader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """
        Mean loss per token of all rows, whatever the batches, and its exponential, the perplexity. Where the loss is on
        answers, also the share of answers of which every token is the most probable one.
        """
        self.model.eval()
        totals = torch.zeros(4, device=self.args.device)  # loss, tokens, answers, right answers
        with torch.no_grad():
            for inputs in dataloader:
                inputs = self._prepare_inputs(inputs)
                outputs = self.model(**inputs, use_cache=False, num_items_in_batch=1)
                labels = inputs["labels"][:, 1:]
                totals[:2] += torch.stack((outputs.loss.float(), (labels != IGNORED_LABEL).sum()))
                if self.recipe.data.loss_on == "answers":
                    totals[2:] += torch.stack(count_answers(outputs.logits[:, :-1].argmax(-1), labels))
        total, tokens, answers, right = self.accelerator.reduce(totals, "sum").tolist()
        if tokens == 0:
            raise ValueError("No token of the evaluation data has a loss; check data.evaluation and data.loss_on.")
        loss = total / tokens
        metrics = {f"{metric_key_prefix}_loss": loss, f"{metric_key_prefix}_perplexity": exponential(loss)}
        if answers:
            metrics[f"{metric_key_prefix}_accuracy"] = right / answers
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(dataloader.dataset))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Record what the base class does, the loss over all steps since the last record, and the throughput."""
        if "train_runtime" in logs:  # averages over the part of the run since it was last resumed
            return
        logs = {key: value for key, value in logs.items() if not key.endswith("_per_second")}
        step = self.state.global_step
        if "loss" in logs:
            logs["loss"] = self._mean_loss() / (step - self.logged_step)
            self.loss_since_log.zero_()
            self.logged_step = step
            if step > self.timed_step:
                tokens = (step - self.timed_step) * self.recipe.training.batch_tokens
                logs.update(self.throughput.report(tokens, self.args.world_size))
            self.timed_step = step
        for key in ("loss", "grad_norm", "eval_loss"):
            if key in logs:
                self.check_finite(key, logs[key], step)
        # The base class counts the whole run as one pass.
        self.state.epoch = None if self.rows is None else step * self.batch_rows / self.rows
        super().log({key: value for key, value in logs.items() if value is not None}, start_time)
        self.write_log("a", self.state.log_history[-1:])

    def check_finite(self, what: str, value: Tensor | float, step: int) -> None:
        """Raise FloatingPointError, which names the step and the last good checkpoint, for NaN and infinity."""
        if math.isfinite(value):
            return
        names = {"loss": "loss", "grad_norm": "norm of the gradients", "eval_loss": "evaluation loss"}
        steps = f"step {step}"
        if what != "eval_loss" and not self.checks_every_step:
            steps = f"step {step} or in the {self.args.logging_steps} before"
        kept = "there is no checkpoint yet"
        if self.checkpoint is not None:
            kept = f"the last good checkpoint is {self.checkpoint}"
        raise FloatingPointError(
            f"The {names.get(what, what)} became {float(value)} at {steps} and training stopped; {kept}; "
            f"try a lower training.learning_rate than {self.recipe.training.learning_rate}, or precision fp32."
        )

    def check_weights(self) -> None:
        """Raise FloatingPointError if a parameter is not finite, in any process."""
        finite = torch.stack([_local(parameter).isfinite().all() for parameter in self.model.parameters()]).all()
        unsound = self.accelerator.reduce((~finite).float(), "sum")
        if unsound > 0:
            self.check_finite("largest parameter", math.nan, self.state.global_step)

    @property
    def next_checkpoint(self) -> Path:
        """Where a checkpoint of this step belongs."""
        return Path(self.recipe.output) / f"checkpoint-{self.state.global_step}"

    def clear_checkpoint(self) -> None:
        """Remove a damaged checkpoint of this step, of which no file must stay among those of the new one."""
        if self.is_world_process_zero() and self.next_checkpoint.exists():
            remove_checkpoint(self.next_checkpoint)
        self.accelerator.wait_for_everyone()

    def finish_checkpoint(self) -> None:
        """Declare the checkpoint that was just written complete, and remove the oldest ones."""
        loss = self._mean_loss()
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            values = {"step": self.state.global_step, "loss_since_log": loss, "logged_step": self.logged_step}
            mark_complete(self.next_checkpoint, {**values, "recipe": self.recipe.to_mapping()})
            self.damaged.discard(self.next_checkpoint)
            remove_old(Path(self.recipe.output), self.recipe.training.keep_checkpoints, self.damaged)
        self.checkpoint = self.next_checkpoint

    def restore(self, checkpoint: Path) -> None:
        """Read back what the base class does not keep in a checkpoint: the losses since the last record."""
        marker = read_marker(checkpoint)
        self.loss_since_log.fill_(marker["loss_since_log"])
        self.logged_step = marker["logged_step"]
        self.checkpoint = checkpoint
        folders = checkpoint_folders(Path(self.recipe.output))
        self.damaged = {folder for folder in folders if step_of(folder) > step_of(checkpoint)}

    def write_log(self, mode: str, records: list[dict[str, Any]]) -> None:
        """Write records to the log file of the run, one a line."""
        if self.is_world_process_zero():
            with open(os.path.join(self.recipe.output, LOG_FILE), mode, encoding="utf-8") as log:
                log.writelines(log_lines(records))

    def start_timing(self) -> None:
        """Measure throughput from now on: evaluations and saving are not training."""
        self.timed_step = self.state.global_step
        self.throughput.start()

    def _get_train_sampler(self, train_dataset=None) -> RowOrder:
        seed = self.recipe.seed if self.recipe.data.stages is None else None
        return RowOrder(self.rows, self.recipe.training.steps * self.batch_rows, seed)

    def _mean_loss(self) -> float:
        """Sum of the losses of the steps since the last record, averaged over the processes."""
        return self.accelerator.reduce(self.loss_since_log.clone(), "mean").item()


class _RunCallback(TrainerCallback):
    """Does what belongs between the steps of a `RecipeTrainer`."""

    def __init__(self, trainer: RecipeTrainer, on_progress: OnProgress | None):
        self.trainer, self.on_progress = trainer, on_progress

    def on_train_begin(self, args, state, control, **kwargs):
        # Records after the checkpoint, of a run that was stopped, are made again.
        self.trainer.write_log("w", state.log_history)
        self.trainer.start_timing()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.trainer.checks_every_step:
            return
        # Clipping to an infinite or undefined norm leaves NaN behind.
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if not all(gradient.isfinite().all() for gradient in gradients):
            self.trainer.check_finite("grad_norm", math.nan, state.global_step + 1)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps:
            control.should_log = True
        if control.should_save:
            self.trainer.check_weights()
            self.trainer.clear_checkpoint()
        self._tell(state)

    def on_log(self, args, state, control, **kwargs):
        self._tell(state)

    def on_evaluate(self, args, state, control, **kwargs):
        self.trainer.start_timing()

    def on_save(self, args, state, control, **kwargs):
        self.trainer.finish_checkpoint()
        self.trainer.start_timing()

    def _tell(self, state) -> None:
        if self.on_progress is not None and state.is_world_process_zero:
            self.on_progress(state.global_step, state.max_steps, (state.log_history or [{}])[-1])


def _local(parameter: Tensor) -> Tensor:
    """The part of a parameter that this process holds."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
