"""
Recipes: training runs as YAML files, read, merged and type-checked by OmegaConf.

A recipe may extend another one: mappings merge key by key, other values replace. `${...}` refers to another key.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.generic import flatten_dict

from ..common.optional import import_optional
from ..configuration_dcformer import DCFormerConfig, DCPythiaConfig
from ..loading import find_folder


omegaconf = import_optional("omegaconf", "Training by a recipe", "train")
OmegaConf = omegaconf.OmegaConf
import_optional("datasets", "Training by a recipe", "train")  # which other modules of training import plainly

HEAD_TASKS = "head_tasks"  # the generated data, and their tokenizer
_PACKAGED = Path(__file__).parent / "recipes"
# Mappings of a recipe, with a key of each for messages.
_SECTIONS = {"model": "preset", "data": "source", "training": "max_steps", "sweep": "seeds"}
# Keys that exclude each other: a recipe that gives one removes the other from the recipe that it extends.
_ALTERNATIVES = {"training": ("tokens", "max_steps"), "model": ("preset", "pretrained")}
_CONFIG_CLASSES = {cls.model_type: cls for cls in (DCFormerConfig, DCPythiaConfig)}
_MOST_LAYERS = 10_000  # a configuration of more takes minutes to build; nobody means that
# Keys of `model:` besides the fields of the configuration.
_MODEL_KEYS = ("preset", "pretrained", "model_type", "attn_implementation", "output_initializer_range")


@dataclass(frozen=True)
class StageRecipe:
    """A stage of training on head tasks: `documents`, and what [`~head_tasks.iterate_practice`] takes."""

    documents: int
    examples: float = 0.0  #: share of the documents, as the next three
    questions: float = 0.0
    recurring_facts: float = 0.0
    recurring_words: float = 0.0
    lines: list[int] | None = None  #: `None`: as `data.lines`
    words: int | None = None
    facts: int = 3


@dataclass(frozen=True)
class DataRecipe:
    """The `data:` mapping of a recipe: the source of documents and how they become rows."""

    #: `"head_tasks"`; a file (.jsonl, .json, .txt, .parquet, .csv, .tsv) or a folder of these; or a name on the Hub
    source: str
    configuration: str | None = None  #: configuration of a data set on the Hub
    split: str = "train"  #: also a slice, as `datasets` writes them; a file has `"train"` only
    text_column: str = "text"  #: column that holds the documents
    sample_by: Literal["document", "line"] = "document"  #: a text file is one document, or every line of it is one
    streaming: bool = False  #: read and pack while training, shuffled within a buffer of 10,000 documents
    sequence_length: int = 2048  #: tokens of a row, as in section 4.1 of the paper
    #: `"split"` fills rows and continues a document in the next row, as a new sequence; `"whole"` puts every document
    #: where it fits and pads the rest; `"none"` gives every document a row. All cut documents longer than a row.
    packing: Literal["split", "whole", "none"] = "split"
    loss_on: Literal["all", "answers"] = "all"  #: tokens, or those in the character ranges of the column `answers`
    documents: int | None = None  #: number of head-task documents to generate, or the most to take of a source
    lines: list[int] | None = None  #: least and most examples in a document of head tasks; `None`: `[1, 8]`
    stages: list[StageRecipe] | None = None  #: head tasks in stages, read in this order, instead of `documents`
    #: Data of the evaluation loss, read in order. Keys that it lacks are those of the training data, except the split
    #: of head tasks, which is `"validation"`.
    evaluation: DataRecipe | None = None

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise ValueError(f"data.sequence_length must be at least 2, got {self.sequence_length}.")
        if self.source != HEAD_TASKS and (self.lines or self.stages):
            raise ValueError(f"data.lines and data.stages are for source {HEAD_TASKS!r} alone, got {self.source!r}.")
        if self.streaming and "[" in self.split:
            raise ValueError(
                f"data.split {self.split!r} is a slice, which data.streaming cannot read; set data.documents instead."
            )
        if self.source == HEAD_TASKS and not self.stages and self.documents is None:
            raise ValueError(f"data.documents is missing; say how many documents of {HEAD_TASKS} to generate.")
        origin, other = (data and (data.source, data.configuration, data.split) for data in (self, self.evaluation))
        if origin == other:
            raise ValueError(
                f"data.evaluation would read the training data, {self.source!r}, split {self.split!r}; give it "
                "another source or split."
            )


@dataclass(frozen=True)
class TokenizerRecipe:
    """The `tokenizer:` mapping of a recipe: a new one is trained on the recipe's own training data."""

    train: int  #: number of tokens, the 256 bytes and the end of text among them
    kind: Literal["bpe"] = "bpe"  #: byte-level; others lack a text, or differ with the number of threads
    documents: int | None = None  #: the first so many documents; `None`: all

    def __post_init__(self) -> None:
        for name, least in (("train", 257), ("documents", 1)):
            if (count := getattr(self, name)) is not None and count < least:
                raise ValueError(f"tokenizer.{name} must be at least {least}, got {count}.")


