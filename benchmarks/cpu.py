"""DCFormer's speed on CPUs beside SDPA, models without composition, and "authors": our code after the paper.

    python -m benchmarks.cpu --quick                               # some minutes: one length, without windows
    python -m benchmarks.cpu --json benchmarks/results/cpu.json    # everything
    python -m benchmarks.cpu --only decode --only prefill          # some sections
    python -m benchmarks.cpu --show benchmarks/results/cpu.json    # recorded figures

What is compared runs in turns in one process, at every number of threads. The machine must do nothing else: each of
many short parallel operations waits for its slowest thread. *ours / this* is the shortest time of ours as a multiple of
that of the row: lower is better. A *bound* is what it would be if the composition took its least time
(dcformer/bench/roofline), added to the measured time without composition.
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
)

from dcformer import DCFormerConfig, DCFormerForCausalLM, cache_bytes_per_token
from dcformer.bench import authors, candidates, roofline
from dcformer.bench.measure import Case, Row, Run, Timer, Timing
from dcformer.bench.operands import prompt_operands
from dcformer.modeling_dcformer import CACHE_NAME

from .authors_decoder import AuthorsDecoder
from .report import CPU, make_parser


SHAPES = ((32, 80), (16, 64))  # heads and channels
WINDOW, LENGTH = 256, 1024
MODEL_HEADS = (12, 6)
VOCABULARY, PROMPT, STEPS = 16384, 1024, 32
COMPOSED, DCFORMER, PLAIN, AUTHORS = "composed", "DCFormer", "no composition", "authors"
NO_COMPOSITION = {"compose_pre": False, "compose_post": False}
RATIO, TARGET = "ours / this", "target"


def compare(
    run: Run,
    threads: list[int],
    title: str,
    cases: dict[str, Any],
    *,
    ours: str,
    plain: str,
    added: Callable[[roofline.Rates], dict[str, float]] = lambda _: {},
    targets: dict[str, float],
) -> None:
    """
    Time cases and the machine's rates in turns, at each number of threads, and compare `ours` with all others.

    `added` gives seconds that composition adds at least to `plain`, by the name of the bound; `targets` the multiple of
    another's time that ours should not exceed.
    """
    calls = {**cases, **roofline.rate_probes(CPU, torch.float32)}
    timed = {name: call if isinstance(call, Case) else Case(call) for name, call in calls.items()}
    timings = run.timer({(name, n): case._replace(threads=n) for n in threads for name, case in timed.items()})
    for number in threads:
        seconds = {name: timings[name, number].minimum for name in calls}
        least = added(roofline.measured_rates(seconds, CPU))
        numerators = {RATIO: seconds[ours]} | {f"bound {name}": seconds[plain] + extra for name, extra in least.items()}
        for name in calls:
            row = Row(f"{title}, {number} threads", name, timings[name, number])
            if name in cases and name != ours:
                row.figures = {figure: numerator / seconds[name] for figure, numerator in numerators.items()}
                row.figures |= {TARGET: targets[name]} if name in targets else {}
            run.rows.append(row)


def operator(run: Run, threads: list[int], with_gradients: bool) -> None:
    """A prompt through the operator, forward, or forward and backward."""
    section, passes = ("forward and backward", 3) if with_gradients else ("forward", 1)
    for heads, channels in SHAPES:
        for length in (LENGTH,) if run.is_quick else (512, LENGTH, 2048):
            for window in (None,) if run.is_quick else (None, WINDOW):
                entries = composing_and_plain(window)
                problem = entries[COMPOSED].problem(
                    heads, channels, CPU, torch.float32, window=window, with_gradients=with_gradients
                )
                if problem is not None:
                    raise RuntimeError(f"{heads} heads of {channels} channels: {problem}; nothing was timed.")
                of = prompt_operands(heads, channels, length, CPU, torch.float32)
                of = of.leaves() if with_gradients else of
                work = roofline.forward_work(heads, channels, length, window)

                def added(rates: roofline.Rates, work: roofline.Work = work) -> dict[str, float]:
                    return {name: passes * value for name, value in roofline.composition_bounds(work, rates).items()}

                target = 1.8 if with_gradients else {(32, 80): 1.4, (16, 64): 1.3}[heads, channels]
                targets = {"sdpa": target} if (length, window) == (LENGTH, None) else {}
                mask = "causal" if window is None else f"window {window}"
                title = f"{section}: float32, H {heads} D {channels}, T {length}, {mask}"
                with torch.set_grad_enabled(with_gradients):
                    calls = {
                        name: (entry.gradient_call if with_gradients else entry.make)(of, window, None)
                        for name, entry in entries.items()
                    }
                    compare(run, threads, title, calls, ours=COMPOSED, plain="sdpa", added=added, targets=targets)


def composing_and_plain(window: int | None) -> dict[str, candidates.Candidate]:
    """The automatic choice, SDPA over the same keys, and the authors' formulation."""
    (sdpa,) = candidates.plain_candidates(CPU, False, window)
    composed = candidates.Candidate(
        COMPOSED, lambda of, window, mask: partial(of.composed, sliding_window=window, attention_mask=mask)
    )
    return {COMPOSED: composed, "sdpa": sdpa, AUTHORS: candidates.authors_candidates(False)[0]}


