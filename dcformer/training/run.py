"""A training run, from its recipe to a folder that Transformers loads; `run_files` lists the files."""

import contextlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed
from transformers.integrations import TensorBoardCallback, WandbCallback

from ..common.files import file_lock, json_digest, read_sealed, write_atomically
from ..common.hub import find_commit
from ..common.processes import count_processes, in_first_process
from ..head_tasks import build_tokenizer as build_head_tasks_tokenizer
from ..loading import find_folder, fingerprint_tokenizer, load_tokenizer, refuse_without_model
from . import run_files
from .data import build_datasets, train_tokenizer
from .documents import fingerprint_documents, fingerprint_files
from .recipe import HEAD_TASKS, OmegaConf, Recipe, TokenizerRecipe, build_config, first_difference
from .run_files import COMPOSITION_FILE, FINAL, LOCK_FILE, RECIPE_FILE, UNFINISHED
from .run_plan import RunPlan, describe_run, measure_run
from .summary import last_values, plot_losses, write_training_card
from .trainer import OnProgress, RecipeTrainer, make_trackers, training_arguments


# Beginnings of keys that may change when a run is resumed, since no loss depends on them; the steps are compared, not
# `tokens` and `max_steps`.
_OF_TRAINING = (
    *("tokens", "max_steps", "per_device_batch_size", "gradient_checkpointing", "compile", "logging_steps"),
    *("evaluation_steps", "save_steps", "keep_checkpoints", "report_to"),
)
_MAY_CHANGE = ("name", "output", "sweep", "data.evaluation", *(f"training.{key}" for key in _OF_TRAINING))

_WAYS_OUT = "give another output, or start over with --no-resume (resume=False)"

logger = logging.getLogger(__name__)


