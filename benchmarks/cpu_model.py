"""Rows of the CPU table for whole models: reading a prompt, and decoding with dynamic, static and compiled caches."""

import argparse

import torch
from transformers import PreTrainedModel

from dcformer import DCFormerConfig, cache_bytes_per_token
from dcformer.bench import roofline

from . import common, model, training
from .cpu_options import CPU, Options, probes, rates
from .results import Findings, Row, Time, time_ratio


SHAPES = (model.Shape(heads=12), model.Shape(heads=6))
# The speed that is wanted, as a share of the model's without composition.
PREFILL_TARGET, DECODE_TARGET, COMPILED_TARGET, TRAINING_TARGET = 0.93, 0.93, 0.95, 0.85
# Kind of cache -> the time that is wanted, as a share of the authors' formulation.
AUTHORS_TARGETS = {"dynamic": 0.85, "static": 0.80}

_TRAINING = "float32, 50 M parameters, a row of 1024"


def prefill(options: Options) -> Findings:
    """1024 tokens into an empty dynamic cache."""
    findings = Findings()
    for shape in SHAPES:
        models = model.make_models(shape, CPU, torch.float32)
        cases = model.prefill_cases(models, shape, model.random_tokens(shape, CPU), with_slow=not options.is_quick)
        timings = options.interleave({**{(name,): case for name, case in cases.items()}, **probes(torch.float32)})
        for threads in options.threads:
            found = rates(timings, torch.float32, threads)
            by_name = {name: timings[name, threads] for name in cases}
            added = prefill_bounds(models[model.DCFORMER], shape.prompt, found)
            case = f"float32, H {shape.heads} D {shape.hidden // shape.heads}, prompt {shape.prompt}"
            findings.add(_speeds("prefill", case, threads, by_name, PREFILL_TARGET, added))
    return findings


def decode(options: Options) -> Findings:
    """One token after another, after a prompt of 1024."""
    findings = Findings()
    for shape in SHAPES:
        models = model.make_models(shape, CPU, torch.float32)
        token_ids = model.random_tokens(shape, CPU)
        cases = {
            (name, kind): case
            for kind in AUTHORS_TARGETS
            for name, case in model.decode_cases(models, shape, token_ids, kind).items()
            if kind == "dynamic" or name != model.AUTHORS
        }
        timings = options.interleave({**cases, **probes(torch.float32)})
        for threads in options.threads:
            added = decode_bounds(models[model.DCFORMER], shape, rates(timings, torch.float32, threads))
            authors = timings[model.AUTHORS, "dynamic", threads]
            for kind, target in AUTHORS_TARGETS.items():
                by_name = {name: timings[name, kind, threads] for name, of_kind in cases if of_kind == kind}
                case = f"{_case(shape)}, {kind} cache"
                wanted = DECODE_TARGET
                without_authors = {name: timing for name, timing in by_name.items() if name != model.AUTHORS}
                findings.add(_speeds("decode", case, threads, without_authors, wanted, added))
                if kind == "dynamic":
                    findings.times.append(Time("decode", f"{_case(shape)}, own cache", model.AUTHORS, threads, authors))
                plain = by_name[model.PLAIN].minimum
                findings.rows.append(
                    Row(
                        "decode",
                        case,
                        "time / authors",
                        threads,
                        **time_ratio(by_name[model.DCFORMER], authors),
                        target=target,
                        bounds={form: (plain + seconds) / authors.minimum for form, seconds in added.items()},
                    )
                )
    return findings


def compiled(options: Options) -> Findings:
    """Decoding by graphs of torch.compile, with a static cache."""
    findings = Findings()
    for shape in SHAPES:
        models = model.make_models(shape, CPU, torch.float32)
        chosen = {name: models[name] for name in (model.DCFORMER, model.PLAIN, model.LLAMA)}
        cases = model.decode_cases(chosen, shape, model.random_tokens(shape, CPU), "static", compiled=True)
        timings = options.interleave({**{(name,): case for name, case in cases.items()}, **probes(torch.float32)})
        for threads in options.threads:
            added = decode_bounds(models[model.DCFORMER], shape, rates(timings, torch.float32, threads))
            by_name = {name: timings[name, threads] for name in cases}
            case = f"{_case(shape)}, static cache, compiled"
            findings.add(_speeds("decode", case, threads, by_name, COMPILED_TARGET, added))
    return findings


