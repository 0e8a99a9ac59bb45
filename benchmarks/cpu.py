"""DCFormer's speed on CPUs beside SDPA, models without composition, and the authors' formulation.

    python -m benchmarks.cpu --quick                               # some minutes: only what has a target
    python -m benchmarks.cpu --json benchmarks/results/cpu.json    # everything, most of an hour
    python -m benchmarks.cpu --only decode --only prefill          # some sections
    python -m benchmarks.cpu --show benchmarks/results/cpu.json    # recorded figures as Markdown

What is compared runs in turns in one process, at every number of threads. The machine must do nothing else: each of
many short parallel operations waits for its slowest thread. A *time* is better when it is lower, a *speed* when it is
higher. A *bound* is the figure that would be reached if the composition took its least time (dcformer/bench/roofline),
added to what the same thing without composition was measured to take.
"""

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from dcformer.bench import candidates, measure, roofline
from dcformer.bench.operands import Operands, packed_documents, prompt_operands, step_operands

from .authors_decoder import AuthorsDecoder


CPU = torch.device("cpu")
SHAPES = ((32, 80), (16, 64))  # heads and channels
WINDOW, LENGTH = 256, 1024
MODEL_HEADS = (12, 6)
VOCABULARY, PROMPT, STEPS = 16384, 1024, 32
DCFORMER, PLAIN, LLAMA, NEOX, AUTHORS = "DCFormer", "no composition", "Llama", "GPT-NeoX", "authors"
CHUNKS = "authors, in chunks"
NO_COMPOSITION = {"compose_pre": False, "compose_post": False}
TRANSFORMER, TRANSFORMER_WINDOWS = "Transformer++", "Transformer++, windows"


class Options(NamedTuple):
    """How much to measure, at which numbers of threads."""

    is_quick: bool = False
    threads: tuple[int, ...] = (1, 2)
    repeats: int = 10
    seconds: float = 40.0


class Peer(NamedTuple):
    """What something of ours is compared with: the wanted figure, and seconds that ours takes at least."""

    name: str
    target: float | None = None
    least: dict[str, float] = {}


class Report:
    """Times, and rows that compare two of them; the same as in benchmarks/results/cpu.json."""

    def __init__(self, options: Options):
        self.options = options
        self.rates: dict[str, dict[str, float]] = {}
        self.rows: list[dict[str, Any]] = []
        self.times: list[dict[str, Any]] = []

    def time(self, cases: dict[str, Any]) -> list[tuple[int, dict[str, measure.Timing], roofline.Rates]]:
        """Time cases and the machine's rates in turns: threads, timings and rates for each number of threads."""
        timer = measure.Timer(CPU, self.options.seconds, self.options.repeats)
        probes = roofline.rate_probes(CPU, torch.float32)
        named = {}
        for threads in self.options.threads:
            for name, case in {**cases, **probes}.items():
                case = case if isinstance(case, measure.Case) else measure.Case(case)
                named[name, threads] = case._replace(threads=threads)
        timings = timer(named)
        found = []
        for threads in self.options.threads:
            seconds = {name: timings[name, threads].minimum for name in probes}
            rates = roofline.measured_rates(seconds, CPU)
            found.append((threads, {name: timings[name, threads] for name in cases}, rates))
        return found

    def compare(
        self,
        section: str,
        case: str,
        threads: int,
        timings: dict[str, measure.Timing],
        ours: str,
        peers: list[Peer],
        is_speed: bool = False,
    ) -> None:
        """Note all times, and ours as multiples of the peers', or the inverse for speeds."""
        for name, timing in timings.items():
            taken = timing._asdict()
            taken.pop("samples")
            self.times.append({"section": section, "case": case, "name": name, "threads": threads, "timing": taken})
        for peer in peers:
            bounds = {name: seconds / timings[peer.name].minimum for name, seconds in peer.least.items()}
            bounds = {name: 1 / bound if is_speed else bound for name, bound in bounds.items()}
            pair = (timings[peer.name], timings[ours]) if is_speed else (timings[ours], timings[peer.name])
            name = f"{'speed' if is_speed else 'time'} / {peer.name}"
            self.add(section, case, name, threads, *pair, target=peer.target, is_speed=is_speed, bounds=bounds)

    def add(
        self,
        section: str,
        case: str,
        name: str,
        threads: int,
        one: measure.Timing,
        other: measure.Timing,
        *,
        target: float | None = None,
        is_speed: bool = False,
        bounds: dict[str, float],
    ) -> None:
        """Note the time of one as a multiple of the other's, by minima, medians and processor time."""
        figures = {
            "ratio": one.minimum / other.minimum,
            "median": one.median / other.median,
            "processor": one.processor_minimum / other.processor_minimum,
        }
        about = {"section": section, "case": case, "measure": name, "threads": threads}
        self.rows.append({**about, **figures, "target": target, "more_is_better": is_speed, "bounds": bounds})


