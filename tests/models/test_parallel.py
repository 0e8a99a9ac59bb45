"""Models that two processes share compute, learn, save and load what one process does."""

import contextlib
import functools
import io
import json
import runpy
import traceback
from collections.abc import Callable
from pathlib import Path

import killable
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from test_loading import write_authors_folder
from tiny_models import ANSWERS, random_tokens, tiny_model
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.modeling_dcformer import CACHE_NAME


# Models compute in float64, where sums over ranks, in another order than those of one process, differ by 1e-13 or so.
TOLERANCE = 1e-9
EXAMPLE = Path(__file__).parents[2] / "examples" / "several_processes.py"
QUESTION = "There are Paris, Paris, Mumbai. Which is different? The city in"
# Name -> variant of tiny_models, changes of it, whether its heads divide between two ranks.
SHARED = {
    "one_group": ("dcformer", {}, False),
    "one_key_value_head": ("grouped", {"num_key_value_heads": 1}, False),
    "two_groups": ("all_branches", {"compose_groups": 2, "vocab_size": 68}, True),
    "gated": ("grouped_query_attention", {"compose_groups": 2, "attention_bias": True, "mlp_gate_dim": 4}, True),
    "tied": ("dcformer", {"compose_groups": 4, "tie_word_embeddings": True}, True),
    "dcpythia_in_groups": ("dcpythia", {"compose_groups": 2}, True),
    "plain_with_learned_positions": ("plain_transformer_with_learned_positions", {"num_key_value_heads": 2}, True),
}
CHECKS: dict[str, Callable[[Path], None]] = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def run_checks(rank, folder):
    """Write the traceback of every check that fails into a file; both processes end one before the next begins."""
    dist.init_process_group("gloo")
    failed = {}
    for name, function in CHECKS.items():
        try:
            torch.manual_seed(0)
            function(folder)
            error = None
        except Exception:
            error = traceback.format_exc()
        errors = [None, None]
        dist.all_gather_object(errors, error)
        if any(errors):
            failed[name] = "\n".join(filter(None, errors))
    if rank == 0:
        (folder / "failed.json").write_text(json.dumps(failed))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """Tracebacks by the name of the check, from two gloo processes."""
    folder = tmp_path_factory.mktemp("models")
    for name, (variant, changes, _) in SHARED.items():
        tiny_model(variant, **changes).save_pretrained(folder / name)
    tiny_model("mlp_gate_and_one_global_in_four").save_pretrained(folder / "four_layers")
    save_file(write_authors_folder(folder / "authors", tiny_model()), folder / "authors" / "model.safetensors")
    assert killable.run_two(run_checks, folder, seconds=300) == [0, 0]
    return json.loads((folder / "failed.json").read_text())


def pair(folder):
    """The model of one process, and its copy shared by two."""
    load = functools.partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float64)
    return load(), load(distributed_config=DistributedConfig(tp_size=2))


def whole(state):
    """Tensors as one process has them."""
    return {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in state.items()}


def assert_near(actual, expected, name="", tolerance=TOLERANCE):
    error, size = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert error < tolerance * max(size, 1), f"{name}: off by {error}, of at most {size}"


def assert_saves(shared, original, again):
    shared.save_pretrained(again)
    dist.barrier()
    expected, saved = load_file(original / "model.safetensors"), load_file(again / "model.safetensors")
    if shared.config.tie_word_embeddings:  # Transformers writes tied weights twice once it has gathered them
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
        saved.setdefault("lm_head.weight", saved["model.embed_tokens.weight"])
    assert saved.keys() == expected.keys()
    for name, weight in expected.items():
        assert saved[name].equal(weight.double()), name


def assert_learns(shared, single, tokens, steps=1, tolerance=TOLERANCE):
    """
    Hold the gradients of `shared` after so many backward passes to those of one pass of one process.

    Returns:
        The logits of the latter.
    """
    output = single(tokens, labels=tokens, use_cache=False)
    output.loss.backward()
    gradients = whole({name: parameter.grad for name, parameter in shared.named_parameters()})
    for name, parameter in single.named_parameters():
        assert_near(gradients[name] / steps, parameter.grad, name, tolerance)
    return output.logits


@torch.no_grad()
def assert_generates(shared, single, tokens, heads):
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected = single.generate(tokens, **options)
    for cache in ({}, {"cache_implementation": "static", "prefill_chunk_size": 4}):
        generated = shared.generate(tokens, **options, **cache)
        assert generated.sequences.equal(expected.sequences)
        assert_near(torch.stack(generated.logits), torch.stack(expected.logits))
        assert {layer.keys.shape[1] for layer in getattr(generated, CACHE_NAME).layers} == {heads}


