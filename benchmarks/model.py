"""Tokens per second of a DCFormer against the same model without composition and against Llama of the same shape."""

import argparse

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dcformer import DCFormerConfig, DCFormerForCausalLM


try:
    from . import common
except ImportError:  # run as a file, not as a module of the package
    import common


_VOCABULARY = 50257
_SWITCHES = ("pre", "post", "query", "key", "low_rank", "gate", "static")


def make_models(args: argparse.Namespace) -> dict[str, PreTrainedModel]:
    """Three models of one shape; the first is what the others are compared with."""
    shape = {
        "vocab_size": _VOCABULARY,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "max_position_embeddings": args.prompt + args.steps,
        "tie_word_embeddings": False,
    }
    no_composition = {f"compose_{switch}": False for switch in _SWITCHES}
    configs = {
        "Llama, sdpa": LlamaConfig(**shape),
        "DCFormer, no composition": DCFormerConfig(**shape, sliding_window=args.window, **no_composition),
        "DCFormer": DCFormerConfig(**shape, sliding_window=args.window),
    }
    models = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        model_class = LlamaForCausalLM if isinstance(config, LlamaConfig) else DCFormerForCausalLM
        models[name] = model_class(config).eval().to(args.device, common.DTYPES[args.dtype])
    return models


def generation_seconds(model: PreTrainedModel, token_ids: Tensor, prompt: int) -> tuple[float, float]:
    """
    Seconds of the prefill and of all decoding steps after it.

    Args:
        token_ids (`Tensor`): (1, prompt + steps); the steps are fed the given tokens one by one.
    """
    cache = DynamicCache(config=model.config)
    device = token_ids.device

    def read(start, stop):
        model(token_ids[:, start:stop], past_key_values=cache, logits_to_keep=1)

    def decode():
        for position in range(prompt, token_ids.shape[1]):
            read(position, position + 1)

    return common.seconds(lambda: read(0, prompt), device), common.seconds(decode, device)


@torch.no_grad()
def measure(models: dict[str, PreTrainedModel], args: argparse.Namespace) -> dict[str, dict[str, common.Timing]]:
    """Prefill and decoding time of every model, in turns after one turn that does not count."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(_VOCABULARY, (1, args.prompt + args.steps), generator=generator).to(args.device)
    samples = {name: [] for name in models}
    for turn in range(args.repeats + 1):
        for name, model in models.items():
            sample = generation_seconds(model, token_ids, args.prompt)
            if turn > 0:
                samples[name].append(sample)
    phases = {"prefill": 0, "decode": 1}
    return {
        phase: {name: common.summarize([sample[index] for sample in taken]) for name, taken in samples.items()}
        for phase, index in phases.items()
    }


def show_throughput(phase: str, tokens: int, timings: dict[str, common.Timing]) -> None:
    """Print tokens per second, and as a share of the first model's."""
    first = next(iter(timings.values()))
    rows = [
        [
            name,
            f"{tokens / timing.minimum:.1f}",
            f"{tokens / timing.median:.1f}",
            f"{first.minimum / timing.minimum:.2f}",
            f"{first.median / timing.median:.2f}",
        ]
        for name, timing in timings.items()
    ]
    common.show_table([f"{phase}, tokens/s", "best", "median", "best / Llama", "median / Llama"], rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--window", type=int, default=256, help="sliding window of every other DCFormer layer")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=8)
    common.add_common_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    common.show_environment(args.device)
    models = make_models(args)
    for name, model in models.items():
        print(f"{name}: {model.num_parameters() / 1e6:.1f} M parameters")
    print(f"batch 1, prompt {args.prompt}, {args.steps} decoding steps, {args.dtype}")
    timings = measure(models, args)
    for phase, tokens in (("prefill", args.prompt), ("decode", args.steps)):
        show_throughput(phase, tokens, timings[phase])
    figures = {phase: {name: timing._asdict() for name, timing in rows.items()} for phase, rows in timings.items()}
    common.write_json(args, figures)


if __name__ == "__main__":
    main()
