"""Time and tokens of scoring tasks of Table 4: lm-eval's own HFLM, ours, and ours that computes shared beginnings once.

    python -m benchmarks.evaluation --data-dir DATA --tokenizer 20B_tokenizer.json --json evaluation.json

All three score the same requests with the same models in one run: a DCFormer, and a GPT-NeoX of its width and depth.
Weights are random: what is timed does not depend on them. DATA is a folder as `dcformer eval --data-dir` takes it.
"""

import argparse
import contextlib
import io
from typing import Any

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from dcformer import DCFormerConfig, DCFormerForCausalLM


try:
    from . import common
except ImportError:  # run as a file, not as a module of the package
    import common

TASKS = "piqa,winogrande,arc_easy,sciq,logiqa,boolq,hellaswag,race_high"
HARNESS, WHOLE, SHARED = SCORERS = ("HFLM", "ours, whole inputs", "ours, shared beginnings")


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


def load_tasks(data_dir: str, names: list[str]) -> dict[str, Any]:
    """The tasks of Table 4 with their documents."""
    from dcformer.eval.plan import task_manager
    from dcformer.eval.suites import PREFIX

    manager = task_manager({"data_dir": data_dir})
    return {name: manager.load([PREFIX + name])["tasks"][PREFIX + name] for name in names}


def make_requests(task: Any, shots: int, documents: int, seed: int = 1234) -> list:
    """The requests of the first documents of a task, each after a number of examples."""
    task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(seed=seed)
    task.build_all_requests(limit=documents, rank=0, world_size=1)
    return task.instances


def make_scorers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> dict:
    from lm_eval.models.huggingface import HFLM

    from dcformer.eval.language_model import DCFormerLM

    options = {"tokenizer": tokenizer, "batch_size": args.batch_size, "device": str(args.device), "backend": "causal"}
    # The tokenizer's own longest input is unknown, and the harness would take it before that of the model.
    options["max_length"] = 2048
    return {
        HARNESS: HFLM(model, **options),
        WHOLE: DCFormerLM(model, shared_prefixes=False, **options),
        SHARED: DCFormerLM(model, **options),
    }


def compare(scorers: dict, requests: list, repeats: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Least seconds of every scorer, by the clock and of the processor, in turns; tokens; differences of scores."""
    samples: dict[str, list[common.Sample]] = {name: [] for name in scorers}
    answers = {}
    for _ in range(repeats):
        for name, scorer in scorers.items():

            def score(name: str = name, scorer: Any = scorer) -> None:
                if name != HARNESS:
                    scorer.forget_documents()
                answers[name] = scorer.loglikelihood(requests, disable_tqdm=True)

            samples[name].append(common.sample(score, device))
    figures = {}
    for name, scorer in scorers.items():
        counted = scorers[WHOLE] if name == HARNESS else scorer  # the harness counts no tokens, and takes the same
        differences = [abs(one[0] - other[0]) for one, other in zip(answers[name], answers[WHOLE])]
        figures[name] = {
            "seconds": min(sample.wall for sample in samples[name]),
            "processor_seconds": min(sample.processor for sample in samples[name]),
            "tokens": counted.input_tokens - counted.cached_tokens,
            "largest_difference": max(differences),
            "greedy_differs": sum(one[1] != other[1] for one, other in zip(answers[name], answers[WHOLE])),
        }
    return figures


def rows_of(results: dict[str, dict[str, dict[str, float]]]) -> list[list[str]]:
    rows = []
    for name, figures in results.items():
        harness, whole, shared = (figures[scorer] for scorer in SCORERS)
        rows.append(
            [
                name,
                f"{whole['tokens']:,}",
                f"{shared['tokens']:,}",
                f"{whole['tokens'] / shared['tokens']:.2f}",
                *(f"{figures[scorer]['seconds']:.1f}" for scorer in SCORERS),
                *(f"{other['seconds'] / shared['seconds']:.2f}" for other in (harness, whole)),
                *(f"{other['processor_seconds'] / shared['processor_seconds']:.2f}" for other in (harness, whole)),
                f"{shared['largest_difference']:.0e}",
            ]
        )
    return rows


COLUMNS = [
    "task",
    "tokens",
    "computed",
    "ratio",
    "HFLM s",
    "whole s",
    "shared s",
    "HFLM / shared",
    "whole / shared",
    "of processor",
    "of processor",
    "largest difference",
]


def total(results: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    def combined(scorer: str, name: str) -> float:
        values = [figures[scorer][name] for figures in results.values()]
        return max(values) if name == "largest_difference" else sum(values)

    names = next(iter(results.values()))[WHOLE]
    return {scorer: {name: combined(scorer, name) for name in names} for scorer in SCORERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder with the data of the tasks")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json of GPT-NeoX")
    parser.add_argument("--tasks", default=TASKS, help="columns of Table 4, separated by commas")
    parser.add_argument("--shots", default="0,5", help="numbers of examples before a question")
    parser.add_argument("--documents", type=int, default=100, help="of each task, the first ones")
    parser.add_argument("--preset", default="dcformer-2.8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the preset's")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    common.add_common_arguments(parser)
    args = parser.parse_args()

    from dcformer.eval.harness import quiet_harness

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=args.tokenizer, eos_token="<|endoftext|>")
    results: dict[str, dict] = {}
    common.show_environment(args.device)
    print(f"First {args.documents} documents, batches of {args.batch_size}, {args.dtype}")
    with quiet_harness():
        tasks = load_tasks(args.data_dir, args.tasks.split(","))
        for name, model in make_models(args, vocab_size=50304).items():
            with contextlib.redirect_stdout(io.StringIO()):
                scorers = make_scorers(model, tokenizer, args)
            results[name] = {}
            for shots in map(int, args.shots.split(",")):
                for task_name, task in tasks.items():
                    requests = make_requests(task, shots, args.documents)
                    if not results[name]:
                        for scorer in scorers.values():  # what happens at the first call alone
                            scorer.loglikelihood(requests[:8], disable_tqdm=True)
                    figures = compare(scorers, requests, args.repeats, args.device)
                    results[name][f"{task_name}, {shots}-shot"] = figures
            results[name]["all"] = total(results[name])
            common.show_table([name, *COLUMNS[1:]], rows_of(results[name]))
            common.write_json(args, results)


if __name__ == "__main__":
    main()
