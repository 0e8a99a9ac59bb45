"""Speed of scoring HellaSwag: DCFormer++ against a GPT-NeoX of the same size, through the same harness.

    python -m benchmarks.evaluation --data-dir DATA --tokenizer 20B_tokenizer.json --device cuda --dtype bfloat16

Weights are random: what is timed does not depend on them. DATA holds hellaswag/validation.parquet.
"""

import argparse

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from dcformer import DCFormerConfig, DCFormerForCausalLM


try:
    from . import common
except ImportError:  # run as a file, not as a module of the package
    import common


def make_models(args: argparse.Namespace, vocab_size: int) -> dict[str, PreTrainedModel]:
    """A DCFormer of the preset and a GPT-NeoX of its width, depth and heads, with an MLP of four times the width."""
    fewer_layers = {"num_hidden_layers": args.layers} if args.layers else {}
    config = DCFormerConfig.from_preset(args.preset, vocab_size=vocab_size, **fewer_layers)
    neox = GPTNeoXConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=4 * config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=2048,
    )
    models = {}
    for name, model_class, shape in (
        ("GPT-NeoX", GPTNeoXForCausalLM, neox),
        ("DCFormer", DCFormerForCausalLM, config),
    ):
        torch.manual_seed(0)
        with torch.device(args.device):
            models[name] = model_class._from_config(shape, dtype=common.DTYPES[args.dtype]).eval()
    return models


def hellaswag_requests(data_dir: str, count: int) -> list:
    """The first `count` log-likelihood requests of the task, four for each document."""
    from lm_eval.tasks import TaskManager

    from dcformer.eval.table4_tasks import tasks_folder

    name = "dcformer_hellaswag"
    manager = TaskManager(include_path=tasks_folder(), include_defaults=False, metadata={"data_dir": data_dir})
    task = manager.load([name])["tasks"][name]
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests(limit=-(-count // 4), rank=0, world_size=1)
    return task.instances[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder with hellaswag/validation.parquet")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json of GPT-NeoX")
    parser.add_argument("--preset", default="dcformer-2.8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the preset's")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    common.add_common_arguments(parser)
    args = parser.parse_args()

    from dcformer.eval.language_model import DCFormerLM

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=args.tokenizer, eos_token="<|endoftext|>")
    requests = hellaswag_requests(args.data_dir, args.requests)
    scorers = {
        name: DCFormerLM(model, tokenizer=tokenizer, batch_size=args.batch_size, device=str(args.device))
        for name, model in make_models(args, vocab_size=50304).items()
    }
    calls = {
        name: lambda scorer=scorer: scorer.loglikelihood(requests, disable_tqdm=True)
        for name, scorer in scorers.items()
    }
    timings = common.interleave(calls, args.repeats, args.device)
    scorer = scorers["DCFormer"]
    scorer.forget_documents()
    calls["DCFormer"]()
    tokens = scorer.input_tokens
    results = {
        name: {"samples_per_second": len(requests) / timing.minimum, "tokens_per_second": tokens / timing.minimum}
        for name, timing in timings.items()
    }
    common.show_environment(args.device)
    print(f"{len(requests)} requests, {tokens} tokens, batches of {args.batch_size}, {args.dtype}")
    rows = [[name, *(f"{value:.1f}" for value in figures.values())] for name, figures in results.items()]
    common.show_table(["model", "requests/s", "tokens/s"], rows)
    ratio = timings["GPT-NeoX"].minimum / timings["DCFormer"].minimum
    print(f"DCFormer / GPT-NeoX {ratio:.2f}")
    common.write_json(args, {**results, "ratio": ratio})


if __name__ == "__main__":
    main()
