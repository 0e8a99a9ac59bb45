"""One model in several processes, which answers as it does in one.

torchrun --nproc-per-node 2 examples/several_processes.py tensor      # or: sharded, pipeline
"""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import dcformer


SIZES = {"tensor": "tp_size", "sharded": "fsdp_size", "pipeline": "pp_size"}


def main(way: str, name: str, prompt: str) -> None:
    if not dist.is_initialized():
        dist.init_process_group()
    config = DistributedConfig(**{SIZES[way]: dist.get_world_size()})
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, distributed_config=config)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    if dist.get_rank() == 0:
        print(tokenizer.decode(tokens[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(
        sys.argv[1],
        dcformer.pretrained_path("dcformer-tiny"),
        "static int device_open(struct device *device)\n{\n    if (!",
    )
