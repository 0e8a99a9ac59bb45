"""Loss per token with quantised weights and quantised caches, against float32 ([figures](../docs/quantization.md)).

    python -m benchmarks.quantization --train valid.txt --text-file test.txt --json quantization.json
    python -m benchmarks.quantization --model CHECKPOINT --text-file test.txt    # another model

With `--train`, a DCFormer and a Transformer++ of the same shape are trained on the bytes of a text first, within
minutes. Every method scores the same rows of tokens. The difference to float32 is taken row by row, and its interval
over rows.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from dcformer.bench import measure as bench

from . import report


FLOAT32 = "float32"
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


class Measured(NamedTuple):
    """Loss per token in nats, its difference to float32, half the width of the 95 % interval of that, perplexity."""

    loss: float
    change: float
    interval: float
    perplexity: float


class Row(NamedTuple):
    """Token ids, and whether each of them counts; the first is never predicted."""

    token_ids: list[int]
    counts: list[bool]


@torch.no_grad()
def row_losses(
    model: PreTrainedModel, rows: list[Row], new_cache: Callable[[], Cache] | None = None
) -> tuple[Tensor, Tensor]:
    """
    Summed loss of every row and how many tokens it predicts: both (rows,), in float64.

    With `new_cache`, rows are read in pieces, each of which sees those before it in that cache.
    """
    losses, counts = torch.zeros(2, len(rows), dtype=torch.float64)
    for length in sorted({len(row.token_ids) for row in rows}):
        numbers = [number for number, row in enumerate(rows) if len(row.token_ids) == length]
        for start in range(0, len(numbers), _BATCH_SIZE):
            chosen = numbers[start : start + _BATCH_SIZE]
            token_ids = torch.tensor([rows[number].token_ids for number in chosen], device=model.device)
            scored = torch.tensor([rows[number].counts for number in chosen])[:, 1:]  # (batch, length - 1)
            if new_cache is None:
                logits = model(token_ids, use_cache=False).logits
            else:
                cache, pieces = new_cache(), token_ids.split(_RESIDUAL_LENGTH, dim=1)
                logits = torch.cat([model(piece, cache=cache, use_cache=True).logits for piece in pieces], 1)
            nats = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().transpose(1, 2), token_ids[:, 1:], reduction="none"
            )
            losses[chosen] = (nats.double().cpu() * scored).sum(1)
            counts[chosen] = scored.double().sum(1)
    return losses, counts


def compare(losses: Tensor, base: Tensor, counts: Tensor) -> Measured:
    """The mean loss per token of all rows, and how far it is above that of `base`."""
    difference = (losses - base) / counts
    weights = counts / counts.sum()
    change = float((weights * difference).sum())
    spread = float((weights.square() * (difference - change).square()).sum().sqrt())
    loss = float(losses.sum() / counts.sum())
    return Measured(loss, change, 1.96 * spread, math.exp(loss))


def measure(folder: str | Path, rows: list[Row], device: torch.device) -> dict[str, Measured]:
    """Every method that the model allows, by name; float32 first."""

    def load(dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
        return DCFormerForCausalLM.from_pretrained(folder, device_map=device, dtype=dtype, **options).eval()

    model = load()
    base, counts = row_losses(model, rows)
    results = {FLOAT32: compare(base, base, counts)}
    if "sliding_attention" not in model.config.layer_types:  # Transformers quantises no others
        for name, options in CACHES.items():
            options = {"residual_length": _RESIDUAL_LENGTH, **options}
            new_cache = partial(QuantizedCache, "quanto", model.config, **options)
            results[name] = compare(row_losses(model, rows, new_cache)[0], base, counts)
    results["bfloat16"] = compare(row_losses(load(torch.bfloat16), rows)[0], base, counts)
    for name, make in WEIGHTS.items():
        linear = [layer for layer in model.modules() if type(layer) is torch.nn.Linear]
        if any(layer.in_features % _GROUPS.get(name, 1) for layer in linear):
            print(f"Left out: {name}, since inputs of a layer are no multiple of {_GROUPS[name]}.")
            continue
        quantised = load(quantization_config=make())
        results[name] = compare(row_losses(quantised, rows)[0], base, counts)
    return results


def text_rows(token_ids: list[int], length: int, count: int) -> list[Row]:
    """Up to `count` windows of `length` tokens, from the beginning."""
    if len(token_ids) < length:
        raise ValueError(f"The text has {len(token_ids)} tokens, fewer than one window; give --length below that.")
    windows = [token_ids[start : start + length] for start in range(0, len(token_ids) - length + 1, length)]
    return [Row(window, [True] * length) for window in windows[:count]]


def train(text: bytes, steps: int, length: int = 256, **values: Any) -> DCFormerForCausalLM:
    """Train a small model on 8 rows of bytes a step, by AdamW; the same call gives the same model."""
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 4, "max_position_embeddings": 512, "sliding_window": None}
    shape |= {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}
    model = DCFormerForCausalLM(DCFormerConfig(**{**shape, **values})).train()
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


def sources(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str | Path, list[Row]]]:
    """Name, folder and rows of every model that is asked for."""
    for name in args.model or ():
        token_ids = AutoTokenizer.from_pretrained(name)(args.text_file.read_text(encoding="utf-8"))["input_ids"]
        yield name, name, text_rows(token_ids, args.length, args.windows)
    if args.train:
        rows = text_rows(list(args.text_file.read_bytes()), args.length, args.windows)
        for name, values in (("DCFormer++", {}), ("Transformer++", {"compose_pre": False, "compose_post": False})):
            train(args.train.read_bytes(), args.steps, **values).save_pretrained(folder / name)
            yield name, folder / name, rows


def main(arguments: list[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", action="append", help="folder of a checkpoint with its tokenizer; may be repeated")
    parser.add_argument("--train", type=Path, help="text to train two small models on first, byte by byte")
    parser.add_argument("--text-file", type=Path, required=True, help="text to score")
    parser.add_argument("--steps", type=int, default=400, help="training steps of --train (default: 400)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window of the text (default: 512)")
    parser.add_argument("--windows", type=int, default=64, help="windows that are scored (default: 64)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args(arguments)
    if bool(args.model) == bool(args.train):
        parser.error("give either --model or --train")
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, source, rows in sources(args, Path(folder)):
            results = measure(source, rows, args.device)
            cells = [
                [method, f"{row.loss:.4f}", f"{row.change:+.4f}", f"± {row.interval:.4f}", f"{row.perplexity:.3f}"]
                for method, row in results.items()
            ]
            bench.show_table([name, "loss", "change", "95 %", "perplexity"], cells)
            figures[name] = {method: row._asdict() for method, row in results.items()}
    report.write(args, args.device, figures=figures)


if __name__ == "__main__":
    main()
