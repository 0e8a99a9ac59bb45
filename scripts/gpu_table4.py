"""
Table 4 on one GPU in minutes: `dcformer eval` beside lm-eval's model class, on some documents of every task.

    scripts/gpu_table4 prepare --data DATA --out FOLDER          # what another machine needs, and a list of wheels
    scripts/gpu_table4 run --data FOLDER --json table4.json      # --tiny: small models, on a CPU

DATA is a folder as `dcformer eval --data-dir` takes it, with GPT-NeoX's `20B_tokenizer.json` in `tokenizer/`. The
models have published shapes and random weights, made on the device.

A cell is a task with a number of examples, scored by one method. Every finished cell is written at once, so the same
command resumes. Cells with most of the table's tokens come first; after --minutes nothing more is computed. The time of
the whole table is estimated from that of every cell, by the tokens of its task in the table and in the cell.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import itertools
import json
import math
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import find_executable_batch_size
from lm_eval.evaluator import evaluate as run_harness
from lm_eval.models.huggingface import HFLM
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks import measure
from dcformer import DCFormerConfig, DCPythiaConfig
from dcformer.common.dtypes import dtype_name
from dcformer.common.files import json_digest, write_atomically
from dcformer.eval import TABLE4_COLUMNS, DCFormerLM, quiet_harness, task_manager
from dcformer.eval.suites import PREFIX
from dcformer.eval.task_data import DEFAULT_SEED, spread_indices
from dcformer.loading import choose_device, load_tokenizer


SHOTS = (0, 5)
MODELS = ("dcpythia-6.9b", "dcformer-2.8b")
HARNESS = "lm-eval hf"
METHODS = ("shared prefixes", "whole inputs", HARNESS)
REFERENCE = "reference"  # the harness in the next wider type, which shows the effect of rounding
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
# Scores agree if they differ by at most this multiple of the harness's rounding error. In a model of 32 layers in
# bfloat16 without composition they differ by twice that error.
MOST_ERRORS = 4
# Standard deviation of the composition's weights times the root of their inputs. With more, rounding errors grow from
# layer to layer until scores mean nothing; with less, scores hardly depend on the composition.
COMPOSITION = 0.3
# Tokens of all inputs of the table, which have 2,048 at most.
TOKENS = Path(__file__).parents[1] / "benchmarks" / "results" / "evaluation_tokens.json"
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,  # for this width like 0.02 for the published ones
}


class Inputs(NamedTuple):
    """The inputs that a cell scores."""

    task: str
    num_fewshot: int
    max_length: int


class TimeIsUp(Exception):
    """An exception that stops the computation when the time is up."""


class Timed:
    """A scorer of lm-eval that measures its time and shows no progress."""

    seconds: float

    def loglikelihood(self, requests: list, disable_tqdm: bool = True) -> list:
        start = time.perf_counter()
        answers = super().loglikelihood(requests, disable_tqdm=True)
        self.seconds = time.perf_counter() - start
        return answers


class Package(Timed, DCFormerLM):
    """The class that `dcformer eval` scores with, timed."""


class Harness(Timed, HFLM):
    """The class that `lm_eval run --model hf` scores with, timed."""

    def tok_encode(self, *given: Any, **options: Any) -> list[int]:
        # Ids without an embedding row are read as the last row, as by the package.
        last = len(self.model.get_output_embeddings().weight) - 1
        return [min(token, last) for token in super().tok_encode(*given, **options)]

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = True, **options: Any) -> list:
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, **options)


def table_tokens() -> dict[tuple[str, int], int]:
    """Task and examples before a question -> tokens of all inputs of the whole table."""
    figures = json.loads(TOKENS.read_text(encoding="utf-8"))["figures"]
    return {(task, shots): figures[f"{task}, {shots}-shot"]["tokens"] for task in TABLE4_COLUMNS for shots in SHOTS}


def prepare(args: argparse.Namespace) -> None:
    """Copy the documents and the tokenizer, and list what `dcformer eval` needs besides PyTorch and Transformers."""
    for task in TABLE4_COLUMNS:
        shutil.copytree(args.data / task, args.out / task, dirs_exist_ok=True, copy_function=shutil.copyfile)
    (args.out / "tokenizer").mkdir(exist_ok=True)
    shutil.copyfile(args.data / "tokenizer" / "20B_tokenizer.json", args.out / "tokenizer" / "20B_tokenizer.json")
    wheels = needed_packages("dcformer", "eval") - {canonicalize_name(name) for name in ("dcformer", *args.has)}
    for name in ("torch", "transformers", "accelerate"):
        wheels -= needed_packages(name)
    lines = [f"{name}=={metadata.version(name)}\n" for name in sorted(wheels)]
    (args.out / "wheels.txt").write_text("".join(lines), encoding="utf-8")
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"{args.out}: {size / 2**20:.1f} MiB; {len(lines)} packages in {args.out / 'wheels.txt'}.")


def needed_packages(name: str, extra: str = "") -> set[str]:
    """The package and all that it needs, by name, as installed here."""
    done, left = set(), {(canonicalize_name(name), extra)}
    while left:
        done.add(package := left.pop())
        for line in metadata.requires(package[0]) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": package[1]}):
                left |= {(canonicalize_name(needed.name), extra) for extra in ("", *needed.extras)} - done
    return {name for name, _ in done}


class Session:
    """All measurements, written to a file after every cell."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.device = args, choose_device(args.device)
        self.end = time.monotonic() + 60 * args.minutes
        names = ("models", "tasks", "lengths", "limit", "tiny", "dtype")
        self.settings = {name: getattr(args, name) for name in names}
        self.settings |= {"environment": measure.environment(self.device), "lm_eval": metadata.version("lm_eval")}
        self.cells: list[dict] = []
        if args.json.exists():
            stored = json.loads(args.json.read_text(encoding="utf-8"))
            for name, value in self.settings.items():
                if stored["settings"].get(name) != value:
                    raise ValueError(
                        f"{str(args.json)!r} was measured with {name}={stored['settings'].get(name)}, not {value}; "
                        "give another --json, or the options that it was begun with."
                    )
            self.cells = stored["cells"]
        self.tokenizer = load_tokenizer(args.data / "tokenizer")
        self.tasks: dict[str, Any] = {}
        self.most_inputs, self.batch_size = 0, 64

    def run(self) -> None:
        """Measure the missing cells until time is up."""
        gc.freeze()  # or every collection would look through the libraries
        with quiet_harness(), contextlib.suppress(TimeIsUp):
            for preset in self.args.models:
                if left := [(inputs, method) for name, inputs, method in self.missing() if name == preset]:
                    model = self.build(preset)
                    for method in METHODS:  # compiles and allocates
                        self.score(model, left[0][0], method)
                    for inputs, method in left:
                        self.add(preset, model, inputs, method)
                    del model

    def plan(self) -> list[tuple[Inputs, str]]:
        """The inputs and methods of the cells of a model, in their order."""
        tokens, longest = table_tokens(), self.args.lengths[0]
        groups = [Inputs(task, shots, longest) for task in self.args.tasks for shots in SHOTS]
        groups.sort(key=lambda inputs: -tokens[inputs[:2]])
        # Inputs of RACE are the longest.
        cut = max(groups, key=lambda inputs: (inputs.task.startswith("race"), inputs.num_fewshot))
        middle = groups.pop(len(groups) // 2)
        ordered = [middle, *groups, *(cut._replace(max_length=length) for length in self.args.lengths[1:])]
        return [(middle, REFERENCE), *itertools.product(ordered, METHODS)]

    def missing(self) -> list[tuple[str, Inputs, str]]:
        """(model, inputs, method) of every missing cell."""
        done = {_key(cell) for cell in self.cells}
        cells = ((preset, *planned) for preset in self.args.models for planned in self.plan())
        return [(preset, inputs, method) for preset, inputs, method in cells if (preset, *inputs, method) not in done]

    def build(self, preset: str) -> PreTrainedModel:
        gc.collect()  # frees the previous model
        family = DCPythiaConfig if preset in DCPythiaConfig.presets() else DCFormerConfig
        config = family.from_preset(preset, oov_policy="clamp", **(TINY if self.args.tiny else {}))
        torch.manual_seed(0)
        with self.device:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.args.dtype)).eval()
        for name, weight in model.named_parameters():
            if "compose" in name:
                rows = weight.shape[2 if name.endswith("low_rank_weight") else 0]
                torch.nn.init.normal_(weight, std=COMPOSITION / math.sqrt(rows))
        self.batch_size = 64

        def watch(_: Any, given: tuple, output: Any) -> None:
            self.most_inputs = max(self.most_inputs, len(given[0]))
            if time.monotonic() > self.end:
                raise TimeIsUp

        model.register_forward_hook(watch)
        return model

    def add(self, preset: str, model: PreTrainedModel, inputs: Inputs, method: str) -> None:
        """Measure a cell, and write it."""
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        self.most_inputs = 0
        scored = self.score(model, inputs, method)
        measured = {
            "most_inputs_at_once": self.most_inputs,
            "peak_memory_gib": torch.cuda.max_memory_allocated(self.device) / 2**30 if is_cuda else None,
        }
        self.cells.append({"model": preset, **inputs._asdict(), "method": method, **measured, **scored})
        self.write()
        print(_line(self.cells[-1]), flush=True)

    def score(self, model: PreTrainedModel, inputs: Inputs, method: str) -> dict[str, Any]:
        """Seconds, counts and scores of a cell."""
        task = self.task(inputs)
        options = {"tokenizer": self.tokenizer, "max_length": inputs.max_length}
        if method in METHODS[:2]:
            scorer = Package(model, shared_prefixes=method == METHODS[0], oov_policy="clamp", **options)
            samples = self.samples(scorer, task)
            counts = {name: len(n) if isinstance(n, set) else n for name, n in scorer.counts().items()}
            return counts | samples
        if method == REFERENCE:
            model = copy.deepcopy(model).to(WIDER[model.dtype])

        # The harness would find a size by five passes over the longest input; this way only real inputs are computed.
        @find_executable_batch_size(starting_batch_size=self.batch_size)
        def score(batch_size: int) -> dict[str, Any]:
            self.batch_size = batch_size
            return self.samples(Harness(model, batch_size=batch_size, **options), task)

        return score()

    def task(self, inputs: Inputs) -> Any:
        """A task of lm-eval with some documents, spread evenly over all."""
        name = PREFIX + inputs.task
        if name not in self.tasks:
            manager = task_manager({"data_dir": str(self.args.data)})
            self.tasks[name] = task = manager.load([name])["tasks"][name]
            rows = task.dataset["scored"]
            task.dataset["scored"] = rows.select(spread_indices(len(rows), self.args.limit))
        task = self.tasks[name]
        task.set_config(key="num_fewshot", value=inputs.num_fewshot)
        task.set_fewshot_seed(seed=DEFAULT_SEED)
        return task

    def samples(self, scorer: Timed, task: Any) -> dict[str, Any]:
        name = task.config.task
        results = run_harness(scorer, {"tasks": {name: task}, "groups": {}, "group_map": {}}, bootstrap_iters=0)
        samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
        return {
            "seconds": scorer.seconds,
            "documents": len(samples),
            "prompts": json_digest([sample["arguments"] for sample in samples]),
            "log_likelihoods": [[float(score) for score, _ in sample["filtered_resps"]] for sample in samples],
            "correct": [float(sample["acc"]) for sample in samples],
        }

    def write(self) -> None:
        missing = [{"model": name, **inputs._asdict(), "method": method} for name, inputs, method in self.missing()]
        content = {
            "settings": self.settings,
            "cells": self.cells,
            "comparisons": self.comparisons(),
            "whole_table": self.whole_table(),
            "missing": missing,
        }
        self.args.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.args.json, json.dumps(content, indent=1) + "\n")

    def groups(self) -> dict[tuple[str, Inputs], dict[str, dict]]:
        """(model, inputs) -> method -> cell."""
        groups: dict[tuple[str, Inputs], dict[str, dict]] = {}
        for cell in self.cells:
            preset, *inputs, method = _key(cell)
            groups.setdefault((preset, Inputs(*inputs)), {})[method] = cell
        return groups

    def comparisons(self) -> list[dict]:
        """The package's scores beside the harness's, in units of the harness's rounding error."""
        groups = self.groups()
        rounding = {
            preset: max(_error(cells[HARNESS], cells[REFERENCE]), torch.finfo(torch.float32).eps)
            for (preset, _), cells in groups.items()
            if {HARNESS, REFERENCE} <= cells.keys()
        }
        comparisons = []
        for ((preset, inputs), cells), method in itertools.product(groups.items(), METHODS[:2]):
            if not {method, HARNESS} <= cells.keys():
                continue
            ours, theirs, unit = cells[method], cells[HARNESS], rounding.get(preset)
            error, is_same = _error(ours, theirs), ours["prompts"] == theirs["prompts"]
            comparisons.append(
                {
                    "model": preset,
                    **inputs._asdict(),
                    "method": method,
                    "same_prompts": is_same,
                    "relative_error": error,
                    "rounding": unit,
                    "error_of_the_reference": _error(ours, cells[REFERENCE]) if REFERENCE in cells else None,
                    "agrees": None if unit is None else is_same and error <= MOST_ERRORS * unit,
                    "decisions": len(ours["correct"]),
                    "other_decisions": sum(a != b for a, b in zip(ours["correct"], theirs["correct"])),
                    "speedup": theirs["seconds"] / ours["seconds"],
                }
            )
        return comparisons

    def whole_table(self) -> list[dict]:
        """Estimates for all documents of the chosen tasks, from inputs that all methods have scored."""
        tokens, tables = table_tokens(), []
        total = sum(tokens[task, shots] for task in self.args.tasks for shots in SHOTS)
        for preset in self.args.models:
            cells = {
                inputs[:2]: of_inputs
                for (name, inputs), of_inputs in self.groups().items()
                if (name, inputs.max_length) == (preset, self.args.lengths[0]) and set(METHODS) <= of_inputs.keys()
            }
            if not cells:
                continue
            share, minutes = sum(tokens[key] for key in cells) / total, {}
            for method in METHODS:
                seconds = sum(
                    of_inputs[method]["seconds"] * tokens[key] / of_inputs[METHODS[1]]["input_tokens"]
                    for key, of_inputs in cells.items()
                )
                minutes[method] = seconds / share / 60  # missing inputs at the rate of the others
            tables.append(
                {
                    "model": preset,
                    "tokens": total,
                    "share_measured": share,
                    "minutes": minutes,
                    "tokens_per_second": {method: total / minutes[method] / 60 for method in METHODS},
                    "times_less_than_the_harness": {name: minutes[HARNESS] / minutes[name] for name in METHODS[:2]},
                    "peak_memory_gib": {
                        method: max(of_inputs[method]["peak_memory_gib"] or 0 for of_inputs in cells.values()) or None
                        for method in METHODS
                    },
                }
            )
        return tables