def operator(report: Report, with_gradients: bool) -> None:
    """A prompt through the operator, forward, or forward and backward."""
    is_quick = report.options.is_quick
    for heads, channels in SHAPES:
        for length in (LENGTH,) if is_quick else (512, 1024, 2048):
            for window in (None,) if is_quick else (None, WINDOW):
                _operator(report, heads, channels, length, window, with_gradients)


def _operator(report: Report, heads: int, channels: int, length: int, window: int | None, with_gradients: bool):
    of = prompt_operands(heads, channels, length, CPU, torch.float32)
    of = of.leaves() if with_gradients else of
    check(heads, channels, window, with_gradients)
    entries = composing_and_plain(window)
    if length > LENGTH:
        del entries["authors"]  # takes seconds
    makers = {name: entry.gradient_call if with_gradients else entry.make for name, entry in entries.items()}
    with torch.set_grad_enabled(with_gradients):
        found = report.time({name: make(of, window, None) for name, make in makers.items()})
    is_wanted = (length, window) == (LENGTH, None)
    target = 1.8 if with_gradients else {(32, 80): 1.4, (16, 64): 1.3}[heads, channels]
    case = f"float32, H {heads} D {channels}, T {length}, {'causal' if window is None else f'window {window}'}"
    section, passes = ("forward and backward", 3) if with_gradients else ("forward", 1)
    least = {}
    for threads, timings, rates in found:
        added = roofline.composition_bounds(roofline.forward_work(heads, channels, length, window), rates)
        least[threads] = {name: timings["sdpa"].minimum + passes * seconds for name, seconds in added.items()}
        peers = [Peer(name, target if name == "sdpa" and is_wanted else None, least[threads]) for name in entries]
        report.compare(section, case, threads, timings, "composed", peers[1:])
        report.rates[f"float32, {threads} threads, H {heads}"] = rates._asdict()
    if not with_gradients and report.options.threads == (1, 2):
        one, two = (timings for _, timings, _ in found)
        bounds = {name: least[1][name] / least[2][name] for name in least[1]}
        for name, target, own in (("composed", 1.7 if is_wanted else None, bounds), ("sdpa", None, {})):
            title = f"{name}: speed / one thread"
            report.add("two threads", case, title, 2, one[name], two[name], target=target, is_speed=True, bounds=own)


def composing_and_plain(window: int | None) -> dict[str, candidates.Candidate]:
    """The automatic choice, SDPA of the same keys, and the authors' formulation."""
    name = candidates.SDPA if window is None else candidates.SDPA_WINDOW
    sdpa = next(each for each in candidates.plain_candidates(CPU, False, window) if each.name == name)
    composed = candidates.Candidate(
        "composed",
        lambda of, window, mask: partial(of.composed, sliding_window=window, attention_mask=mask),
        lambda of: [*of.states, *of.factors],
    )
    return {"composed": composed, "sdpa": sdpa, "authors": candidates.authors_candidates(False)[0]}


def check(heads: int, channels: int, window: int | None = None, with_gradients: bool = False, **options: Any) -> None:
    """Raise RuntimeError if the automatic choice computes wrong values: nothing is timed then."""
    wrong = composing_and_plain(window)["composed"].problem(
        heads, channels, CPU, torch.float32, window=window, with_gradients=with_gradients, **options
    )
    if wrong is not None:
        raise RuntimeError(f"{heads} heads of {channels} channels: {wrong}; nothing was timed.")


