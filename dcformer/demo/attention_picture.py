"""The attention of one head as a picture, before composition and after it."""

from collections.abc import Sequence
from typing import Any

import torch

from ..analysis import heat_map, record
from ..loading import LoadedModel


MOST_READ = 512  # tokens; the memory for their attention grows with the square
MOST_DRAWN = 48  # tokens; more could not be distinguished


def draw(loaded: LoadedModel, ids: Sequence[int], layer: int, head: int) -> str:
    """HTML of a head's weights before and after composition, in a text of these ids; layer and head count from 0."""
    layer, config = int(layer), loaded.model.config
    maps = ["weights", "composed_weights"]
    recording = record(loaded.model, ids[:MOST_READ], maps, layer, int(head), loaded.tokenizer)
    plain, composed = (recording[name][layer][0, 0] for name in maps)  # (query, key)
    after = "This layer does not compose its weights, so both are the same."
    if config.composes_layer(layer) and config.compose_post:
        sums = composed.sum(-1)
        after = (
            f"Signed: {int((composed < 0).sum())} of {int((plain != 0).sum())} weights are negative (orange). Rows "
            f"need not sum to one: these sum to {sums.min():.2f} to {sums.max():.2f}."
        )
    figures, tokens = [], recording.tokens[0]
    labels = tokens[-MOST_DRAWN:]
    panels = ("Before composition", plain, "Rows sum to one."), ("After composition", composed, after)
    for title, weights, note in panels:
        last = weights[-MOST_DRAWN:, -MOST_DRAWN:]
        picture = heat_map(last, labels, labels, f"{title}, queries down, keys across")
        caption = f"{note} Colour scale: up to {weights.abs().max():.2f}."
        figures.append(f"<figure><h4>{title}</h4>{picture}<figcaption>{caption}</figcaption></figure>")
    seen = config.sliding_window if config.layer_types[layer] == "sliding_attention" else "all"
    notes = [f"A query of layer {layer} sees {seen} keys up to its position."]
    if len(ids) > MOST_READ:
        notes.append(f"The first {MOST_READ} of {len(ids)} tokens are read.")
    if len(tokens) > MOST_DRAWN:
        notes.append(f"The last {MOST_DRAWN} of {len(tokens)} tokens are drawn.")
    return f'<div class="attention">{"".join(figures)}</div><p>{" ".join(notes)}</p>'


def copying_head(model: Any, ids: Sequence[int]) -> tuple[int, int]:
    """The layer and the head with most attention to earlier occurrences of the next token."""
    tokens = torch.tensor(ids)
    repeats = tokens[1:, None] == tokens[None, :-1]  # (query, key): the key is the token after the query
    maps = record(model, ids, ["weights"])["weights"].values()
    attention = torch.stack([(weights[0, :, :-1, :-1] * repeats).sum((1, 2)) for weights in maps])  # (layer, head)
    layer, head = divmod(int(attention.argmax()), attention.shape[1])
    return layer, head
