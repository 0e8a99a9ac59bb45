"""Time and tokens of scoring tasks of Table 4: lm-eval's own HFLM, ours, and ours that computes shared beginnings once.

    python -m benchmarks.evaluation --data-dir DATA --tokenizer 20B_tokenizer.json --json evaluation.json
    python -m benchmarks.evaluation --data-dir DATA --tokenizer 20B_tokenizer.json --json tokens.json --tokens

The second counts the tokens of all documents of all columns, and computes nothing.

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
DOCUMENTS = 100
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


def make_requests(task: Any, shots: int, documents: int | None, seed: int = 1234) -> list:
    """The requests of the first documents of a task, or of all, each after a number of examples."""
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


def count_tokens(
    tasks: dict[str, Any], tokenizer: PreTrainedTokenizerFast, numbers_of_shots: list[int], documents: int | None
) -> dict[str, dict[str, int]]:
    """For every task and number of examples, the tokens of all inputs, and how many sharing leaves to compute."""
    from dcformer.eval.language_model import DCFormerLM
    from dcformer.eval.scoring import TargetScore
    from dcformer.eval.shared_prefixes import all_stretches, shared_stretches

    class Counter(DCFormerLM):
        """Takes inputs as they would be scored, and scores none."""

        def _score(self, inputs: Any, requests: Any, override_bs: Any) -> Any:
            roots = shared_stretches([each.ids for each in inputs])
            computed = sum(stretch.stop - stretch.start for stretch in all_stretches(roots))
            self.cached_tokens += sum(len(each.ids) for each in inputs) - computed
            yield [(place, [TargetScore(0.0, False)] * len(each.targets)) for place, each in enumerate(inputs)]

    shape = GPTNeoXConfig(
        vocab_size=50304, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with contextlib.redirect_stdout(io.StringIO()):
        counter = Counter(GPTNeoXForCausalLM(shape), tokenizer=tokenizer, max_length=2048, device="cpu")
    figures: dict[str, dict[str, int]] = {}
    for shots in numbers_of_shots:
        whole = computed = 0
        for name, task in tasks.items():
            counter.forget_documents()
            counter.loglikelihood(make_requests(task, shots, documents), disable_tqdm=True)
            own = {"tokens": counter.input_tokens, "computed": counter.input_tokens - counter.cached_tokens}
            figures[f"{name}, {shots}-shot"] = own
            whole, computed = whole + own["tokens"], computed + own["computed"]
        figures[f"all, {shots}-shot"] = {"tokens": whole, "computed": computed}
    rows = [
        [name, f"{own['tokens']:,}", f"{own['computed']:,}", f"{own['tokens'] / own['computed']:.2f}"]
        for name, own in figures.items()
    ]
    common.show_table(COLUMNS[:4], rows)
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
    parser.add_argument("--tokens", action="store_true", help="count tokens only, by default of all documents")
    parser.add_argument("--tasks", help=f"columns of Table 4, separated by commas (default: {TASKS}; to count, all)")
    parser.add_argument("--shots", default="0,5", help="numbers of examples before a question")
    documents_help = f"of each task, the first ones (default: {DOCUMENTS}; to count, all)"
    parser.add_argument("--documents", type=int, help=documents_help)
    parser.add_argument("--preset", default="dcformer-2.8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the preset's")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    common.add_common_arguments(parser)
    args = parser.parse_args()

    from dcformer.eval.harness import quiet_harness
    from dcformer.eval.table4_tasks import TABLE4_COLUMNS

    args.tasks = args.tasks or (",".join(TABLE4_COLUMNS) if args.tokens else TASKS)
    numbers_of_shots = [int(shots) for shots in args.shots.split(",")]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=args.tokenizer, eos_token="<|endoftext|>")
    if args.tokens:
        with quiet_harness():
            tasks = load_tasks(args.data_dir, args.tasks.split(","))
            common.write_json(args, count_tokens(tasks, tokenizer, numbers_of_shots, args.documents))
        return
    args.documents = args.documents or DOCUMENTS
    results: dict[str, dict] = {}
    common.show_environment(args.device)
    print(f"First {args.documents} documents, batches of {args.batch_size}, {args.dtype}")
    with quiet_harness():
        tasks = load_tasks(args.data_dir, args.tasks.split(","))
        for name, model in make_models(args, vocab_size=50304).items():
            with contextlib.redirect_stdout(io.StringIO()):
                scorers = make_scorers(model, tokenizer, args)
            results[name] = {}
            for shots in numbers_of_shots:
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