def training_step(options: Options) -> Findings:
    """Forward, backward, clipping and AdamW on a row of 1024 tokens, beside baselines of the same shape."""
    args = argparse.Namespace(preset="50m", length=1024, attention="sdpa", device=CPU, dtype="float32", compile=False)
    models = training.make_models(args)
    token_ids = random_row(next(iter(models.values())).config.vocab_size, args.length)
    timings = options.interleave({(name,): training.make_step(of, token_ids, args) for name, of in models.items()})
    findings = Findings()
    for threads in options.threads:
        by_name = {name: timings[name, threads] for name in models}
        ours = by_name["DCFormer++"]
        findings.times += [Time("training", _TRAINING, name, threads, timing) for name, timing in by_name.items()]
        for name, timing in by_name.items():
            if name == "DCFormer++":
                continue
            target = TRAINING_TARGET if "windows" in name else None
            ratio = time_ratio(timing, ours)
            row = Row("training", _TRAINING, f"speed / {name}", threads, **ratio, target=target, more_is_better=True)
            findings.rows.append(row)
    return findings


def random_row(vocabulary: int, length: int) -> torch.Tensor:
    """(1, length) token ids."""
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))


def _speeds(
    section: str,
    case: str,
    threads: int,
    timings: dict[str, common.Timing],
    target: float | None,
    added: dict[str, float],
) -> Findings:
    """All times, and the DCFormer's speed as a share of every other's; the target is for no composition."""
    ours, plain = timings[model.DCFORMER], timings[model.PLAIN].minimum
    findings = Findings([Time(section, case, name, threads, timing) for name, timing in timings.items()])
    for peer, timing in timings.items():
        if peer == model.DCFORMER:
            continue
        findings.rows.append(
            Row(
                section,
                case,
                f"speed / {peer}",
                threads,
                **time_ratio(timing, ours),
                target=target if peer == model.PLAIN else None,
                more_is_better=True,
                bounds={form: timing.minimum / (plain + seconds) for form, seconds in added.items()},
            )
        )
    return findings


def prefill_bounds(of: PreTrainedModel, length: int, found: roofline.Rates) -> dict[str, float]:
    """Seconds that composition must add to reading a prompt: making the factors, and mixing all layers' heads."""
    config = of.config
    factors = 2 * length * _compose_parameters(of) / found.flops
    bounds = {}
    for layer_type in config.layer_types:
        work = roofline.forward_work(
            batch=1,
            heads=config.num_attention_heads,
            length=length,
            head_dim=config.head_dim,
            rank=config.compose_rank,
            itemsize=4,
            sliding_window=config.sliding_window if layer_type == "sliding_attention" else None,
        )
        for form, seconds in roofline.composition_bounds(work, found).items():
            bounds[form] = bounds.get(form, factors) + seconds
    return bounds


def decode_bounds(of: PreTrainedModel, shape: model.Shape, found: roofline.Rates) -> dict[str, float]:
    """Seconds that composition must add to a step: reading its parameters and the cached factors of all keys."""
    config = of.config
    plain = DCFormerConfig.from_dict({**config.to_dict(), "compose_pre": False, "compose_post": False})
    extra = cache_bytes_per_token(config, torch.float32) - cache_bytes_per_token(plain, torch.float32)
    keys = sum(
        min(shape.prompt, config.sliding_window) if layer_type == "sliding_attention" else shape.prompt
        for layer_type in config.layer_types
    )
    return {"reading": (4 * _compose_parameters(of) + extra * keys) / found.read_bytes}


def _compose_parameters(of: PreTrainedModel) -> int:
    return sum(parameter.numel() for name, parameter in of.named_parameters() if ".compose." in name)


def _case(shape: model.Shape) -> str:
    return f"float32, H {shape.heads} D {shape.hidden // shape.heads}, after {shape.prompt} tokens"