def _key(cell: dict) -> tuple:
    return (cell["model"], cell["task"], cell["num_fewshot"], cell["max_length"], cell["method"])


def _error(ours: dict, theirs: dict) -> float:
    """The norm of the difference of all log-likelihoods of two cells over that of the second."""
    one, other = (
        torch.tensor([*itertools.chain(*cell["log_likelihoods"])], dtype=torch.float64) for cell in (ours, theirs)
    )
    return float((one - other).norm() / other.norm())


def _line(cell: dict) -> str:
    name = f"{cell['model']}, {cell['task']} {cell['num_fewshot']}-shot in {cell['max_length']:,}, {cell['method']}"
    memory = "" if cell["peak_memory_gib"] is None else f", {cell['peak_memory_gib']:.1f} GiB"
    return f"{name}: {cell['seconds']:.2f} s, {cell['most_inputs_at_once']} inputs at once{memory}"


def show(session: Session) -> None:
    comparisons = session.comparisons()
    for table in session.whole_table():
        columns = [table[name] for name in ("minutes", "tokens_per_second", "peak_memory_gib")]
        print(f"\n{table['model']}: the whole table, by {table['share_measured']:.0%} of its tokens")
        for method in METHODS:
            minutes, rate, memory = (column[method] for column in columns)
            print(f"  {method}: {minutes:.1f} minutes, {rate:,.0f} tokens/s, {memory or 0:.1f} GiB")
    if missing := session.missing():
        print(f"{len(missing)} cells are missing: run the same command again.")
    others = sum(comparison["other_decisions"] for comparison in comparisons)
    decisions = sum(comparison["decisions"] for comparison in comparisons)
    print(f"{others} of {decisions} decisions differ from the harness's.")
    for comparison in comparisons:
        if comparison["agrees"] is False:
            print("DIFFERS:", {name: value for name, value in comparison.items() if name != "speedup"})


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return the exit status: 1 if scores differ by more than rounding."""
    parser = argparse.ArgumentParser(
        prog="gpu_table4", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "run"):
        command = commands.add_parser(name)
        command.add_argument("--data", type=Path, required=True, help="folder of data and tokenizer")
    commands.choices["prepare"].add_argument("--out", type=Path, required=True, help="folder to write")
    commands.choices["prepare"].add_argument("--has", nargs="*", default=[], help="packages that are installed there")
    command.add_argument("--json", type=Path, required=True, help="file of all figures and scores")
    command.add_argument("--minutes", type=float, default=5.5, help="time limit (default: 5.5)")
    command.add_argument("--limit", type=int, help="documents of each task (default: 40, tiny: 2)")
    command.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    command.add_argument("--tasks", nargs="+", choices=TABLE4_COLUMNS, default=list(TABLE4_COLUMNS))
    command.add_argument("--lengths", type=int, nargs="+", help="context of all, and of RACE again (2048 1024)")
    command.add_argument("--device", help="default: the first GPU, else the CPU")
    command.add_argument(
        "--dtype", choices=[dtype_name(dtype) for dtype in WIDER], help="default: bfloat16, tiny: float32"
    )
    command.add_argument("--tiny", action="store_true", help="two layers of width 32, to try the script on a CPU")
    args = parser.parse_args(arguments)
    if args.command == "prepare":
        prepare(args)
        return 0
    args.limit = (2 if args.tiny else 40) if args.limit is None else args.limit
    args.lengths = args.lengths or ([256, 128] if args.tiny else [2048, 1024])
    if args.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {args.limit}.")
    if not all(1 <= length <= 2048 for length in args.lengths):
        raise ValueError(f"--lengths must be from 1 to 2048, the models' positions, got {args.lengths}.")
    args.dtype = args.dtype or ("float32" if args.tiny else "bfloat16")
    session = Session(args)
    session.run()
    session.write()
    show(session)
    return int(any(comparison["agrees"] is False for comparison in session.comparisons()))


if __name__ == "__main__":
    sys.exit(main())
