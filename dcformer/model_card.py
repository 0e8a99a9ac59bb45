"""The model card, README.md, that a saved folder gets: what the model is, how it loads, and what is not known of it.

A card ends with a comment that holds its own SHA-256. So a card that nobody has touched is replaced when the model is
saved again, and one that a person or another tool has written or edited stays as it is.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData
from yaml import YAMLError

from .sharing_dcformer import AUTO_CLASSES, has_code
from .version_dcformer import __version__


if TYPE_CHECKING:
    from .configuration_dcformer import DCFormerConfig
    from .configuration_dcvit import DCViTConfig

CARD_FILE = "README.md"
PAPER_URL = "https://arxiv.org/abs/2405.08553"
# As the authors' repositories on the Hub say.
PUBLISHED_LICENCES = {"Caiyun-AI/DCFormer-2.8B": "mit", "Caiyun-AI/DCPythia-6.9B": "mit"}

_SIGNATURE = re.compile(
    r"\n<!-- dcformer wrote this card and replaces it when the model is saved again, unless it was edited\. "
    r"sha256: ([0-9a-f]{64}) -->\n\Z"
)
# What the card that Transformers pushes asks its readers for.
_TRANSFORMERS_TEMPLATE = ("[More Information Needed]", "This model card has been automatically generated")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LIMITS = (
    "Nothing is known here of what the model was trained on or how well it does unless this card says so: evaluate it "
    "on your own task before you rely on it. What it says can be wrong, biased or offensive."
)


def write_card(
    name: str,
    config: "DCFormerConfig | DCViTConfig",
    *,
    class_name: str,
    parameters: int,
    dtype: str,
    tags: Iterable[str] = (),
    licence: str | None = None,
    base_model: str | None = None,
    sections: Sequence[tuple[str, str]] = (),
    limits: str = _LIMITS,
) -> str:
    """
    The card of a model that is being saved.

    Args:
        name (`str`): What the card calls it and loads it by: the folder or the name on the Hub.
        config: Its configuration; the card says `trust_remote_code=True` if it names the code in the folder.
        class_name (`str`): The model's class.
        parameters (`int`): How many it has.
        dtype (`str`): Number type of the weights.
        tags: Further tags for the Hub.
        licence (`str`, *optional*): The Hub's name of the licence, if it is known.
        base_model (`str`, *optional*): The model on the Hub that it was made from.
        sections: Heading and Markdown of what is known besides.
        limits (`str`): What the model cannot do.

    Returns:
        The whole file, signed.
    """
    ending = class_name.removeprefix(type(config).__name__.removesuffix("Config"))
    auto_class, task = AUTO_CLASSES.get(ending, ("AutoModel", "feature-extraction"))
    data = ModelCardData(
        license=licence,
        library_name="transformers",
        pipeline_tag=task,
        tags=list(dict.fromkeys([config.model_type, "dcmha", *tags])),
        base_model=base_model,
    )
    if config.composes_heads:
        kind = "whose attention heads are composed dynamically (Dynamically Composable Multi-Head Attention, ICML 2024)"
    else:
        kind = "with plain attention heads, a baseline of Dynamically Composable Multi-Head Attention (ICML 2024)"
    parts = [
        f"---\n{data.to_yaml()}\n---\n\n# {name}",
        f"`{class_name}` of {parameters:,} parameters in {dtype}, {kind}; saved with [dcformer]({PAPER_URL}) "
        f"{__version__}.",
        f"## How to load\n\n{_loading(name, auto_class, has_code(config))}",
        f"## Shape\n\n{shape_table(config, parameters)}",
        *(f"## {heading}\n\n{text}" for heading, text in sections),
        f"## Licence\n\n{_licence(licence)}",
        f"## Limits\n\n{limits}",
    ]
    return signed("\n\n".join(parts) + "\n")


def _loading(name: str, auto_class: str, with_code: bool) -> str:
    if with_code:
        return (
            f'```python\nfrom transformers import {auto_class}\n\nmodel = {auto_class}.from_pretrained("{name}", '
            "trust_remote_code=True)\n```\n\n"
            "The code lies beside the weights; read it before you trust it. Where dcformer is installed, "
            "`import dcformer` takes the place of `trust_remote_code=True`."
        )
    return (
        "```python\nimport dcformer  # registers the model with Transformers\n"
        f"from transformers import {auto_class}\n\n"
        f'model = {auto_class}.from_pretrained("{name}")\n```'
    )


def shape_table(config: "DCFormerConfig | DCViTConfig", parameters: int) -> str:
    """What a reader wants to know of a configuration, as a Markdown table."""
    switches = {
        "before the softmax": config.compose_pre,
        "after it": config.compose_post,
        "query-wise": config.compose_query,
        "key-wise": config.compose_key,
        "low-rank": config.compose_low_rank,
        "gates": config.compose_gate,
        "static": config.compose_static,
    }
    composed = ", ".join(name for name, is_on in switches.items() if is_on)
    groups = f", {config.compose_groups} groups of heads" if config.compose_groups > 1 else ""
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    key_value = f", {heads} key/value heads" * (heads != config.num_attention_heads)
    channels = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    rows = {
        "parameters": f"{parameters:,}",
        "layers": config.num_hidden_layers,
        "width": f"{config.hidden_size}, MLP {config.intermediate_size}",
        "attention": f"{config.num_attention_heads} heads of {channels} channels{key_value}",
        "composition": f"rank {config.compose_rank}{groups}: {composed}" if config.composes_heads else "none",
        **(_of_images(config) if hasattr(config, "image_size") else _of_texts(config)),
    }
    return table(("", ""), rows.items())


def _of_texts(config: Any) -> dict[str, str]:
    sliding = config.layer_types.count("sliding_attention")
    if sliding:
        seen = f"{config.sliding_window} tokens in {sliding} of {config.num_hidden_layers} layers, all in the others"
    else:
        seen = "all tokens in every layer"
    return {
        "a layer sees": seen,
        "vocabulary": f"{config.vocab_size:,} tokens",
        "longest input": f"{config.max_position_embeddings:,} tokens",
    }


def _of_images(config: Any) -> dict[str, str]:
    sizes = {"images": config.image_size, "patches": config.patch_size}
    height_and_width = {name: (size, size) if isinstance(size, int) else size for name, size in sizes.items()}
    return {name: f"{height} x {width} pixels" for name, (height, width) in height_and_width.items()}


def table(headings: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    lines = [
        headings,
        ["---"] * len(headings),
        *([" ".join(str(cell).replace("|", "\\|").split()) for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _licence(licence: str | None) -> str:
    if licence is None:
        return "None was stated when the model was saved; ask whoever made the weights."
    return f"`{licence}`, as the model that this one was made from."


def signed(text: str) -> str:
    """A card with the comment by which it is known later."""
    comment = (
        "<!-- dcformer wrote this card and replaces it when the model is saved again, unless it was edited. "
        f"sha256: {hashlib.sha256(text.encode()).hexdigest()} -->"
    )
    return f"{text}\n{comment}\n"


def is_untouched(text: str) -> bool:
    """Whether we wrote a card and nobody has changed it since."""
    match = _SIGNATURE.search(text)
    return match is not None and hashlib.sha256(text[: match.start()].encode()).hexdigest() == match[1]


def without_signature(text: str) -> str:
    """The card as one that stays, whoever saves the model again."""
    return _SIGNATURE.sub("", text)


def users_card(folder: str | os.PathLike) -> bytes | None:
    """The card of a folder if somebody else has written or edited it, else None."""
    path = Path(folder) / CARD_FILE
    content = path.read_bytes() if path.is_file() else None
    if content is None or is_untouched(content.decode(errors="replace")):
        return None
    return content


def is_transformers_template(text: str) -> bool:
    """Whether a card is the one that Transformers pushes, which says nothing of the model."""
    return all(part in text for part in _TRANSFORMERS_TEMPLATE)


def read_metadata(text: str) -> dict[str, Any]:
    """The metadata of a card; empty if they cannot be read."""
    try:
        return ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, YAMLError):  # of a card that is not ours; the model is saved all the same
        return {}


def known_origin(source: str, name: str) -> tuple[str | None, str | None]:
    """
    Licence and base model of what a model was loaded from.

    Args:
        source (`str`): Folder or name on the Hub; empty for a model that was made anew.
        name (`str`): What the model is saved as.
    """
    card = Path(source, CARD_FILE) if source else None
    if card is not None and Path(source).is_dir():
        data = read_metadata(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else {}
        licence, base = data.get("license"), data.get("base_model")
        return licence if isinstance(licence, str) else None, base if isinstance(base, str) else None
    if not _HUB_NAME.fullmatch(source):
        return None, None
    return PUBLISHED_LICENCES.get(source), source if source != name else None


def bullet_list(items: Mapping[str, Any]) -> str:
    """A Markdown list of names and values."""
    return "\n".join(f"- {name}: {value}" for name, value in items.items())


__all__ = ["CARD_FILE", "is_untouched", "signed", "users_card", "without_signature", "write_card"]
