"""Tokens per second of training: a DCFormer++ against Transformer++ of its shape, with and without its windows."""

import argparse
from pathlib import Path

import torch
from transformers import PreTrainedModel

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.bench import roofline
from dcformer.training.throughput import flops_per_token, peak_flops


try:
    from . import common
except ImportError:  # run as a file, not as a module of the package
    import common


# What differs between the models; the first is what the others are compared with. The paper's baselines have no
# windows, which its Table 6 compares with as well as with baselines that have them.
_MODELS = {
    "Transformer++": {"compose_pre": False, "compose_post": False, "sliding_window": None},
    "Transformer++, windows": {"compose_pre": False, "compose_post": False},
    "DCFormer++": {},
}
# Rows and tokens of a row, if not given: one step should take seconds.
_BATCHES = {"50m": (1, 1024), "405m": (8, 2048)}


def make_config(preset: str, **values) -> DCFormerConfig:
    """The 405M shape of Table 3, or a smaller one of about 50 million parameters, a third of them embeddings."""
    if preset == "405m":
        return DCFormerConfig.from_preset("dcformer-405m", **values)
    shape = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536}
    return DCFormerConfig(**shape, num_hidden_layers=10, num_attention_heads=8, **values)


def make_models(args: argparse.Namespace) -> dict[str, PreTrainedModel]:
    """Models in float32, as they are trained, with the same weights where they have the same parameters' shapes."""
    models = {}
    for name, values in _MODELS.items():
        torch.manual_seed(0)
        config = make_config(args.preset, max_position_embeddings=args.length, **values)
        config._attn_implementation = "eager" if config.composes_heads else args.attention
        models[name] = DCFormerForCausalLM(config).train().to(args.device)
    return models


def make_step(model: PreTrainedModel, token_ids: torch.Tensor, args: argparse.Namespace):
    """One optimiser step as a call: forward, backward, clipping and AdamW, under autocast if not in float32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    parameters = list(model.parameters())
    dtype = common.DTYPES[args.dtype]
    forward = torch.compile(model) if args.compile else model

    def step() -> None:
        with torch.autocast(token_ids.device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = forward(input_ids=token_ids, labels=token_ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def bounds(model: PreTrainedModel, rates: roofline.Rates, args: argparse.Namespace) -> dict[str, float]:
    """
    Tokens per second that training cannot exceed: with every operation at the rate of matrix products, and with each
    term of the composition besides sweeping scores that stay in the cache, once forward and twice backward.
    """
    config, tokens = model.config, args.batch * args.length
    matmul_seconds = tokens * flops_per_token(config, args.length) / rates.flops
    pass_bytes = 0.0
    if config.composes_heads:
        for layer_type in config.layer_types:
            pass_bytes += roofline.forward_work(
                batch=args.batch,
                heads=config.num_attention_heads,
                length=args.length,
                head_dim=config.head_dim,
                rank=config.compose_rank,
                itemsize=common.DTYPES[args.dtype].itemsize,
                sliding_window=config.sliding_window if layer_type == "sliding_attention" else None,
            ).pass_bytes
    pass_seconds = 3 * pass_bytes / rates.cache_bytes
    return {"fused": tokens / matmul_seconds, "pass by pass": tokens / (matmul_seconds + pass_seconds)}


def show_bounds(models: dict[str, PreTrainedModel], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure the machine's rates and print what they allow, as tokens per second and as shares of the first model."""
    dtype = common.DTYPES[args.dtype]
    probes = common.interleave(roofline.rate_probes(args.device, dtype), args.repeats, args.device)
    rates = roofline.measured_rates({name: timing.minimum for name, timing in probes.items()}, args.device)
    print(f"matrix products {rates.flops / 1e9:.0f} Gflop/s, copies in cache {rates.cache_bytes / 1e9:.0f} GB/s")
    found = {name: bounds(model, rates, args) for name, model in models.items()}
    first = next(iter(found.values()))
    rows = []
    for name, model in models.items():
        row = [name, f"{model.num_parameters() / 1e6:.1f}", f"{flops_per_token(model.config, args.length) / 1e6:.0f}"]
        for kind, tokens_per_second in found[name].items():
            row += [f"{tokens_per_second:.0f}", f"{tokens_per_second / first[kind]:.2f}"]
        rows.append(row)
    columns = ["tokens/s at most", "M par.", "Mflop/token", "fused", "ratio", "by pass", "ratio"]
    common.show_table(columns, rows)
    return found


def show_throughput(models: dict[str, PreTrainedModel], timings: dict[str, common.Timing], args) -> dict[str, dict]:
    """Print tokens per second, and the DCFormer's as shares of each baseline's; MFU is that of the best step."""
    tokens = args.batch * args.length
    # The data sheet of a GPU; on a CPU what a matrix product reaches.
    peak = peak_flops("fp32" if args.dtype == "float32" else "bf16")
    figures, rows = {}, []
    for name, timing in timings.items():
        best, median = tokens / timing.minimum, tokens / timing.median
        mfu = None if peak is None else best * flops_per_token(models[name].config, args.length) / peak
        figures[name] = {"tokens_per_second": {"best": best, "median": median}, "mfu": mfu}
        rows.append([name, f"{best:.1f}", f"{median:.1f}", "unknown" if mfu is None else f"{mfu:.1%}"])
    common.show_table(["tokens/s", "best", "median", "MFU"], rows)
    *baselines, composing = figures
    for baseline in baselines:
        ratios = {
            kind: value / figures[baseline]["tokens_per_second"][kind]
            for kind, value in figures[composing]["tokens_per_second"].items()
        }
        figures[composing][f"ratio to {baseline}"] = ratios
        print(f"{composing} / {baseline}: {ratios['best']:.2f} by the best, {ratios['median']:.2f} by medians")
    return figures


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=sorted(_BATCHES), default="50m")
    parser.add_argument("--batch", type=int, help="rows of a step; 1, for 405m 8")
    parser.add_argument("--length", type=int, help="tokens of a row; 1024, for 405m 2048")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--attention", default="sdpa", help="of the baselines: sdpa, flash_attention_2, ...")
    parser.add_argument("--compile", action="store_true", help="torch.compile every model")
    common.add_common_arguments(parser)
    args = parser.parse_args()
    batch, length = _BATCHES[args.preset]
    args.batch, args.length = args.batch or batch, args.length or length
    return args


def main() -> None:
    args = parse_arguments()
    if args.json is not None:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    common.show_environment(args.device)
    compiled = ", compiled" if args.compile else ""
    print(f"{args.batch} rows of {args.length} tokens, {args.dtype}, baselines with {args.attention}{compiled}")
    models = make_models(args)
    allowed = show_bounds(models, args)
    generator = torch.Generator().manual_seed(0)
    vocabulary = next(iter(models.values())).config.vocab_size
    token_ids = torch.randint(vocabulary, (args.batch, args.length), generator=generator).to(args.device)
    steps = {name: make_step(model, token_ids, args) for name, model in models.items()}
    timings = common.interleave(steps, args.repeats, args.device)
    common.write_json(args, {"bounds": allowed, "training": show_throughput(models, timings, args)})


if __name__ == "__main__":
    main()