def make_models(heads: int) -> dict[str, Any]:
    """A DCFormer; beside it the same without composition, Llama and GPT-NeoX by SDPA, and the authors' formulation."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "max_position_embeddings": PROMPT + STEPS,
        "tie_word_embeddings": False,
    }
    makers = {
        DCFORMER: (DCFormerForCausalLM, DCFormerConfig(**sizes, sliding_window=WINDOW)),
        PLAIN: (DCFormerForCausalLM, DCFormerConfig(**sizes, sliding_window=WINDOW, **NO_COMPOSITION)),
        "Llama": (LlamaForCausalLM, LlamaConfig(**sizes)),
        "GPT-NeoX": (GPTNeoXForCausalLM, GPTNeoXConfig(**sizes)),
    }
    models: dict[str, Any] = {}
    for name, (model_class, config) in makers.items():
        torch.manual_seed(0)
        models[name] = model_class(config).eval()
    models[AUTHORS] = AuthorsDecoder(models[DCFORMER], PROMPT + STEPS)
    ours, theirs = (read(models[name], random_tokens(PROMPT), new_cache(models[name])) for name in (DCFORMER, AUTHORS))
    if not candidates.relative_error(theirs, ours) <= 1e-3:
        raise RuntimeError("The authors' formulation has other logits than DCFormer; nothing was timed.")
    return models


def random_tokens(length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def read(model: Any, token_ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Feed tokens to a model and its cache."""
    if isinstance(model, AuthorsDecoder):
        return model(token_ids, cache, logits_to_keep=1)
    return model(token_ids, **{CACHE_NAME: cache}, logits_to_keep=1).logits


def new_cache(model: Any, kind: str = "dynamic") -> Any:
    if isinstance(model, AuthorsDecoder):
        return model.new_cache()
    static = partial(StaticCache, max_cache_len=PROMPT + STEPS)
    return (static if kind == "static" else DynamicCache)(config=model.config)


def decode_case(model: Any, kind: str = "dynamic") -> Case:
    """One step after another over given tokens, each sample with a copy of a cache that holds the prompt."""
    token_ids, filled = random_tokens(PROMPT + STEPS), new_cache(model, kind)
    read(model, token_ids[:, :PROMPT], filled)

    def steps(cache: Any) -> None:
        for token in token_ids[:, PROMPT:].split(1, dim=1):
            read(model, token, cache)

    return Case(steps, prepare=lambda: copy.deepcopy(filled), parts=STEPS)


def prefill(run: Run, threads: list[int]) -> None:
    """A prompt into an empty dynamic cache, with the logits of its last token."""
    for heads in MODEL_HEADS:
        models, prompt = make_models(heads), random_tokens(PROMPT)
        config, parameters = models[DCFORMER].config, compose_parameters(models[DCFORMER])

        def added(rates: roofline.Rates, config: Any = config, parameters: int = parameters) -> dict[str, float]:
            least = dict.fromkeys(("fused", "by passes"), 2 * PROMPT * parameters / rates.flops)
            for kind in config.layer_types:
                window = config.sliding_window if kind == "sliding_attention" else None
                work = roofline.forward_work(config.num_attention_heads, config.head_dim, PROMPT, window)
                for name, seconds in roofline.composition_bounds(work, rates).items():
                    least[name] += seconds
            return least

        cases = {
            name: Case(partial(read, model, prompt), prepare=partial(new_cache, model))
            for name, model in models.items()
        }
        title = f"prefill: float32, H {heads} D {config.head_dim}, prompt {PROMPT}"
        targets = {PLAIN: 1 / 0.93}
        compare(run, threads, title, cases, ours=DCFORMER, plain=PLAIN, added=added, targets=targets)


