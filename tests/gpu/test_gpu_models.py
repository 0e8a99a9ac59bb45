"""What users do with a model on a GPU: the same results as on a CPU in float32, and by the kernels."""

import copy

import pytest
import torch
from tiny_models import ANSWERS, random_tokens, tiny_model
from transformers import pipeline

from dcformer.kernels import backward, decode, forward, triton_form


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
DEVICE = "cuda"
# Relative norms of errors of logits, and in float32 of gradients, of two layers whose weights compose strongly.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@pytest.fixture
def launched(monkeypatch):
    """The names of the passes that ran on the kernels, which take calls of any size here."""
    names = set()

    def watch(name, run):
        def watched(*arguments):
            names.add(name)
            return run(*arguments)

        return watched

    for module in (forward, backward, decode):
        name = f"composed_{module.__name__.rpartition('.')[2]}"
        monkeypatch.setattr(module, name, watch(name, getattr(module, name)))
    monkeypatch.setattr(triton_form, "FEWEST_SCORES_IN_A_GRAPH", 0)
    torch._dynamo.reset()
    return names


def relative_error(found, expected):
    return float((found.detach().float().cpu() - expected).norm() / expected.norm())


def on_device(model, dtype=torch.float32):
    return copy.deepcopy(model).to(DEVICE, dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache", [None, "static", "offloaded"])
def test_generation_takes_likely_tokens_with_every_cache(cache, dtype, launched):
    model, tokens = tiny_model("grouped_query_attention"), random_tokens(3, 17)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    inputs = {"attention_mask": mask.to(DEVICE), "return_dict_in_generate": True, "output_logits": True}
    found = on_device(model, dtype).generate(tokens.to(DEVICE), **inputs, **options)
    sequences = found.sequences.cpu()
    whole = torch.cat((mask, torch.ones(3, 12, dtype=mask.dtype)), dim=1)
    expected = model(sequences, attention_mask=whole).logits[:, 16:-1]
    assert relative_error(torch.stack(found.logits, dim=1), expected) < TOLERANCES[dtype]
    assert "composed_decode" in launched


def test_a_pipeline_answers_as_on_a_cpu():
    prompt = "Is the king red ?"
    texts = [
        pipeline("text-generation", model=ANSWERS, **options)(prompt, max_new_tokens=4, do_sample=False)
        for options in ({"device": "cpu"}, {"device_map": "auto", "dtype": torch.bfloat16})
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_a_training_step(autocast, checkpoints, is_compiled, launched):
    exact, tokens = tiny_model("all_branches").train(), random_tokens(2, 40)
    exact(tokens, labels=tokens).loss.backward()
    errors = {}
    for implementation in ("dcmha_plain", "eager"):
        model = on_device(exact)
        model.zero_grad()
        model.set_attn_implementation(implementation)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        run = torch.compile(model) if is_compiled and implementation == "eager" else model
        with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
            loss = run(tokens.to(DEVICE), labels=tokens.to(DEVICE), use_cache=False).loss
        loss.backward()
        pairs = zip(model.named_parameters(), exact.parameters())
        errors[implementation] = {name: relative_error(found.grad, right.grad) for (name, found), right in pairs}
    for name, error in errors["eager"].items():
        # Autocast costs PyTorch itself as much: 7 % for embeddings in bfloat16.
        assert error <= (TOLERANCES[torch.float32] if autocast is None else 2 * errors["dcmha_plain"][name]), name
    assert launched == {"composed_forward", "composed_backward"}


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(launched):
    model, documents = tiny_model(), [random_tokens(1, length, seed=length) for length in (7, 30, 19)]
    positions = torch.cat([torch.arange(tokens.shape[1]) for tokens in documents])[None]
    tokens = torch.cat(documents, dim=1)
    found = on_device(model)(tokens.to(DEVICE), position_ids=positions.to(DEVICE), use_cache=False).logits
    assert relative_error(found, torch.cat([model(each).logits for each in documents], dim=1)) < 1e-4
    assert launched == {"composed_forward"}


def test_an_adapter_learns(launched):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(on_device(tiny_model(), torch.bfloat16), peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2)
    tokens, losses = random_tokens(4, 33).to(DEVICE), []
    for _ in range(8):
        losses.append(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0] and launched == {"composed_forward", "composed_backward"}


@torch.no_grad()
def test_cuda_graphs_of_a_compiled_model_give_the_same(launched):
    model = tiny_model()
    compiled = torch.compile(on_device(model, torch.bfloat16), mode="reduce-overhead")
    for seed in range(4):  # the first calls record
        tokens = random_tokens(2, 40, seed=seed)
        found = compiled(tokens.to(DEVICE), use_cache=False).logits
        assert relative_error(found, model(tokens).logits) < TOLERANCES[torch.bfloat16]
    assert launched == {"composed_forward"}


@torch.no_grad()
def test_int8_weights(launched):
    quantization = pytest.importorskip("torchao.quantization")
    model, tokens = tiny_model(hidden_size=128, intermediate_size=256), random_tokens(2, 40)
    quantised = on_device(model, torch.bfloat16)
    quantization.quantize_(quantised, quantization.Int8WeightOnlyConfig())
    assert relative_error(quantised(tokens.to(DEVICE), use_cache=False).logits, model(tokens).logits) < 0.1
    assert launched == {"composed_forward"}