def one_query(report: Report) -> None:
    """A decoding step's attention over 1024 keys, whose factors are read from rows of the cache."""
    for heads, channels in (*SHAPES, (12, 64), (6, 128)):
        check(heads, channels, is_step=True)
        of = step_operands(heads, channels, LENGTH, CPU, torch.float32)
        alone = Operands(of.query, of.key.contiguous(), of.value.contiguous(), None, None)
        entries = composing_and_plain(None)
        # A single query sees all keys, so it needs no causal mask, which SDPA would align to the first key.
        sdpa = partial(torch.nn.functional.scaled_dot_product_attention, *alone.states)
        with torch.no_grad():
            found = report.time({"composed": entries["composed"].make(of, None, None), "sdpa": sdpa})
        for threads, timings, _ in found:
            case = f"float32, H {heads} D {channels}, T {LENGTH}, causal"
            report.compare("one query", case, threads, timings, "composed", [Peer("sdpa")])


def packed(report: Report) -> None:
    """A row of documents, beside the same number of documents as a batch and one by one."""
    length, document = 2048, 256
    for heads, channels in SHAPES:
        check(heads, channels, is_packed=True)
        row = prompt_operands(heads, channels, length, CPU, torch.float32)
        batch = prompt_operands(heads, channels, document, CPU, torch.float32, batch=length // document)
        single = prompt_operands(heads, channels, document, CPU, torch.float32)
        calls = {
            "packed": partial(row.composed, attention_mask=packed_documents(length, document, CPU)),
            "batch": batch.composed,
            "one by one": lambda single=single: [single.composed() for _ in range(length // document)],
        }
        with torch.no_grad():
            found = report.time(calls)
        for threads, timings, _ in found:
            case = f"float32, H {heads} D {channels}, T {length} of {length // document} documents"
            report.compare("packed", case, threads, timings, "packed", [Peer("batch", 1.3), Peer("one by one", 1.3)])


def make_models(heads: int) -> dict[str, PreTrainedModel]:
    """A DCFormer, the same model without composition, Llama and GPT-NeoX; the latter three run SDPA."""
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
        LLAMA: (LlamaForCausalLM, LlamaConfig(**sizes)),
        NEOX: (GPTNeoXForCausalLM, GPTNeoXConfig(**sizes)),
    }
    models = {}
    for name, (model_class, config) in makers.items():
        torch.manual_seed(0)
        models[name] = model_class(config).eval()
    return models


def random_tokens(length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def read(model: Any, token_ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Feed tokens to a model and its cache."""
    if isinstance(model, AuthorsDecoder):
        return model(token_ids, cache, logits_to_keep=1)
    return model(token_ids, past_key_values=cache, logits_to_keep=1).logits


def new_cache(model: Any, kind: str = "dynamic") -> Any:
    if isinstance(model, AuthorsDecoder):
        return model.new_cache()
    static = partial(StaticCache, max_cache_len=PROMPT + STEPS)
    return (static if kind == "static" else DynamicCache)(config=model.config)


def decode_case(model: Any, kind: str = "dynamic", compiled: bool = False) -> measure.Case:
    """One step after another over given tokens, each sample with a copy of a cache that holds the prompt."""
    token_ids, filled = random_tokens(PROMPT + STEPS), new_cache(model, kind)
    read(model, token_ids[:, :PROMPT], filled)
    stepping = torch.compile(model, fullgraph=True) if compiled else model

    def steps(cache: Any) -> None:
        for token in token_ids[:, PROMPT:].split(1, dim=1):
            read(stepping, token, cache)

    return measure.Case(steps, prepare=lambda: copy.deepcopy(filled), parts=STEPS)


def prefill(report: Report) -> None:
    """A prompt into an empty dynamic cache, with the logits of its last token."""
    for heads in MODEL_HEADS:
        models: dict[str, Any] = make_models(heads)
        config = models[DCFORMER].config
        models[CHUNKS] = AuthorsDecoder(models[DCFORMER], PROMPT + STEPS)
        check_authors(models)
        prompt = random_tokens(PROMPT)
        cases = {
            name: measure.Case(partial(read, model, prompt), prepare=partial(new_cache, model))
            for name, model in models.items()
        }
        for threads, timings, rates in report.time(cases):
            least = dict.fromkeys(
                ("fused", "by passes"), 2 * PROMPT * compose_parameters(models[DCFORMER]) / rates.flops
            )
            for layer_type in config.layer_types:
                window = config.sliding_window if layer_type == "sliding_attention" else None
                work = roofline.forward_work(heads, config.head_dim, PROMPT, window)
                for name, seconds in roofline.composition_bounds(work, rates).items():
                    least[name] += seconds
            case = f"float32, H {heads} D {config.head_dim}, prompt {PROMPT}"
            compare_models(report, "prefill", case, threads, timings, 0.93, least)


def check_authors(models: dict[str, Any]) -> None:
    """Raise RuntimeError unless the authors' formulation has our logits: nothing is timed then."""
    prompt = random_tokens(PROMPT)
    ours, theirs = (read(models[name], prompt, new_cache(models[name])) for name in (DCFORMER, CHUNKS))
    if candidates.relative_error(theirs, ours) > 1e-3:
        raise RuntimeError("The authors' formulation has other logits than DCFormer; nothing was timed.")


def decode(report: Report) -> None:
    """One token after another, after a prompt of 1024, with a dynamic and a static cache."""
    for heads in MODEL_HEADS:
        models = make_models(heads)
        authors: Any = AuthorsDecoder(models[DCFORMER], PROMPT + STEPS)
        check_authors({**models, CHUNKS: authors})
        cases = {f"{name}|{kind}": decode_case(model, kind) for name, model in models.items() for kind in _CACHES}
        for threads, timings, rates in report.time({**cases, AUTHORS: decode_case(authors)}):
            least = {"reading": decode_seconds(models[DCFORMER], rates)}
            for kind, target in _CACHES.items():
                own = {name: timings[f"{name}|{kind}"] for name in models}
                case = f"float32, H {heads} D {768 // heads}, after {PROMPT} tokens, {kind} cache"
                compare_models(report, "decode", case, threads, own, 0.93, least)
                authors_time = timings[AUTHORS]
                bounds = {"reading": (own[PLAIN].minimum + least["reading"]) / authors_time.minimum}
                name, ours = f"time / {AUTHORS}", own[DCFORMER]
                report.add("decode", case, name, threads, ours, authors_time, target=target, bounds=bounds)
            case = f"float32, H {heads} D {768 // heads}, after {PROMPT} tokens, own cache"
            report.compare("decode", case, threads, {AUTHORS: authors_time}, AUTHORS, [])


_CACHES = {"dynamic": 0.85, "static": 0.80}  # and the wanted time, as a share of the authors' formulation


def compiled(report: Report) -> None:
    """Decoding by graphs of torch.compile, with a static cache."""
    torch._dynamo.config.recompile_limit = 64  # every model and number of threads has graphs of its own
    for heads in MODEL_HEADS:
        models = make_models(heads)
        chosen = {name: models[name] for name in (DCFORMER, PLAIN, LLAMA)}
        cases = {name: decode_case(model, "static", compiled=True) for name, model in chosen.items()}
        for threads, timings, rates in report.time(cases):
            case = f"float32, H {heads} D {768 // heads}, after {PROMPT} tokens, static cache, compiled"
            least = {"reading": decode_seconds(models[DCFORMER], rates)}
            compare_models(report, "decode", case, threads, timings, 0.95, least)


def compare_models(
    report: Report,
    section: str,
    case: str,
    threads: int,
    timings: dict[str, measure.Timing],
    target: float,
    least: dict[str, float],
) -> None:
    """The DCFormer's speed as a share of every other's; the target is for the model without composition."""
    taken = {name: timings[PLAIN].minimum + seconds for name, seconds in least.items()}
    peers = [Peer(name, target if name == PLAIN else None, taken) for name in timings if name != DCFORMER]
    report.compare(section, case, threads, timings, DCFORMER, peers, is_speed=True)


def decode_seconds(model: PreTrainedModel, rates: roofline.Rates) -> float:
    """Seconds that composition adds to a step at least: reading its parameters and the cached factors of all keys."""
    config = model.config
    plain = DCFormerConfig.from_dict({**config.to_dict(), **NO_COMPOSITION})
    extra = cache_bytes_per_token(config, torch.float32) - cache_bytes_per_token(plain, torch.float32)
    keys = sum(WINDOW if kind == "sliding_attention" else PROMPT for kind in config.layer_types)
    return (4 * compose_parameters(model) + extra * keys) / rates.read_bytes


def compose_parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if ".compose." in name)


def training(report: Report) -> None:
    """Forward, backward, clipping and fused AdamW on a row of 1024 tokens, beside baselines of the same shape."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10}
    shape |= {"num_attention_heads": 8, "max_position_embeddings": LENGTH}
    variants = {TRANSFORMER: {**NO_COMPOSITION, "sliding_window": None}, TRANSFORMER_WINDOWS: NO_COMPOSITION}
    token_ids, steps = random_tokens(LENGTH), {}
    for name, values in {**variants, "DCFormer++": {}}.items():
        torch.manual_seed(0)
        steps[name] = _training_step(DCFormerForCausalLM(DCFormerConfig(**shape, **values)).train(), token_ids)
    for threads, timings, _ in report.time(steps):
        case = "float32, 50 M parameters, a row of 1024"
        peers = [Peer(TRANSFORMER), Peer(TRANSFORMER_WINDOWS, 0.85)]
        report.compare("training", case, threads, timings, "DCFormer++", peers, is_speed=True)


def _training_step(model: PreTrainedModel, token_ids: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        model(input_ids=token_ids, labels=token_ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


SECTIONS: dict[str, Callable[[Report], None]] = {
    "decode": decode,
    "compiled": compiled,
    "prefill": prefill,
    "training": training,
    "forward": partial(operator, with_gradients=False),
    "backward": partial(operator, with_gradients=True),
    "decode-operator": one_query,
    "packed": packed,
}


def markdown(content: dict[str, Any]) -> str:
    """Environment, rates, rows (those with targets first) and times of a JSON file, as Markdown."""
    parts = [", ".join(f"{name} {value}" for name, value in content["environment"].items()) + "."]
    for name, rates in content["rates"].items():
        parts.append(
            f"- {name}: matrix products {rates['flops'] / 1e9:.0f} Gflop/s; copies {rates['memory_bytes'] / 1e9:.1f} "
            f"in memory, {rates['cache_bytes'] / 1e9:.1f} in cache, reading {rates['read_bytes'] / 1e9:.1f} GB/s"
        )
    columns = ["what", "threads", "figure", "target", "met", "bound", "median", "processor time"]
    rows = sorted(content["rows"], key=lambda row: row["target"] is None)
    parts.append(markdown_table(columns, [_row_cells(row) for row in rows]))
    cells = [
        [f"{time['section']}: {time['case']}: {time['name']}", str(time["threads"])]
        + [f"{1000 * time['timing'][name]:.2f}" for name in ("minimum", "median", "processor_minimum")]
        for time in content["times"]
    ]
    parts.append(markdown_table(["time of", "threads", "min ms", "median ms", "processor ms"], cells))
    return "\n\n".join(parts) + "\n"


def is_met(row: dict[str, Any]) -> bool:
    return row["ratio"] >= row["target"] if row["more_is_better"] else row["ratio"] <= row["target"]


def _row_cells(row: dict[str, Any]) -> list[str]:
    target = met = ""
    if row["target"] is not None:
        target = f"{'>=' if row['more_is_better'] else '<='} {row['target']:.3g}"
        met = "yes" if is_met(row) else "no"
    bounds = ", ".join(f"{value:.2f} {name}" for name, value in row["bounds"].items())
    what = f"{row['section']}: {row['case']}: {row['measure']}"
    figures = [f"{row[name]:.2f}" for name in ("ratio", "median", "processor")]
    return [what, str(row["threads"]), figures[0], target, met, bounds, *figures[1:]]


def markdown_table(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only what has a target, and fewer turns")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="measure this alone; may be repeated")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (default: 1 2)")
    parser.add_argument("--repeats", type=int, help="most turns (default: 10, with --quick 3)")
    parser.add_argument("--seconds", type=float, help="time of a comparison (default: 40, with --quick 10)")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    parser.add_argument("--show", type=Path, help="print such a file as Markdown, and measure nothing")
    args = parser.parse_args(arguments)
    if args.show is not None:
        print(markdown(json.loads(args.show.read_text(encoding="utf-8"))), end="")
        return
    repeats, seconds = (3, 10.0) if args.quick else (10, 40.0)
    options = Options(args.quick, tuple(args.threads), args.repeats or repeats, args.seconds or seconds)
    torch.set_num_threads(max(options.threads))
    report = Report(options)
    for name in args.only or SECTIONS:
        SECTIONS[name](report)
        content = {"environment": measure.environment(CPU), "arguments": vars(args)}
        content |= {"rates": report.rates, "rows": report.rows, "times": report.times}
        if args.json is not None:
            measure.write_json(args.json, content)
    print(markdown(content), end="")
    wanted = [row for row in report.rows if row["target"] is not None]
    print(f"{sum(map(is_met, wanted))} of {len(wanted)} targets are reached.")


if __name__ == "__main__":
    main()
