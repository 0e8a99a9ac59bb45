"""The bundled language models, with composition and without: what they write, their loss on held-out text, their speed.

python examples/demo.py                                   # a minute on two CPU cores
python examples/demo.py FOLDER "Once upon a time" ...     # a model folder and prompts of your own
"""

# ruff: noqa: E402
import argparse
import logging
import time
from pathlib import Path


# torchao says at its import what it lacks without a GPU.
for library in ("torchao", "torch.utils._pytree"):
    logging.getLogger(library).setLevel(logging.ERROR)

import numpy
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import dcformer


MODELS = {"transformer-tiny": "Transformer++, no composition", "dcformer-tiny": "DCFormer++, composed heads"}
PROMPTS = [
    """struct buffer {
    char *data;
    size_t length;
};

void buffer_free(struct buffer *buffer)
{
    free(buffer->""",
    """static struct buffer *buffer_create(size_t size)
{
    struct buffer *buffer = malloc(sizeof(*buffer));
    if (!""",
]
LENGTH = 256  # tokens that the models read at once
MAX_NEW_TOKENS = 48


def held_out_tokens(tokenizer) -> torch.Tensor:
    """NumPy's C headers, which lie on every machine that runs this, as token ids (rows, length)."""
    files = sorted(Path(numpy.get_include()).rglob("*.h"))
    ids = [token for file in files for token in tokenizer(file.read_text(encoding="utf-8"))["input_ids"]]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


@torch.inference_mode()
def read(model, rows: torch.Tensor) -> tuple[float, float, float]:
    """Loss in nats per token, share of tokens that were the likeliest, and tokens per second."""
    loss = right = seconds = 0.0
    for batch in track(rows.split(16), description="reading", transient=True):
        started = time.perf_counter()
        logits = model(input_ids=batch).logits[:, :-1]  # (rows, positions, vocabulary)
        seconds += time.perf_counter() - started
        wanted = batch[:, 1:]
        loss += torch.nn.functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="sum").item()
        right += (logits.argmax(-1) == wanted).sum().item()
    predicted = rows[:, 1:].numel()
    return loss / predicted, right / predicted, rows.numel() / seconds


def write(model, tokenizer, prompt: str, stop: str | None) -> tuple[str, float]:
    """The greedy continuation of a prompt, up to a string if one is given, and tokens per second."""
    options = {} if stop is None else {"stop_strings": stop, "tokenizer": tokenizer}
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    started = time.perf_counter()
    sequences = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, **options)
    tokens = sequences[0, inputs.input_ids.shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True), len(tokens) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description="Let the bundled models write and read, side by side.")
    parser.add_argument("folder", nargs="?", help="Folder of another model to write with; nothing is compared then.")
    parser.add_argument("prompts", nargs="*", help="Prompts to use instead of those of the demo.")
    arguments = parser.parse_args()
    disable_progress_bar()
    console = Console(highlight=False)
    names = [arguments.folder] if arguments.folder else MODELS
    folders = {name: arguments.folder or dcformer.pretrained_path(name) for name in names}
    models = {name: AutoModelForCausalLM.from_pretrained(folder, dtype="float32") for name, folder in folders.items()}
    tokenizer = AutoTokenizer.from_pretrained(next(iter(folders.values())))

    speeds = {}
    for prompt in arguments.prompts or PROMPTS:
        console.rule("prompt", align="left")
        console.print(prompt, markup=False)
        for name, model in models.items():
            console.rule(MODELS.get(name, name), align="left", style="blue")
            text, speeds[name] = write(model, tokenizer, prompt, None if arguments.folder else "\n\n")
            console.print(text, markup=False)
    if arguments.folder is not None:
        return
    table = Table(title="The C headers of NumPy, which neither was trained on")
    for column in ("model", "nats per token", "next token right", "tokens/s read", "tokens/s written"):
        table.add_column(column, justify="right" if table.columns else "left", no_wrap=not table.columns)
    rows, losses = held_out_tokens(tokenizer), []
    for name, model in models.items():
        loss, right, speed = read(model, rows)
        losses.append(loss)
        table.add_row(name, f"{loss:.3f}", f"{100 * right:.1f} %", f"{speed:,.0f}", f"{speeds[name]:.0f}")
    console.print(table)
    console.print(
        f"One pair of models, one text: with composition the loss is {losses[0] - losses[1]:.3f} nats per token lower. "
        "research/language_modelling compares more."
    )


if __name__ == "__main__":
    main()
