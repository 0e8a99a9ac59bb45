"""Models as torch's tracers see them: export, trace, compile, fake and meta tensors, forward-mode derivatives."""

import pytest
import torch
from tiny_models import random_tokens, strengthened, tiny_config, tiny_model
from torch.torch_version import TorchVersion
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.integrations.executorch import convert_and_export_with_cache

from dcformer import DCFormerForCausalLM, DCFormerForSequenceClassification


# torch 2.10 exports no key/value heads that are shared, nor those of Llama.
GROUPED = "dcformer" if TorchVersion(torch.__version__) < "2.11" else "grouped_query_attention"


def largest_difference(actual, expected):
    return (actual - expected).abs().max().item()


def padded(batch, length, label_shape):
    """Tokens with padding on the left, on the right and without any, as far as there are rows, and labels."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[:1, : length // 3], mask[1:2, length - length // 3 :] = 0, 0
    labels = random_tokens(batch, length, 2, seed=2)
    labels = labels if label_shape == 2 else labels[:, 0]
    return {"input_ids": random_tokens(batch, length), "attention_mask": mask, "labels": labels, "use_cache": False}


@pytest.mark.parametrize(
    ("model_class", "variant", "label_shape"),
    [(DCFormerForCausalLM, GROUPED, 2), (DCFormerForSequenceClassification, "plain_gated_transformer", 1)],
)
def test_exported_once_it_is_right_at_every_length_batch_and_padding_in_any_runtime(model_class, variant, label_shape):
    model = strengthened(model_class(tiny_config(variant, num_hidden_layers=1, pad_token_id=0)))
    batch, length = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("length", min=2, max=64)
    free = {0: batch, 1: length}
    shapes = {"input_ids": free, "attention_mask": free, "use_cache": None}
    shapes["labels"] = free if label_shape == 2 else {0: batch}
    exported = torch.export.export(model, (), padded(2, 13, label_shape), dynamic_shapes=shapes)
    assert "dcformer." not in str(exported.graph)
    for size in ((3, 2), (1, 21), (5, 40)):  # the window is 6
        inputs = padded(*size, label_shape)
        actual, expected = exported.module()(**inputs), model(**inputs)
        assert largest_difference(actual.logits, expected.logits) < 2e-5
        assert abs(actual.loss - expected.loss) < 1e-5


@pytest.mark.parametrize(
    "variant, kind", [("grouped_query_attention", "full_attention"), ("pre_only", "sliding_attention")]
)
def test_the_static_cache_of_an_exported_program_holds_the_key_wise_weights(variant, kind, length=16):
    model = tiny_model(variant, num_hidden_layers=1, layer_types=[kind])
    cache = {"batch_size": 1, "max_cache_len": length, "device": "cpu"}
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=cache)
    step = convert_and_export_with_cache(model, strict=False).module()
    for seed in (1, 2):  # the second text finds the rows of the first
        tokens = random_tokens(1, length, seed=seed)
        steps = [step(input_ids=tokens[:, [i]], cache_position=torch.tensor([i])) for i in range(length)]
        assert largest_difference(torch.cat(steps, dim=1), model(tokens, use_cache=False).logits) < 2e-5


def test_a_cache_with_rows_that_a_graph_cannot_widen_is_refused_and_others_are_not():
    model = tiny_model(num_hidden_layers=1).requires_grad_(False)
    cache = StaticCache(config=model.config, max_cache_len=16)
    cache.early_initialization(1, 4, model.config.head_dim, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="early_initialization with head_dim=16"):
        torch.jit.trace(lambda tokens: model(tokens, cache=cache).logits, random_tokens(1, 1))
    model = tiny_model("pre_only", num_hidden_layers=1).requires_grad_(False)  # whose values have head_dim channels
    cache = DynamicCache(config=model.config)
    model(random_tokens(1, 5), cache=cache)
    torch.jit.trace(lambda tokens: model(tokens, cache=cache).logits, random_tokens(1, 1), check_trace=False)


def test_torchscript_of_a_text_of_several_chunks_knows_all_lengths():
    model = tiny_model(num_hidden_layers=1, use_cache=False)
    with torch.no_grad():
        traced = torch.jit.trace(model, (random_tokens(1, 300),), check_trace=False, strict=False)
    assert "dcformer::" not in str(traced.inlined_graph)
    for tokens in (random_tokens(2, 40), random_tokens(1, 520)):
        assert largest_difference(traced(tokens)["logits"], model(tokens).logits) < 1e-5


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