def train(
    recipe: Recipe,
    resume: bool = True,
    on_progress: OnProgress | None = None,
    on_message: Callable[[str], None] | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """
    Train a model, or resume a run that was stopped. Under `torchrun` or `accelerate launch` every process calls this,
    and only the first one writes.

    Args:
        resume: Resume from the newest complete checkpoint in `recipe.output`, rather than remove those and start over.
        on_progress: Called after every step with steps done, all steps, the last record of the log.
        on_message: Called by the first process with lines that say what comes next, and what the run will do.
        dry_run: Measure a step and an evaluation instead, without a look at `recipe.output`, and return the fields of
            [`RunPlan`].

    Returns:
        `folder` of the model, `steps`, `loss` (of the last record), `evaluation_loss` and `perplexity` (`None` without
        an evaluation), `seconds` of this call, `resumed_from` (step, 0 if from the start), and `fingerprints`,
        see `fingerprint_inputs`.

    Raises:
        ValueError: if the batch does not divide among processes, the data hold no token to train on, or the folder is
            that of another recipe or in use by another process.
        FloatingPointError: if a loss or the norm of gradients is no longer finite; checkpoints stay as they are.
    """
    started, output = time.monotonic(), Path(recipe.output)
    if recipe.training.fsdp and count_processes() == 1:
        raise ValueError("training.fsdp needs several processes; start it with torchrun, or set training.fsdp=false.")
    arguments = training_arguments(recipe)
    trackers = make_trackers(arguments)
    say = on_message if on_message is not None and arguments.process_index == 0 else lambda _: None
    set_seed(recipe.seed)
    say(f"Reading {recipe.data.source} and the tokenizer")
    if dry_run:
        tokenizer, rows, plan = _prepare(recipe, arguments, None, say)
        say("Taking a step and an evaluation")
        plan = measure_run(plan, recipe, _build_model(recipe, tokenizer), tokenizer, *rows)
        say(plan.describe_time())
        return asdict(plan)
    with contextlib.ExitStack() as stack:

        def open_folder() -> tuple[Path | None, dict[str, Any]]:
            stack.enter_context(file_lock(output / LOCK_FILE))
            return _find_checkpoint(recipe, output, resume)

        checkpoint, marks = in_first_process(open_folder)
        trained = run_files.step_of(checkpoint)
        if trained < recipe.training.steps:
            tokenizer, rows, _ = _prepare(recipe, arguments, checkpoint, say)
            if isinstance(recipe.tokenizer, TokenizerRecipe):
                marks["fingerprints"]["tokenizer"] = fingerprint_tokenizer(tokenizer)
            in_first_process(lambda: _prepare_folder(recipe, output, resume, trained))
            arguments.run_name = f"{recipe.name}-{marks['run_id']}"
            in_first_process(lambda: _continue_trackers(trackers, arguments, output, trained, stack))
            model = _build_model(recipe, tokenizer)
            trainer = RecipeTrainer(recipe, model, arguments, tokenizer, *rows, trackers, on_progress)
            trainer.checkpoint, trainer.marks = checkpoint, marks
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            trainer.accelerator.wait_for_everyone()
            checkpoint = trainer.checkpoint
        assert checkpoint is not None  # there is one of the last step
        records = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        if arguments.process_index == 0:
            _finish(recipe, checkpoint, records)

    last = last_values(records)
    return {
        "folder": str(output / FINAL),
        "steps": recipe.training.steps,
        "loss": last["loss"],
        "evaluation_loss": last.get("eval_loss"),
        "perplexity": last.get("eval_perplexity"),
        "seconds": time.monotonic() - started,
        "resumed_from": trained,
        "fingerprints": marks["fingerprints"],
    }


def plan_run(recipe: Recipe) -> RunPlan:
    """Describe a run without reading data, weights, or a tokenizer whose size `model` says; `print` shows the lines."""
    tells = isinstance(recipe.tokenizer, TokenizerRecipe) or {"preset", "pretrained", "vocab_size"} & {*recipe.model}
    return describe_run(recipe, _build_model(recipe, None if tells else build_tokenizer(recipe), on_meta=True))


def build_tokenizer(recipe: Recipe, checkpoint: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a recipe: `"head_tasks"`, as [`load_tokenizer`] finds it, or trained unless in a checkpoint."""
    if isinstance(recipe.tokenizer, TokenizerRecipe):
        return load_tokenizer(checkpoint) if checkpoint else train_tokenizer(recipe.tokenizer, recipe.data)
    return build_head_tasks_tokenizer() if recipe.tokenizer == HEAD_TASKS else load_tokenizer(recipe.tokenizer)


def fingerprint_inputs(recipe: Recipe, local_only: bool = False) -> dict[str, str]:
    """
    Hash what a run reads, by keys of the recipe: data, tokenizer, unless the run trains it, and the model that
    `model.pretrained` names. `local_only` leaves out what is not on this machine (any more).
    """
    sources = {"data.source": recipe.data, "data.evaluation.source": recipe.data.evaluation}
    hashes = {key: fingerprint_documents(source, local_only) for key, source in sources.items() if source is not None}
    name, pretrained = recipe.tokenizer, recipe.model.get("pretrained")
    if isinstance(name, str) and (not local_only or name == HEAD_TASKS or Path(find_folder(name)).exists()):
        hashes["tokenizer"] = fingerprint_tokenizer(build_tokenizer(recipe))
    if pretrained is not None and (folder := Path(find_folder(pretrained))).is_dir():
        weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
        hashes["model.pretrained"] = json_digest(fingerprint_files([folder / "config.json", *weights]))
    elif pretrained is not None and not local_only:
        refuse_without_model(pretrained)
        hashes["model.pretrained"] = find_commit(pretrained)
    return {key: value for key, value in hashes.items() if value is not None}


def _find_checkpoint(recipe: Recipe, output: Path, resume: bool) -> tuple[Path | None, dict[str, Any]]:
    """
    The checkpoint to resume from, and the `fingerprints` and `run_id` of further ones. ValueError if the folder is that
    of something else, or all of its checkpoints are damaged. A finished run reads nothing, so its data may be gone.
    """
    run_files.check_free(output)
    folders, checkpoint, known = run_files.checkpoint_folders(output), None, {}
    if folders and not (output / RECIPE_FILE).is_file():
        raise ValueError(
            f"{str(output)!r} holds {folders[0].name} but no {RECIPE_FILE}: checkpoints of something else, which this "
            "run would remove; give another output."
        )
    if resume and folders:
        checkpoint, flaws = run_files.find_newest(output)
        if checkpoint is None:
            reasons = " ".join(flaws)
            raise ValueError(f"{reasons} None is whole, and nothing was removed; restore the files, {_WAYS_OUT}.")
        for flaw in flaws:
            logger.warning(f"{flaw} The run resumes from {checkpoint.name} instead.")
        known = read_sealed(checkpoint / run_files.MARKER)
        if differs := first_difference(Recipe.from_mapping(known["recipe"]), recipe, _MAY_CHANGE):
            raise ValueError(f"{str(output)!r} is of another recipe: {differs}; {_WAYS_OUT}.")
    finished = run_files.step_of(checkpoint) == recipe.training.steps
    fingerprints = fingerprint_inputs(recipe, local_only=finished)
    # A resumed run takes its weights from the checkpoint, but its configuration from model.pretrained.
    pretrained = recipe.model.get("pretrained")
    names = {"data.source": recipe.data.source, "tokenizer": recipe.tokenizer, "model.pretrained": pretrained}
    for key, name in names.items():
        if known and key in fingerprints and fingerprints[key] != known["fingerprints"].get(key):
            raise ValueError(
                f"{key} {name!r} has other content than {str(checkpoint)!r} was trained on; restore it, {_WAYS_OUT}."
            )
    marks = {"fingerprints": known["fingerprints"] if finished else fingerprints}
    return checkpoint, marks | {"run_id": known.get("run_id", secrets.token_hex(4))}


def _prepare(
    recipe: Recipe, arguments: TrainingArguments, checkpoint: Path | None, say: Callable[[str], None]
) -> tuple[PreTrainedTokenizerBase, tuple[Any, Any], RunPlan]:
    """The tokenizer, the rows for training and evaluation, and what the run will do, which is said meanwhile."""
    own = recipe.tokenizer if isinstance(recipe.tokenizer, TokenizerRecipe) else None
    if own and checkpoint is None:
        say("Training the tokenizer")
    tokenizer = in_first_process(lambda: build_tokenizer(recipe, checkpoint))
    if own and len(tokenizer) < own.train:
        say(f"The data have no more than {len(tokenizer):,} tokens, tokenizer.train is {own.train:,}")
    plan = describe_run(recipe, _build_model(recipe, tokenizer, on_meta=True))
    say(plan.describe_work())
    say(f"Tokenising {recipe.data.source}{' while training' * recipe.data.streaming}")
    with arguments.main_process_first(desc="preparing data"):
        train_rows, evaluation_rows = build_datasets(recipe.data, tokenizer, recipe.seed)
    evaluation = None if evaluation_rows is None else list(evaluation_rows)
    rows = None if recipe.data.streaming else len(train_rows)
    plan = replace(plan, rows=rows, evaluation_rows=None if evaluation is None else len(evaluation))
    if said := plan.describe_data():
        say(said)
    return tokenizer, (train_rows, evaluation), plan


def _prepare_folder(recipe: Recipe, output: Path, resume: bool, trained: int) -> None:
    """Remove checkpoints past the step to resume from, and what is unfinished; and write the recipe."""
    for checkpoint in run_files.checkpoint_folders(output):
        if run_files.step_of(checkpoint) > trained:
            if resume:
                logger.warning(f"{str(checkpoint)!r} is damaged and is removed.")
            run_files.remove_folder(checkpoint)
    if not resume:
        run_files.remove_folder(output / FINAL)
    shutil.rmtree(output / UNFINISHED, ignore_errors=True)
    write_atomically(output / RECIPE_FILE, OmegaConf.to_yaml(recipe.to_mapping()))


def _build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None, on_meta: bool = False) -> PreTrainedModel:
    """The model with float32 parameters: new ones from the seed, or those of `model.pretrained`; or none, on meta."""
    values, defaults = dict(recipe.model), {"max_position_embeddings": recipe.data.sequence_length}
    if tokenizer is not None:
        defaults |= {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        defaults["vocab_size"] = len(tokenizer)
    if isinstance(recipe.tokenizer, TokenizerRecipe):  # also where a preset has another
        values.setdefault("vocab_size", defaults.get("vocab_size", recipe.tokenizer.train))
    config = build_config(values, **defaults)
    attention = recipe.model.get("attn_implementation")
    options = {"dtype": torch.float32} | ({} if attention is None else {"attn_implementation": attention})
    if on_meta:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **options)
    elif recipe.model.get("pretrained") is not None:
        folder = find_folder(recipe.model["pretrained"])
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, **options)
    else:
        set_seed(recipe.seed)
        model = AutoModelForCausalLM.from_config(config, **options)
        if (deviation := recipe.model.get("output_initializer_range")) is not None:
            for name, parameter in model.named_parameters():
                if name.endswith((".o_proj.weight", ".down_proj.weight")):
                    torch.nn.init.normal_(parameter, std=deviation)
    if recipe.training.trainable == "compose":
        model.freeze_all_but_composition()
    if recipe.training.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return model


def _continue_trackers(
    trackers: Sequence[Any], arguments: TrainingArguments, output: Path, trained: int, stack: contextlib.ExitStack
) -> None:
    """Have TensorBoard and wandb continue the run in its folder; trackio continues by the name itself."""
    for tracker in trackers:
        if isinstance(tracker, TensorBoardCallback):
            tracker.tb_writer = tracker._SummaryWriter(str(output / "tensorboard"), purge_step=trained + 1)
        elif isinstance(tracker, WandbCallback) and tracker._wandb.run is None:
            names = {"project": "huggingface", "dir": str(output), "run_id": arguments.run_name.rpartition("-")[2]}
            given = {name: os.getenv(f"WANDB_{name.upper()}", value) for name, value in names.items()}
            run = tracker._wandb.init(name=arguments.run_name, id=given.pop("run_id"), resume="allow", **given)
            stack.enter_context(run)  # that ends with this one, since a sweep has others


def _finish(recipe: Recipe, checkpoint: Path, records: list[dict[str, Any]]) -> None:
    """Write the recipe, the final model, the log and the curves from the last checkpoint."""
    output, values = Path(recipe.output), read_sealed(checkpoint / run_files.MARKER)["recipe"]
    write_atomically(output / RECIPE_FILE, OmegaConf.to_yaml(values))
    run_files.write_final(checkpoint, output / FINAL)
    shutil.rmtree(output / UNFINISHED, ignore_errors=True)
    write_training_card(output / FINAL, recipe, records)
    if recipe.training.trainable == "compose":
        AutoModelForCausalLM.from_pretrained(output / FINAL).save_composition(output / COMPOSITION_FILE)
    run_files.write_log(output, records)
    try:
        plot_losses(records, output / "losses.png")
    except ImportError as error:
        logger.warning(f"The losses are not plotted: {error}")
