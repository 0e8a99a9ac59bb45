"""Throughput of a DCFormer in vLLM and by `generate()`, one by one and in padded batches, and of a Llama in vLLM.

    OMP_NUM_THREADS=1 python -m benchmarks.serving --device cpu
    python -m benchmarks.serving --preset dcformer-2.8b --length 2048 --compile

Needs vLLM for its rows. Prompts and answers have log-normal lengths, cut at the model's length. Every engine runs in a
process of its own. Before it is timed, its greedy tokens must be the model's likeliest, but for ties.
"""

import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from dcformer import DCFormerConfig, cache_bytes_per_token

from .cpu import DCFORMER, PLAIN, Text
from .measure import Benchmark, Entry, Run, run_command


LLAMA, ONE_BY_ONE, PADDED, VLLM = "Llama", "generate, one by one", "generate, padded batches", "vLLM"
ENGINES = ((DCFORMER, VLLM), (DCFORMER, ONE_BY_ONE), (DCFORMER, PADDED), (LLAMA, VLLM), (PLAIN, VLLM))
GATE_LENGTHS, GATE_TOKENS = (5, 60, 290, 17), 24
_TIES = {"float32": 1e-3, "bfloat16": 0.15}  # how far below the likeliest logit that of a token may be: rounding
Request = tuple[list[int], int]  # ids of a prompt, and how many tokens the answer to it has
Engine = Callable[[Sequence[Request]], list[list[int]]]  # answers greedily


