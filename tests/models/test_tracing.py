"""Models as torch's tracers see them: export, trace, compile, fake and meta tensors, forward-mode derivatives."""

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from transformers import GenerationConfig, StaticCache
from transformers.integrations.executorch import convert_and_export_with_cache


def largest_difference(actual, expected):
    return (actual - expected).abs().max().item()


def test_exported_once_it_runs_at_every_length_and_batch():
    model = tiny_model(num_hidden_layers=1)
    batch, length = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(
        model,
        (),
        {"input_ids": random_tokens(2, 13), "use_cache": False},
        dynamic_shapes={"input_ids": {0: batch, 1: length}, "use_cache": None},
    )
    for tokens in (random_tokens(3, 2), random_tokens(1, 21), random_tokens(5, 40)):
        logits = exported.module()(input_ids=tokens, use_cache=False).logits
        assert largest_difference(logits, model(tokens, use_cache=False).logits) < 1e-5


def test_a_static_cache_with_rows_that_a_graph_cannot_widen_is_refused():
    model = tiny_model(num_hidden_layers=1, sliding_window=64)
    cache = {"batch_size": 1, "max_cache_len": 16, "device": "cpu"}
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=cache)
    with pytest.raises(ValueError, match="early_initialization with head_dim=16"):
        convert_and_export_with_cache(model, strict=False)


@pytest.mark.parametrize("variant", ["dcformer", "pre_only", "grouped_query_attention"])
def test_a_static_cache_that_the_user_allocated_by_head_dim(variant):
    model, tokens = tiny_model(variant), random_tokens(2, 13)
    cache = StaticCache(config=model.config, max_cache_len=16)
    heads, head_dim = model.config.num_key_value_heads, model.config.head_dim
    cache.early_initialization(2, heads, head_dim, torch.float32, torch.device("cpu"))
    pieces = [model(piece, cache=cache).logits for piece in tokens.split([9, 1, 3], dim=1)]
    assert largest_difference(torch.cat(pieces, dim=1), model(tokens, use_cache=False).logits) < 2e-5


def test_compiled_for_a_second_length_it_knows_all():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    model = tiny_model(num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    counts = []
    for length in (9, 20, 50):
        tokens = random_tokens(2, length)
        mask = torch.ones_like(tokens)
        logits = compiled(tokens, attention_mask=mask, use_cache=False).logits
        assert largest_difference(logits, model(tokens, use_cache=False).logits) < 1e-5
        counts.append(len(graphs))
    assert counts == [1, 2, 2]


def test_forward_mode_derivatives(length=13):
    model = tiny_model().double()
    embeddings = model.get_input_embeddings()(random_tokens(1, length)).detach()
    direction = torch.randn(embeddings.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def logits(inputs):
        return model(inputs_embeds=inputs, use_cache=False).logits

    _, derivative = torch.func.jvp(logits, (embeddings,), (direction,))
    step = 1e-5
    numeric = (logits(embeddings + step * direction) - logits(embeddings - step * direction)) / (2 * step)
    torch.testing.assert_close(derivative, numeric, rtol=1e-5, atol=1e-5)
