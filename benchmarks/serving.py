"""Serving: a DCFormer in vLLM, by `generate()` one by one and in padded batches, and a Llama of its shape in vLLM.

    python -m benchmarks.serving
    python -m benchmarks.serving --preset dcformer-2.8b --length 2048 --device cuda --dtype bfloat16 --compile

Needs vLLM. Prompts and answers have ragged lengths: log-normal, cut at the model's length. Those of ShareGPT have means
of 161 and 338 tokens (Kwon and others 2023, section 6.1); with means of 120 and 80 a run takes minutes. There are as
many clients as `--concurrency` says, and each sends its next request when its last is answered. Every engine has a
process of its own and the same number of threads; engines take turns. Before anything is timed, greedy tokens of every
engine have to be those of `generate()`.
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, cache_bytes_per_token
from dcformer.bench import roofline

from . import common
from .serving_engines import Request, Served, Settings, Step, Turn, run_engine


DCFORMER, PLAIN, LLAMA = "DCFormer", "no composition", "Llama"
ONE_BY_ONE, PADDED, VLLM = "one by one", "padded batches", "vllm"
NAMES = {ONE_BY_ONE: "generate, one by one", PADDED: "generate, padded batches", VLLM: "vLLM"}
# Model and engine, in the order of their turns.
ENGINES = ((DCFORMER, VLLM), (DCFORMER, ONE_BY_ONE), (DCFORMER, PADDED), (LLAMA, VLLM), (PLAIN, VLLM))
_SWITCHES = ("pre", "post", "query", "key", "low_rank", "gate", "static")
_WANTED_RATIO = 3.0
_LEAST_CACHE_BYTES = 2**28
_MEAN_PROMPT, _MEAN_ANSWER, _SPREAD = 120.0, 80.0, 0.9
_GATE_LENGTHS, _GATE_TOKENS = (5, 60, 290, 17), 24
# How far the two likeliest logits of `generate` may lie apart where an engine takes the other one: rounding.
_TIES = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.02}


class Figures(NamedTuple):
    """Of the best turn of an engine; seconds."""

    requests_per_second: float
    tokens_per_second: float
    first_token_median: float
    first_token_95: float
    answer_median: float
    processor_per_1000_tokens: float
    steps: int
    bound_tokens_per_second: float


def make_configs(args: argparse.Namespace) -> dict[str, PreTrainedConfig]:
    """A DCFormer of the sizes that were asked for, the same without composition, and a Llama of its shape."""
    without = {f"compose_{switch}": False for switch in _SWITCHES}
    common_values = {"max_position_embeddings": args.length, "bos_token_id": None, "eos_token_id": None}
    if args.preset is not None:
        makers = [lambda values: DCFormerConfig.from_preset(args.preset, **values)]
        if args.preset.startswith("dcpythia"):
            makers = [lambda values: DCPythiaConfig.from_preset(args.preset, **values)]
    else:
        common_values |= {
            "vocab_size": args.vocabulary,
            "hidden_size": args.hidden,
            "intermediate_size": args.intermediate,
            "num_hidden_layers": args.layers,
            "num_attention_heads": args.heads,
            "sliding_window": args.window or None,
        }
        makers = [lambda values: DCFormerConfig(**values)]
    composed, plain = (makers[0]({**common_values, **switches}) for switches in ({}, without))
    llama = LlamaConfig(
        vocab_size=composed.vocab_size,
        hidden_size=composed.hidden_size,
        intermediate_size=composed.intermediate_size,
        num_hidden_layers=composed.num_hidden_layers,
        num_attention_heads=composed.num_attention_heads,
        num_key_value_heads=composed.num_key_value_heads,
        head_dim=composed.head_dim,
        max_position_embeddings=args.length,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    return {DCFORMER: composed, PLAIN: plain, LLAMA: llama}


def save_model(config: PreTrainedConfig, folder: Path, dtype: torch.dtype) -> int:
    """Save a model with random weights, with which heads compose strongly; returns how many parameters it has."""
    model_class = LlamaForCausalLM if isinstance(config, LlamaConfig) else DCFormerForCausalLM
    torch.manual_seed(0)
    model: PreTrainedModel = model_class._from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            inputs = parameter.shape[-1]
            if "compose" in name and "static" not in name:
                inputs = parameter.shape[2 if name.endswith("low_rank_weight") else 0]
            parameter.normal_(std=inputs**-0.5)
    model.save_pretrained(folder)
    return model.num_parameters()


def draw_requests(
    count: int, vocabulary: int, length: int, seed: int, means: tuple[float, float] = (_MEAN_PROMPT, _MEAN_ANSWER)
) -> list[Request]:
    """
    Requests with random tokens and log-normal lengths.

    Args:
        length (`int`): Of prompt and answer together at most; prompts take three quarters of it at most.
        means (`tuple[float, float]`): Mean tokens of a prompt and of an answer before they are cut.
    """
    generator = random.Random(seed)

    def lengths(mean: float) -> int:
        return round(generator.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD))

    requests = []
    for _ in range(count):
        prompt = min(max(lengths(means[0]), 4), 3 * length // 4)
        answer = min(max(lengths(means[1]), 2), length - prompt)
        requests.append(Request([generator.randrange(vocabulary) for _ in range(prompt)], answer))
    return requests


class Engine:
    """An engine in a process of its own."""

    def __init__(self, kind: str, settings: Settings):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run_engine, args=(kind, settings, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.facts: dict[str, Any] = self._answer()

    def call(self, method: str, *arguments: Any) -> Any:
        self._connection.send((method, *arguments))
        return self._answer()

    def close(self) -> None:
        self._connection.close()
        self._process.join(timeout=30)

    def _answer(self) -> Any:
        try:
            is_well, result = self._connection.recv()
        except EOFError:
            raise RuntimeError("The process of an engine ended; its messages stand above.") from None
        if not is_well:
            raise RuntimeError(f"An engine failed: {result}")
        return result


@contextlib.contextmanager
def running(kind: str, settings: Settings) -> Iterator[Engine]:
    engine = Engine(kind, settings)
    try:
        yield engine
    finally:
        engine.close()


def first_difference(expected: Sequence[Step], tokens: Sequence[int], tie: float) -> int | None:
    """
    Where a text leaves the greedy one, or None.

    Args:
        tie (`float`): If the logits of the two likeliest tokens are as near as this and the text takes the second, it
            is equal that far, and cannot be compared further.
    """
    for position, (step, token) in enumerate(zip(expected, tokens, strict=True)):
        if token != step.token:
            return None if token == step.second and step.margin <= tie else position
    return None


def check_tokens(name: str, engine: Engine, expected: list[list[Step]], prompts: list[list[int]], tie: float) -> None:
    """Raise RuntimeError unless an engine writes what `generate()` does."""
    found = engine.call("greedy", prompts, _GATE_TOKENS)
    for prompt, steps, tokens in zip(prompts, expected, found, strict=True):
        if (position := first_difference(steps, tokens, tie)) is not None:
            raise RuntimeError(
                f"{name} writes token {tokens[position]} at position {position} after a prompt of {len(prompt)} "
                f"tokens, and generate() writes {steps[position].token}: nothing was timed."
            )


def bound(
    kind: str, requests: Sequence[Request], concurrency: int, matrices: int, itemsize: int, rates: roofline.Rates
) -> float:
    """
    Seconds that an engine takes at least: its matrix products at the measured rate, or its weights read once in every
    step, whichever is longer. Attention is not counted.

    Args:
        matrices (`int`): Parameters that a token is multiplied by.
    """
    tokens = sum(len(request.prompt) + request.answer for request in requests)
    answers = [request.answer for request in requests]
    steps = float(sum(answers))
    if kind == VLLM:
        steps = max(steps / concurrency, max(answers))
    elif kind == PADDED:
        batches = [requests[start : start + concurrency] for start in range(0, len(requests), concurrency)]
        longest = [(len(b), max(len(r.prompt) for r in b), max(r.answer for r in b)) for b in batches]
        tokens = sum(rows * (prompt + answer) for rows, prompt, answer in longest)
        steps = sum(answer for *_, answer in longest)
    return max(2 * matrices * tokens / rates.flops, steps * matrices * itemsize / rates.read_bytes)


def summarize(turns: Sequence[Turn], requests: Sequence[Request], bound_seconds: float) -> Figures:
    best = min(turns, key=lambda turn: turn.wall)
    tokens = sum(request.answer for request in requests)
    served = [Served(*times) for times in best.served]
    first = sorted(times.first - times.sent for times in served)
    return Figures(
        requests_per_second=len(requests) / best.wall,
        tokens_per_second=tokens / best.wall,
        first_token_median=statistics.median(first),
        first_token_95=first[math.ceil(0.95 * len(first)) - 1],
        answer_median=statistics.median(times.done - times.sent for times in served),
        processor_per_1000_tokens=1000 * min(turn.processor for turn in turns) / tokens,
        steps=best.steps,
        bound_tokens_per_second=tokens / bound_seconds,
    )


def show(figures: dict[tuple[str, str], Figures]) -> None:
    columns = ["model and engine", "requests/s", "tokens/s", "at most", "first token s", "95 %", "answer s",
               "processor s / 1000 tokens", "steps"]  # fmt: skip
    rows = [
        [
            f"{model}, {NAMES[kind]}",
            f"{row.requests_per_second:.2f}",
            f"{row.tokens_per_second:.0f}",
            f"{row.bound_tokens_per_second:.0f}",
            f"{row.first_token_median:.2f}",
            f"{row.first_token_95:.2f}",
            f"{row.answer_median:.2f}",
            f"{row.processor_per_1000_tokens:.1f}",
            str(row.steps),
        ]
        for (model, kind), row in figures.items()
    ]
    common.show_table(columns, rows)


def ratios(figures: dict[tuple[str, str], Figures]) -> dict[str, dict[str, float]]:
    """How many times as fast the DCFormer in vLLM is as the others: by the clock, and by processor time per token."""
    ours = figures[DCFORMER, VLLM]
    return {
        f"{model}, {NAMES[kind]}": {
            "tokens per second": ours.tokens_per_second / row.tokens_per_second,
            "processor": row.processor_per_1000_tokens / ours.processor_per_1000_tokens,
        }
        for (model, kind), row in figures.items()
        if (model, kind) != (DCFORMER, VLLM)
    }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_common_arguments(parser)
    parser.add_argument("--preset", help="a published shape in place of the sizes below")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--intermediate", type=int, default=1408)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256, help="of every other layer; 0 for none (default 256)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt and its answer at most")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--mean-prompt", type=float, default=_MEAN_PROMPT, help="mean tokens of a prompt (120)")
    parser.add_argument("--mean-answer", type=float, default=_MEAN_ANSWER, help="mean tokens of an answer (80)")
    parser.add_argument("--concurrency", type=int, default=16, help="clients, rows of a padded batch (default 16)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each engine")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile its models; without: eager")
    parser.add_argument("--turns", type=int, default=1, help="of each engine; the best counts (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    args = parser.parse_args(arguments)
    if args.dtype not in _TIES:
        parser.error(f"--dtype must be one of {', '.join(_TIES)}, got {args.dtype}")
    if args.length < max(_GATE_LENGTHS) + _GATE_TOKENS:
        parser.error(f"--length must be at least {max(_GATE_LENGTHS) + _GATE_TOKENS}, got {args.length}")
    return args


def prepare_environment(args: argparse.Namespace) -> None:
    """Settings of the processes that engines run in, which read them when they start."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    prepare_environment(args)
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()
    dtype = common.DTYPES[args.dtype]
    configs = make_configs(args)
    requests = draw_requests(
        args.requests, configs[DCFORMER].vocab_size, args.length, args.seed, (args.mean_prompt, args.mean_answer)
    )
    tokens = random.Random(args.seed)
    gate = [[tokens.randrange(configs[DCFORMER].vocab_size) for _ in range(length)] for length in _GATE_LENGTHS]
    warm_up = [Request(prompt, 4) for prompt in gate]
    layers = configs[DCFORMER].num_hidden_layers
    cache_bytes = 2 * args.concurrency * args.length * layers * cache_bytes_per_token(configs[DCFORMER], dtype)
    common.show_environment(args.device)
    print(
        f"{args.requests} requests: {sum(len(r.prompt) for r in requests)} tokens of prompts, "
        f"{sum(r.answer for r in requests)} of answers; {args.concurrency} clients, {args.dtype}, "
        f"vLLM {'compiled' if args.compile else 'eager'}, generate eager"
    )
    rates = measure_rates(args.device, dtype)
    print(
        f"At most {rates.flops / 1e9:.0f} GFLOP/s and {rates.read_bytes / 1e9:.1f} GB/s of readings were measured; the "
        "bound is matrix products at that rate, or all weights read in every step."
    )
    facts: dict[str, Any] = {}
    figures: dict[tuple[str, str], Figures] = {}
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        settings, expected, matrices = {}, {}, {}
        for model, config in configs.items():
            folder = Path(root) / model.replace(" ", "_")
            count = save_model(config, folder, dtype)
            matrices[model] = count - config.vocab_size * config.hidden_size  # embeddings are looked up
            settings[model] = Settings(
                str(folder), args.dtype, str(args.device), args.threads, args.concurrency, args.length, args.compile,
                max(cache_bytes, _LEAST_CACHE_BYTES),
            )  # fmt: skip
            with running(ONE_BY_ONE, settings[model]) as reference:
                expected[model] = reference.call("margins", gate, _GATE_TOKENS)
        engines = {}
        for model, kind in ENGINES:
            name = f"{model}, {NAMES[kind]}"
            engine = engines[model, kind] = stack.enter_context(running(kind, settings[model]))
            facts[name] = engine.facts
            check_tokens(name, engine, expected[model], gate, _TIES[args.dtype])
            engine.call("serve", warm_up)
        print(f"Greedy tokens of all engines are those of generate() ({len(gate)} prompts, {_GATE_TOKENS} tokens).")
        turns: dict[tuple[str, str], list[Turn]] = {key: [] for key in engines}
        for _ in range(args.turns):
            for key, engine in engines.items():
                turns[key].append(engine.call("serve", requests))
    for (model, kind), taken in turns.items():
        least = bound(kind, requests, args.concurrency, matrices[model], dtype.itemsize, rates)
        figures[model, kind] = summarize(taken, requests, least)
    show(figures)
    against = ratios(figures)
    print("The DCFormer in vLLM is so many times as fast, by tokens/s and by processor time per token, as")
    for name, ratio in against.items():
        wanted = f" (wanted: at least {_WANTED_RATIO:.0f})" if name.endswith(NAMES[ONE_BY_ONE]) else ""
        print(f"  {name}: {ratio['tokens per second']:.2f}, {ratio['processor']:.2f}{wanted}")
    for name, found in facts.items():
        print(f"{name}: {', '.join(f'{what} {value}' for what, value in found.items())}")
    common.write_json(
        args,
        {
            "engines": {f"{model}, {NAMES[kind]}": row._asdict() for (model, kind), row in figures.items()},
            "ratios": against,
            "facts": facts,
            "rates": rates._asdict(),
            "parameters without embeddings": matrices,
        },
    )


def measure_rates(device: torch.device, dtype: torch.dtype) -> roofline.Rates:
    probes = roofline.rate_probes(device, dtype)
    timings = common.interleave(probes, 3, device)
    return roofline.measured_rates({name: timing.minimum for name, timing in timings.items()}, device)


if __name__ == "__main__":
    main()
