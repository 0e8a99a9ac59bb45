"""Throughput of a DCFormer in vLLM and by `generate()`, one by one and in padded batches, and of a Llama in vLLM.

    OMP_NUM_THREADS=1 python -m benchmarks.serving --threads 1
    python -m benchmarks.serving --preset dcformer-2.8b --length 2048 --device cuda --dtype bfloat16 --compile

Needs vLLM. Lengths of prompts and answers are log-normal, cut at the model's length. Every engine runs in a separate
process with the same number of threads. Before it is timed, its greedy tokens have to be those of `generate()`.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from dcformer import DCFormerConfig, DCFormerForCausalLM, cache_bytes_per_token
from dcformer.bench import measure

from . import report


DCFORMER, PLAIN, LLAMA = "DCFormer", "no composition", "Llama"
ONE_BY_ONE, PADDED, VLLM = "generate, one by one", "generate, padded batches", "vLLM"
ENGINES = ((DCFORMER, VLLM), (DCFORMER, ONE_BY_ONE), (DCFORMER, PADDED), (LLAMA, VLLM), (PLAIN, VLLM))
GATE_LENGTHS, GATE_TOKENS = (5, 60, 290, 17), 24
# How far the two likeliest logits of `generate` may lie apart where an engine takes the other one: rounding.
_TIES = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.02}


class Request(NamedTuple):
    """Ids of a prompt, and how many tokens the answer to it has."""

    prompt: list[int]
    answer: int


class Step(NamedTuple):
    """A token of a greedy text, the second likeliest, and how far their logits lie apart."""

    token: int
    second: int
    margin: float


def sample_requests(args: argparse.Namespace, vocabulary: int) -> list[Request]:
    """Random tokens with log-normal lengths of the wanted means; prompts take three quarters of the length at most."""
    generator, spread = random.Random(args.seed), 0.9

    def length(mean: float) -> int:
        return round(generator.lognormvariate(math.log(mean) - spread**2 / 2, spread))

    requests = []
    for _ in range(args.requests):
        prompt = min(max(length(args.mean_prompt), 4), 3 * args.length // 4)
        answer = min(max(length(args.mean_answer), 2), args.length - prompt)
        requests.append(Request([generator.randrange(vocabulary) for _ in range(prompt)], answer))
    return requests


def make_configs(args: argparse.Namespace) -> dict[str, PreTrainedConfig]:
    """A DCFormer of the sizes that were asked for, the same without composition, and a Llama of its shape."""
    values: dict[str, Any] = {"max_position_embeddings": args.length, "bos_token_id": None, "eos_token_id": None}
    sizes = {
        "vocab_size": args.vocabulary,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "sliding_window": args.window or None,
    }
    switches = ("pre", "post", "query", "key", "low_rank", "gate", "static")
    without = {f"compose_{switch}": False for switch in switches}
    composed, plain = (
        DCFormerConfig.from_preset(args.preset, **values, **switched_off)
        if args.preset
        else DCFormerConfig(**values, **sizes, **switched_off)
        for switched_off in ({}, without)
    )
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shared = {name: getattr(composed, name) for name in (*shape, "num_key_value_heads", "head_dim")}
    return {DCFORMER: composed, PLAIN: plain, LLAMA: LlamaConfig(**values, **shared, tie_word_embeddings=False)}


def save_model(config: PreTrainedConfig, folder: Path, dtype: torch.dtype) -> None:
    """Save a model with random weights that compose heads strongly."""
    torch.manual_seed(0)
    model_class = LlamaForCausalLM if isinstance(config, LlamaConfig) else DCFormerForCausalLM
    model = model_class._from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            inputs = parameter.shape[-1]
            if "compose" in name and "static" not in name:
                inputs = parameter.shape[2 if name.endswith("low_rank_weight") else 0]
            parameter.normal_(std=inputs**-0.5)
    model.save_pretrained(folder)


_GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def greedy_steps(folder: str, prompts: Sequence[list[int]], args: argparse.Namespace) -> list[list[Step]]:
    """Greedy texts by `generate()`, one prompt at a time, with the second likeliest tokens."""
    model = _load(folder, args)
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        output = model.generate(
            ids, max_new_tokens=GATE_TOKENS, return_dict_in_generate=True, output_logits=True, **_GREEDY
        )
        best = torch.cat(output.logits).float().topk(2)  # (new tokens, 2)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        texts.append([Step(*step, margin) for step, margin in zip(best.indices.tolist(), margins)])
    return texts


def _load(folder: str, args: argparse.Namespace) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype).eval().to(args.device)


def answer_by_generate(model: Any, requests: Sequence[Request], rows: int) -> list[list[int]]:
    """Greedy answers in batches of `rows` requests, padded on the left; each batch takes its longest answer."""
    answers = []
    for start in range(0, len(requests), rows):
        batch = requests[start : start + rows]
        length = max(len(request.prompt) for request in batch)
        padding = [length - len(request.prompt) for request in batch]
        ids = torch.tensor([[0] * missing + request.prompt for missing, request in zip(padding, batch)])
        mask = torch.tensor([[0] * missing + [1] * (length - missing) for missing in padding])  # (rows, length)
        ids, mask = ids.to(model.device), mask.to(model.device)
        longest = max(request.answer for request in batch)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=longest, **_GREEDY)[:, length:].tolist()
        answers += [row[: request.answer] for row, request in zip(out, batch)]
    return answers


def make_engine(kind: str, folder: str, args: argparse.Namespace):
    """A function that answers requests greedily."""
    if kind != VLLM:
        model = _load(folder, args)
        return lambda requests: answer_by_generate(model, requests, args.concurrency if kind == PADDED else 1)
    from vllm import LLM, SamplingParams

    config = AutoConfig.from_pretrained(folder)
    per_layer = 2 * config.num_attention_heads * config.head_dim * getattr(torch, args.dtype).itemsize
    if isinstance(config, DCFormerConfig):
        per_layer = cache_bytes_per_token(config, getattr(torch, args.dtype))
    cache_bytes = 2 * args.concurrency * args.length * config.num_hidden_layers * per_layer
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=args.length,
        max_num_seqs=args.concurrency,
        enable_prefix_caching=False,
        enforce_eager=not args.compile,
        kv_cache_memory_bytes=max(cache_bytes, 2**28),
    )

    def answer(requests: Sequence[Request]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(max_tokens=request.answer, **options) for request in requests]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    return answer


def first_difference(expected: Sequence[Step], tokens: Sequence[int], tie: float) -> int | None:
    """Where a text leaves the greedy one, or None; after a tie of the two likeliest tokens it is not compared."""
    for position, (step, token) in enumerate(zip(expected, tokens, strict=True)):
        if token != step.token:
            return None if token == step.second and step.margin <= tie else position
    return None


def check_tokens(name: str, answers: Sequence[list[int]], expected: Sequence[Sequence[Step]], tie: float) -> None:
    """Raise RuntimeError unless an engine writes what `generate()` does."""
    for tokens, steps in zip(answers, expected, strict=True):
        if (position := first_difference(steps, tokens, tie)) is not None:
            raise RuntimeError(
                f"{name} writes token {tokens[position]} at position {position}, and generate() writes "
                f"{steps[position].token}: nothing was timed."
            )


def run_engine(kind: str, folder: str, args: argparse.Namespace) -> dict[str, float]:
    """Check and time one engine, in a separate process."""
    torch.set_num_threads(args.threads)
    config = AutoConfig.from_pretrained(folder)
    gate = [Request([index % config.vocab_size for index in range(length)], GATE_TOKENS) for length in GATE_LENGTHS]
    expected = greedy_steps(folder, [request.prompt for request in gate], args)
    engine = make_engine(kind, folder, args)
    check_tokens(kind, engine(gate), expected, _TIES[args.dtype])
    requests = sample_requests(args, config.vocab_size)
    start, processor = time.perf_counter(), time.process_time()
    engine(requests)
    wall, tokens = time.perf_counter() - start, sum(request.answer for request in requests)
    per_thousand = 1000 * (time.process_time() - processor) / tokens
    return {"requests/s": len(requests) / wall, "tokens/s": tokens / wall, "processor s / 1000 tokens": per_thousand}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument("--preset", help="a published shape instead of the sizes below")
    for name, value in (("layers", 8), ("hidden", 512), ("heads", 8), ("intermediate", 1408), ("vocabulary", 8192)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--window", type=int, default=256, help="of every other layer; 0 for none")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt and its answer at most")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--mean-prompt", type=float, default=120.0, help="mean tokens of a prompt; ShareGPT has 161")
    parser.add_argument("--mean-answer", type=float, default=80.0, help="mean tokens of an answer; ShareGPT has 338")
    parser.add_argument("--concurrency", type=int, default=16, help="sequences at once, rows of a padded batch")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each engine")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile its models")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=sorted(_TIES), default="float32")
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)  # kind and folder of the one to time
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.engine:
        print("\n" + json.dumps(run_engine(*args.engine, args)))
        return
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as root:
        for model, config in make_configs(args).items():
            save_model(config, Path(root, model), getattr(torch, args.dtype))
        for model, kind in ENGINES:
            command = [sys.executable, "-m", "benchmarks.serving", *(sys.argv[1:] if arguments is None else arguments)]
            command += ["--engine", kind, str(Path(root, model))]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            figures[f"{model}, {kind}"] = json.loads(done.stdout.splitlines()[-1])
    ours = figures[f"{DCFORMER}, {VLLM}"]["tokens/s"]
    for row in figures.values():
        row["vLLM DCFormer / this"] = ours / row["tokens/s"]
    columns = list(next(iter(figures.values())))
    rows = [[name, *(f"{row[column]:.2f}" for column in columns)] for name, row in figures.items()]
    measure.show_table(["engine", *columns], rows)
    report.write(args, torch.device(args.device), engines=figures)


if __name__ == "__main__":
    main()
