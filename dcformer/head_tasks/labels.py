"""Words for people in tables and plots, where files and recipes have keys."""

from __future__ import annotations

from collections.abc import Mapping


# Rows of Table 9: what is composed, then where, then with what rank.
VARIANTS = {
    "none": "no composition",
    "static": "static composition",
    "low_rank": "dynamic, low rank only",
    "gate": "dynamic, gate only",
    "query_wise": "query-wise only",
    "key_wise": "key-wise only",
    "pre": "scores only (pre-compose)",
    "post": "weights only (post-compose)",
    "rank_1": "both, rank 1",
    "rank_2": "DCFormer++ (both, rank 2)",
    "rank_4": "both, rank 4",
    "all": "both, rank 2, and static",
    "dcformer-tiny": "DCFormer (dcformer-tiny)",
    "transformer-tiny": "Transformer (transformer-tiny)",
}
# Of the sweeps over widths and learning rates.
for _key, _name in (("dcformer", "DCFormer++"), ("transformer", "Transformer++")):
    for _width in (32, 48, 64):
        VARIANTS[f"{_key}_{_width}"] = f"{_name}, width {_width}"
        for _rate in ("1e-2", "2e-2", "4e-2", "8e-2"):
            VARIANTS[f"{_key}_{_width}_rate_{_rate}"] = f"{_name}, width {_width}, rate {_rate}"
for _rate in ("1e-5", "1e-4"):
    VARIANTS[f"dcformer_48_compose_rate_{_rate}"] = f"DCFormer++, width 48, rate 4e-2, of compose weights {_rate}"
SWEEPS = {
    "head-tasks-rates": "Learning rates at width 48",
    "head-tasks-claim": "Equal quality for less? DCFormer++ and Transformer++",
    "head-tasks-ablation": "Table 9 in miniature: what is composed",
}
REFERENCES = {
    "blind_choice": "blind choice",
    "lone_name": "question-blind rule",
    "odd_one_out": "best question-blind rule",
}


def variant_label(name: str, labels: Mapping[str, str] | None = None) -> str:
    """
    What a variant of a sweep is called in a table or plot.

    Args:
        name: Its key in the recipe.
        labels (*optional*): Names that go before those of this file; a name that neither has stands for itself, with
            spaces for underscores.
    """
    known = VARIANTS if labels is None else {**VARIANTS, **labels}
    return known.get(name, name.replace("_", " "))


def sweep_label(name: str) -> str:
    """What a sweep is called in a plot; one without another name keeps that of its recipe."""
    return SWEEPS.get(name, name)


def transformation_label(key: str) -> str:
    """`object->superclass` in words; what is no transformation of that form stays."""
    return key.replace("->", " to ")


def shots_label(shots: str) -> str:
    """A row of scores by number of examples before the question."""
    if shots == "0":
        return "no example"
    return f"{shots} example" if shots == "1" else f"{shots} examples"
