"""Recipes: what a training run is made of, as a YAML file.

A recipe may extend another one: mappings merge key by key, all other values replace. References such as
`${training.batch_tokens}` are resolved in what is left at the end, and that is checked as a whole, so that a wrong key
or value stops a run before anything is loaded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig

from ..common.quoting import quoted, shortened
from ..common.renamed import refuse_old_name
from ..common.yaml_text import read_yaml
from ..configuration_dcformer import DCFormerConfig, DCPythiaConfig
from .data_recipe import DataRecipe
from .fields import check_keys, check_mapping, check_range, full_key, merge_mappings, read_fields


_PACKAGED = Path(__file__).parent / "recipes"
# Keys of which one excludes the other: a recipe that gives one takes away the other of the recipe that it extends.
_ALTERNATIVES = {"training": ("tokens", "max_steps"), "model": ("preset", "pretrained")}
_CONFIG_CLASSES = {cls.model_type: cls for cls in (DCFormerConfig, DCPythiaConfig)}
_LONGEST_FILE = 2**17  # bytes, of which a recipe has a few thousand
_MOST_TOKENS = 10**18  # of a whole run
# The largest integers of `training:`; larger ones are slips of the pen, and nothing could count so far.
_LARGEST = {
    **dict.fromkeys(("max_steps", "logging_steps", "evaluation_steps", "save_steps", "keep_checkpoints"), 10**12),
    **dict.fromkeys(("batch_tokens", "per_device_batch_size"), 10**9),
    "tokens": _MOST_TOKENS,
}
# What its other numbers must be, in words, and how that is found.
_BOUNDS: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    ("positive and finite", lambda value: 0 < value < math.inf, ("learning_rate", "adam_epsilon", "max_grad_norm")),
    ("in [0, 1)", lambda value: 0 <= value < 1, ("adam_beta1", "adam_beta2", "warmup_ratio")),
    ("in [0, 1]", lambda value: 0 <= value <= 1, ("final_learning_rate_ratio",)),
    ("finite and not negative", lambda value: 0 <= value < math.inf, ("weight_decay",)),
)
_MOST_LAYERS = 10_000
_LARGEST_MODEL_INTEGER = 2**31 - 1
LARGEST_SEED = 2**32 - 1  # of NumPy
# Keys of `model:` besides the fields of the configuration.
_MODEL_KEYS = ("preset", "pretrained", "model_type", "attn_implementation", "output_initializer_range")


@dataclass(frozen=True)
class TrainingRecipe:
    """
    The `training:` mapping of a recipe. Defaults are the paper's where it names them (section 4).

    Attributes:
        tokens (`int`, *optional*): Tokens to train on, rounded up to whole steps; either this or `max_steps`.
        max_steps (`int`, *optional*): Optimiser steps to train for.
        batch_tokens (`int`): Tokens in one optimiser step, over all processes and accumulated passes.
        per_device_batch_size (`int`, defaults to 1): Rows in one forward pass on one device.
        optimizer (`str`, defaults to `"adamw"`): `"muon"` for Muon on the matrices of layers and AdamW on all else; it
            needs torch 2.9, and takes no part in the paper.
        muon_learning_rate (`float`, *optional*): Highest learning rate of Muon, which is the length of a step along
            every singular direction of a square matrix; 0.02 is usual.
        learning_rate (`float`, defaults to 3e-4): Highest learning rate, right after the warm-up.
        compose_learning_rate (`float`, *optional*): Highest learning rate of the weights of dynamic composition (the
            low-rank projections and gates), by AdamW; `learning_rate` if not given, as in the paper. Their deviations
            are far below those of other weights, and so are good rates where `learning_rate` is high.
        final_learning_rate_ratio (`float`, defaults to 0.1): Where the cosine ends, as a share of the highest.
        warmup_ratio (`float`, defaults to 0.01): Share of the steps, rounded down, over which the rate rises linearly;
            the first of them has rate 0. [`~training.trainer.learning_rate_schedule`] has the formula.
        adam_beta1, adam_beta2, adam_epsilon (`float`, default to 0.9, 0.95 and 1e-8): The constants of AdamW.
        weight_decay (`float`, defaults to 0.1): Decay of matrices, embeddings and compose weights. Norms and biases do
            not decay; in the authors' JAX code all parameters do.
        max_grad_norm (`float`, defaults to 1.0): Gradients of a larger norm are scaled down to it.
        precision (`str`, defaults to `"fp32"`): `"bf16"` for autocast to bfloat16; parameters stay float32.
        gradient_checkpointing (`bool`, defaults to `False`): Recompute layers in the backward pass.
        compile (`bool`, defaults to `False`): Compile the model with `torch.compile`.
        logging_steps (`int`, defaults to 10): Steps between records of the log.
        evaluation_steps (`int`, defaults to 1000): Steps between evaluations; there is one at the end too.
        save_steps (`int`, defaults to 1000): Steps between checkpoints; there is one at the end too.
        keep_checkpoints (`int`, defaults to 2): Checkpoints that are kept, the newest.
        fsdp (`bool`, defaults to `False`): Divide parameters and optimiser state among the processes (FSDP2).
        tensorboard (`bool`, defaults to `True`): Log for TensorBoard as well, if it is installed.
    """

    batch_tokens: int
    tokens: int | None = None
    max_steps: int | None = None
    per_device_batch_size: int = 1
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_learning_rate: float | None = None
    learning_rate: float = 3e-4
    compose_learning_rate: float | None = None
    final_learning_rate_ratio: float = 0.1
    warmup_ratio: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    precision: Literal["bf16", "fp32"] = "fp32"
    gradient_checkpointing: bool = False
    compile: bool = False
    logging_steps: int = 10
    evaluation_steps: int = 1000
    save_steps: int = 1000
    keep_checkpoints: int = 2
    fsdp: bool = False
    tensorboard: bool = True

    def __post_init__(self):
        if (self.tokens is None) == (self.max_steps is None):
            raise ValueError(
                f"Give exactly one of training.tokens and training.max_steps, got {self.tokens} and {self.max_steps}."
            )
        for name, most in _LARGEST.items():
            value = getattr(self, name)
            if value is not None:
                check_range(f"training.{name}", value, 1, most)
        if self.steps * self.batch_tokens > _MOST_TOKENS:
            raise ValueError(
                f"training.max_steps {self.steps:,} x training.batch_tokens {self.batch_tokens:,} must be at most "
                f"{_MOST_TOKENS:,} tokens; lower one."
            )
        if (self.optimizer == "muon") != (self.muon_learning_rate is not None):
            raise ValueError(
                f"training.muon_learning_rate belongs to training.optimizer 'muon', such as 0.02, got "
                f"{self.muon_learning_rate} with {self.optimizer!r}."
            )
        for name in ("muon_learning_rate", "compose_learning_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ValueError(f"training.{name} must be positive and finite, got {rate}.")
        if self.optimizer == "muon" and self.fsdp:
            raise ValueError(
                "training.optimizer 'muon' needs whole matrices, which training.fsdp divides; turn one of them off."
            )
        for bound, is_within, names in _BOUNDS:
            for name in names:
                if not is_within(getattr(self, name)):
                    raise ValueError(f"training.{name} must be {bound}, got {getattr(self, name)}.")

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        if self.max_steps is not None:
            return self.max_steps
        assert self.tokens is not None  # one of the two is given
        return -(-self.tokens // self.batch_tokens)

    def accumulation_steps(self, sequence_length: int, processes: int) -> int:
        """
        Forward passes of every process in an optimiser step.

        Raises:
            ValueError: if `batch_tokens` is no multiple of the tokens of one pass over all processes.
        """
        tokens = sequence_length * self.per_device_batch_size * processes
        if self.batch_tokens % tokens != 0:
            near = sorted({max(tokens, self.batch_tokens // tokens * tokens), -(-self.batch_tokens // tokens) * tokens})
            raise ValueError(
                f"training.batch_tokens must be a multiple of {tokens} (data.sequence_length {sequence_length} x "
                f"training.per_device_batch_size {self.per_device_batch_size} x {processes} "
                f"process{'' if processes == 1 else 'es'}), got {self.batch_tokens}; "
                f"take {' or '.join(map(str, near))}."
            )
        return self.batch_tokens // tokens


@dataclass(frozen=True)
class Recipe:
    """
    A checked recipe.

    Attributes:
        name (`str`): Name of the run, for logs and plots.
        output (`str`): Folder of the run.
        model (`dict`): `preset` or `pretrained` (or neither), `attn_implementation`, fields of the configuration, and
            `output_initializer_range`: standard deviation of the new weights whose results are added to the residual
            stream (of attention and MLP the last ones), if it is not `initializer_range` as for all others.
        tokenizer (`str`): Folder or name on the Hub; `"head_tasks"` for the tokenizer of the head tasks.
        data (`DataRecipe`): Training and evaluation data.
        training (`TrainingRecipe`): Optimiser, schedule, precision, and what is logged and kept.
        seed (`int`, defaults to 0): Seed of the initialisation and of the order of the data.
        sweep (`dict`, *optional*): Variants and seeds to train, if the recipe is of many runs.
    """

    name: str
    output: str
    model: dict
    tokenizer: str
    data: DataRecipe
    training: TrainingRecipe
    seed: int = 0
    sweep: dict | None = None

    @classmethod
    def from_mapping(cls, values: dict) -> Recipe:
        """
        The recipe of a mapping as YAML gives it, without `extends`.

        Raises:
            ValueError: for unknown or missing keys and for wrong values, of which the message quotes the first.
        """
        check_mapping(values, "")
        check_keys(values, [field.name for field in fields(cls)], "")
        values = dict(values)
        name = values.setdefault("name", "run")
        values.setdefault("output", f"runs/{name}")
        values.setdefault("model", {})
        if "data" in values:
            values["data"] = DataRecipe.from_mapping(values["data"])
        values["training"] = read_fields(TrainingRecipe, values.get("training", {}), "training")
        recipe = read_fields(cls, values, "")
        refuse_old_name("tokenizer", recipe.tokenizer)
        check_range("seed", recipe.seed, 0, LARGEST_SEED)
        _check_model(recipe.model)
        attention = recipe.model.get("attn_implementation") or ""
        if "flash" in attention and recipe.data.packing != "none" and recipe.training.per_device_batch_size > 1:
            # It knows documents by their position ids in a batch of one row alone, and would say nothing.
            raise ValueError(
                f"model.attn_implementation {attention!r} keeps packed documents apart only in batches of one row, got "
                f"training.per_device_batch_size {recipe.training.per_device_batch_size}; set it to 1, or take sdpa."
            )
        return recipe

    def to_mapping(self) -> dict[str, Any]:
        """What `from_mapping` reads, with every default filled in."""
        values = asdict(self)
        absent = "tokens" if self.training.tokens is None else "max_steps"
        del values["training"][absent]
        return {key: value for key, value in values.items() if value is not None}


def load_recipe(recipe: str | os.PathLike, overrides: Sequence[str] = ()) -> Recipe:
    """
    Read a recipe.

    Args:
        recipe: YAML file, or the name of a packaged recipe such as `"dcformer++-405m"`.
        overrides (`Sequence[str]`): Values that replace the file's: `"training.max_steps=20"`, read as YAML.

    Raises:
        FileNotFoundError: if there is neither such a file nor such a packaged recipe.
        ValueError: if a file is no YAML, recipes extend each other in a circle, a key or value is wrong, or the name is
            that of a recipe that is called otherwise now.
        OSError: if a file cannot be read.
    """
    values = _read_extended(_find(recipe, None), ())
    updates = [_override(text) for text in overrides]
    try:
        for update in updates:
            values = merged(values, update)
        return Recipe.from_mapping(merge_mappings({}, values, resolve=True))
    except ValueError as error:
        raise ValueError(shortened(f"Recipe {str(recipe)!r}: {error}")) from error


def packaged_recipes() -> list[str]:
    """Names of the recipes in the package, sorted."""
    return sorted(file.stem for file in _PACKAGED.glob("*.yaml"))


def merged(base: Mapping, update: Mapping) -> dict[str, Any]:
    """`base` with the values of `update`: mappings merge, else the new value replaces, and takes away alternatives."""
    for section, names in _ALTERNATIVES.items():
        old, new = base.get(section), update.get(section)
        given = [name for name in names if isinstance(new, Mapping) and new.get(name) is not None]
        if isinstance(old, Mapping) and len(given) == 1:
            base = {**base, section: {key: value for key, value in old.items() if key in given or key not in names}}
    return merge_mappings(base, update)


def _override(text: str) -> dict[str, Any]:
    """The mapping that a `key=value` of the command line stands for."""
    key, found, value = text.partition("=")
    if not found or not key:
        raise ValueError(f"--set must be key=value, such as training.max_steps=20; got {quoted(text)}.")
    update = read_yaml(value, f"the value of {key}")
    for part in reversed(key.strip().split(".")):
        update = {part: update}
    return update


def _read_extended(file: Path, extending: tuple[Path, ...]) -> dict[str, Any]:
    file = file.resolve()
    if file in extending:
        names = " extends ".join(item.name for item in (*extending[extending.index(file) :], file))
        raise ValueError(f"Recipes extend each other in a circle: {names}; remove one of the extends.")
    values = read_yaml(_read_text(file), repr(str(file)))
    if values is None:
        raise ValueError(f"{str(file)!r} is empty; a recipe is a mapping of keys to values.")
    if not isinstance(values, dict):
        raise ValueError(f"{str(file)!r} must hold a mapping of keys to values, got {quoted(values)}.")
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ValueError(f"extends must name one recipe, got {quoted(base)} in {str(file)!r}.")
    extended = _read_extended(_find(base, file.parent), (*extending, file))
    try:
        return merged(extended, values)
    except ValueError as error:
        raise ValueError(f"{str(file)!r}: {error}") from error


def _read_text(file: Path) -> str:
    try:
        size = file.stat().st_size
        if size > _LONGEST_FILE:
            raise ValueError(f"{str(file)!r} has {size:,} bytes, too many for a recipe; name its YAML file.")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is no text in UTF-8 ({error.reason}); save it as such.") from error
    except OSError as error:
        raise OSError(f"{str(file)!r} cannot be read: {error.strerror or error}; correct its permissions.") from error


def _find(recipe: str | os.PathLike, folder: Path | None) -> Path:
    """A file (beside the one that extends it, if one does), or else a packaged recipe."""
    file = Path(recipe) if folder is None else folder / recipe
    if file.is_file():
        return file
    packaged = _PACKAGED / f"{str(recipe).removesuffix('.yaml')}.yaml"
    if packaged.parent == _PACKAGED and packaged.is_file():
        return packaged
    refuse_old_name("recipe", packaged.stem, _recipe_of_preset(packaged.stem))
    if file.is_dir():
        raise FileNotFoundError(f"{str(file)!r} is a folder; name the YAML file of a recipe.")
    raise FileNotFoundError(
        f"There is no recipe {str(file)!r}; give a YAML file or one of {', '.join(packaged_recipes())}."
    )


def _recipe_of_preset(name: str) -> str:
    """Which recipe trains a preset whose name a recipe of another model had, as the end of a sentence."""
    improved = name.replace("dcformer-", "dcformer++-")
    return f"; the preset {name!r} is trained by {improved!r}" if name in DCFormerConfig.presets() else ""


def _check_model(model: dict) -> None:
    check_keys(model, [*_MODEL_KEYS, *(field.name for field in fields(DCFormerConfig))], "model")
    if "preset" in model and "pretrained" in model:
        raise ValueError(
            f"Give model.preset ({quoted(model['preset'])}) or model.pretrained ({quoted(model['pretrained'])}), not "
            "both."
        )
    presets = [name for cls in _CONFIG_CLASSES.values() for name in cls.presets()]
    if model.get("preset") not in (None, *presets):
        raise ValueError(f"model.preset must be one of {', '.join(presets)}, got {quoted(model['preset'])}.")
    if model.get("model_type") not in (None, *_CONFIG_CLASSES):
        raise ValueError(f"model.model_type must be {' or '.join(_CONFIG_CLASSES)}, got {quoted(model['model_type'])}.")
    _check_integers(model, "model")
    _check_output_deviation(model)
    if "pretrained" not in model:  # weights bring a configuration of their own, which is read when they are
        build_config(model)


def _check_output_deviation(model: dict) -> None:
    value = model.get("output_initializer_range")
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise ValueError(
            f"model.output_initializer_range must be a number, finite and not negative, got {quoted(value)}."
        )
    if "pretrained" in model:
        raise ValueError(
            f"model.output_initializer_range is for new weights, got {value} with model.pretrained "
            f"{quoted(model['pretrained'])}; set it to null."
        )


def _check_integers(values: Any, name: str) -> None:
    """Refuse integers that no model can have before anything is made in such a number."""
    if isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            _check_integers(value, full_key(name, key))
    elif isinstance(values, int) and abs(values) > _LARGEST_MODEL_INTEGER:
        check_range(name, values, -_LARGEST_MODEL_INTEGER, _LARGEST_MODEL_INTEGER)
    elif name == "model.num_hidden_layers" and isinstance(values, int):
        check_range(name, values, 1, _MOST_LAYERS)


def build_config(model: dict, **defaults: Any) -> PreTrainedConfig:
    """
    The configuration that the `model:` mapping of a recipe describes.

    Args:
        model (`dict`): The `model:` mapping of a recipe that was checked.
        **defaults: Fields for a model without preset or weights, where the mapping leaves them out; `bos_token_id`,
            `eos_token_id` and `pad_token_id` hold for presets as well.

    Raises:
        ValueError: for a value that no model can have.
    """
    values = {key: value for key, value in model.items() if key not in _MODEL_KEYS}
    preset = model.get("preset")
    special = {key: value for key, value in defaults.items() if key.endswith("_token_id")}
    try:
        if "pretrained" in model:
            return AutoConfig.from_pretrained(model["pretrained"], **values)
        if preset is not None:
            cls = next(cls for cls in _CONFIG_CLASSES.values() if preset in cls.presets())
            return cls.from_preset(preset, **{**special, **values})
        return _CONFIG_CLASSES[model.get("model_type", DCFormerConfig.model_type)](**{**defaults, **values})
    except (ValueError, TypeError) as error:
        raise ValueError(shortened(f"model: {error}")) from error