@dataclass(frozen=True)
class TrainingRecipe:
    """The `training:` mapping of a recipe. Defaults are the paper's where it names them (section 4, appendix C)."""

    batch_tokens: int  #: tokens in one optimiser step, over all processes and accumulated passes
    tokens: int | None = None  #: length of the run, rounded up to whole steps; either this or `max_steps`
    max_steps: int | None = None  #: length of the run in optimiser steps
    trainable: Literal["all", "compose"] = "all"  #: parameters that are trained: all, or those of composition alone
    per_device_batch_size: int = 1  #: rows in one forward pass on one device
    optimizer: Literal["adamw", "muon"] = "adamw"  #: Muon is for the matrices of layers, AdamW for everything else
    muon_learning_rate: float | None = None  #: highest learning rate of Muon; 0.02 is usual
    learning_rate: float = 3e-4  #: highest learning rate of AdamW, right after the warm-up
    #: highest learning rate of the low-rank projections and gates of composition; `None`: `learning_rate`
    compose_learning_rate: float | None = None
    final_learning_rate_ratio: float = 0.1  #: end of the cosine, as a share of the highest rate
    warmup_ratio: float = 0.01  #: share of the steps, rounded down, over which the rate rises linearly from 0
    adam_beta1: float = 0.9  #: of AdamW, as the next two
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.1  #: of matrices, embeddings and compose weights; norms and biases do not decay
    max_grad_norm: float = 1.0  #: gradients of a larger norm are scaled down to it
    #: bf16 for autocast, parameters stay float32; auto: bf16 where the GPU, or without one the CPU, multiplies in it
    precision: Literal["bf16", "fp32", "auto"] = "fp32"
    gradient_checkpointing: bool = False  #: recompute layers in the backward pass
    compile: bool = False  #: use `torch.compile`
    compile_mode: str | None = None  #: mode of `torch.compile`, which it switches on, such as `reduce-overhead`
    logging_steps: int = 10  #: steps between records of the log; there is one before every checkpoint too
    evaluation_steps: int = 1000  #: steps between evaluations; there is one at the end too
    save_steps: int = 1000  #: steps between checkpoints; there is one at the end too
    keep_checkpoints: int = 2  #: checkpoints to keep, the newest
    fsdp: bool = False  #: divide parameters and optimiser state among the processes (FSDP2)
    #: a tracker of Transformers' Trainer, or a list: `wandb`, `trackio`, `mlflow` and others, `all`, `none`; `None`:
    #: `tensorboard`, if it is installed
    report_to: list[str] | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.max_steps is None):
            raise ValueError(
                f"Give exactly one of training.tokens and training.max_steps, got {self.tokens} and {self.max_steps}."
            )
        # Trainer gives numbers below 1 another meaning; torch refuses other wrong numbers.
        counts = ("tokens", "max_steps", "batch_tokens", "per_device_batch_size", "save_steps", "keep_checkpoints")
        for name in counts:
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"training.{name} must be at least 1, got {count}.")
        for name in ("warmup_ratio", "final_learning_rate_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"training.{name} must be in [0, 1], got {getattr(self, name)}.")
        if not self.max_grad_norm > 0:
            raise ValueError(f"training.max_grad_norm must be positive, got {self.max_grad_norm}.")
        if (self.optimizer == "muon") != (self.muon_learning_rate is not None):
            raise ValueError(
                f"training.muon_learning_rate belongs to training.optimizer 'muon', got {self.muon_learning_rate} "
                f"with {self.optimizer!r}; give both or neither."
            )
        if self.optimizer == "muon" and self.fsdp:
            raise ValueError("training.optimizer 'muon' needs whole matrices, which training.fsdp divides; drop one.")

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.max_steps or -(-(self.tokens or 0) // self.batch_tokens)

    def accumulation_steps(self, sequence_length: int, processes: int) -> int:
        """Forward passes of every process in an optimiser step; ValueError if the batch does not divide into them."""
        tokens = sequence_length * self.per_device_batch_size * processes
        if self.batch_tokens % tokens != 0:
            raise ValueError(
                f"training.batch_tokens must be a multiple of {tokens} (data.sequence_length {sequence_length} x "
                f"training.per_device_batch_size {self.per_device_batch_size} x {processes} processes), got "
                f"{self.batch_tokens}."
            )
        return self.batch_tokens // tokens


@dataclass(frozen=True)
class Recipe:
    """A checked recipe."""

    #: folder, bundled model or name on the Hub; `"head_tasks"` for that of the head tasks; or a `TokenizerRecipe`
    tokenizer: Any
    data: DataRecipe
    training: TrainingRecipe
    #: `preset` or `pretrained` (or neither), `attn_implementation`, fields of the configuration, and
    #: `output_initializer_range`: standard deviation of new `o_proj` and `down_proj` weights
    model: dict[str, Any] = field(default_factory=dict)
    name: str = "run"  #: of the run, for logs and plots
    output: str = "runs/${name}"  #: folder of the run
    seed: int = 0  #: seed of the initialisation and of the order of the data
    sweep: dict[str, Any] | None = None  #: variants and seeds to train, see [`~experiments.SweepRecipe`]

    def __post_init__(self) -> None:
        _check_model(self.model)
        if not self.output:
            raise ValueError("output must name a folder, got ''.")
        _check_tokenizer(self)
        attention = self.model.get("attn_implementation") or ""
        if "flash" in attention and self.data.packing != "none" and self.training.per_device_batch_size > 1:
            # It finds documents by their position ids in batches of one row only, and silently ignores them in others.
            raise ValueError(
                f"model.attn_implementation {attention!r} keeps packed documents apart only in batches of one row, got "
                f"training.per_device_batch_size {self.training.per_device_batch_size}; set it to 1, or use sdpa."
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Recipe:
        """Read a recipe from a mapping like that of a YAML file without `extends`; errors as of `load_recipe`."""
        values, schema = dict(values), OmegaConf.structured(cls)
        for section, completed in (("data", _with_evaluation), ("training", _with_trackers)):
            if isinstance(values.get(section), Mapping):
                values[section] = completed(values[section])
        if isinstance(values.get("tokenizer"), Mapping):
            OmegaConf.set_readonly(schema, False)
            schema.tokenizer = OmegaConf.structured(TokenizerRecipe)
        try:
            return OmegaConf.to_object(OmegaConf.merge(schema, values))
        except omegaconf.errors.OmegaConfBaseException as error:
            sentence = str(error).partition("\n")[0].rstrip(".")  # the rest names types of OmegaConf
            if isinstance(error, omegaconf.errors.ConfigKeyError) and not sentence.endswith("?"):
                # OmegaConf suggests keys of the same mapping only.
                sentence += f".{_did_you_mean(error.full_key)}"
            where = "" if repr(error.full_key) in sentence else f"{error.full_key}: "
            raise type(error)(f"{where}{sentence}") from error

    def to_mapping(self) -> dict[str, Any]:
        """The mapping that `from_mapping` reads, with every default filled in."""
        return asdict(self)


def load_recipe(recipe: str | os.PathLike, overrides: Sequence[str] = ()) -> Recipe:
    """
    Read a recipe. For files that are not YAML, and for wrong keys and types, OmegaConf raises its errors.

    Args:
        recipe: YAML file, or the name of a packaged recipe such as `"dcformer++-405m"`.
        overrides: Values that replace those of the file, such as `"training.max_steps=20"`, read as YAML.

    Raises:
        FileNotFoundError: if there is neither such a file nor such a packaged recipe.
        ValueError: for a wrong value or combination of values, or recipes that extend each other in a circle.
    """
    for text in overrides:
        if "=" not in text:
            raise ValueError(f"--set must be key=value, such as training.max_steps=20; got {text!r}.")
    updates = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))
    values = merge_recipes(_read_extended(recipe), updates)
    return Recipe.from_mapping(OmegaConf.to_container(OmegaConf.create(values), resolve=True))


def packaged_recipes() -> list[str]:
    """Names of the recipes in the package, sorted."""
    return sorted(file.stem for file in _PACKAGED.glob("*.yaml"))


def merge_recipes(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """
    Merge the mappings of two recipes key by key; other values of `update`, lists as a whole, replace those of `base`.

    `training.tokens` replaces `training.max_steps`, `model.preset` replaces `model.pretrained`, and vice versa.
    """
    for section, key in _SECTIONS.items():
        _check_mapping(section, update.get(section), key)
    for section, names in _ALTERNATIVES.items():
        old, new = base.get(section) or {}, update.get(section) or {}
        given = [name for name in names if new.get(name) is not None]
        if len(given) == 1:
            base = {**base, section: {key: old[key] for key in old if key in given or key not in names}}
    return OmegaConf.to_container(OmegaConf.merge(base, update))


def build_config(model: Mapping[str, Any], **defaults: Any) -> PreTrainedConfig:
    """
    Build the configuration that the `model:` mapping of a recipe describes.

    `defaults` are fields for a model without preset or weights that the mapping may leave out; the ids of special
    tokens among them are used with presets as well.
    """
    values = {key: value for key, value in model.items() if key not in _MODEL_KEYS}
    preset = model.get("preset")
    if model.get("pretrained") is not None:
        return AutoConfig.from_pretrained(find_folder(model["pretrained"]), **values)
    if preset is not None:
        cls = DCPythiaConfig if preset in DCPythiaConfig.presets() else DCFormerConfig
        special = {key: value for key, value in defaults.items() if key.endswith("_token_id")}
        return cls.from_preset(preset, **{**special, **values})
    return _CONFIG_CLASSES[model.get("model_type", DCFormerConfig.model_type)](**{**defaults, **values})


def first_difference(there: Recipe, here: Recipe, ignored: tuple[str, ...]) -> str | None:
    """Name the first key in which two recipes differ, with its values; `ignored` has prefixes of keys that may."""
    old, new = (
        {key: value for key, value in flatten_dict(recipe.to_mapping()).items() if value != {}}
        | {"the number of steps": recipe.training.steps}
        for recipe in (there, here)
    )
    for key in sorted({*old, *new}):
        if not key.startswith(ignored) and old.get(key) != new.get(key):
            return f"{key} is {old.get(key)!r} there and {new.get(key)!r} here"
    return None


def _read_extended(recipe: str | os.PathLike, extending: Sequence[Path] = ()) -> dict[str, Any]:
    """The mapping of a recipe, a file (beside the last that extends it) or a packaged one, merged into its base."""
    if not isinstance(recipe, str | os.PathLike):
        raise ValueError(f"extends must name one recipe, got {recipe!r}.")
    beside = (extending[-1].parent if extending else Path()) / recipe
    places = (beside, _PACKAGED / f"{str(recipe).removesuffix('.yaml')}.yaml")
    if (file := next((path.resolve() for path in places if path.is_file()), None)) is None:
        names = ", ".join(packaged_recipes())
        raise FileNotFoundError(f"There is no recipe {str(beside)!r}; give a YAML file or one of {names}.")
    if file in extending:
        raise ValueError(f"Recipes extend each other in a circle: {' extends '.join(f.name for f in extending)}.")
    values = OmegaConf.to_container(OmegaConf.load(file))
    keys = {"extends", *(field.name for field in fields(Recipe))}
    if not isinstance(values, dict) or (values and not keys & values.keys()):  # OmegaConf makes a key of a text
        raise ValueError(f"{str(file)!r} is no recipe, which is YAML with keys such as model, data and training.")
    base = values.pop("extends", None)
    return merge_recipes({} if base is None else _read_extended(base, (*extending, file)), values)


def _check_mapping(name: str, value: Any, key: str) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping with keys such as {name}.{key}, got {value!r}.")


def _with_evaluation(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """`data:` with an evaluation that inherits the keys of the training data that it lacks."""
    evaluation = data.get("evaluation")
    _check_mapping("data.evaluation", evaluation, "source")
    if evaluation is None:
        return data
    inherited = {key: value for key, value in data.items() if key not in ("evaluation", "stages")}
    if evaluation.get("source", data.get("source")) == HEAD_TASKS:
        inherited["split"] = "validation"
    else:
        inherited.pop("lines", None)
    return {**data, "evaluation": {**inherited, **evaluation}}


def _with_trackers(training: Mapping[str, Any]) -> dict[str, Any]:
    """`training:` with a list of trackers; `tensorboard`, which older recipes have, counts where there is none."""
    training = dict(training)
    if training.pop("tensorboard", True) is False and training.get("report_to") is None:
        training["report_to"] = "none"
    if isinstance(training.get("report_to"), str):
        training["report_to"] = [training["report_to"]]
    return training


def _check_tokenizer(recipe: Recipe) -> None:
    """Raise ValueError for a tokenizer that is neither a name nor one that can be trained for this recipe."""
    tokenizer, data, rows = recipe.tokenizer, recipe.data, recipe.model.get("vocab_size")
    if isinstance(tokenizer, str):
        return
    if not isinstance(tokenizer, TokenizerRecipe):
        raise ValueError(f"tokenizer must be a name, a folder or a mapping such as {{train: 8192}}, got {tokenizer!r}.")
    if data.source == HEAD_TASKS:
        raise ValueError("tokenizer.train is for texts, and head_tasks have a tokenizer; set tokenizer=head_tasks.")
    if data.streaming and tokenizer.documents is None and data.documents is None:
        raise ValueError("tokenizer.documents is missing; say from how many streamed documents to train a tokenizer.")
    if (name := recipe.model.get("pretrained")) is not None:
        raise ValueError(f"tokenizer.train makes ids that the weights of model.pretrained {name!r} do not know.")
    if rows is not None and rows < tokenizer.train:
        raise ValueError(f"model.vocab_size must be at least tokenizer.train, {tokenizer.train}, got {rows}.")


_CLASSES = {"data": DataRecipe, "training": TrainingRecipe, "model": DCFormerConfig}
_KEYS = {section: {field.name for field in fields(cls)} for section, cls in _CLASSES.items()}
_KEYS["model"].update(_MODEL_KEYS)


def _did_you_mean(wrong: str) -> str:
    """A question that suggests keys of a recipe that end like a wrong one, or nearly; or nothing."""
    likely = difflib.get_close_matches(wrong.rpartition(".")[2], set().union(*_KEYS.values()), n=1, cutoff=0.8)
    keys = [f"{section}.{name}" for section, names in _KEYS.items() for name in likely if name in names]
    return f" Did you mean {' or '.join(keys)}?" if keys else ""


def _check_model(model: Mapping[str, Any]) -> None:
    """Raise ValueError for keys and values that Transformers would ignore, or refuse only after reading data."""
    if wrong := [key for key in model if key not in _KEYS["model"]]:
        where, meant = "see the fields of DCFormerConfig", _did_you_mean(wrong[0])
        raise ValueError(f"'model.{wrong[0]}' is not a key of a recipe; {where}.{meant}")
    preset, pretrained = model.get("preset"), model.get("pretrained")
    if preset is not None and pretrained is not None:
        raise ValueError(f"Give model.preset ({preset!r}) or model.pretrained ({pretrained!r}), not both.")
    if model.get("model_type") not in (None, *_CONFIG_CLASSES):
        raise ValueError(f"model.model_type must be {' or '.join(_CONFIG_CLASSES)}, got {model['model_type']!r}.")
    if pretrained is not None and model.get("output_initializer_range") is not None:
        raise ValueError(f"model.output_initializer_range is for new weights, got model.pretrained {pretrained!r}.")
    if isinstance(layers := model.get("num_hidden_layers"), int) and layers > _MOST_LAYERS:
        raise ValueError(f"model.num_hidden_layers must be at most {_MOST_LAYERS:,}, got {layers:,}.")
    if pretrained is None:  # else the configuration comes with the weights
        build_config(model)
