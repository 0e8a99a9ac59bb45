"""Adapters of PEFT in vLLM, several at once, answer as the Transformers model with each; those that do not fit answer
nothing, and the engine stays."""

import copy
import shutil

import pytest
import torch
from tiny_models import tiny_model


pytest.importorskip("vllm", reason="vLLM needs a separate environment: make test-serving")
pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm_engines import as_inputs, engine, greedy_of_generate, greedy_sampling, log_probabilities_of_model, prompts_of


ATTENTION, MLP = ["qkv_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
LENGTHS = (1, 5, 17, 30)


def adapter(base, folder, *, rank=4, **options):
    """A model with random adapters, saved in a folder."""
    config = LoraConfig(r=rank, lora_alpha=6, task_type="CAUSAL_LM", **options)
    model = get_peft_model(copy.deepcopy(base), config)
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
    return model.eval()


def ask(llm, prompts, folders):
    """Outputs of all prompts with each adapter, in one batch."""
    requests = [folder and LoRARequest(folder.name, 1 + i, str(folder)) for i, folder in enumerate(folders)]
    sampling = greedy_sampling(8, prompt_logprobs=0)
    given = [request for request in requests for _ in prompts]
    return llm.generate(as_inputs(prompts * len(folders)), sampling, use_tqdm=False, lora_request=given)


@pytest.mark.parametrize("source", ["shared_heads", "authors"])
def test_several_adapters_serve_as_in_transformers_and_others_are_refused(source, golden, tmp_path):
    if source == "authors":
        for part in ("config.json", "model.safetensors"):
            shutil.copy(golden / "B_torch" / "B1_dcformer_9769ae6" / part, tmp_path)
    else:
        tiny_model(num_key_value_heads=2, mlp_gate_dim=4).save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    folders = [None, *(tmp_path / name for name in "abc")]
    models = [base, adapter(base, folders[1], target_modules=ATTENTION + MLP)]
    models.append(adapter(base, folders[2], rank=7, target_modules=["qkv_proj"], use_rslora=True))
    models.append(adapter(base, folders[3], rank=2, target_modules=["up_proj"], rank_pattern={"up_proj": 3}))
    refused = {
        "lora_A.weight has shape .*made for another model": ({"target_modules": ["o_proj"]}, {"head_dim": 16}),
        "lora_B.weight has shape .*made for another model": ({"target_modules": MLP[1:2]}, {"intermediate_size": 44}),
        "layers.7.*not of a linear layer": ({"target_modules": r".*layers\.7\.mlp\.up_proj"}, {"num_hidden_layers": 8}),
        "changes the composition": ({"target_parameters": ["compose.gate_weight"]}, {}),
        "modules_to_save: .'compose'": ({"target_modules": ["o_proj"], "modules_to_save": ["compose"]}, {}),
        "LoRA rank 17 is greater": ({"target_modules": ["o_proj"], "rank": 17}, {}),
        "No such file": (None, {}),
    }
    prompts = prompts_of(base.config.vocab_size, LENGTHS)
    options = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16, "max_num_batched_tokens": 32}
    with engine(tmp_path, max_num_seqs=6, **options) as llm:
        for number, (message, (chosen, other)) in enumerate(refused.items()):
            if chosen is not None:
                config = type(base.config)(**{**base.config.to_dict(), "layer_types": None, **other})
                adapter(AutoModelForCausalLM.from_config(config), tmp_path / f"{number}", **chosen)
            with pytest.raises(VLLMValidationError, match=message):
                ask(llm, prompts, [tmp_path / f"{number}"])
        outputs = ask(llm, prompts, folders)
        shutil.copytree(tmp_path / "0", folders[1], dirs_exist_ok=True)  # no longer what was checked
        with pytest.raises(VLLMValidationError, match="made for another model"):
            ask(llm, prompts, folders[1:2])
    for i, model in enumerate(models):
        answers = outputs[i * len(prompts) : (i + 1) * len(prompts)]
        assert [list(answer.outputs[0].token_ids) for answer in answers] == greedy_of_generate(model, prompts, 8)
        scores = [
            position[token].logprob
            for prompt, answer in zip(prompts, answers)
            for token, position in zip(prompt[1:], answer.prompt_logprobs[1:])
        ]
        torch.testing.assert_close(torch.tensor(scores), log_probabilities_of_model(model, prompts), atol=1e-4, rtol=0)