def sample_requests(args: Any, vocabulary: int) -> list[Request]:
    """Random tokens with log-normal lengths of the wanted means; prompts take three quarters of the length at most."""
    generator, spread = random.Random(0), 0.9

    def length(mean: float) -> int:
        return round(generator.lognormvariate(math.log(mean) - spread**2 / 2, spread))

    requests = []
    for _ in range(args.requests):
        prompt = min(max(length(args.mean_prompt), 4), 3 * args.length // 4)
        answer = min(max(length(args.mean_answer), 2), args.length - prompt)
        requests.append(([generator.randrange(vocabulary) for _ in range(prompt)], answer))
    return requests


def save_model(run: Run, name: str, folder: Path) -> None:
    """Save a model with random weights that compose heads strongly: a DCFormer, without composition, or a Llama."""
    text = (
        Text(run.args.length, 0, 2, 2, 32, 64, 64) if run.is_quick else Text(run.args.length, 0, 8, 8, 512, 1408, 8192)
    )
    config: Any = text.config(PLAIN if name == PLAIN else DCFORMER)
    if run.args.preset:
        switches = ("pre", "post", "query", "key", "low_rank", "gate", "static") if name == PLAIN else ()
        values = {"max_position_embeddings": run.args.length, "bos_token_id": None, "eos_token_id": None}
        values |= {f"compose_{switch}": False for switch in switches}
        config = DCFormerConfig.from_preset(run.args.preset, **values)
    if name == LLAMA:
        shape = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        shape += " head_dim max_position_embeddings bos_token_id eos_token_id"
        config = LlamaConfig(**{name: getattr(config, name) for name in shape.split()}, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=run.dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                reads_first = "compose" in name and "static" not in name
                axis = (2 if name.endswith("low_rank_weight") else 0) if reads_first else -1
                parameter.normal_(std=parameter.shape[axis] ** -0.5)
    model.save_pretrained(folder)


def load(args: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(args.folder, dtype=args.dtype).eval().to(args.device)


def answer_by_generate(model: Any, rows: int, requests: Sequence[Request]) -> list[list[int]]:
    """Answers in batches of `rows` requests, padded on the left; each batch takes its longest answer."""
    answers, options = [], {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for start in range(0, len(requests), rows):
        prompts, wanted = zip(*requests[start : start + rows])
        length = max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts], device=model.device)
        padding = torch.tensor([length - len(prompt) for prompt in prompts], device=model.device)[:, None]
        mask = (torch.arange(length, device=model.device) >= padding).long()  # (rows, length)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max(wanted), **options)[:, length:].tolist()
        answers += [row[:number] for row, number in zip(out, wanted)]
    return answers


def make_engine(args: Any) -> Engine:
    if args.kind != VLLM:
        return partial(answer_by_generate, load(args), args.concurrency if args.kind == PADDED else 1)
    from vllm import LLM, SamplingParams

    config, dtype = AutoConfig.from_pretrained(args.folder), getattr(torch, args.dtype)
    per_layer = 2 * config.num_attention_heads * config.head_dim * dtype.itemsize
    if isinstance(config, DCFormerConfig):
        per_layer = cache_bytes_per_token(config, dtype)
    cache_bytes = 2 * args.concurrency * args.length * config.num_hidden_layers * per_layer
    options = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "enforce_eager": not args.compile}
    sizes = {"max_model_len": args.length, "max_num_seqs": args.concurrency}
    llm = LLM(args.folder, dtype=args.dtype, kv_cache_memory_bytes=max(cache_bytes, 2**28), **sizes, **options)

    def answer(requests: Sequence[Request]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(max_tokens=number, **options) for _, number in requests]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    return answer


@torch.no_grad()
def check_tokens(model: Any, requests: Sequence[Request], answers: Sequence[list[int]], tie: float) -> None:
    """Raise RuntimeError unless every token of the answers is the model's likeliest, or as likely but for rounding."""
    for (prompt, number), answer in zip(requests, answers, strict=True):
        ids = torch.tensor([prompt + answer], device=model.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()  # (answer, vocabulary)
        below = logits.amax(-1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        if len(answer) != number or not below.max() <= tie:
            raise RuntimeError(f"an answer has tokens that are not likeliest: their logits are below by {below.max()}")


def run_engine(args: Any) -> dict[str, float]:
    """Check and time one engine."""
    torch.set_num_threads(args.threads)
    vocabulary = AutoConfig.from_pretrained(args.folder).vocab_size
    lengths = [min(length, args.length - GATE_TOKENS) for length in GATE_LENGTHS]
    gate = [([index % vocabulary for index in range(length)], GATE_TOKENS) for length in lengths]
    engine = make_engine(args)
    check_tokens(load(args), gate, engine(gate), _TIES[args.dtype])
    requests = sample_requests(args, vocabulary)
    start, processor = time.perf_counter(), time.process_time()
    engine(requests)
    wall, tokens = time.perf_counter() - start, sum(number for _, number in requests)
    per_thousand = 1000 * (time.process_time() - processor) / tokens
    return {"requests/s": len(requests) / wall, "tokens/s": tokens / wall, "processor s / 1000 tokens": per_thousand}


def measure(run: Run, _: None) -> None:
    rates: dict[str, float] = {}
    if run.is_quick:
        vars(run.args).update(length=64, requests=4, mean_prompt=12.0, mean_answer=8.0)

    def make(name: str, model: str, kind: str, root: str) -> dict[str, float] | str:
        if kind == VLLM and importlib.util.find_spec("vllm") is None:
            return "not measured: vLLM is not installed"
        if not (folder := Path(root, model)).exists():
            save_model(run, model, folder)
        about = {"kind": kind, "folder": str(folder), "device": str(run.device), "threads": run.threads[0]}
        about = {**vars(run.args), **about, "dtype": str(run.dtype).removeprefix("torch."), "json": None}
        environment = {"OMP_NUM_THREADS": str(run.threads[0]), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        options = {"stdout": subprocess.PIPE, "text": True, "check": True, "env": os.environ | environment}
        command = [sys.executable, "-m", "benchmarks.serving", "--engine", json.dumps(about)]
        try:
            done = subprocess.run(command, timeout=max(run.end - time.perf_counter(), 1), **options)
        except subprocess.TimeoutExpired:
            return "not measured: the seconds were over"
        figures = json.loads(done.stdout.splitlines()[-1])
        rates[name] = figures["tokens/s"]
        ours = ", ".join(ENGINES[0])
        return figures | ({f"{ours} / this": rates[ours] / rates[name]} if ours in rates else {})

    with tempfile.TemporaryDirectory() as root:
        names = {", ".join(engine): engine for engine in ENGINES}
        run.compare("engines", [Entry(name, partial(make, name, *engine, root)) for name, engine in names.items()])


OPTIONS = {
    "--preset": {"help": "a published shape instead of 8 layers of 512"},
    "--length": {"type": int, "default": 1024, "help": "tokens of a prompt and its answer at most"},
    "--requests": {"type": int, "default": 64},
    "--mean-prompt": {"type": float, "default": 120.0, "help": "mean tokens of a prompt; ShareGPT has 161"},
    "--mean-answer": {"type": float, "default": 80.0, "help": "mean tokens of an answer; ShareGPT has 338"},
    "--concurrency": {"type": int, "default": 16, "help": "sequences at once, rows of a padded batch"},
    "--compile": {"action": "store_true", "help": "let vLLM compile its models"},
}
REGISTRY = (Benchmark("engines", "requests", "generate(), Llama", "the likeliest tokens", lambda _: [None], measure),)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        print("\n" + json.dumps(run_engine(SimpleNamespace(**json.loads(sys.argv[2])))))
    else:
        sys.exit(run_command(__doc__, REGISTRY, options=OPTIONS, seconds=3600.0))
