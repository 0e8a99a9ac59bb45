"""Loading of checkpoints: the authors' names, and what a load that went wrong tells the user."""

import logging
import os
import pickle
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError
from transformers.core_model_loading import WeightRenaming
from transformers.utils import cached_file

from .sharing_dcformer import SOURCE_NOTE, read_header_notes


if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

_Model = TypeVar("_Model", bound="PreTrainedModel")
_Source: TypeAlias = str | os.PathLike[str]


# The authors' name of a parameter, in parts, -> ours. Only renaming: to split or merge tensors while loading is wrong
# when every rank of a sharded load sees a part of them.
_SHARED_NAMES = {
    "tok_embeddings.": "embed_tokens.",
    ".attention.wqkv.": ".self_attn.qkv_proj.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".attention.q_norm.scale": ".self_attn.q_norm.weight",
    ".attention.k_norm.scale": ".self_attn.k_norm.weight",
    ".attention.dyn_w_proj.dw1": ".self_attn.compose.hidden_weight",
    ".attention.dyn_w_proj.qkw": ".self_attn.compose.low_rank_weight",
    ".attention.dyn_w_proj.dd": ".self_attn.compose.gate_weight",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".feed_forward.w2.": ".mlp.down_proj.",
}
# By model type; and the output layer, which is outside the decoder.
AUTHORS_NAMES = {
    "dcformer": {
        **_SHARED_NAMES,
        ".feed_forward.w1.": ".mlp.gate_proj.",
        ".feed_forward.w3.": ".mlp.up_proj.",
        ".feed_forward.mg.": ".mlp.gate_mix.",
    },
    "dcpythia": {**_SHARED_NAMES, ".feed_forward.w1.": ".mlp.up_proj."},
}
AUTHORS_OUTPUT_NAMES = {"output.": "lm_head."}
# Rows that `oov_policy="pad"` rounds the vocabulary up to: 50,257 becomes 50,304, past the tokenizer's last id 50,276.
_VOCABULARY_MULTIPLE = 128


def authors_patterns(model_type: str) -> dict[str, str]:
    """The authors' names as the `key_mapping` of Transformers' `from_pretrained`: regular expression -> our part."""
    names = {**AUTHORS_NAMES[model_type], **AUTHORS_OUTPUT_NAMES}
    return {_pattern(authors_part): our_part for authors_part, our_part in names.items()}


def _pattern(authors_part: str) -> str:
    # A part that does not start with a dot starts a name; one that does not end with a dot ends it. Transformers turns
    # the pattern into a name when it saves, for which it drops lookarounds, but would keep a "$".
    start, end = "" if authors_part.startswith(".") else "(?<![^.])", "" if authors_part.endswith(".") else "(?!.)"
    return start + re.escape(authors_part) + end


@contextmanager
def saved_in_authors_names(model: "PreTrainedModel", patterns: dict[str, str]) -> Iterator[None]:
    """Let Transformers write the authors' names, also of a model that was not read from a file of theirs."""
    used = getattr(model, "_weight_conversions", None)
    model._weight_conversions = [WeightRenaming(*names) for names in patterns.items()]
    try:
        yield
    finally:
        model._weight_conversions = used


