"""The training YAML of a MaxText run: its values, checked when they are asked for, and its keys, if misspelt."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from ...common.quoting import quoted
from ...common.yaml_text import read_yaml


# Every key that the conversion reads. A training YAML has hundreds more, which say nothing about the model.
READ_KEYS = (
    "base_emb_dim",
    "base_mlp_dim",
    "base_num_decoder_layers",
    "base_num_query_heads",
    "decoder_block",
    "global_parameter_scale",
    "head_dim",
    "key_wise",
    "logits_via_embedding",
    "max_target_length",
    "mlp_activations",
    "normalization_layer_epsilon",
    "normalize_embedding_logits",
    "num_layers_per_block",
    "param_scan_axis",
    "post_compose",
    "pre_compose",
    "qk_norm",
    "query_wise",
    "scan_layers",
    "vocab_size",
    "window_size",
)
# Keys of MaxText that look like one of these and mean something else.
_LOOK_ALIKES = {
    "base_moe_mlp_dim",
    "mlp_activations_limit",
    "num_decoder_layers",
    "num_query_heads",
    "use_qk_norm",
    "v_head_dim",
}
# Share of equal characters from which a key counts as one of these, misspelt. No other key of MaxText comes close.
_MISSPELT = 0.85


class TrainConfig:
    """The values of a run's training YAML, each checked against its type when asked for."""

    def __init__(self, path: Path | None):
        """
        Args:
            path (`Path`, *optional*): The YAML file. None: no values.

        Raises:
            FileNotFoundError: if the file does not exist.
            ValueError: if it is not a YAML mapping, or has a key that is one we read, misspelt.
        """
        self.path = path
        self.values: dict[Any, Any] = {}
        if path is None:
            return
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no training configuration {str(path)!r}; check --train-config.")
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{str(path)!r} is no text in UTF-8 ({error.reason}); save it as such.") from error
        self.values = read_yaml(text, repr(str(path)))
        if not isinstance(self.values, dict):
            raise ValueError(f"{str(path)!r} must hold `key: value` lines, got {type(self.values).__name__}.")
        for key in self.values:
            if (meant := _meant(key)) is not None:
                raise ValueError(f"{str(path)!r} has the key {quoted(key)}; {meant!r} was meant: correct or remove it.")

    @property
    def name(self) -> str:
        """The file's name without its folders; empty if there is no file."""
        return "" if self.path is None else Path(self.path).name

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        """A value of one of the types, or the default if the file does not have the key."""
        if key not in self.values:
            return default
        value = self.values[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ValueError(f"{key} in {str(self.path)!r} must be {names}, got {quoted(value)}.")
        return value


def _meant(key: Any) -> str | None:
    """The key that an unknown one looks like, by its letters and digits alone."""
    if not isinstance(key, str) or key in READ_KEYS or key in _LOOK_ALIKES:
        return None
    plain = {re.sub(r"[^a-z0-9]", "", known): known for known in READ_KEYS}
    found = difflib.get_close_matches(re.sub(r"[^a-z0-9]", "", key.lower()), plain, n=1, cutoff=_MISSPELT)
    return plain[found[0]] if found else None
