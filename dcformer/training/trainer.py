"""
`transformers.Trainer` with the schedule and weight decay of the paper, for runs that can be stopped at any moment.

It averages losses over the same steps however often the run was stopped, weighs tokens and not batches in an
evaluation, marks checkpoints that are complete, and stops as soon as a number is no longer finite.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments, default_data_collator
from transformers.integrations import (
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
    is_tensorboard_available,
)
from transformers.trainer_callback import PrinterCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import EvalLoopOutput

from ..common.processes import count_processes
from .data import IGNORED_LABEL, RowOrder, fill_batches
from .optimizer import build_optimizer
from .recipe import Recipe
from .run_files import LOG_FILE, UNFINISHED, checkpoint_folders, finish_checkpoint, remove_folder, write_log
from .throughput import TrainingClock, flops_per_token, peak_flops, resolve_precision


OnProgress = Callable[[int, int, dict[str, float]], None]


def count_answers(predicted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """
    Count the answers, which are runs of labels without a gap, and those that are predicted in all their tokens, from
    the most probable tokens and the right ones or -100: both (batch, tokens).
    """
    scored = labels != IGNORED_LABEL  # (batch, tokens)
    starts = scored.clone()
    starts[:, 1:] &= ~scored[:, :-1]
    answer = starts.flatten().cumsum(0).view_as(labels)  # number of the answer that a token belongs to
    wrong = answer[scored & (predicted != labels)].unique()
    return starts.sum(), starts.sum() - wrong.numel()


def training_arguments(recipe: Recipe) -> TrainingArguments:
    """Arguments of `transformers.Trainer` for a recipe."""
    training = recipe.training
    arguments = TrainingArguments(
        output_dir=str(Path(recipe.output, UNFINISHED)),  # until they are complete
        max_steps=training.steps,
        per_device_train_batch_size=training.per_device_batch_size,
        per_device_eval_batch_size=training.per_device_batch_size,
        gradient_accumulation_steps=training.accumulation_steps(recipe.data.sequence_length, count_processes()),
        learning_rate=training.learning_rate,
        # The schedule of the authors' JAX code (`create_learning_rate_schedule` in jax/MaxText/max_utils.py).
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": training.final_learning_rate_ratio},
        warmup_steps=int(training.steps * training.warmup_ratio),
        max_grad_norm=training.max_grad_norm,
        bf16=resolve_precision(training.precision) == "bf16",
        torch_compile=training.compile,
        torch_compile_mode=training.compile_mode,
        fsdp=True if training.fsdp else None,
        fsdp_config={"version": 2, "state_dict_type": "FULL_STATE_DICT"} if training.fsdp else None,
        ddp_find_unused_parameters=False,
        logging_steps=training.logging_steps,
        logging_nan_inf_filter=False,  # such a loss ends the run
        eval_strategy="steps" if recipe.data.evaluation is not None else "no",
        eval_steps=training.evaluation_steps,
        save_steps=training.save_steps,  # save_total_limit would remove old checkpoints too early
        remove_unused_columns=False,
        seed=recipe.seed,
        use_cache=True,  # in the configuration that is saved; training itself runs without
        use_cpu=not torch.accelerator.is_available(),  # or several processes on CPUs would not connect
        dataloader_pin_memory=torch.accelerator.is_available(),
        report_to=["tensorboard"] * is_tensorboard_available() if training.report_to is None else training.report_to,
        run_name=recipe.name,
        disable_tqdm=True,
    )
    # Else, without bf16, what `accelerate launch` is configured for would count instead of the recipe.
    arguments.mixed_precision = "bf16" if arguments.bf16 else "no"
    # One process drives one device: several GPUs in one process would change the batch.
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    if arguments.device.type == "cpu":
        # accelerate numbers the CPU of several processes, and Transformers 5.17 cannot load a checkpoint to "cpu:0".
        arguments._setup_devices = torch.device("cpu")
    return arguments


def make_trackers(arguments: TrainingArguments) -> list[TrainerCallback]:
    """Make the trackers that `report_to` names, and remove the names, or Trainer would make them again."""
    names, arguments.report_to = [*dict.fromkeys(arguments.report_to)], []
    if not names:
        return []  # before asking what is installed, which imports some of it, for seconds
    trackers = get_reporting_integration_callbacks(names)
    installed = {*get_available_reporting_integrations(), "flyte"}  # which Transformers leaves out, and checks itself
    for name in names:
        if name not in installed:  # before one is made, whose end would print a traceback
            package = {"azure_ml": "azureml-sdk", "comet_ml": "comet-ml"}.get(name, name)
            raise ImportError(f"training.report_to {name!r} needs {package}: pip install {package}.", name=package)
    return [tracker() for tracker in trackers]


class RecipeTrainer(Trainer):
    """Trainer of a recipe, for a model with float32 parameters and rows as `build_datasets` makes them."""

    is_fsdp_enabled: bool
    optimizer: torch.optim.Optimizer | None

    def __init__(
        self,
        recipe: Recipe,
        model: PreTrainedModel,
        arguments: TrainingArguments,
        tokenizer: PreTrainedTokenizerBase,
        train_rows: Dataset | IterableDataset,
        evaluation_rows: Dataset | IterableDataset | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        on_progress: OnProgress | None = None,
    ):
        self.recipe = recipe
        self.batch_rows = recipe.training.batch_tokens // recipe.data.sequence_length
        self.rows = len(train_rows) if isinstance(train_rows, Dataset) else None
        if evaluation_rows is not None:
            batch = arguments.per_device_eval_batch_size * arguments.world_size
            evaluation_rows = fill_batches(evaluation_rows, batch)
        super().__init__(
            model=model,
            args=arguments,
            data_collator=default_data_collator,
            train_dataset=train_rows if isinstance(train_rows, Dataset) else train_rows.repeat(None),
            eval_dataset=evaluation_rows,
            processing_class=tokenizer,
            callbacks=[*callbacks, _RunCallback(self, on_progress)],  # trackers may read a checkpoint before it moves
        )
        self.remove_callback(PrinterCallback)
        self.checkpoint: Path | None = None  # the last complete one
        self.marks: dict[str, Any] = {}  # recorded in every checkpoint
        self.clock = TrainingClock()
        self.flops_per_token = flops_per_token(model.config, recipe.data.sequence_length)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator of the base class, which here also shards parameters on CPUs."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp_plugin_args is None or self.is_fsdp_enabled:
            return
        # accelerate shards on accelerators only, and silently replicates on CPUs.
        from accelerate import FullyShardedDataParallelPlugin, PartialState
        from accelerate.utils import DistributedType

        for state in (PartialState(), self.accelerator.state):  # accelerate may copy the first into the second again
            state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of `build_optimizer`."""
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model if model is None else model, self.recipe.training)
        return self.optimizer

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss without a cache, since with one position ids would not separate documents."""
        return super().compute_loss(model, {**inputs, "use_cache": False}, *args, **kwargs)

    def evaluation_loop(self, dataloader: DataLoader, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """
        Mean loss per token over all rows, and its exponential, the perplexity. Where the loss is on answers, also the
        accuracy: the share of answers in which every token is the most probable one.
        """
        self.clock.lap()
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
        loss = total / max(tokens, 1)  # a dry run may measure rows without any
        metrics = {"eval_loss": loss, "eval_perplexity": math.exp(loss) if loss < 700 else math.inf}
        if answers:
            metrics["eval_accuracy"] = right / answers
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(self.eval_dataset))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """
        Record what the base class does, the throughput, and the totals of the run: `seconds` of training steps and
        `flops` of forward and backward passes.
        """
        if "train_runtime" in logs:  # averages since the run was last resumed
            return
        logs = {key: value for key, value in logs.items() if not key.endswith("_per_second")}
        step, batch_tokens = self.state.global_step, self.recipe.training.batch_tokens
        if "loss" in logs:
            self.clock.lap()
            last = self._last_record()
            speed = (step - last["step"]) * batch_tokens / max(self.clock.seconds - last["seconds"], 1e-9)
            logs["tokens_per_second"] = speed
            if peak := peak_flops(self.recipe.training.precision):
                logs["mfu"] = speed * self.flops_per_token / (peak * self.args.world_size)
        for key in ("loss", "grad_norm", "eval_loss"):
            if not math.isfinite(logs.get(key, 0.0)):
                left = f"the last good checkpoint is {self.checkpoint}" if self.checkpoint else "no checkpoint is left"
                instead = ", or precision fp32" if self.args.bf16 else ""
                raise FloatingPointError(
                    f"{key} became {float(logs[key])} by step {step}; {left}; try a lower training.learning_rate than "
                    f"{self.recipe.training.learning_rate}{instead}."
                )
        logs |= {"seconds": round(self.clock.seconds, 3), "flops": float(step * batch_tokens * self.flops_per_token)}
        # The base class counts the whole run as one pass.
        self.state.epoch = None if self.rows is None else step * self.batch_rows / self.rows
        super().log(logs, start_time)
        if self.is_world_process_zero():
            with open(Path(self.recipe.output, LOG_FILE), "a", encoding="utf-8") as log:
                log.write(json.dumps(self.state.log_history[-1]) + "\n")

    def finish_checkpoint(self) -> None:
        """Move the checkpoint that was just written to its place, and remove old ones."""
        self.accelerator.wait_for_everyone()
        written = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        self.checkpoint = Path(self.recipe.output) / written.name
        if self.is_world_process_zero():
            record = self._last_record()
            values = {"step": record["step"], "loss": record["loss"], "recipe": self.recipe.to_mapping()}
            finish_checkpoint(written, values | self.marks)
            for old in checkpoint_folders(self.checkpoint.parent)[: -self.recipe.training.keep_checkpoints]:
                remove_folder(old)

    def _get_train_sampler(self, train_dataset: Dataset) -> RowOrder:
        seed = self.recipe.seed if self.recipe.data.stages is None else None
        return RowOrder(len(train_dataset), self.recipe.training.steps * self.batch_rows, seed)

    def _last_record(self) -> dict[str, Any]:
        """The last record of a training loss."""
        records = (record for record in reversed(self.state.log_history) if "loss" in record)
        return next(records, {"step": 0, "seconds": 0.0})


class _RunCallback(TrainerCallback):
    """The work between the steps of a `RecipeTrainer`."""

    def __init__(self, trainer: RecipeTrainer, on_progress: OnProgress | None):
        self.trainer, self.on_progress = trainer, on_progress

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *rest: Any, **kwargs: Any) -> None:
        # A resumed run repeats the records after its checkpoint.
        if state.is_world_process_zero:
            write_log(Path(self.trainer.recipe.output), state.log_history)
        self.trainer.clock.seconds = self.trainer._last_record()["seconds"]
        self.trainer.clock.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # There is a record before every checkpoint, so that its loss is known and finite; the last step has both.
        control.should_log |= control.should_save
        self.on_log(args, state)

    def on_log(self, args: TrainingArguments, state: TrainerState, *rest: Any, **kwargs: Any) -> None:
        if self.on_progress is not None and state.is_world_process_zero:
            self.on_progress(state.global_step, state.max_steps, (state.log_history or [{}])[-1])

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.clock.start()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.finish_checkpoint()
        self.trainer.clock.start()
