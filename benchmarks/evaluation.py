"""Tokens to compute for the tasks of Table 4, with beginnings that inputs share computed once, and without.

    python -m benchmarks.evaluation --tokens --data-dir DATA --tokenizer 20B_tokenizer.json --json tokens.json

Nothing is computed but the counts. DATA is a folder as `dcformer eval --data-dir` takes it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from dcformer.bench import measure
from dcformer.eval import TABLE4_COLUMNS, DCFormerLM, quiet_harness, task_manager
from dcformer.eval.prefixes import shared_beginnings, without_prefixes

from . import report


class TokenCounter(DCFormerLM):
    """Counts the tokens that would be computed, and computes none."""

    def _score(self, inputs: Sequence, requests: Any, override_bs: Any) -> Iterator[list]:
        inputs = without_prefixes(inputs)
        for group in shared_beginnings([each.ids for each in inputs]):
            lengths = [len(inputs[place].ids) for place in group.places]
            self.computed_tokens += sum(lengths) - group.length * (len(lengths) - 1)
        yield [(target.request, 0.0, False) for each in inputs for target in each.targets]


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
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=50304, **sizes)).eval()
    counter = TokenCounter(model, tokenizer=tokenizer, max_length=2048)
    figures: dict[str, dict[str, int]] = {}
    for shots in numbers_of_shots:
        own = {}
        for name, task in tasks.items():
            counter.start_counting(lambda *_: None)
            counter.loglikelihood(make_requests(task, shots, documents))
            own[f"{name}, {shots}-shot"] = {"tokens": counter.input_tokens, "computed": counter.computed_tokens}
        total = {key: sum(each[key] for each in own.values()) for key in ("tokens", "computed")}
        figures |= {**own, f"all, {shots}-shot": total}
    return figures


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--tokens", action="store_true", required=True, help="count tokens")
    parser.add_argument("--data-dir", required=True, help="folder with the data of the tasks")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json of GPT-NeoX")
    parser.add_argument("--tasks", default=",".join(TABLE4_COLUMNS), help="columns of Table 4, separated by commas")
    parser.add_argument("--shots", default="0,5", help="numbers of examples before a question")
    parser.add_argument("--documents", type=int, help="first documents of each task (default: all)")
    args = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=args.tokenizer, eos_token="<|endoftext|>")
    with quiet_harness():
        manager = task_manager({"data_dir": args.data_dir})
        names = {name: f"dcformer_{name}" for name in args.tasks.split(",")}
        tasks = {name: manager.load([task])["tasks"][task] for name, task in names.items()}
        figures = count_tokens(tasks, tokenizer, [int(shots) for shots in args.shots.split(",")], args.documents)
    rows = [
        [name, f"{own['tokens']:,}", f"{own['computed']:,}", f"{own['tokens'] / own['computed']:.2f}"]
        for name, own in figures.items()
    ]
    measure.show_table(["task", "tokens", "computed", "ratio"], rows)
    report.write(args, figures=figures)


if __name__ == "__main__":
    main()
