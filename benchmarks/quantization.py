"""What quantised weights and quantised caches cost: loss per token against the same model in float32.

    python -m benchmarks.quantization                                          # the bundled models, on head tasks
    python -m benchmarks.quantization --train VALID.txt --text-file TEST.txt   # and small models, trained here on bytes
    python -m benchmarks.quantization --model FOLDER --text-file TEST.txt      # a checkpoint and its tokenizer

Every method scores the same rows of tokens. The difference to float32 is taken row by row, and its interval over rows.
"""

import argparse
import functools
import logging
import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
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

from dcformer import DCFormerForCausalLM, pretrained_path
from dcformer.common.optional import import_optional
from dcformer.common.quiet import quiet_libraries
from dcformer.head_tasks.suite import held_out_documents


try:
    from . import common, small_text_model
except ImportError:  # run as a file, not as a module of the package
    import common
    import small_text_model


FLOAT32 = "float32"
# Tokens that go into a quantised cache at once, and that it keeps as they are before it quantises them: what
# `generate()` takes unless told otherwise.
_RESIDUAL_LENGTH = 128
_DOCUMENTS = 200
_BATCH_SIZE = 16


def _torchao() -> ModuleType:
    missing = "The benchmark of quantisation needs torchao: pip install 'dcformer[quantization]'."
    return import_optional("torchao.quantization", missing)


def _torchao_int4() -> TorchAoConfig:
    torchao = _torchao()
    return TorchAoConfig(torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32)))


def _nf4() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


WEIGHTS: dict[str, Callable[[], Any]] = {
    "torchao int8, weights": lambda: TorchAoConfig(_torchao().Int8WeightOnlyConfig()),
    "torchao int8, weights and activations": lambda: TorchAoConfig(_torchao().Int8DynamicActivationInt8WeightConfig()),
    "torchao int4, groups of 32": _torchao_int4,
    "bitsandbytes int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes nf4": _nf4,
    "quanto int8": lambda: QuantoConfig(weights="int8"),
    "quanto int4": lambda: QuantoConfig(weights="int4"),
}
# Numbers of a row of weights that share a scale, where a method cannot take a row that is no multiple of it.
_GROUPS = {"torchao int4, groups of 32": 32, "bitsandbytes nf4": 64}
# Bits, numbers that share a scale, and the axis that has scales of its own: 0 is Transformers' choice, whose groups run
# along rows and so mix keys with the weights of the composition behind them; with -1 every channel has its own.
CACHES = {
    "cache of 4 bits, groups in rows": (4, 64, 0),
    "cache of 4 bits, groups in channels": (4, 64, -1),
    "cache of 2 bits, groups in rows": (2, 64, 0),
    "cache of 2 bits, groups in channels": (2, 64, -1),
}


class Measured(NamedTuple):
    """Loss per token in nats, its difference to float32, and half the width of the 95 % interval of that."""

    loss: float
    change: float
    interval: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


class Row(NamedTuple):
    """Token ids, and whether each of them counts; the first is never predicted."""

    token_ids: list[int]
    counts: list[bool]


def row_losses(
    model: PreTrainedModel, rows: list[Row], new_cache: Callable[[], Cache] | None = None
) -> tuple[Tensor, Tensor]:
    """
    Summed loss of every row and how many tokens it predicts.

    Args:
        model: In evaluation mode.
        rows: Of two tokens at least; rows of the same length are batched.
        new_cache: Makes the cache through which all but the last tokens of a row are read. None: no cache.

    Returns:
        Both (rows,), in float64.
    """
    losses, counts = torch.zeros(len(rows), dtype=torch.float64), torch.zeros(len(rows), dtype=torch.float64)
    by_length: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        by_length.setdefault(len(row.token_ids), []).append(number)
    for numbers in by_length.values():
        for start in range(0, len(numbers), _BATCH_SIZE):
            chosen = numbers[start : start + _BATCH_SIZE]
            token_ids = torch.tensor([rows[number].token_ids for number in chosen], device=model.device)
            scored = torch.tensor([rows[number].counts for number in chosen])[:, 1:]  # (batch, length - 1)
            logits = _logits(model, token_ids, new_cache)
            nats = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().transpose(1, 2), token_ids[:, 1:], reduction="none"
            )
            losses[chosen] = (nats.double().cpu() * scored).sum(1)
            counts[chosen] = scored.double().sum(1)
    return losses, counts


@torch.no_grad()
def _logits(model: PreTrainedModel, token_ids: Tensor, new_cache: Callable[[], Cache] | None) -> Tensor:
    """(batch, length, vocabulary); with a cache, read in pieces each of which sees those before it quantised."""
    if new_cache is None:
        return model(token_ids, use_cache=False).logits
    cache = new_cache()
    pieces = token_ids.split(_RESIDUAL_LENGTH, dim=1)
    return torch.cat([model(piece, past_key_values=cache, use_cache=True).logits for piece in pieces], dim=1)


def compare(losses: Tensor, base: Tensor, counts: Tensor) -> Measured:
    """The mean loss per token of all rows, and what it is above that of `base`."""
    difference = (losses - base) / counts
    weights = counts / counts.sum()
    change = float((weights * difference).sum())
    # Of a mean over rows of about the same number of tokens
    spread = float((weights.square() * (difference - change).square()).sum().sqrt())
    return Measured(float(losses.sum() / counts.sum()), change, 1.96 * spread)


