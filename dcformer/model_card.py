"""The model card, README.md, of a folder with a model: its class, shape, origin and licence, and how to load it.

A card ends with its own SHA-256 in a comment, which shows whether anybody has edited it.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from .version_dcformer import __version__


CARD_FILE = "README.md"
PAPER_URL = "https://arxiv.org/abs/2405.08553"
# As the authors' repositories on the Hub say.
PUBLISHED_LICENCES = {"Caiyun-AI/DCFormer-2.8B": "mit", "Caiyun-AI/DCPythia-6.9B": "mit"}

_SIGNATURE = "<!-- dcformer wrote this card and may replace it unless it was edited. sha256: {} -->"
_SIGNED = re.compile("\n" + re.escape(_SIGNATURE).replace(r"\{\}", "([0-9a-f]{64})") + r"\n\Z")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LIMITS = (
    "Nothing is known here of what the model was trained on or how well it does unless this card says so: evaluate it "
    "on your own task before you rely on it. What it says can be wrong, biased or offensive."
)


def write_card(
    name: str,
    config: Any,
    *,
    parameters: int,
    dtype: str,
    licence: str | None = None,
    base_model: str | None = None,
    sections: Sequence[tuple[str, str]] = (),
    limits: str = _LIMITS,
) -> str:
    """
    The text of a model card, signed.

    Args:
        name (`str`): The folder or the name on the Hub.
        config (`DCFormerConfig`), parameters (`int`), dtype (`str`): Of a causal language model.
        licence, base_model (`str`, *optional*): As the Hub names them.
        sections (defaults to none): Heading and Markdown text of further sections.
        limits (`str`): Text of the section on limits.
    """
    data = ModelCardData(
        license=licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[config.model_type, "dcmha"],
        base_model=base_model,
    )
    kind = "with plain attention heads, a baseline of Dynamically Composable Multi-Head Attention (ICML 2024)"
    if config.composes_heads:
        kind = "with dynamically composed attention heads (Dynamically Composable Multi-Head Attention, ICML 2024)"
    licence_text = "None was stated when the model was saved; ask whoever made the weights."
    if licence is not None:
        licence_text = f"`{licence}`, as the model that this one was made from."
    class_name = (config.architectures or [""])[0]
    parts = [
        f"---\n{data.to_yaml()}\n---\n\n# {name}",
        f"`{class_name}` of {parameters:,} parameters in {dtype}, {kind}; saved with [dcformer]({PAPER_URL}) "
        f"{__version__}.",
        f"## How to load\n\n{_loading(name, config)}",
        f"## Shape\n\n{shape_table(config, parameters)}",
        *(f"## {heading}\n\n{text}" for heading, text in sections),
        f"## Licence\n\n{licence_text}",
        f"## Limits\n\n{limits}",
    ]
    text = "\n\n".join(parts) + "\n"
    return f"{text}\n{_SIGNATURE.format(hashlib.sha256(text.encode()).hexdigest())}\n"


def _loading(name: str, config: Any) -> str:
    first, trusts, note = "import dcformer  # registers the model with Transformers\n", "", ""
    if getattr(config, "_auto_class", None) or getattr(config, "auto_map", None):
        first, trusts = "", ", trust_remote_code=True"
        note = (
            "\n\nThe code lies beside the weights; read it before you trust it. Where dcformer is installed, "
            "`import dcformer` replaces `trust_remote_code=True`."
        )
    load = f'model = AutoModelForCausalLM.from_pretrained("{name}"{trusts})'
    return f"```python\n{first}from transformers import AutoModelForCausalLM\n\n{load}\n```{note}"


def shape_table(config: Any, parameters: int) -> str:
    """The shape that a `DCFormerConfig` describes, as a Markdown table."""
    parts = {"pre": "before the softmax", "post": "after it", "query": "query-wise", "key": "key-wise"}
    parts |= {"low_rank": "low-rank", "gate": "gates", "static": "static"}
    composed = ", ".join(name for part, name in parts.items() if getattr(config, f"compose_{part}"))
    groups = f", {config.compose_groups} groups of heads" if config.compose_groups > 1 else ""
    some = "" if config.compose_layers is None else f", in {len(config.compose_layers)} layers"
    heads = config.num_key_value_heads
    key_value = f", {heads} key/value heads" * (heads != config.num_attention_heads)
    sliding, layers = config.layer_types.count("sliding_attention"), config.num_hidden_layers
    seen = f"{config.sliding_window} tokens in {sliding} of {layers} layers, all in the others"
    rows = {
        "parameters": f"{parameters:,}",
        "layers": layers,
        "width": f"{config.hidden_size}, MLP {config.intermediate_size}",
        "attention": f"{config.num_attention_heads} heads of {config.head_dim} channels{key_value}",
        "composition": f"rank {config.compose_rank}{groups}{some}: {composed}" if config.composes_heads else "none",
        "a layer sees": seen if sliding else "all tokens in every layer",
        "vocabulary": f"{config.vocab_size:,} tokens",
        "longest input": f"{config.max_position_embeddings:,} tokens",
    }
    return table(("", ""), rows.items())


def table(headings: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    cells = [[" ".join(str(cell).replace("|", "\\|").split()) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, ["---"] * len(headings), *cells])


def bullet_list(items: Mapping[str, Any]) -> str:
    """A Markdown list of names and values."""
    return "\n".join(f"- {name}: {value}" for name, value in items.items())


def without_signature(text: str) -> str:
    """The card as one that is never replaced."""
    return _SIGNED.sub("", text)


def users_card(folder: str | os.PathLike) -> bytes | None:
    """The card in a folder if a person or another tool wrote or edited it, else None."""
    path = Path(folder) / CARD_FILE
    if not path.is_file():
        return None
    content = path.read_bytes()
    match = _SIGNED.search(text := content.decode(errors="replace"))
    is_untouched = match is not None and hashlib.sha256(text[: match.start()].encode()).hexdigest() == match[1]
    return None if is_untouched else content


def known_origin(source: str, name: str) -> dict[str, str]:
    """The `licence` and `base_model`, if known, of a model `name` made from `source`, a folder or a name on the Hub."""
    if source and Path(source).is_dir():
        card = Path(source, CARD_FILE)
        data = ModelCard.load(card, ignore_metadata_errors=True).data if card.is_file() else ModelCardData()
        origin = {"licence": data.license, "base_model": data.base_model}
    elif _HUB_NAME.fullmatch(source):
        origin = {"licence": PUBLISHED_LICENCES.get(source), "base_model": source if source != name else None}
    else:
        return {}
    return {key: value for key, value in origin.items() if isinstance(value, str)}
