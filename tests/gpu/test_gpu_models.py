"""What users do with a model on a GPU: the same results as on a CPU in float32, and by the kernels."""

import copy
import json

import pytest
import torch
from tiny_models import ANSWERS, random_tokens, tiny_model
from torch._dynamo.utils import counters
from transformers import TorchAoConfig, pipeline

from dcformer import DCFormerForCausalLM


pytestmark = pytest.mark.gpu
# Relative norms of errors of logits, of two layers whose weights compose strongly: PyTorch alone errs by 5 % and 0.6 %.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 8e-2, torch.float16: 1e-2}
TRAINING = {"composed_forward", "composed_backward"}


def relative_error(found, expected):
    return float((found.detach().float().cpu() - expected).norm() / expected.norm())


def exact_model(variant="all_branches"):
    """By PyTorch in float32 on the CPU, which the copies on the device are held to."""
    model = tiny_model(variant)
    model.set_attn_implementation("dcmha_plain")
    return model


def on_device(exact, device, dtype=torch.float32, implementation="eager"):
    model = copy.deepcopy(exact).to(device, dtype)
    model.set_attn_implementation(implementation)
    return model


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(device, launched):
    model, documents = exact_model(), [random_tokens(1, length, seed=length) for length in (7, 30, 19)]
    positions = torch.cat([torch.arange(tokens.shape[1]) for tokens in documents])[None]
    tokens = torch.cat(documents, dim=1)
    found = on_device(model, device)(tokens.to(device), position_ids=positions.to(device), use_cache=False).logits
    assert relative_error(found, torch.cat([model(each).logits for each in documents], dim=1)) < 1e-4
    assert launched == {"composed_forward"}


def test_an_adapter_learns(device, launched):
    peft = pytest.importorskip("peft")
    base = on_device(exact_model(), device, torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2)
    tokens, losses = random_tokens(2, 40).to(device), []
    for _ in range(8):
        losses.append(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0] and launched == TRAINING


@torch.no_grad()
def test_int8_weights(device, launched, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model, tokens = exact_model(), random_tokens(2, 40)
    model.save_pretrained(tmp_path)
    options = {"quantization_config": TorchAoConfig(quantization.Int8WeightOnlyConfig()), "device_map": "auto"}
    quantised = DCFormerForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **options)
    assert type(quantised.model.layers[0].self_attn.qkv_proj.weight) is not torch.nn.Parameter
    found = quantised(tokens.to(device), use_cache=False).logits
    assert found.device.type == device and relative_error(found, model(tokens).logits) < 0.1
    assert launched == {"composed_forward"}


def test_a_pipeline_answers_as_on_a_cpu(device, launched):
    pytest.importorskip("accelerate")
    prompt, texts = "Is the king red ?", []
    for options in ({"device": "cpu"}, {"device_map": "auto", "dtype": torch.bfloat16}):
        answers = pipeline("text-generation", model=ANSWERS, **options)
        texts.append(answers(prompt, max_new_tokens=4, do_sample=False))
    assert texts[0] == texts[1] and answers.model.device.type == device
    assert launched == {"composed_decode"}  # which takes prompts as short as this one too


def gradient_errors(exact, tokens, device, implementation, autocast, checkpoints=False, **compilation):
    """By parameter, the relative errors of the gradients of a step on the device; a compiled step is the third one."""
    model = on_device(exact, device, implementation=implementation)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    run = torch.compile(model, **compilation) if compilation else model
    for _ in range(3 if compilation else 1):  # CUDA graphs are recorded in the second call and replayed in the third
        model.zero_grad()
        with torch.autocast(device, autocast, enabled=autocast is not None):
            loss = run(tokens.to(device), labels=tokens.to(device), use_cache=False).loss
        loss.backward()
    pairs = zip(model.named_parameters(), exact.parameters())
    return {name: relative_error(found.grad, right.grad) for (name, found), right in pairs}


def hold_gradients(device, autocast, *steps):
    """Hold every step, options of [`gradient_errors`], to gradients of the CPU in float32."""
    exact, tokens = exact_model().train(), random_tokens(2, 40)
    exact(tokens, labels=tokens).loss.backward()
    plain = gradient_errors(exact, tokens, device, "dcmha_plain", autocast)
    mean = sum(plain.values()) / len(plain)
    for step in steps:
        for name, error in gradient_errors(exact, tokens, device, "eager", autocast, **step).items():
            # Autocast costs PyTorch as much. Of parameters with 8 numbers that is a matter of luck, so none of them is
            # held to less than all have on average.
            bound = TOLERANCES[torch.float32] if autocast is None else 3 * max(plain[name], mean)
            assert error <= bound, (name, step, error, bound)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_a_training_step(autocast, device, launched):
    hold_gradients(device, autocast, {}, {"checkpoints": True})
    assert launched == TRAINING


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache", [None, "offloaded", "static"])
def test_generation_takes_likely_tokens_with_every_cache(cache, dtype, device, launched):
    model, tokens = exact_model("grouped_query_attention"), random_tokens(3, 17)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    inputs = {"attention_mask": mask.to(device), "return_dict_in_generate": True, "output_logits": True}
    found = on_device(model, device, dtype).generate(tokens.to(device), **inputs, **options)
    sequences = found.sequences.cpu()
    whole = torch.cat((mask, torch.ones(3, 12, dtype=mask.dtype)), dim=1)
    expected = model(sequences, attention_mask=whole).logits[:, 16:-1]
    assert relative_error(torch.stack(found.logits, dim=1), expected) < TOLERANCES[dtype]
    assert launched == {"composed_forward", "composed_decode"}
    assert (counters["stats"]["unique_graphs"] > 0) == (cache == "static")  # which generate() compiles by itself


@torch.no_grad()
def test_cuda_graphs_of_a_compiled_model_give_the_same(device, launched):
    model = exact_model()
    compiled = torch.compile(on_device(model, device, torch.bfloat16), mode="reduce-overhead")
    for seed in range(4):  # the first calls record
        tokens = random_tokens(2, 40, seed=seed)
        found = compiled(tokens.to(device), use_cache=False).logits
        assert relative_error(found, model(tokens).logits) < TOLERANCES[torch.bfloat16]
    assert launched == {"composed_forward"} and counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize(
    ("autocast", "step"),
    [(torch.bfloat16, {"mode": "default", "checkpoints": True}), (None, {"mode": "reduce-overhead"})],
    ids=["autocast_with_checkpoints", "cuda_graphs"],
)
def test_gradients_of_a_compiled_training_step(autocast, step, device, launched):
    hold_gradients(device, autocast, step)
    assert launched == TRAINING and counters["inductor"]["cudagraph_skips"] == 0


def test_a_compiled_recipe_in_bf16_with_checkpoints_learns_as_a_plain_one_in_float32(device, launched, tmp_path):
    pytest.importorskip("omegaconf")
    pytest.importorskip("datasets")
    pytest.importorskip("accelerate")
    from tiny_recipes import tiny_recipe

    from dcformer.training import train

    fast = {"compile": True, "precision": "bf16", "gradient_checkpointing": True}
    losses = []
    for training, model in ((fast, {}), ({}, {"attn_implementation": "dcmha_plain"})):
        folder = tmp_path / str(len(losses))
        train(tiny_recipe(folder, training={**training, "logging_steps": 1}, model=model, data={"evaluation": None}))
        log = json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        losses.append([record["loss"] for record in log])
    assert losses[0] == pytest.approx(losses[1], rel=0.01) and len(losses[0]) == 6
    assert launched == TRAINING
