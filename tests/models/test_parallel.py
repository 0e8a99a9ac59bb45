"""Models that two processes share compute, learn, save and load what one process does."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny_models import VARIANTS, random_tokens, tiny_model
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from dcformer import DCFormerForCausalLM


# Sums over ranks run in another order than those of one process.
TOLERANCE = 2e-5
# Name -> variant of tiny_models, changes of it, whether two ranks can hold heads of their own.
SHARED = {
    "one_group": ("dcformer", {}, False),
    "one_group_with_grouped_queries": ("grouped_query_attention", {}, False),
    "two_groups": ("grouped", {}, True),
    "two_groups_of_every_branch": ("all_branches", {"compose_groups": 2, "vocab_size": 68}, True),
    "two_groups_with_grouped_queries": ("grouped_query_attention", {"compose_groups": 2, "attention_bias": True}, True),
    "two_groups_with_mlp_gate": ("dcformer", {"compose_groups": 2, "mlp_gate_dim": 4}, True),
    "three_slices_of_the_mlp": ("dcformer", {"mlp_gate_dim": 3}, False),
    "tied": ("dcformer", {"compose_groups": 4, "tie_word_embeddings": True}, True),
    "dcpythia": ("dcpythia", {}, False),
    "dcpythia_in_groups": ("dcpythia", {"compose_groups": 2}, True),
    "plain": ("plain_gated_transformer", {}, True),
    "plain_with_learned_positions": ("plain_transformer_with_learned_positions", {"num_key_value_heads": 2}, True),
}
CHECKS: dict[str, Callable[[Path], None]] = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def run_in_two_processes(function, *arguments):
    """What each of two gloo processes, forked from this one, puts into the dictionary that `function` returns."""
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        port = unused.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def run(rank):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
        dist.init_process_group("gloo")
        queue.put((rank, function(*arguments)))
        dist.destroy_process_group()

    processes = [context.Process(target=run, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(150)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    return [found for _, found in sorted((queue.get() for _ in processes), key=lambda item: item[0])]


def failures(folder):
    """Traceback by check; both processes go on with the next check only if both have ended this one."""
    import time
    found = {}
    for name, function in CHECKS.items():
        s = time.time()
        try:
            torch.manual_seed(0)
            function(folder)
            error = None
        except Exception:
            error = traceback.format_exc()
        if dist.get_rank() == 0: print(name, time.time() - s, flush=True)
        errors = [None, None]
        dist.all_gather_object(errors, error)
        if any(errors):
            found[name] = "\n".join(filter(None, errors))
    return found


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, (variant, changes, _) in SHARED.items():
        tiny_model(variant, **changes).save_pretrained(folder / name)
    return run_in_two_processes(failures, folder)[0]


def pair(folder):
    """The model of one process, and its copy shared by two."""
    shared = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    return AutoModelForCausalLM.from_pretrained(folder), shared


def whole(model, state):
    """Tensors as one process has them."""
    state = {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in state.items()}
    for name, module in model.named_modules():
        if (grouped := getattr(module, "grouped_queries", None)) is not None:
            for key in state:
                if key.startswith(f"{name}.qkv_proj."):
                    state[key] = grouped.in_order(state[key])
    return state


def assert_near(actual, expected, name=""):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=TOLERANCE, msg=lambda text: f"{name}: {text}")


def shared_check(function):
    for name in SHARED:
        CHECKS[f"{name}-{function.__name__}"] = lambda folder, name=name: function(folder / name, *SHARED[name][2:])
    return function


@shared_check
def computes_and_learns(folder, by_heads):
    single, shared = pair(folder)
    attention = shared.model.layers[0].self_attn
    assert (attention.num_heads == single.config.num_attention_heads // 2) == by_heads
    own = attention.qkv_proj.weight.to_local()
    assert own.numel() == single.model.layers[0].self_attn.qkv_proj.weight.numel() / 2
    tokens = random_tokens(2, 21)
    with torch.no_grad():
        assert_near(shared(tokens).logits, single(tokens).logits)
    for _ in range(2):  # gradients add up
        for model in (single, shared):
            model(tokens, labels=tokens, use_cache=False).loss.backward()
    expected = {name: parameter.grad for name, parameter in single.named_parameters()}
    found = whole(shared, {name: parameter.grad for name, parameter in shared.named_parameters()})
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_near(found[name], gradient, name)


@torch.no_grad()
@shared_check
def generates(folder, by_heads):
    single, shared = pair(folder)
    tokens = random_tokens(2, 9)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    for options in ({}, {"cache_implementation": "static"}, {"cache_implementation": "static", "prefill_chunk_size": 4}):
        options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, **options}
        found = shared.generate(tokens, return_dict_in_generate=True, output_logits=True, **options)
        expected = single.generate(tokens, return_dict_in_generate=True, output_logits=True, **options)
        assert found.sequences.equal(expected.sequences)
        for step, other in zip(found.logits, expected.logits):
            assert_near(step, other)
        heads = {layer.keys.shape[1] for layer in found.past_key_values.layers}
        assert heads == {single.config.num_key_value_heads // (2 if by_heads else 1)}


@torch.no_grad()
@shared_check
def saves_the_whole_model(folder, by_heads):
    _, shared = pair(folder)
    again = folder.parent / f"{folder.name}-again"
    shared.save_pretrained(again)
    dist.barrier()
    expected, found = load_file(folder / "model.safetensors"), load_file(again / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].equal(weight), name


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(name, failed):
    assert name not in failed, failed[name]
