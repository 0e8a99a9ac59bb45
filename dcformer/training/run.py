"""A training run from its recipe to a folder that Transformers loads.

<output>/checkpoint-<step>/     what a stopped run is resumed from
<output>/log.jsonl              a record per line: loss, learning rate, throughput, evaluation
<output>/recipe.yaml            the recipe, with all its defaults
<output>/losses.png             curves
<output>/final/                 the trained model, with its tokenizer
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from transformers.utils import logging as transformers_logging

from ..common.optional import import_optional
from ..common.renamed import with_current_names
from ..common.tokenizers import load_tokenizer
from .checkpoints import newest_checkpoint, read_marker, remove_incomplete, step_of
from .data import build_datasets
from .data_recipe import HEAD_TASKS
from .fields import first_difference
from .recipe import Recipe, build_config
from .run_folder import FINAL, check_folder, locked_folder, prepare_folder
from .size import check_size


# What may change between the parts of a run: none of it moves a loss.
_MAY_CHANGE = ("name", "output", "sweep", "data.evaluation") + tuple(
    f"training.{key}"
    for key in (
        "tokens",
        "max_steps",
        "per_device_batch_size",
        "gradient_checkpointing",
        "compile",
        "logging_steps",
        "evaluation_steps",
        "save_steps",
        "keep_checkpoints",
        "tensorboard",
    )
)
# Of a configuration, what says nothing about the weights.
_NOT_ARCHITECTURE = ("transformers_version", "_name_or_path", "dtype", "architectures", "use_cache")
_NO_SPACE = ("os error 28", "No space left")
_TORCH_CANNOT_WRITE = ("iostream error", "PytorchStreamWriter", "inline_container")

Outcome = TypeVar("Outcome")

logger = logging.getLogger(__name__)


def train(recipe: Recipe, resume: bool = True, on_progress=None) -> dict[str, Any]:
    """
    Train a model, or resume a run that was stopped.

    Under `torchrun` or `accelerate launch` every process calls it, and only the first one writes.

    Args:
        recipe (`Recipe`): What to train.
        resume (`bool`, defaults to `True`): Resume from the newest complete checkpoint in `recipe.output` whose files
            are as they were written; otherwise its checkpoints are removed and the run starts over.
        on_progress (`Callable`, *optional*): Called after every step with steps done, all steps, the last record.

    Returns:
        `folder` of the model, `steps`, `loss` (of the last record), `evaluation_loss` and `perplexity` (if evaluated),
        `seconds` of this call, and `resumed_from` (step, 0 if from the start).

    Raises:
        FileNotFoundError: if data, tokenizer or weights do not exist.
        ValueError: if a value of the recipe is wrong, data hold nothing, the folder belongs to another recipe or
            architecture, another process is writing it, or all of its complete checkpoints are damaged.
        FloatingPointError: if loss, gradients or weights are no longer finite; checkpoints are kept as they are.
        OSError: if nothing can be written to the folder, or a checkpoint cannot, such as to a full disk; the previous
            one is kept.
    """
    import_optional("accelerate", 'Training needs accelerate; install it with `pip install "dcformer[train]"`.')
    started = time.monotonic()
    output = Path(recipe.output)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if recipe.training.fsdp and processes == 1:
        raise ValueError("training.fsdp needs several processes; start it with torchrun, or set training.fsdp=false.")
    from .trainer import RecipeTrainer, training_arguments

    arguments = training_arguments(recipe, processes)
    set_seed(recipe.seed)
    tokenizer = build_tokenizer(recipe.tokenizer)
    config = _build_config(recipe, tokenizer)
    with contextlib.ExitStack() as stack:
        # Trainer sets the level of Transformers' messages, for the whole process.
        stack.callback(transformers_logging.set_verbosity, transformers_logging.get_verbosity())

        def open_folder() -> Path | None:
            stack.enter_context(locked_folder(output))
            check_folder(output)
            return newest_checkpoint(output) if resume else None

        checkpoint = _by_first_process(open_folder, arguments)
        if checkpoint is not None:
            _check_same_run(recipe, config, checkpoint)
        with arguments.main_process_first(desc="preparing data"):
            train_rows, evaluation_rows = build_datasets(recipe.data, tokenizer, recipe.seed)
            if evaluation_rows is not None and not hasattr(evaluation_rows, "__len__"):
                evaluation_rows = list(evaluation_rows)
        _by_first_process(lambda: prepare_folder(recipe, output, resume), arguments)

        trained = 0 if checkpoint is None else step_of(checkpoint)
        if trained < recipe.training.steps:
            trainer = RecipeTrainer(
                recipe, _build_model(recipe, config), arguments, tokenizer, train_rows, evaluation_rows, on_progress
            )
            _log_for_tensorboard(trainer, trained)
            if checkpoint is not None:
                trainer.restore(checkpoint)
            try:
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            except Exception as error:
                unwritten = _writing_error(error, output)
                if arguments.process_index == 0:
                    remove_incomplete(output)
                if unwritten is None:
                    raise
                raise unwritten from error
            trainer.accelerator.wait_for_everyone()
            checkpoint = trainer.checkpoint
        assert checkpoint is not None  # there is one of the last step
        return _finish(recipe, checkpoint, trained, started, arguments)


def _by_first_process(work: Callable[[], Outcome], arguments) -> Outcome:
    """What the first process makes of something, or its error, in all processes, so that none waits for the others."""
    if arguments.world_size == 1:
        return work()
    from accelerate.utils import broadcast_object_list

    outcome: list = [None, None]
    if arguments.process_index == 0:
        try:
            outcome[0] = work()
        except (ValueError, OSError) as error:
            outcome[1] = error
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def build_tokenizer(name: str):
    """The tokenizer of a recipe: a folder, a name on the Hub, or `"head_tasks"`."""
    if name == HEAD_TASKS:
        from ..head_tasks import build_tokenizer as build_word_tokenizer

        return build_word_tokenizer()
    try:
        return load_tokenizer(name)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"There is no tokenizer at {name!r}, neither a folder with one nor on the Hub; correct tokenizer."
        ) from error


def _build_config(recipe: Recipe, tokenizer):
    config = build_config(
        recipe.model,
        vocab_size=len(tokenizer),
        max_position_embeddings=recipe.data.sequence_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    check_size(config)
    learned = getattr(config, "position_embedding_type", "rope") == "learned"
    if learned and recipe.data.sequence_length > config.max_position_embeddings:
        raise ValueError(
            f"data.sequence_length {recipe.data.sequence_length} exceeds model.max_position_embeddings "
            f"{config.max_position_embeddings}, and learned positions have no more; lower one or raise the other."
        )
    return config


def _build_model(recipe: Recipe, config) -> torch.nn.Module:
    """The model with float32 parameters: new ones from the seed, or those of `model.pretrained`."""
    options = {"dtype": torch.float32}
    if "attn_implementation" in recipe.model:
        options["attn_implementation"] = recipe.model["attn_implementation"]
    if "pretrained" in recipe.model:
        model = AutoModelForCausalLM.from_pretrained(recipe.model["pretrained"], config=config, **options)
    else:
        set_seed(recipe.seed)
        model = AutoModelForCausalLM.from_config(config, **options)
        if (deviation := recipe.model.get("output_initializer_range")) is not None:
            _draw_outputs(model, deviation)
    if recipe.training.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return model


@torch.no_grad()
def _draw_outputs(model: torch.nn.Module, deviation: float) -> None:
    """Draw the matrices whose results are added to the residual stream anew, with their own standard deviation."""
    for name, parameter in model.named_parameters():
        if name.endswith((".o_proj.weight", ".down_proj.weight")):
            parameter.normal_(std=deviation)


def _check_same_run(recipe: Recipe, config, checkpoint: Path) -> None:
    """Raise ValueError if a checkpoint is of another architecture or recipe."""
    advice = "give another output, or start over with --no-resume (resume=False)"
    found, wanted = (
        {key: value for key, value in item.to_dict().items() if key not in _NOT_ARCHITECTURE}
        for item in (AutoConfig.from_pretrained(str(checkpoint)), config)
    )
    for key in wanted:
        # JSON has no tuples, and its numbers may be of another type.
        if found.get(key) != wanted[key]:
            raise ValueError(
                f"{str(checkpoint)!r} is of another architecture: {key} is {found.get(key)!r} there and "
                f"{wanted[key]!r} in the recipe; {advice}."
            )
    marker = with_current_names(read_marker(checkpoint)["recipe"])
    # A budget in tokens and one in steps may be the same.
    steps = {"training.steps": Recipe.from_mapping(marker).training.steps}, {"training.steps": recipe.training.steps}
    if differs := first_difference(marker | steps[0], recipe.to_mapping() | steps[1], _MAY_CHANGE):
        raise ValueError(f"{str(checkpoint)!r} is of another recipe: {differs}; {advice}.")


def _log_for_tensorboard(trainer, trained: int) -> None:
    from transformers.integrations import TensorBoardCallback, is_tensorboard_available

    if not trainer.recipe.training.tensorboard or not trainer.is_world_process_zero():
        return
    if not is_tensorboard_available():
        logger.warning(
            "TensorBoard is not installed, so only log.jsonl is written; pip install tensorboard, or set "
            "training.tensorboard=false."
        )
        return
    from torch.utils.tensorboard import SummaryWriter

    folder = str(Path(trainer.recipe.output) / "tensorboard")
    trainer.add_callback(TensorBoardCallback(SummaryWriter(folder, purge_step=trained + 1)))


def _writing_error(error: Exception, output: Path) -> OSError | None:
    """An OSError for what the writers of tensors raise instead of one, such as when the disk is full."""
    if not isinstance(error, SafetensorError | RuntimeError):
        return None
    message = str(error)
    by_torch = any(sign in message for sign in _TORCH_CANNOT_WRITE)  # it gives no reason
    if (by_torch and shutil.disk_usage(output).free < 2**24) or any(sign in message for sign in _NO_SPACE):
        return OSError(errno.ENOSPC, "no space left for a checkpoint; the one before is kept", str(output))
    if by_torch:
        return OSError(errno.EIO, "a checkpoint cannot be written; the one before is kept", str(output))
    return None


def _finish(recipe: Recipe, checkpoint: Path, trained: int, started: float, arguments) -> dict[str, Any]:
    """Write what a finished run leaves, from its last checkpoint, and tell what came of it."""
    from .final import finish_run, read_records

    output = Path(recipe.output)
    if arguments.process_index == 0:
        finish_run(checkpoint, recipe)
    records = read_records(checkpoint)
    last = {key: next((r[key] for r in reversed(records) if key in r), None) for key in ("loss", "eval_loss")}
    perplexity = next((r["eval_perplexity"] for r in reversed(records) if "eval_perplexity" in r), None)
    return {
        "folder": str(output / FINAL),
        "steps": recipe.training.steps,
        "loss": last["loss"],
        "evaluation_loss": last["eval_loss"],
        "perplexity": perplexity,
        "seconds": time.monotonic() - started,
        "resumed_from": trained,
    }
