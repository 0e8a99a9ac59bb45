"""Tokens and time of scoring tasks of Table 4: lm-eval's own HFLM, ours, and ours that computes shared beginnings once.

    python -m benchmarks.evaluation --data-dir DATA --tokenizer 20B_tokenizer.json --tokens --json tokens.json
    python -m benchmarks.evaluation --data-dir DATA --tokenizer 20B_tokenizer.json --json evaluation.json

The first counts the tokens of all documents and computes nothing. The second scores the same requests in three ways in
turns, with a DCFormer and a GPT-NeoX of its width and depth; weights are random, since times do not depend on them.
DATA is a folder as `dcformer eval --data-dir` takes it.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.bench import measure
from dcformer.eval import TABLE4_COLUMNS, DCFormerLM, quiet_harness, task_manager
from dcformer.eval.prefixes import shared_beginnings, without_prefixes


CPU = torch.device("cpu")
TASKS = "piqa,winogrande,arc_easy,sciq,logiqa,boolq,hellaswag,race_high"
HARNESS, WHOLE, SHARED = "HFLM", "ours, whole inputs", "ours, shared beginnings"
VOCABULARY, MAX_LENGTH = 50304, 2048


class TokenCounter(DCFormerLM):
    """Counts the tokens that would be computed, and computes none."""

    def _score(self, inputs: Sequence, requests: Any, override_bs: Any) -> Iterator[list]:
        inputs = without_prefixes(inputs)
        for group in shared_beginnings([each.ids for each in inputs]):
            lengths = [len(inputs[place].ids) for place in group.places]
            self.computed_tokens += sum(lengths) - group.length * (len(lengths) - 1)
        yield [(target.request, 0.0, False) for each in inputs for target in each.targets]


def load_tasks(data_dir: str, names: list[str]) -> dict[str, Any]:
    """The tasks of Table 4 with their documents."""
    manager = task_manager({"data_dir": data_dir})
    return {name: manager.load([f"dcformer_{name}"])["tasks"][f"dcformer_{name}"] for name in names}


def make_requests(task: Any, shots: int, documents: int | None, seed: int = 1234) -> list:
    """The requests of the first documents of a task, or of all, each after a number of examples."""
    task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(seed=seed)
    task.build_all_requests(limit=documents, rank=0, world_size=1)
    return task.instances


def count_tokens(
    tasks: dict[str, Any], tokenizer: PreTrainedTokenizerFast, numbers_of_shots: list[int], documents: int | None
) -> dict[str, dict[str, int]]:
    """Task and number of examples -> tokens of all inputs, and how many sharing leaves to compute."""
    counter = TokenCounter(_neox(8, 1, 1), tokenizer=tokenizer, max_length=MAX_LENGTH)
    figures: dict[str, dict[str, int]] = {}
    for shots in numbers_of_shots:
        for name, task in tasks.items():
            counter.start_counting(lambda *_: None)
            counter.loglikelihood(make_requests(task, shots, documents))
            figures[f"{name}, {shots}-shot"] = {"tokens": counter.input_tokens, "computed": counter.computed_tokens}
        own = [figures[f"{name}, {shots}-shot"] for name in tasks]
        figures[f"all, {shots}-shot"] = {key: sum(each[key] for each in own) for key in ("tokens", "computed")}
    return figures


def make_models(preset: str, layers: int | None) -> dict[str, PreTrainedModel]:
    """A DCFormer of the preset, and a GPT-NeoX of its width, depth and heads with an MLP of four times the width."""
    values = {"num_hidden_layers": layers} if layers else {}
    config = DCFormerConfig.from_preset(preset, vocab_size=VOCABULARY, **values)
    torch.manual_seed(0)
    neox = _neox(config.hidden_size, config.num_hidden_layers, config.num_attention_heads)
    return {"GPT-NeoX": neox, "DCFormer": DCFormerForCausalLM(config).eval()}


def _neox(width: int, layers: int, heads: int) -> GPTNeoXForCausalLM:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    config = GPTNeoXConfig(vocab_size=VOCABULARY, num_attention_heads=heads, max_position_embeddings=2048, **sizes)
    return GPTNeoXForCausalLM(config).eval()


def compare(scorers: dict[str, Any], requests: list, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds, tokens and differences of the scores of every scorer."""
    answers: dict[str, list] = {}

    def score(name: str) -> None:
        if name != HARNESS:
            scorers[name].start_counting(lambda *_: None)
        answers[name] = scorers[name].loglikelihood(requests, disable_tqdm=True)

    cases = {name: measure.Case(score, prepare=lambda name=name: name) for name in scorers}
    timings = measure.Timer(CPU, seconds=0, most=max(repeats, 3))(cases)
    figures = {}
    for name, timing in timings.items():
        counted = scorers[WHOLE if name == HARNESS else name]  # the harness counts no tokens, and takes the same
        pairs = list(zip(answers[name], answers[WHOLE], strict=True))
        figures[name] = {
            "seconds": timing.minimum,
            "processor_seconds": timing.processor_minimum,
            "tokens": counted.computed_tokens,
            "largest_difference": max(abs(one[0] - other[0]) for one, other in pairs),
            "greedy_differs": sum(one[1] != other[1] for one, other in pairs),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder with the data of the tasks")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json of GPT-NeoX")
    parser.add_argument("--tokens", action="store_true", help="count tokens only, by default of all documents")
    parser.add_argument("--tasks", help=f"columns of Table 4, separated by commas (default: {TASKS}; to count, all)")
    parser.add_argument("--shots", default="0,5", help="numbers of examples before a question")
    parser.add_argument("--documents", type=int, help="first documents of each task (default: 100; to count, all)")
    parser.add_argument("--preset", default="dcformer-2.8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the preset's")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    args = parser.parse_args()
    names = (args.tasks or (",".join(TABLE4_COLUMNS) if args.tokens else TASKS)).split(",")
    numbers_of_shots = [int(shots) for shots in args.shots.split(",")]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=args.tokenizer, eos_token="<|endoftext|>")
    results: dict[str, Any] = {}
    with quiet_harness():
        tasks = load_tasks(args.data_dir, names)
        if args.tokens:
            results = count_tokens(tasks, tokenizer, numbers_of_shots, args.documents)
            rows = [[name, f"{own['tokens']:,}", f"{own['computed']:,}", f"{own['tokens'] / own['computed']:.2f}"]
                    for name, own in results.items()]  # fmt: skip
            measure.show_table(["task", "tokens", "computed", "ratio"], rows)
        for model_name, model in {} if args.tokens else make_models(args.preset, args.layers).items():
            options = {"tokenizer": tokenizer, "batch_size": args.batch_size, "max_length": MAX_LENGTH}
            scorers = {
                HARNESS: HFLM(model, backend="causal", **options),
                WHOLE: DCFormerLM(model, shared_prefixes=False, **options),
                SHARED: DCFormerLM(model, **options),
            }
            results[model_name] = own = {
                f"{name}, {shots}-shot": compare(
                    scorers, make_requests(task, shots, args.documents or 100), args.repeats
                )
                for shots in numbers_of_shots
                for name, task in tasks.items()
            }
            keys = ("seconds", "processor_seconds", "tokens")
            own["all"] = {scorer: {key: sum(each[scorer][key] for each in own.values()) for key in keys}
                          for scorer in scorers}  # fmt: skip
            rows = [[name, *(f"{each[scorer][key]:,.1f}" for key in keys for scorer in scorers)]
                    for name, each in own.items()]  # fmt: skip
            measure.show_table([model_name, *(f"{key}, {scorer}" for key in keys for scorer in scorers)], rows)
    if args.json is not None:
        content = {"environment": measure.environment(CPU), "arguments": vars(args), "figures": results}
        measure.write_json(args.json, content)


if __name__ == "__main__":
    main()