def decode(run: Run, threads: list[int]) -> None:
    """One token after another, after a prompt of 1024, with a dynamic and a static cache; "authors" has another."""
    for heads in MODEL_HEADS:
        models = make_models(heads)
        config, parameters = models[DCFORMER].config, compose_parameters(models[DCFORMER])
        plain = models[PLAIN].config
        extra = cache_bytes_per_token(config, torch.float32) - cache_bytes_per_token(plain, torch.float32)
        keys = sum(WINDOW if kind == "sliding_attention" else PROMPT for kind in config.layer_types)

        def added(rates: roofline.Rates, read_bytes: int = 4 * parameters + extra * keys) -> dict[str, float]:
            return {"reading": read_bytes / rates.read_bytes}

        for kind, target in (("dynamic", 0.85), ("static", 0.80)):
            cases = {name: decode_case(model, kind) for name, model in models.items()}
            title = f"decode: float32, H {heads} D {config.head_dim}, after {PROMPT} tokens, {kind} cache"
            targets = {PLAIN: 1 / 0.93, AUTHORS: target}
            compare(run, threads, title, cases, ours=DCFORMER, plain=PLAIN, added=added, targets=targets)


def compose_parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if ".compose." in name)


def training(run: Run, threads: list[int]) -> None:
    """Forward, backward, clipping and fused AdamW on one text of 1024 tokens, beside baselines of the same shape."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10}
    shape |= {"num_attention_heads": 8, "max_position_embeddings": LENGTH}
    ours, plain, windows = "DCFormer++", "Transformer++", "Transformer++, windows"
    variants = {plain: {**NO_COMPOSITION, "sliding_window": None}, windows: NO_COMPOSITION, ours: {}}
    token_ids, steps = random_tokens(LENGTH), {}
    for name, values in variants.items():
        torch.manual_seed(0)
        steps[name] = _training_step(DCFormerForCausalLM(DCFormerConfig(**shape, **values)).train(), token_ids)
    title = "training: float32, 50 M parameters, a text of 1024 tokens"
    compare(run, threads, title, steps, ours=ours, plain=plain, targets={windows: 1 / 0.85})


def _training_step(model: PreTrainedModel, token_ids: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        model(input_ids=token_ids, labels=token_ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


SECTIONS: dict[str, Callable[[Run, list[int]], None]] = {
    "decode": decode,
    "prefill": prefill,
    "training": training,
    "forward": partial(operator, with_gradients=False),
    "backward": partial(operator, with_gradients=True),
}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one length, without windows, and fewer turns")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="measure this alone; may be repeated")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (default: 1 2)")
    parser.add_argument("--seconds", type=float, help="time of a comparison (default: 40, with --quick 10)")
    parser.add_argument("--show", type=Path, help="print such a JSON file, and measure nothing")
    args: argparse.Namespace = parser.parse_args(arguments)
    run = Run(" ".join(sys.argv), CPU, is_quick=args.quick, notes=[authors.NOTE])
    if args.show is not None:
        rows = json.loads(args.show.read_text(encoding="utf-8"))["rows"]
        run.rows = [Row(**{**row, "timing": Timing(**row["timing"])}) for row in rows]
    else:
        torch.set_num_threads(max(args.threads))
        run.timer = Timer(CPU, args.seconds or (10 if args.quick else 40), most=3 if args.quick else 10)
        for name in args.only or SECTIONS:
            SECTIONS[name](run, args.threads)
            if args.json is not None:
                run.write(args.json)
    run.show()
    wanted = [row.figures for row in run.rows if TARGET in row.figures]
    print(f"{sum(figures[RATIO] <= figures[TARGET] for figures in wanted)} of {len(wanted)} targets are reached.")


if __name__ == "__main__":
    main()
