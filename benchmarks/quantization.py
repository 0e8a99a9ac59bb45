"""Loss per token with quantised weights and quantised caches, against float32 ([figures](../docs/quantization.md)).

    python -m benchmarks.quantization --train valid.txt --text-file test.txt --json quantization.json
    python -m benchmarks.quantization --model CHECKPOINT --text-file test.txt    # another model

With `--train`, a DCFormer and a Transformer++ of the same shape are trained on the bytes of a text first, within
minutes. Every method scores the same rows of tokens. The difference to float32 is taken row by row, and its interval
over rows.
"""

import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BitsAndBytesConfig,
    Cache,
    PreTrainedModel,
    QuantizedCache,
    QuantoConfig,
    TorchAoConfig,
)

from dcformer import DCFormerConfig, DCFormerForCausalLM

from .measure import Benchmark, Entry, Run, run_command


FLOAT32, BFLOAT16 = "float32", "bfloat16"
# Tokens that go into a quantised cache at once, and that it keeps as they are: the default of `generate()`.
_RESIDUAL_LENGTH = 128
_BATCH_SIZE = 16


def _torchao(name: str, **options: Any) -> TorchAoConfig:
    from torchao import quantization

    if "granularity" in options:
        options["granularity"] = quantization.PerGroup(options["granularity"])
    return TorchAoConfig(getattr(quantization, name)(**options))