def measure(folder: str | Path, rows: list[Row], device: torch.device) -> dict[str, Measured]:
    """Every method that the model allows, by name; float32 first."""

    def load(**options: Any) -> PreTrainedModel:
        with quiet_libraries():
            return DCFormerForCausalLM.from_pretrained(folder, device_map=device, **options).eval()

    model = load(dtype=torch.float32)
    base, counts = row_losses(model, rows)
    found = {FLOAT32: compare(base, base, counts)}
    if "sliding_attention" not in model.config.layer_types:  # Transformers quantises no others
        for name, options in CACHES.items():
            new_cache = functools.partial(_quantised_cache, model, *options)
            found[name] = compare(row_losses(model, rows, new_cache)[0], base, counts)
    found["bfloat16"] = compare(row_losses(load(dtype=torch.bfloat16), rows)[0], base, counts)
    for name, make in WEIGHTS.items():
        if uneven := uneven_layers(model, name):
            print(f"Left out: {name}, since inputs of {', '.join(uneven)} are no multiple of {_GROUPS[name]}.")
            continue
        quantised = load(dtype=torch.float32, quantization_config=make())
        found[name] = compare(row_losses(quantised, rows)[0], base, counts)
    return found


def uneven_layers(model: PreTrainedModel, method: str) -> list[str]:
    """Names of the linear layers whose inputs do not divide into the groups of a method."""
    group = _GROUPS.get(method, 1)
    linear = ((name.split(".")[-1], layer) for name, layer in model.named_modules() if type(layer) is torch.nn.Linear)
    return sorted({name for name, layer in linear if layer.in_features % group != 0})


def _quantised_cache(model: PreTrainedModel, bits: int, group: int, axis: int) -> Cache:
    return QuantizedCache(
        "quanto",
        model.config,
        nbits=bits,
        q_group_size=group,
        axis_key=axis,
        axis_value=axis,
        residual_length=_RESIDUAL_LENGTH,
    )


def text_rows(token_ids: list[int], length: int, count: int) -> list[Row]:
    """The first `count` windows of `length` tokens; raises ValueError for a text that is shorter than one."""
    windows = [token_ids[start : start + length] for start in range(0, len(token_ids) - length + 1, length)]
    if not windows:
        raise ValueError(f"The text has {len(token_ids)} tokens, fewer than one window; give --length below that.")
    return [Row(window, [True] * length) for window in windows[:count]]


def head_task_rows(folder: str) -> list[Row]:
    """Documents of the head tasks, of which the answers count: nothing else in them can be known."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for document in held_out_documents(_DOCUMENTS):
        encoded = tokenizer(document["text"], return_offsets_mapping=True)
        counts = [
            any(start < answer_end and answer_start < end for answer_start, answer_end in document["answers"])
            for start, end in encoded["offset_mapping"]
        ]
        rows.append(Row(encoded["input_ids"], counts))
    return rows


def _trained(args: argparse.Namespace, folder: Path) -> Iterable[tuple[str, Path]]:
    text = args.train.read_bytes()
    for name, values in small_text_model.VARIANTS.items():
        if not (folder / name).exists():
            model = small_text_model.train(text, values, steps=args.steps)
            with quiet_libraries():
                model.save_pretrained(folder / name)
        yield name, folder / name


def _sources(args: argparse.Namespace, folder: Path) -> Iterable[tuple[str, str | Path, list[Row]]]:
    """Name, folder and rows of every model that is asked for."""
    if args.model:
        text = args.text_file.read_text(encoding="utf-8")
        for name in args.model:
            tokenizer = AutoTokenizer.from_pretrained(name)
            yield name, name, text_rows(tokenizer(text)["input_ids"], args.length, args.windows)
        return
    for name in ("dcformer-tiny", "transformer-tiny"):
        yield name, pretrained_path(name), head_task_rows(pretrained_path(name))
    if args.train:
        rows = text_rows(list(args.text_file.read_bytes()), args.length, args.windows)
        for name, trained in _trained(args, args.keep or folder):
            yield name, trained, rows


def show(name: str, found: dict[str, Measured]) -> None:
    print(f"\n{name}")
    common.show_table(
        ["method", "loss", "change", "95 %", "perplexity"],
        [
            [method, f"{row.loss:.4f}", f"{row.change:+.4f}", f"± {row.interval:.4f}", f"{row.perplexity:.3f}"]
            for method, row in found.items()
        ],
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_common_arguments(parser)
    parser.add_argument("--model", action="append", help="folder of a checkpoint with its tokenizer; may be repeated")
    parser.add_argument("--train", type=Path, help="text on whose bytes to train the two small models first")
    parser.add_argument("--text-file", type=Path, help="text to score, for --model and --train")
    parser.add_argument("--steps", type=int, default=small_text_model.STEPS, help="training steps of --train")
    parser.add_argument("--keep", type=Path, help="folder for the trained models; those in it are not trained again")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window of the text (default 512)")
    parser.add_argument("--windows", type=int, default=64, help="windows that are scored (default 64)")
    args = parser.parse_args(arguments)
    if bool(args.model or args.train) != bool(args.text_file) or (args.model and args.train):
        parser.error("give --text-file together with either --model or --train")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it says at every product that it casts
    common.show_environment(args.device)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, source, rows in _sources(args, Path(folder)):
            found = measure(source, rows, args.device)
            show(name, found)
            figures[name] = {method: {**row._asdict(), "perplexity": row.perplexity} for method, row in found.items()}
    common.write_json(args, figures)


if __name__ == "__main__":
    main()