def load_checked(
    model_class: type[_Model],
    load: Callable[..., Any],
    path: _Source | None,
    may_lack_weights: bool,
    *args: Any,
    ignore_mismatched_sizes: bool = False,
    **kwargs: Any,
) -> tuple[_Model, dict[str, Any]]:
    """
    Load a model by Transformers, and refuse what would leave a weight random that the file ought to hold.

    Args:
        model_class: The class that is loaded.
        load (`Callable`): `PreTrainedModel.from_pretrained` of that class.
        path: Folder or name on the Hub, or None for weights given as `state_dict`.
        may_lack_weights (`bool`): Leave it to the caller to look into the loading info for missing weights.
        ignore_mismatched_sizes (`bool`, defaults to `False`): Draw weights of another shape anew.

    Returns:
        The model and Transformers' loading info.

    Raises:
        FileNotFoundError, ValueError: as `DCFormerPreTrainedModel.from_pretrained` says.
    """
    if path is not None and _looks_local(path) and not Path(path).exists():
        raise FileNotFoundError(f"There is no model folder {str(path)!r}; check the path.")
    with _held_back_reports() as held_back:
        try:
            # Mismatches are let through here, to be reported below by name and shape.
            options: dict[str, Any] = {"ignore_mismatched_sizes": True, "output_loading_info": True}
            model, info = load(path, *args, **options, **kwargs)
        except (SafetensorError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(_unreadable(path, error)) from error
        except RuntimeError as error:
            if "PytorchStreamReader" not in str(error):
                raise
            raise ValueError(_unreadable(path, error)) from error
        try:
            _check_split_projections(path, info["unexpected_keys"])
            if not ignore_mismatched_sizes:
                is_own = "config" not in kwargs or getattr(kwargs["config"], "_name_or_path", None) == str(path)
                _check_sizes(path, info["mismatched_keys"], "its config.json" if is_own else "the configuration given")
            if path is not None and info["missing_keys"] and not may_lack_weights:
                _check_missing(model_class, model, path, info["missing_keys"], kwargs)
        except ValueError:
            held_back.clear()
            raise
    if path is not None:
        model._source_sha256 = _noted_source(path, kwargs)
    return model, info


def _noted_source(path: _Source, kwargs: dict[str, Any]) -> str | None:
    """The checksum of the checkpoint that the weights were converted from, if their header notes one."""
    where = {name: kwargs[name] for name in ("subfolder", "revision", "cache_dir", "token") if name in kwargs}
    # What was loaded is on this machine.
    config = cached_file(
        path, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False, **where
    )
    return None if config is None else read_header_notes(Path(config).parent).get(SOURCE_NOTE)


@contextmanager
def _held_back_reports() -> Iterator[list[logging.LogRecord]]:
    """Hold back what Transformers reports of a load, and pass on what is left of it at the end."""
    logger = logging.getLogger("transformers.modeling_utils")
    records: list[logging.LogRecord] = []

    def hold_back(record: logging.LogRecord) -> bool:
        is_report = "LOAD REPORT" in record.getMessage()
        if is_report:
            records.append(record)
        return not is_report

    logger.addFilter(hold_back)
    try:
        yield records
    finally:
        logger.removeFilter(hold_back)
        for record in records:
            logger.handle(record)


def _looks_local(path: _Source) -> bool:
    """Whether a name can only be a path: names on the Hub have at most one slash and do not start with one or a dot."""
    return isinstance(path, Path) or str(path).startswith((".", "/", "~")) or str(path).count("/") > 1


def _unreadable(path: _Source | None, error: Exception) -> str:
    reason = str(error).split(". ")[0]
    return f"A weights file in {str(path)!r} is truncated or damaged ({reason}); copy or download it again."


def _and_others(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more weights"


def _check_split_projections(path: _Source | None, unexpected_keys: Collection[str]) -> None:
    split = sorted(key for key in unexpected_keys if re.search(r"\battention\.w[qkv]\.", key))
    if split:
        raise ValueError(
            f"{str(path)!r} holds split query, key and value projections ({_and_others(split)}); write it in our "
            "layout with `dcformer convert torch SRC DST` and load DST."
        )


class _OtherShape(ValueError, RuntimeError):
    """A ValueError, as all that a user can correct, and what Transformers raises here, which callers may expect."""


def _check_sizes(
    path: _Source | None, mismatched_keys: Collection[tuple[str, torch.Size, torch.Size]], by: str
) -> None:
    if not mismatched_keys:
        return
    key, in_file, by_config = sorted(mismatched_keys, key=lambda item: item[0])[0]
    others = f", and {len(mismatched_keys) - 1} more differ" if len(mismatched_keys) > 1 else ""
    raise _OtherShape(
        f"{key} has shape {tuple(in_file)} in {str(path)!r} but {tuple(by_config)} by {by}{others}; correct the "
        "configuration, or pass ignore_mismatched_sizes=True to from_pretrained to draw these anew."
    )


def _check_missing(
    model_class: type[_Model], model: _Model, path: _Source, missing_keys: Collection[str], kwargs: dict[str, Any]
) -> None:
    """
    Raise ValueError for weights that are not in the file although its own configuration says that they are. Those that
    only the caller's configuration adds (composition switched on in a plain Transformer) start at random, as does a
    head that the file never had; of both Transformers' report tells.
    """
    where = {name: kwargs[name] for name in ("subfolder", "revision", "cache_dir", "token") if name in kwargs}
    own = type(model.config).from_pretrained(path, **where)
    with torch.device("meta"):
        expected = {name for name, _ in model_class(own).named_parameters()}
    saved_class = (own.architectures or [model_class.__name__])[0]
    if saved_class != model_class.__name__:
        expected = {name for name in expected if name.startswith(f"{model_class.base_model_prefix}.")} or expected
    if heads := getattr(model_class, "_heads_that_may_be_new", None):
        expected = {name for name in expected if not re.match(heads, name)}
    if lost := sorted(expected & set(missing_keys)):
        raise ValueError(
            f"{str(path)!r} lacks {_and_others(lost)}, for which its config.json asks and which would start at random; "
            "copy or download it again, or correct its config.json."
        )


def padded_rows(rows: int) -> int:
    """The rows of a vocabulary with those that `oov_policy="pad"` adds."""
    return -(-rows // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE


def pad_rows(model: "PreTrainedModel") -> None:
    """Add embedding and output rows up to the next multiple of 128, each the mean of the rows that there are."""
    rows = model.config.vocab_size
    if padded_rows(rows) == rows:
        return
    if getattr(model.config, "distributed_config", None) is not None:
        raise ValueError(
            "oov_policy='pad' cannot add rows to a vocabulary that several processes share; load the model in one "
            "process, save it, and load what was saved."
        )
    model.resize_token_embeddings(padded_rows(rows), mean_resizing=False)
    generation_config = model.generation_config  # None without a language model's head
    if generation_config is not None:
        added = range(rows, model.get_input_embeddings().num_embeddings)
        generation_config.suppress_tokens = [*(generation_config.suppress_tokens or []), *added]
    layers: tuple[Any, ...] = (model.get_input_embeddings(), model.get_output_embeddings())
    with torch.no_grad():
        for layer in layers:
            if layer is not None:
                # In float32 at least: in 16 bits a sum over a vocabulary is worthless.
                kept = layer.weight[:rows]
                mean = kept.to(torch.promote_types(kept.dtype, torch.float32)).mean(0)
                layer.weight[rows:] = mean.to(layer.weight.dtype)
