"""Prefill and decoding time of a DCFormer beside models of one shape without composition, and the authors' form.

python -m benchmarks.model --heads 6 --cache static --threads 1 2
"""

import argparse
import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
)

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.bench import authors

from . import common


VOCABULARY = 16384
DCFORMER, PLAIN, LLAMA, NEOX = "DCFormer", "no composition", "Llama", "GPT-NeoX"
# Named by how they read a prompt, since they decode alike.
AUTHORS, AUTHORS_CHUNKS = "authors", "authors, in chunks"
_SWITCHES = ("pre", "post", "query", "key", "low_rank", "gate", "static")


class Shape(NamedTuple):
    """Sizes that all models share; every other layer of a DCFormer has the window."""

    heads: int = 12
    hidden: int = 768
    intermediate: int = 2048
    layers: int = 4
    prompt: int = 1024
    steps: int = 32
    window: int | None = 256


def make_models(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """A DCFormer, the same model without composition, Llama and GPT-NeoX; the latter three run sdpa."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.prompt + shape.steps,
        "tie_word_embeddings": False,
    }
    no_composition = {f"compose_{switch}": False for switch in _SWITCHES}
    makers = {
        DCFORMER: (DCFormerForCausalLM, DCFormerConfig(**sizes, sliding_window=shape.window)),
        PLAIN: (DCFormerForCausalLM, DCFormerConfig(**sizes, sliding_window=shape.window, **no_composition)),
        LLAMA: (LlamaForCausalLM, LlamaConfig(**sizes)),
        NEOX: (GPTNeoXForCausalLM, GPTNeoXConfig(**sizes)),
    }
    models = {}
    for name, (model_class, config) in makers.items():
        torch.manual_seed(0)
        models[name] = model_class(config).eval().to(device, dtype)
    return models


def random_tokens(shape: Shape, device: torch.device) -> Tensor:
    """(1, prompt + steps)"""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (1, shape.prompt + shape.steps), generator=generator).to(device)


def prefill_cases(
    models: dict[str, PreTrainedModel], shape: Shape, token_ids: Tensor, with_slow: bool = True
) -> dict[str, common.Case]:
    """
    The prompt into an empty cache, with the logits of its last token.

    Args:
        with_slow (`bool`, defaults to `True`): Whether the authors' formulation reads the prompt as a whole too, which
            takes several times as long as in chunks.
    """
    prompt = token_ids[:, : shape.prompt]
    cases = {}
    for name, model in models.items():
        read = _reader(model)
        prepare = _empty_cache(model, shape, "dynamic")
        cases[name] = common.Case(_with_prompt(read, prompt), prepare=prepare)
    chunks = {AUTHORS_CHUNKS: authors.CHUNK, **({AUTHORS: None} if with_slow else {})}
    for name, chunk in chunks.items():
        decoder = authors.AuthorsDecoder(models[DCFORMER], shape.prompt + shape.steps, chunk)
        cases[name] = common.Case(_with_prompt(_reader(decoder), prompt), prepare=decoder.new_cache)
    return cases


def decode_cases(
    models: dict[str, PreTrainedModel], shape: Shape, token_ids: Tensor, cache: str, compiled: bool = False
) -> dict[str, common.Case]:
    """
    One step after another over given tokens, each case with a copy of a cache that holds the prompt.

    Args:
        cache (`str`): "dynamic" or "static", of Transformers; the authors' formulation has its own.
        compiled (`bool`, defaults to `False`): Compile the models, each graph as a whole, and leave the authors'
            formulation out.
    """
    cases = {}
    for name, model in models.items():
        filled = _empty_cache(model, shape, cache)()
        read = _reader(model)
        read(token_ids[:, : shape.prompt], filled)
        if compiled:
            read = _reader(torch.compile(model, fullgraph=True))
        cases[name] = _steps(read, shape, token_ids, filled)
    if compiled:
        # Every model and number of threads has graphs of its own for the functions that they share.
        torch._dynamo.config.recompile_limit = 64
    else:
        decoder = authors.AuthorsDecoder(models[DCFORMER], shape.prompt + shape.steps, authors.CHUNK)
        filled = decoder.new_cache()
        decoder(token_ids[:, : shape.prompt], filled, logits_to_keep=1)
        cases[AUTHORS] = _steps(_reader(decoder), shape, token_ids, filled)
    return cases


def _steps(read: Callable[[Tensor, object], Tensor], shape: Shape, token_ids: Tensor, filled) -> common.Case:
    tokens = token_ids[:, shape.prompt :].split(1, dim=1)

    def decode(cache):
        for token in tokens:
            read(token, cache)

    return common.Case(decode, prepare=lambda: copy.deepcopy(filled), calls=shape.steps)


def _with_prompt(read: Callable[[Tensor, object], Tensor], prompt: Tensor) -> Callable[[object], Tensor]:
    return lambda cache: read(prompt, cache)


def _reader(model) -> Callable[[Tensor, object], Tensor]:
    """What feeds tokens to a model and its cache; without gradients."""
    if isinstance(model, authors.AuthorsDecoder):
        return lambda token_ids, cache: model(token_ids, cache, logits_to_keep=1)

    @torch.no_grad()
    def read(token_ids: Tensor, cache: Cache) -> Tensor:
        return model(token_ids, past_key_values=cache, logits_to_keep=1).logits

    return read


def _empty_cache(model: PreTrainedModel, shape: Shape, kind: str) -> Callable[[], Cache]:
    if kind == "static":
        return lambda: StaticCache(config=model.config, max_cache_len=shape.prompt + shape.steps)
    return lambda: DynamicCache(config=model.config)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--window", type=int, default=256, help="sliding window of every other DCFormer layer")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic", help="for decoding")
    parser.add_argument("--compile", action="store_true", help="torch.compile the decoding steps")
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--repeats", type=int, default=8)
    common.add_common_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    common.show_environment(args.device)
    shape = Shape(**{field: getattr(args, field) for field in Shape._fields})
    models = make_models(shape, args.device, common.DTYPES[args.dtype])
    for name, model in models.items():
        print(f"{name}: {model.num_parameters() / 1e6:.1f} M parameters")
    print(f"batch 1, prompt {args.prompt}, {args.steps} decoding steps, {args.dtype}, {args.cache} cache")
    token_ids = random_tokens(shape, args.device)
    phases = {
        "prefill": (prefill_cases(models, shape, token_ids), args.prompt),
        "decode": (decode_cases(models, shape, token_ids, args.cache, args.compile), 1),
    }
    figures = {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        for phase, (cases, tokens) in phases.items():
            timings = common.interleave(cases, args.repeats, args.device)
            show_throughput(f"{phase}, {threads} threads", tokens, timings)
            figures[f"{phase}, {threads} threads"] = {name: timing._asdict() for name, timing in timings.items()}
    common.write_json(args, figures)


def show_throughput(phase: str, tokens: int, timings: dict[str, common.Timing]) -> None:
    """Print tokens per second, and the time as a share of the model's without composition."""
    plain = timings[PLAIN]
    rows = [
        [
            name,
            f"{tokens / timing.minimum:.1f}",
            f"{tokens / timing.median:.1f}",
            f"{plain.minimum / timing.minimum:.2f}",
            f"{plain.median / timing.median:.2f}",
        ]
        for name, timing in timings.items()
    ]
    common.show_table([f"{phase}, tokens/s", "best", "median", f"best / {PLAIN}", f"median / {PLAIN}"], rows)


if __name__ == "__main__":
    main()
