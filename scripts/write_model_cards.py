"""
Write the files of model_cards/ again: `python scripts/write_model_cards.py`.

They are made of `scripts/model_cards/`, the presets and the paper. A card's scores are the paper's and say so; sizes
and memory are computed from the shapes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import torch
from huggingface_hub import ModelCardData
from transformers import AutoModelForCausalLM

from dcformer import DCFormerConfig, DCPythiaConfig, cache_bytes_per_token
from dcformer.cards import PAPER_SHOTS, paper_scores
from dcformer.configuration_dcformer import PRESETS
from dcformer.eval import TABLE4_COLUMNS, published
from dcformer.model_card import PAPER_URL, shape_table, table
from dcformer.pretrained import pretrained_names


_FOLDER = Path(__file__).resolve().with_name("model_cards")


def published_cards() -> dict[str, str]:
    """Name of a file -> text: a card for every preset, two of them checkpoints on the Hub, and a list of them."""
    catalogue = json.loads((_FOLDER / "catalogue.json").read_text(encoding="utf-8"))["cards"]
    cards = {f"{name}.md": _card(name, catalogue[name]) for name in PRESETS}
    shapes = [(name, catalogue[name], _shape(name)[1]) for name in PRESETS]
    return {**cards, "README.md": _render("index.md.jinja", shapes=shapes, bundled=pretrained_names())}


def _render(template: str, **values: Any) -> str:
    loader = jinja2.FileSystemLoader(_FOLDER)
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    return jinja2.Environment(loader=loader, **options).get_template(template).render(values)


@cache
def _shape(name: str) -> tuple[DCFormerConfig, int]:
    """The configuration of a preset, and its number of parameters."""
    family = DCPythiaConfig if PRESETS[name]["model_type"] == "dcpythia" else DCFormerConfig
    config = family.from_preset(name)
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config).num_parameters()


def _card(name: str, facts: dict[str, Any]) -> str:
    config, parameters = _shape(name)
    length = config.max_position_embeddings
    sliding = min(config.sliding_window or length, length)
    seen = sum(sliding if kind == "sliding_attention" else length for kind in config.layer_types)
    is_published = "repository" in facts
    data = ModelCardData(
        license=facts.get("licence", "apache-2.0"),
        language="en",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[config.model_type, "dcmha", "causal-lm"],
        datasets=facts.get("datasets"),
        model_name=facts["title"],
        eval_results=[score.to_eval_result() for score in paper_scores(facts["row"])] if is_published else None,
    )
    return _render(
        "card.md.jinja",
        **facts,
        name=name,
        metadata=data.to_yaml(),
        description=PRESETS[name]["description"],
        family=type(config).__name__.removesuffix("Config"),
        paper=PAPER_URL,
        shape=shape_table(config, parameters),
        parameters=parameters,
        length=length,
        cached=seen * cache_bytes_per_token(config, torch.bfloat16),
        vocabulary=config.vocab_size,
        numbers=_paper_numbers(facts),
    )


def _paper_numbers(facts: dict[str, Any]) -> list[str]:
    parts = []
    if row := facts.get("row"):
        rows = [row, *facts["compared_with"]]
        for shots in PAPER_SHOTS:
            models = [published.paper_accuracies(name, shots) for name in rows]
            tasks = [(task, *(round(100 * m[task], 1) for m in models)) for task in (*TABLE4_COLUMNS, "average")]
            parts.append(f"Table 4, accuracy in percent, {shots}-shot:\n\n{table(('task', *rows), tasks)}")
        models = [published.paper_perplexities(name) for name in rows]
        titles = {"pile_ppl": "the Pile, validation", "flan_ppl": "Flan, 320,000 examples"}
        perplexities = [(title, *(m[task] for m in models)) for task, title in titles.items()]
        parts.append(f"Table 4, perplexity per token:\n\n{table(('data', *rows), perplexities)}")
    parts += [f"{t['title']}:\n\n{table(t['headings'], t['rows'])}" for t in facts.get("tables", ())]
    return parts + facts.get("statements", [])


if __name__ == "__main__":
    for file, text in published_cards().items():
        (_FOLDER.parents[1] / "model_cards" / file).write_text(text, encoding="utf-8")
