"""The main job from end to end: files in the authors' layout, loaded by the Auto classes, generating text in a batch.

There is no trained model in this package yet, so the demo draws a small DCFormer at random and trains a small tokenizer
on the text below: what it writes is noise. Put your own folder on the command line to generate with a real model:

    python examples/demo.py path/to/DCFormer-2.8B "Once upon a time" "The capital of France is"
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, pipeline
from transformers.utils import logging

import dcformer
from dcformer.modeling_dcformer import AUTHORS_NAMES


PROMPTS = [
    "Attention heads work independently.",
    "Every pair of a query and a key has its own map, computed from both, that says how the heads are mixed",
    "Compose!",
]
TEXT = [
    "Attention heads work independently in a Transformer, although many of them are redundant.",
    "A DCFormer composes them: scores before the softmax and weights after it are mixed across heads.",
    "Every pair of a query and a key has its own map, computed from both, that says how the heads are mixed.",
    "The maps are of low rank with gates on the diagonal, so they cost few parameters and little computation.",
]


def train_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 512 tokens, saved to `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>", pad_token="<|padding|>"
    )
    fast.save_pretrained(folder)
    return fast


def write_authors_checkpoint(folder: Path, vocab_size: int) -> int:
    """Draw a small DCFormer, write it as the authors' torch code does, and return its number of parameters."""
    torch.manual_seed(0)
    values = {
        "model_type": "dcformer",
        "architectures": ["DCFormer"],
        "vocab_size": vocab_size,
        "dim": 128,
        "n_layer": 4,
        "n_head": 8,
        "n_local_heads": 8,
        "head_dim": 16,
        "intermediate_size": 384,
        "block_size": 256,
        "norm_eps": 1e-6,
        "rope_base": 10000,
        "window_size": 16,
        "window_type": None,
        "use_qk_norm": True,
        "use_dcmha": True,
        "query_wise": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    model = dcformer.DCFormerForCausalLM(dcformer.DCFormerConfig(**values))
    names = {**AUTHORS_NAMES[dcformer.DCFormerModel], **AUTHORS_NAMES[dcformer.DCFormerForCausalLM]}
    weights = {}
    for name, weight in model.state_dict().items():
        name = name.removeprefix("model.")
        for theirs, ours in names.items():
            name = name.replace(ours, theirs)
        weights[name] = weight
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    return model.num_parameters()


def generate(folder: Path, prompts: list[str]) -> None:
    """Load a model folder and continue all prompts in one left-padded batch."""
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    print(f"Loaded {type(model).__name__} from {folder} in {time.perf_counter() - started:.1f} s.")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=len(prompts))
    longest = max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
    started = time.perf_counter()
    answers = generator(prompts, max_new_tokens=40, do_sample=False, return_full_text=False)
    seconds = time.perf_counter() - started
    print(
        f"Prompts of up to {longest} tokens and 40 new ones, past the sliding window of "
        f"{model.config.sliding_window} keys, in one batch of {len(prompts)}: {seconds:.1f} s."
    )
    for prompt, (answer,) in zip(prompts, answers):
        print(f"\n> {prompt}\n{answer['generated_text']!r}")


def main() -> None:
    logging.disable_progress_bar()
    if len(sys.argv) > 1:
        if not Path(sys.argv[1]).is_dir():
            sys.exit(f"There is no model folder {sys.argv[1]!r}; give the path of a downloaded checkpoint.")
        generate(Path(sys.argv[1]), sys.argv[2:] or PROMPTS)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = train_tokenizer(folder)
        parameters = write_authors_checkpoint(folder, len(tokenizer))
        print(f"No trained model is in the box yet: this one has {parameters:,} random parameters and writes noise.")
        generate(folder, PROMPTS)


if __name__ == "__main__":
    main()
