"""The scores in the cards of the bundled models: those of the weights that are shipped, and of all training seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .comparison import part_of
from .intervals import further_share_interval, seed_interval
from .labels import REFERENCES
from .references import BLIND_CHOICE, LONE_NAME, ODD_ONE_OUT
from .suite import AUTHORS, HELD_OUT


BEGIN, END = "<!-- scores: written by scripts/pack_pretrained.py -->", "<!-- end of scores -->"
COMMAND = "dcformer eval --suite head_tasks --data-dir DIR"

_SINGLE = ("by_shots", "0")
_WHOLE: tuple[str, str, tuple[str, ...]] = ("held-out tasks, none to seven examples", HELD_OUT, ())
_ROWS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("held-out questions without an example before", HELD_OUT, _SINGLE),
    ("of these about persons", HELD_OUT, ("by_subject", "persons", *_SINGLE)),
    ("of these about lists", HELD_OUT, ("by_subject", "lists", *_SINGLE)),
    ("with seven examples before", HELD_OUT, ("by_shots", "7")),
    _WHOLE,
    ("the authors' 888 texts, two to seven examples", AUTHORS, ()),
)


def score_section(results: Mapping[str, Any], references: Mapping[str, Mapping[str, Any]]) -> str:
    """
    The part of a card between [`BEGIN`] and [`END`].

    Args:
        results: What `dcformer.pretrained.seed_results` returns of packed models: `runs`, and in `packed` the `seed` of
            the weights and their `evaluation`, by name of the model.
        references: Set of documents -> [`dcformer.head_tasks.references.reference_summaries`].
    """
    packed = results["packed"]
    names = sorted(packed["evaluation"])
    rules = (BLIND_CHOICE, LONE_NAME, ODD_ONE_OUT)
    shipped = _table(("", *names, *(REFERENCES[rule] for rule in rules)))
    for title, documents, keys in _ROWS:
        parts = [part_of(packed["evaluation"][name].get(documents), *keys) for name in names]
        parts += [part_of(references.get(documents, {}).get(rule), *keys) for rule in rules]
        if any(part is not None for part in parts):
            shipped.append(_row(title, *("" if part is None else f"{100 * part['accuracy']:.1f} %" for part in parts)))
    seeds = sorted({run["seed"] for run in results["runs"]})
    over_seeds = _table(("", *names))
    for title, documents, keys in _ROWS:
        cells = [_over_seeds(results["runs"], name, documents, keys) for name in names]
        if any(cells):
            over_seeds.append(_row(title, *cells))
    blocks = [
        BEGIN,
        f"Right answers of the weights in this package (seed {packed['seed']}, rounded to bfloat16), as `{COMMAND}` "
        "measures them, and of rules that never read the question:",
        "\n".join(shipped),
        f"The same recipe with seeds {', '.join(map(str, seeds))}, before rounding: mean and 95 % interval of "
        "Student's t.",
        "\n".join(over_seeds),
        *_further_seed(results["runs"], names),
        END,
    ]
    return "\n\n".join(blocks)


def with_scores(card: str, section: str) -> str:
    """
    A card with its scores written anew.

    Raises:
        ValueError: if the card does not mark where they stand.
    """
    before, begin, rest = card.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The card does not say where its scores stand; put {BEGIN!r} and {END!r} around them.")
    return before + section + after


def _table(headings: tuple[str, ...]) -> list[str]:
    return [_row(*headings), "|" + "---|" * len(headings)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _values(runs: list[Mapping[str, Any]], name: str, documents: str, keys: tuple[str, ...]) -> list[float]:
    """Accuracies in percent, one per training seed."""
    return [100 * part["accuracy"] for part in _parts(runs, name, documents, keys)]


def _parts(runs: list[Mapping[str, Any]], name: str, documents: str, keys: tuple[str, ...]) -> list[Mapping[str, Any]]:
    parts = [part_of((run["evaluation"] or {}).get(documents), *keys) for run in runs if run["variant"] == name]
    return [part for part in parts if part is not None]


def _further_seed(runs: list[Mapping[str, Any]], names: list[str]) -> list[str]:
    """A sentence for whoever trains the recipe once more; none if there are too few seeds."""
    (title, documents, keys), ends = _WHOLE, {}
    for name in names:
        parts = _parts(runs, name, documents, keys)
        if len(parts) > 1:
            ends_of_share = further_share_interval([part["accuracy"] for part in parts], parts[0]["answers"])
            low, high = (100 * end for end in ends_of_share)
            ends[name] = f"between {low:.1f} % and {high:.1f} % for {name}"
    if not ends:
        return []
    expected = ", ".join(ends.values())
    return [
        f"A single run with another seed is expected {expected} ({title}; 95 % prediction interval, on logits, as runs "
        "are further below the mean than any can be above)."
    ]


def _over_seeds(runs: list[Mapping[str, Any]], name: str, documents: str, keys: tuple[str, ...]) -> str:
    values = _values(runs, name, documents, keys)
    if not values:
        return ""
    mean, half_width = seed_interval(values)
    if math.isnan(half_width):
        return f"{mean:.1f} %"
    return f"{mean:.1f} % ({max(0.0, mean - half_width):.1f} to {min(100.0, mean + half_width):.1f})"
