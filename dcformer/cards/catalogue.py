"""The cards of the published checkpoints and shapes, made from `catalogue.json`, the presets and the paper's tables.

A card's numbers are the paper's and say so. Sizes and memory are computed from the shapes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData

from ..configuration_dcformer import DCFormerConfig, DCPythiaConfig
from ..dcmha_cache import cache_bytes_per_token
from ..eval import published
from ..eval.table4_tasks import TABLE4_COLUMNS
from ..model_card import PAPER_URL, shape_table, table
from ..modeling_dcformer import DCFormerForCausalLM, DCPythiaForCausalLM
from ..presets_dcformer import PRESETS
from ..pretrained import pretrained_names
from .scores import PAPER_SHOTS, paper_scores


_CLASSES = {"dcformer": (DCFormerConfig, DCFormerForCausalLM), "dcpythia": (DCPythiaConfig, DCPythiaForCausalLM)}
_GB = 1e9


def published_cards() -> dict[str, str]:
    """
    The cards of all presets, two of which are checkpoints on the Hub, and a page that lists them.

    Returns:
        Name of a file -> its text.
    """
    cards = {f"{name}.md": _card(name, facts) for name, facts in _catalogue().items()}
    return {**cards, "README.md": _index()}


@cache
def _catalogue() -> dict[str, dict[str, Any]]:
    cards = json.loads((Path(__file__).parent / "catalogue.json").read_text(encoding="utf-8"))["cards"]
    return {name: cards[name] for name in PRESETS}  # every preset has one


@cache
def _shape(name: str) -> tuple[DCFormerConfig, int]:
    """The configuration of a preset, and its number of parameters."""
    config_class, model_class = _CLASSES[PRESETS[name]["model_type"]]
    config = config_class.from_preset(name)
    with torch.device("meta"):
        return config, model_class(config).num_parameters()


def _card(name: str, facts: dict[str, Any]) -> str:
    config, parameters = _shape(name)
    repository = facts.get("repository")
    data = ModelCardData(
        license=facts.get("licence", "apache-2.0"),
        language="en",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[config.model_type, "dcmha", "causal-lm"],
        datasets=facts.get("datasets"),
        model_name=facts["title"],
        eval_results=[score.to_eval_result() for score in paper_scores(facts.get("row"))] if repository else None,
    )
    sections = {
        "How to load": _loading(name, facts),
        "Intended use": _intended_use(facts),
        "Shape": shape_table(config, parameters),
        "Memory": _memory(config, parameters),
        "Training data": facts["training"],
        "The paper's numbers": _paper_numbers(facts),
        "Licence": _licence(facts),
        "Limits": _limits(config, facts),
    }
    kind = "A checkpoint that the authors published" if repository else "A shape, without weights"
    head = (
        f"{kind}: {PRESETS[name]['description']}. Its attention heads are composed dynamically (DCMHA, [Improving "
        f"Transformers with Dynamically Composable Multi-Head Attention]({PAPER_URL}), ICML 2024). dcformer's name of "
        f"the shape is `{name}`."
    )
    body = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in sections.items())
    return f"---\n{data.to_yaml()}\n---\n\n# {facts['title']}\n\n{head}\n\n{body}\n"


def _loading(name: str, facts: dict[str, Any]) -> str:
    config_class, model_class = _CLASSES[PRESETS[name]["model_type"]]
    if repository := facts.get("repository"):
        return (
            "```python\nimport dcformer  # registers the model with Transformers\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{repository}", dtype="bfloat16")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{repository}")\n```\n\n'
            "The authors' files load as they are, without `trust_remote_code`. With it, and without dcformer, their "
            "own code would run, which does not load in Transformers 5."
        )
    return (
        f"```python\nfrom dcformer import {config_class.__name__}, {model_class.__name__}\n\n"
        f'config = {config_class.__name__}.from_preset("{name}")\n'
        f"model = {model_class.__name__}(config)  # random weights\n```"
    )


def _intended_use(facts: dict[str, Any]) -> str:
    if facts.get("repository"):
        return (
            "Research on attention and on pretrained language models: comparing with Pythia, looking inside, and as a "
            "base for fine-tuning. It continues English text; it was not tuned to follow instructions or to chat."
        )
    return "Training models of this shape, and measuring what composition costs at this size."


def _memory(config: DCFormerConfig, parameters: int) -> str:
    length = config.max_position_embeddings
    sliding = config.sliding_window or length
    seen = sum(min(sliding, length) if kind == "sliding_attention" else length for kind in config.layer_types)
    cached = seen * cache_bytes_per_token(config, torch.bfloat16) / _GB
    rows = [
        ("weights in bfloat16", f"{2 * parameters / _GB:.1f} GB"),
        ("weights in float32", f"{4 * parameters / _GB:.1f} GB"),
        (f"cache of one sequence of {length:,} tokens, bfloat16", f"{cached:.2f} GB"),
    ]
    return (
        f"{table(('what', 'size'), rows)}\n\nActivations come on top; training with AdamW takes 16 bytes a parameter."
    )


def _paper_numbers(facts: dict[str, Any]) -> str:
    """Everything here is copied from the paper; nothing was measured by this package."""
    parts = []
    if row := facts.get("row"):
        rows = [row, *facts["compared_with"]]
        for shots in PAPER_SHOTS:
            found = {each: published.paper_accuracies(each, shots) for each in rows}
            tasks = [
                (task, *(round(100 * found[each][task], 1) for each in rows)) for task in (*TABLE4_COLUMNS, "average")
            ]
            parts.append(f"Table 4, accuracy in percent, {shots}-shot:\n\n{table(('task', *rows), tasks)}")
        perplexities = {each: published.paper_perplexities(each) for each in rows}
        lines = [
            (title, *(perplexities[each][task] for each in rows))
            for task, title in (("pile_ppl", "the Pile, validation"), ("flan_ppl", "Flan, 320,000 examples"))
        ]
        parts.append(f"Table 4, perplexity per token:\n\n{table(('data', *rows), lines)}")
    parts += [f"{each['title']}:\n\n{table(each['headings'], each['rows'])}" for each in facts.get("tables", ())]
    parts += facts.get("statements", [])
    if not parts:
        return "The paper has no numbers of this shape."
    return "Copied from the paper, not measured with this package.\n\n" + "\n\n".join(parts)


def _licence(facts: dict[str, Any]) -> str:
    if facts.get("repository"):
        return "MIT, as the authors' repository on the Hub says. The code of dcformer is under Apache 2.0."
    return (
        "The shape is part of dcformer, under Apache 2.0; weights that you train carry the licence that you give them."
    )


def _limits(config: DCFormerConfig, facts: dict[str, Any]) -> str:
    limits = [
        "sdpa, FlashAttention and FlexAttention cannot compose heads, so attention takes more time than in a plain "
        "Transformer of this size.",
    ]
    if facts.get("datasets"):
        limits = [
            "The Pile is text of the internet and of books: what such a model writes can be false, biased, offensive, "
            "or taken word for word from its training data.",
            f"Inputs longer than {config.max_position_embeddings:,} tokens were not trained on.",
            *limits,
        ]
    if config.vocab_size == 50257:
        limits.append(
            "The GPT-NeoX tokenizer has ids up to 50,276 (runs of spaces), and this shape has 50,257 embedding rows; "
            "`oov_policy` says what happens to the others."
        )
    return "\n".join(f"- {limit}" for limit in limits)


def _index() -> str:
    rows = []
    for name, facts in _catalogue().items():
        repository = facts.get("repository")
        weights = f"[{repository}](https://huggingface.co/{repository})" if repository else "none published"
        rows.append((f"[{facts['title']}]({name}.md)", f"`{name}`", f"{_shape(name)[1] / _GB:.2f} billion", weights))
    bundled = ", ".join(f"[{name}](../dcformer/pretrained/{name}/README.md)" for name in pretrained_names())
    return (
        "# Model cards\n\nThe authors published two checkpoints; the other cards are of shapes for which this package "
        f"has a preset. Bundled with the package are {bundled}.\n\n"
        f"{table(('card', 'preset', 'parameters', 'weights'), rows)}\n\n"
        "`python scripts/write_model_cards.py` writes these files from `dcformer/cards/catalogue.json`; a saved or "
        "converted model gets a card of its own ([sharing](../docs/sharing.md)).\n"
    )
