"""Every mode of `generate()`, compared with greedy decoding without a cache."""

import copy

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from transformers import CompileConfig, DynamicCache, StaticCache

from dcformer.modeling_dcformer import CACHE_NAME


LENGTH, NEW = 9, 6  # prompt and answer reach past the window of 6
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
EVERY_OUTPUT = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions")


def from_embeddings(model, tokens, **options):
    new = model.generate(inputs_embeds=model.get_input_embeddings()(tokens), **options)  # the new tokens alone
    return torch.cat([tokens, new], dim=1)


def in_two_calls(model, tokens, **options):
    options = {name: value for name, value in options.items() if name not in ("max_new_tokens", "attention_mask")}
    first = model.generate(tokens, max_new_tokens=NEW - 4, return_dict_in_generate=True, **options)
    return model.generate(first.sequences, max_new_tokens=4, **{CACHE_NAME: getattr(first, CACHE_NAME)}, **options)


def option(**added):
    return lambda model, tokens, **options: model.generate(tokens, **options, **added)


def with_cache(make):
    return lambda model, tokens, **options: model.generate(tokens, **{CACHE_NAME: make(model.config)}, **options)


# Modes that return the tokens of greedy decoding. Those of the second table take one row at a time.
MODES = {
    "static_cache": option(cache_implementation="static"),
    "given_dynamic_cache": with_cache(lambda config: DynamicCache(config=config)),
    "given_dynamic_cache_without_windows": with_cache(lambda config: DynamicCache()),
    "given_static_cache_longer_than_needed": with_cache(lambda config: StaticCache(config=config, max_cache_len=40)),
    "prefill_in_chunks": option(prefill_chunk_size=4),
    "prefill_in_chunks_to_a_static_cache": option(prefill_chunk_size=4, cache_implementation="static"),
    "embeddings": from_embeddings,
    "every_output": lambda model, tokens, **options: (
        model.generate(tokens, **dict.fromkeys(EVERY_OUTPUT, True), **options).sequences
    ),
}
MODES_FOR_ONE_ROW = {
    "draft_of_a_dcformer": lambda model, tokens, **options: model.generate(
        tokens, assistant_model=tiny_model(seed=7).double(), **options
    ),
    "draft_that_is_always_right": lambda model, tokens, **options: model.generate(
        tokens, assistant_model=copy.deepcopy(model), **options
    ),
    "prompt_lookup": option(prompt_lookup_num_tokens=3),
    "in_two_calls": in_two_calls,
}


@torch.no_grad()
@pytest.mark.parametrize("variant", ["dcformer", "grouped_query_attention"])
def test_every_mode_gives_a_left_padded_row_what_it_gets_alone_without_a_cache(variant):
    # In float64, where the order of sums cannot turn a choice between two tokens.
    model, tokens = tiny_model(variant).double(), random_tokens(3, LENGTH)
    padding = (4, 0, 7)
    mask = torch.ones_like(tokens)
    for row, padded in enumerate(padding):
        mask[row, :padded] = 0
    alone = [
        model.generate(tokens[row : row + 1, padded:], use_cache=False, **GREEDY)[0, LENGTH - padded :]
        for row, padded in enumerate(padding)
    ]
    assert len(alone[1]) == NEW
    for name, generate in (MODES | {"no_cache": option(use_cache=False)}).items():
        together = generate(model, tokens, attention_mask=mask, **GREEDY)[:, LENGTH:]
        assert torch.equal(together, torch.stack(alone)), name
    for name, generate in MODES_FOR_ONE_ROW.items():
        assert torch.equal(generate(model, tokens[1:2], **GREEDY)[0, LENGTH:], alone[1]), name


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3, "num_return_sequences": 2}, {"num_beams": 3, "do_sample": True}, {"guidance_scale": 1.5}],
)
def test_beams_samples_and_guidance_are_those_of_the_uncached_run(options):
    model, tokens = tiny_model().double(), random_tokens(2, LENGTH)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    options = {"attention_mask": mask, **GREEDY, **options}
    generated = []
    for arguments in ({"use_cache": False}, {"cache_implementation": "dynamic"}, {"cache_implementation": "static"}):
        torch.manual_seed(5)
        generated.append(model.generate(tokens, **options, **arguments))
    assert torch.equal(generated[0], generated[1]) and torch.equal(generated[0], generated[2])


@torch.no_grad()
def test_compiled_generation_makes_no_graph_a_second_time():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _, mode=None):
        graphs.append(graph)
        return graph

    model = tiny_model(num_hidden_layers=1).double()
    options = CompileConfig(fullgraph=True, backend=backend)
    options._compile_all_devices = True  # by default Transformers compiles on accelerators only
    for seed in (1, 2):
        tokens = random_tokens(2, LENGTH, seed=seed)
        mask = torch.ones_like(tokens)
        mask[0, : 2 * seed] = 0
        arguments = {"attention_mask": mask, **GREEDY}
        compiled = model.generate(tokens, cache_implementation="static", compile_config=options, **arguments)
        assert torch.equal(compiled, model.generate(tokens, use_cache=False, **arguments))
        assert len(graphs) == 2  # the first step, and the steps after it


@pytest.mark.newer_transformers("cannot draft by the first layers")
@pytest.mark.parametrize("variant", ["dcformer", "plain_gated_transformer"])
def test_drafts_of_the_first_layers_change_nothing(variant):
    model, tokens = tiny_model(variant, num_hidden_layers=4), random_tokens(1, 9)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    greedy = model.generate(tokens, **options)
    for layers in (1, 3):
        assert torch.equal(model.generate(tokens, assistant_early_exit=layers, **options), greedy)
        assert model.config.num_hidden_layers == 4
    assert torch.equal(model.generate(tokens, **options), greedy)
    model.config.num_hidden_layers = 3
    assert model.model.layers_here() == [0, 1, 2] and len(model(tokens, output_hidden_states=True).hidden_states) == 4
