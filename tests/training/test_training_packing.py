"""Packed documents: laid out without loss, and as independent of each other as in rows of their own."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model
from transformers.masking_utils import find_packed_sequence_indices

from dcformer.training.data import IGNORED_LABEL, collate, pack


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


def random_documents(lengths: list[int]) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(0, PADDING, (length,), generator=generator).tolist() for length in lengths]
    return [(input_ids, input_ids) for input_ids in documents]


def pieces(row: dict[str, list[int]]) -> list[dict[str, list[int]]]:
    """A row cut where positions begin again."""
    starts = [index for index, position in enumerate(row["position_ids"]) if position == 0]
    stops = [*starts[1:], len(row["position_ids"])]
    return [{key: values[a:b] for key, values in row.items()} for a, b in zip(starts, stops)]


layouts = given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    sequence_length=st.integers(2, 12),
    packing=st.sampled_from(["split", "whole", "none"]),
)


@layouts
@settings(max_examples=60, deadline=None)
def test_every_token_is_in_the_rows_once_and_in_order(lengths, sequence_length, packing):
    rows = list(pack(numbered_documents(lengths), sequence_length, packing, padding_token_id=-1))

    assert all(len(values) == sequence_length for row in rows for values in row.values())
    found = [piece["input_ids"] for row in rows for piece in pieces(row) if piece["input_ids"][0] != -1]
    if packing == "split":  # the other layouts move whole pieces between rows
        assert found == sorted(found)
    assert [token for piece in sorted(found) for token in piece] == list(range(sum(lengths)))


@layouts
@settings(max_examples=60, deadline=None)
def test_pieces_begin_without_a_label_and_belong_to_one_document(lengths, sequence_length, packing):
    documents = numbered_documents(lengths)
    labels = {token: label for document in documents for token, label in zip(*document)}
    owner = {token: number for number, (input_ids, _) in enumerate(documents) for token in input_ids}
    for row in pack(documents, sequence_length, packing, padding_token_id=-1):
        row_pieces = pieces(row)
        for place, piece in enumerate(row_pieces):
            size = len(piece["input_ids"])
            assert piece["position_ids"] == list(range(size))
            assert piece["labels"][0] == IGNORED_LABEL
            if piece["input_ids"][0] == -1:
                assert place == len(row_pieces) - 1
                assert piece["input_ids"] == [-1] * size
                assert piece["labels"] == [IGNORED_LABEL] * size
            else:
                assert len({owner[token] for token in piece["input_ids"]}) == 1
                assert piece["labels"][1:] == [labels[token] for token in piece["input_ids"][1:]]
        sequences = find_packed_sequence_indices(torch.tensor([row["position_ids"]]))
        assert len(row_pieces) == (1 if sequences is None else len(sequences.unique()))


@layouts
@settings(max_examples=60, deadline=None)
def test_layouts_cut_only_what_they_must(lengths, sequence_length, packing):
    rows = list(pack(numbered_documents(lengths), sequence_length, packing, padding_token_id=-1))
    found = [[len(piece["input_ids"]) for piece in pieces(row) if piece["input_ids"][0] != -1] for row in rows]

    cut = [size for length in lengths for size in [sequence_length] * (length // sequence_length)]
    cut += [length % sequence_length for length in lengths if length % sequence_length]
    if packing == "split":
        assert len(rows) == -(-sum(lengths) // sequence_length)
    else:
        assert sorted(size for sizes in found for size in sizes) == sorted(cut)
    if packing == "none":
        assert all(len(sizes) == 1 for sizes in found)


def test_whole_documents_fill_gaps_left_before():
    rows = list(pack(numbered_documents([6, 6, 4, 4, 5, 5]), 10, "whole", padding_token_id=-1))

    assert len(rows) == 3
    assert all(-1 not in row["input_ids"] for row in rows)


def token_losses(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Loss of predicting each token of a batch from those before it, (batch, length); 0 for the first."""
    logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none"
    )
    return torch.nn.functional.pad(losses, (1, 0))


def document_losses(model, input_ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor([input_ids])
    return token_losses(model, {"input_ids": tokens, "position_ids": None})[0]


@pytest.mark.parametrize("packing", ["split", "whole"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_packed_losses_equal_those_of_documents_alone(name, packing):
    variant, implementation = MODELS[name]
    model = tiny_model(variant, attn_implementation=implementation)
    documents = random_documents([20, 3, 17, 1, 2, 9, 24, 11, 5, 30])
    batch = collate(pack(documents, 32, packing, PADDING))
    assert batch["input_ids"].shape[0] > 2

    losses = token_losses(model, batch)
    compared = 0
    for row in range(losses.shape[0]):
        stops = [*(batch["position_ids"][row] == 0).nonzero().flatten().tolist(), 32]
        for start, stop in itertools.pairwise(stops):
            input_ids = batch["input_ids"][row, start:stop].tolist()
            if input_ids[0] == PADDING:
                continue
            if packing == "whole":
                assert input_ids in [document for document, _ in documents]
            alone = document_losses(model, input_ids)
            # float32, losses of about 5 from sums over some hundred products
            torch.testing.assert_close(losses[row, start + 1 : stop], alone[1:], atol=1e-5, rtol=0)
            compared += stop - start
    assert compared == sum(len(document) for document, _ in documents)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_of_a_packed_batch_are_sums_over_documents(name):
    variant, implementation = MODELS[name]
    model = tiny_model(variant, attn_implementation=implementation).train()
    documents = random_documents([20, 3, 17, 2, 9, 24])
    batch = collate(pack(documents, 32, "whole", PADDING))
    scored = (batch["labels"] != IGNORED_LABEL).sum()
    assert scored == sum(len(document) - 1 for document, _ in documents)

    packed = model(**batch, use_cache=False).loss
    alone = sum(document_losses(model, document).sum() for document, _ in documents) / scored
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for one, other in zip(torch.autograd.grad(packed, parameters), torch.autograd.grad(alone, parameters)):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


@torch.no_grad()
def test_documents_of_a_row_would_meet_without_position_ids():
    """That the comparisons above can fail: the same rows without restarts give other losses."""
    model = tiny_model("dcformer")
    batch = collate(pack(random_documents([20, 12]), 32, "whole", PADDING))
    apart = token_losses(model, batch)
    together = token_losses(model, {**batch, "position_ids": torch.arange(32)[None]})

    torch.testing.assert_close(apart[:, :20], together[:, :20], atol=1e-5, rtol=0)
    assert (apart[:, 21:] - together[:, 21:]).abs().max() > 0.1


def test_a_batch_has_three_long_tensors_and_no_attention_mask():
    batch = collate(pack(numbered_documents([5, 9]), 8, "none", padding_token_id=0))

    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert all(tensor.shape == (3, 8) and tensor.dtype == torch.int64 for tensor in batch.values())