def shares(folder, name):
    single, shared = pair(folder / name)
    by_heads = SHARED[name][2]
    for layer, other in zip(shared.model.layers, single.model.layers):
        assert (layer.self_attn.num_heads == other.self_attn.num_heads // 2) == by_heads
        weight = layer.self_attn.o_proj.weight
        assert weight.to_local().numel() == other.self_attn.o_proj.weight.numel() // 2
    assert_generates(shared, single, random_tokens(2, 9), single.config.num_key_value_heads // (2 if by_heads else 1))
    tokens = random_tokens(2, 21)
    for _ in range(2):  # gradients add up
        output = shared(tokens, labels=tokens, use_cache=False)
        output.loss.backward()
    assert_near(output.logits, assert_learns(shared, single, tokens, steps=2))
    assert_saves(shared, folder / name, folder / f"{name}-again")


CHECKS.update({f"shares_{name}": functools.partial(shares, name=name) for name in SHARED})


@check
def reads_files_of_the_authors(folder):
    single, shared = pair(folder / "authors")
    state = whole(shared.state_dict())
    for key, weight in single.state_dict().items():
        assert state[key].equal(weight), key
    tokens = random_tokens(2, 9)
    assert_near(shared(tokens).logits, single(tokens).logits)


@check
def a_plan_of_the_caller_is_kept(folder):
    plan = {"model.layers.*.self_attn.qkv_proj": "colwise_gather_output", "lm_head": "colwise_gather_output"}
    config = DistributedConfig(tp_size=2, tp_plan=plan)
    single = AutoModelForCausalLM.from_pretrained(folder / "two_groups")
    shared = AutoModelForCausalLM.from_pretrained(folder / "two_groups", distributed_config=config)
    assert shared.model.layers[0].self_attn.num_heads == single.config.num_attention_heads
    torch.testing.assert_close(shared(random_tokens(2, 9)).logits, single(random_tokens(2, 9)).logits)


@check
def no_more_is_communicated_than_in_llama(folder):
    config = DCFormerConfig.from_pretrained(folder / "two_groups")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    llama = LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in sizes}))
    if dist.get_rank() == 0:
        llama.save_pretrained(folder / "llama")
    dist.barrier()
    counts = {}
    for name in ("llama", "two_groups"):
        _, shared = pair(folder / name)
        with CommDebugMode() as communication, torch.no_grad():
            shared(random_tokens(2, 9))
        counts[name] = communication.get_total_counts()
        with CommDebugMode() as communication:
            shared(random_tokens(2, 9))
        assert communication.get_total_counts() == counts[name]
    assert counts["llama"] >= 4  # two in each of two layers
    assert len(set(counts.values())) == 1, counts


@torch.no_grad()
@check
def stages_of_a_pipeline_compute_and_generate(folder):
    for name in ("four_layers", "tied", "plain_with_learned_positions"):
        single = AutoModelForCausalLM.from_pretrained(folder / name)
        stage = AutoModelForCausalLM.from_pretrained(folder / name, distributed_config=DistributedConfig(pp_size=2))
        assert len(stage.model.layers_here()) == len(single.model.layers) / 2
        tokens = random_tokens(2, 9)
        mask = torch.ones_like(tokens)
        mask[1, :4] = 0
        pieces = [stage(tokens[:, :5], use_cache=True)]
        pieces.append(stage(tokens[:, 5:], **{CACHE_NAME: getattr(pieces[0], CACHE_NAME)}))  # positions are counted
        for logits in (stage(tokens).logits, torch.cat([piece.logits for piece in pieces], dim=1)):
            torch.testing.assert_close(logits, single(tokens).logits, rtol=1e-5, atol=2e-5)
        for options in ({}, {"cache_implementation": "static"}):
            options.update(attention_mask=mask, max_new_tokens=4, do_sample=False)
            assert stage.generate(tokens, **options).equal(single.generate(tokens, **options)), (name, options)


@check
def transformers_own_sharding(folder):
    single = DCFormerForCausalLM.from_pretrained(folder / "two_groups", dtype=torch.float64)
    model = DCFormerForCausalLM.from_pretrained(
        folder / "two_groups", dtype=torch.float64, distributed_config=DistributedConfig(fsdp_size=2)
    )
    tokens = random_tokens(2, 21)
    rows = tokens[dist.get_rank() :][:1]
    model(rows, labels=rows).loss.backward()
    assert_learns(model, single, tokens, tolerance=1e-6)  # of losses in float32
    generated = [copy.generate(tokens[:, :9], max_new_tokens=4, do_sample=False) for copy in (model, single)]
    assert generated[0].equal(generated[1])
    assert_saves(model, folder / "two_groups", folder / "fsdp-again")


@check
def the_example_answers_as_one_process_does(folder):
    for way in ("tensor", "sharded", "pipeline"):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path(str(EXAMPLE))["main"](way, ANSWERS, QUESTION)
        assert ("India" in output.getvalue()) == (dist.get_rank() == 0), way


OF_TENSOR_PARALLELISM = ("shares", "reads_files", "a_plan", "the_example")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.newer_transformers("shares no vocabulary of an odd size"))
        if name.startswith(OF_TENSOR_PARALLELISM)
        else name
        for name in CHECKS
    ],
)
def test_two_processes(name, failed):
    assert name not in failed, failed[name]


@torch.no_grad()
def test_layers_on_the_disk(tmp_path):
    model, tokens = tiny_model("dcpythia"), random_tokens(2, 9)
    model.save_pretrained(tmp_path)
    devices = {"model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "disk", "lm_head": "cpu"}
    devices.update({"model.embed_tokens": "cpu", "model.rotary_emb": "cpu"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=devices, offload_folder=tmp_path / "offload")
    assert next(loaded.model.layers[0].parameters()).is_meta
    options = {"max_new_tokens": 8, "do_sample": False}
    assert loaded.generate(tokens, **options).equal(model.generate(tokens, **options))
