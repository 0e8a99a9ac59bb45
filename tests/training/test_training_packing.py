"""Packed rows hold every token once, and their losses and gradients are those of the documents alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model
from transformers import default_data_collator
from transformers.masking_utils import find_packed_sequence_indices

from dcformer.training.data import IGNORED_LABEL, pack


PADDING = 66  # a token of the tiny models that no document holds
# Composing and plain models, sliding windows of 6 in every other layer.
MODELS = {
    "composing": ("dcformer", "eager"),
    "composing_parallel": ("dcpythia", "eager"),
    "plain_sdpa": ("plain_gated_transformer", "sdpa"),
    "plain_eager": ("plain_gated_transformer", "eager"),
    "learned_positions_sdpa": ("plain_transformer_with_learned_positions", "sdpa"),
}


def numbered_documents(lengths: list[int]) -> list[tuple[list[int], list[int]]]:
    """Documents whose tokens count on from 0 through all of them; every third token is without a loss."""
    documents, start = [], 0
    for length in lengths:
        input_ids = list(range(start, start + length))
        documents.append((input_ids, [IGNORED_LABEL if token % 3 == 0 else token for token in input_ids]))
        start += length
    return documents


def parts(row: dict[str, list[int]]) -> list[dict[str, list[int]]]:
    """A row cut where positions begin again."""
    starts = [index for index, position in enumerate(row["position_ids"]) if position == 0]
    stops = [*starts[1:], len(row["position_ids"])]
    return [{key: values[a:b] for key, values in row.items()} for a, b in zip(starts, stops)]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    length=st.integers(2, 12),
    packing=st.sampled_from(["split", "whole", "none"]),
)
@settings(max_examples=100, deadline=None)
def test_rows_hold_every_token_once_in_parts_of_one_document(lengths, length, packing):
    documents = numbered_documents(lengths)
    labels = {token: label for document in documents for token, label in zip(*document)}
    owner = {token: number for number, (input_ids, _) in enumerate(documents) for token in input_ids}
    rows = list(pack(documents, length, packing, padding_token_id=-1))
    assert all(len(values) == length for row in rows for values in row.values())
    packed = []
    for row in rows:
        row_parts = parts(row)
        sequences = find_packed_sequence_indices(torch.tensor([row["position_ids"]]))
        assert len(row_parts) == (1 if sequences is None else len(sequences.unique()))
        for index, part in enumerate(row_parts):
            ids = part["input_ids"]
            assert part["position_ids"] == list(range(len(ids)))
            assert part["labels"][0] == IGNORED_LABEL
            if ids[0] == -1:
                assert index == len(row_parts) - 1 and ids == [-1] * len(ids)
                assert part["labels"] == [IGNORED_LABEL] * len(ids)
            else:
                assert len({owner[token] for token in ids}) == 1
                assert part["labels"][1:] == [labels[token] for token in ids[1:]]
                packed.append(ids)
        assert packing != "none" or len(row_parts) <= 2
    assert [token for ids in sorted(packed) for token in ids] == list(range(sum(lengths)))
    if packing == "split":
        assert packed == sorted(packed) and len(rows) == -(-sum(lengths) // length)
    else:  # documents are cut only if they are longer than a row
        cut = [min(length, size - start) for size in lengths for start in range(0, size, length)]
        assert sorted(map(len, packed)) == sorted(cut)


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [([6, 6, 4, 4, 5, 5], 3), ([7, 5, 3, 5], 2), ([9, *[6] * 16, *[4] * 16], 17)],
    ids=["gaps", "fullest_row_that_fits", "fullest_row_goes"],
)
def test_whole_documents_fill_gaps_left_before(lengths, rows):
    packed = list(pack(numbered_documents(lengths), 10, "whole", padding_token_id=-1))
    assert len(packed) == rows and sum(row["input_ids"].count(-1) for row in packed) == 10 * rows - sum(lengths)


@pytest.mark.parametrize("packing", ["split", "whole"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_of_packed_rows_are_sums_over_documents(name, packing):
    variant, implementation = MODELS[name]
    model = tiny_model(variant, attn_implementation=implementation).train()
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(0, PADDING, (size,), generator=generator).tolist() for size in (20, 3, 17, 1, 9, 24)]
    rows = list(pack([(ids, ids) for ids in documents], 32, packing, PADDING))
    batch = default_data_collator(rows)
    assert set(batch) == {"input_ids", "labels", "position_ids"}  # an attention mask would hide the documents
    scored = (batch["labels"] != IGNORED_LABEL).sum()
    packed = model(**batch, use_cache=False).loss

    alone = 0
    for part in (part for row in rows for part in parts(row) if part["input_ids"][0] != PADDING):
        assert packing == "split" or part["input_ids"] in documents
        tokens = torch.tensor([part["input_ids"]])
        logits = model(tokens, use_cache=False).logits[0, :-1]
        alone = alone + torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
    torch.testing.assert_close(packed, alone / scored, atol=1e-5, rtol=0)
    parameters = list(model.parameters())
    for one, other in zip(torch.autograd.grad(packed, parameters), torch.autograd.grad(alone / scored, parameters)):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)
    # The comparison can fail: without restarts of positions documents meet.
    together = model(**{**batch, "position_ids": torch.arange(32)[None]}, use_cache=False).loss
    assert (together - packed).abs() > 1e-4