_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
WEIGHTS: dict[str, Callable[[], Any]] = {
    "torchao int8, weights": partial(_torchao, "Int8WeightOnlyConfig"),
    "torchao int8, weights and activations": partial(_torchao, "Int8DynamicActivationInt8WeightConfig"),
    "torchao int4, groups of 32": partial(_torchao, "IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=32),
    "bitsandbytes int8": partial(BitsAndBytesConfig, load_in_8bit=True),
    "bitsandbytes nf4": partial(BitsAndBytesConfig, **_NF4),
    "quanto int8": partial(QuantoConfig, weights="int8"),
    "quanto int4": partial(QuantoConfig, weights="int4"),
}
# Numbers of a row of weights that share a scale, where a method cannot take a row that is no multiple of it.
_GROUPS = {"torchao int4, groups of 32": 32, "bitsandbytes nf4": 64}
# Bits, and the axis of groups that share a scale: with 0, Transformers' default, they run along rows and so mix keys
# with the weights of the composition behind them; with -1 they run along channels.
CACHES = {
    f"cache of {bits} bits, groups in {what}": {"nbits": bits, "q_group_size": 64, "axis_key": axis, "axis_value": axis}
    for bits in (4, 2)
    for what, axis in (("rows", 0), ("channels", -1))
}


Text = tuple[str, str, Tensor]  # name and folder of a model, and the token ids that it scores, (rows, length)


@torch.no_grad()
def row_losses(model: PreTrainedModel, rows: Tensor, new_cache: Callable[[], Cache] | None = None) -> Tensor:
    """Mean loss of a token of every row, (rows,) in float64; with `new_cache`, rows are read in pieces through one."""
    losses = []
    for token_ids in rows.to(model.device).split(_BATCH_SIZE):
        if new_cache is None:
            logits = model(token_ids, use_cache=False).logits
        else:
            cache, pieces = new_cache(), token_ids.split(_RESIDUAL_LENGTH, dim=1)
            logits = torch.cat([model(piece, cache=cache, use_cache=True).logits for piece in pieces], 1)
        logits = logits[:, :-1].float().transpose(1, 2)
        nats = torch.nn.functional.cross_entropy(logits, token_ids[:, 1:], reduction="none")  # (batch, length - 1)
        losses.append(nats.double().mean(1).cpu())
    return torch.cat(losses)


def compare(losses: Tensor, base: Tensor) -> dict[str, float]:
    """The mean loss of a token, how far it is above that of `base`, and half of the 95 % interval of that."""
    change, loss = losses - base, float(losses.mean())
    interval = 1.96 * float((change - change.mean()).square().sum().sqrt()) / len(change)
    return {"loss": loss, "change": float(change.mean()), "interval": interval, "perplexity": math.exp(loss)}


def measure(run: Run, text: Text) -> None:
    """Every method that the model allows; float32 first."""
    name, folder, rows = text

    def load(dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
        return DCFormerForCausalLM.from_pretrained(folder, device_map=run.device, dtype=dtype, **options).eval()

    model = load()
    base = row_losses(model, rows)
    linear = [layer for layer in model.modules() if type(layer) is torch.nn.Linear]

    def make(name: str) -> dict[str, float] | str:
        if name in CACHES:
            if "sliding_attention" in model.config.layer_types:
                return "not measured: Transformers quantises no caches of windows"
            options = {"residual_length": _RESIDUAL_LENGTH, **CACHES[name]}
            losses = row_losses(model, rows, partial(QuantizedCache, "quanto", model.config, **options))
        elif name in WEIGHTS:
            if any(layer.in_features % _GROUPS.get(name, 1) for layer in linear):
                return f"not measured: inputs of a layer are no multiple of {_GROUPS[name]}"
            losses = row_losses(load(quantization_config=WEIGHTS[name]()), rows)
        else:
            losses = base if name == FLOAT32 else row_losses(load(torch.bfloat16), rows)
        return compare(losses, base)

    run.compare(name, [Entry(name, partial(make, name)) for name in (FLOAT32, *CACHES, BFLOAT16, *WEIGHTS)])


def text_rows(token_ids: list[int], length: int, count: int) -> Tensor:
    """Up to `count` windows of `length` tokens, from the beginning: (windows, length)."""
    if len(token_ids) < length:
        raise ValueError(f"The text has {len(token_ids)} tokens, fewer than one window; give --length below that.")
    return torch.tensor(token_ids[: len(token_ids) // length * length]).view(-1, length)[:count]


def train(text: bytes, steps: int, length: int = 256, **values: Any) -> DCFormerForCausalLM:
    """Train a small model on 8 rows of bytes a step, by AdamW; the same call gives the same model."""
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 4, "max_position_embeddings": 512, "sliding_window": None}
    shape |= {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}
    model = DCFormerForCausalLM(DCFormerConfig(**shape, **values)).train()
    token_ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def rate(step: int) -> float:  # a linear warm-up, then half a cosine down to a tenth
        return min((step + 1) / 50, 0.55 + 0.45 * math.cos(math.pi * max(0, step - 50) / max(1, steps - 50)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(0, len(token_ids) - length, (8,), generator=generator)
        rows = torch.stack([token_ids[start : start + length] for start in starts])
        model(rows, labels=rows, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def texts(run: Run) -> Iterator[Text]:
    """Name, folder and rows of every model that is asked for."""
    args = run.args
    steps, length, count = (2, 160, 2) if run.is_quick else (args.steps, args.length, args.windows)
    for name in args.model or ():
        token_ids = AutoTokenizer.from_pretrained(name)(args.text_file.read_text(encoding="utf-8"))["input_ids"]
        yield name, name, text_rows(token_ids, length, count)
    if args.train:
        rows = text_rows(list(args.text_file.read_bytes()), length, count)
        for name, values in (("DCFormer++", {}), ("Transformer++", {"compose_pre": False, "compose_post": False})):
            with tempfile.TemporaryDirectory() as folder:
                train(args.train.read_bytes(), steps, **values).save_pretrained(folder)
                yield name, folder, rows


OPTIONS = {
    "--model": {"action": "append", "help": "folder of a checkpoint with its tokenizer; may be repeated"},
    "--train": {"type": Path, "help": "text to train two small models on first, byte by byte"},
    "--text-file": {"type": Path, "required": True, "help": "text to score"},
    "--steps": {"type": int, "default": 400, "help": "training steps of --train (default: 400)"},
    "--length": {"type": int, "default": 512, "help": "tokens of a window of the text (default: 512)"},
    "--windows": {"type": int, "default": 64, "help": "windows that are scored (default: 64)"},
}
REGISTRY = (Benchmark("losses", "loss per token", "float32", "nothing: it is the error", texts, measure),)


if __name__ == "__main__":
    sys.exit(run_command(__doc__, REGISTRY, options=OPTIONS, device="cpu", seconds=3600.0))
