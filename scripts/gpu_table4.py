"""
Table 4 on one GPU in minutes: `dcformer eval` beside lm-eval's own model class, on some documents of every task.

    scripts/gpu_table4 prepare --data DATA --out FOLDER          # what another machine needs, and a list of wheels
    scripts/gpu_table4 run --data FOLDER --json table4.json      # --tiny: small models, on a CPU

DATA is a folder as `dcformer eval --data-dir` takes it, with GPT-NeoX's `20B_tokenizer.json` in `tokenizer/`. The
models have published shapes and random weights, made on the device.

A cell is a task with a number of examples, scored by one method. Every finished cell is written at once: the same
command resumes. Cells with most of the table's tokens come first; after --minutes nothing more is computed. What the
whole table would take is the time of each cell, times its tokens in the table over those that were scored.
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
from collections.abc import Iterator
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

from dcformer import DCFormerConfig, DCPythiaConfig
from dcformer.bench import measure
from dcformer.common.files import json_digest, write_atomically
from dcformer.eval import TABLE4_COLUMNS, DCFormerLM, quiet_harness, task_manager
from dcformer.eval.data import DEFAULT_SEED, spread_places
from dcformer.eval.suites import PREFIX
from dcformer.loading import choose_device, load_tokenizer


SHOTS = (0, 5)
MODELS = ("dcpythia-6.9b", "dcformer-2.8b")
HARNESS = "lm-eval hf"
METHODS = ("shared prefixes", "whole inputs", HARNESS)
REFERENCE = "reference"  # the harness's, in the next wider type: what rounding does to scores
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
# Scores agree if they differ by at most so many times what rounding does to the harness's. Those of a model of 32
# layers in bfloat16 without its composition differ by twice as much.
MOST_ERRORS = 4
# Deviation of the composition's weights, as a multiple of one over the root of their inputs: with more of it rounding
# grows from layer to layer until scores say nothing, with less they hardly depend on it.
COMPOSITION = 0.3
# Tokens of all inputs of the table, with 2,048 at most.
TOKENS = Path(__file__).parents[1] / "benchmarks" / "results" / "evaluation_tokens.json"
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,  # as large for this width as 0.02 for theirs
}


class Inputs(NamedTuple):
    """What a cell scores."""

    task: str
    num_fewshot: int
    max_length: int


class TimeIsUp(Exception):
    """Ends what is being computed."""


class Timed:
    """A scorer of lm-eval that says how long it took, instead of how far it is."""

    seconds: float

    def loglikelihood(self, requests: list, disable_tqdm: bool = True) -> list:
        start = time.perf_counter()
        answers = super().loglikelihood(requests, disable_tqdm=True)
        self.seconds = time.perf_counter() - start
        return answers


class Package(Timed, DCFormerLM):
    """What `dcformer eval` scores with."""


class Harness(Timed, HFLM):
    """What `lm_eval run --model hf` scores with."""

    def tok_encode(self, *given: Any, **options: Any) -> list[int]:
        # Ids beyond the embedding have no logits; the package reads the last row for them too.
        rows = self.model.get_output_embeddings().weight.shape[0]
        return [min(token, rows - 1) for token in super().tok_encode(*given, **options)]

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = True, **options: Any) -> list:
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, **options)


def table_tokens() -> dict[tuple[str, int], int]:
    """Task and examples before a question -> tokens of all inputs of the whole table."""
    figures = json.loads(TOKENS.read_text(encoding="utf-8"))["figures"]
    parts = {name: name.removesuffix("-shot").rsplit(", ", 1) for name in figures}
    return {(task, int(shots)): figures[name]["tokens"] for name, (task, shots) in parts.items() if task != "all"}


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
    """Names of the packages that one needs, as they are installed here, with itself."""
    found, left = set(), {(canonicalize_name(name), extra)}
    while left:
        found.add(each := left.pop())
        for line in metadata.requires(each[0]) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": each[1]}):
                name = canonicalize_name(needed.name)
                left |= {(name, extra) for extra in ("", *needed.extras)} - found
    return {name for name, _ in found}


class Session:
    """All that is measured, of which everything is in a file after every cell."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.device = args, choose_device(args.device)
        self.end = time.monotonic() + 60 * args.minutes
        names = ("models", "tasks", "lengths", "limit", "tiny", "dtype")
        self.settings = {name: getattr(args, name) for name in names}
        self.settings |= {"environment": measure.environment(self.device), "lm_eval": metadata.version("lm_eval")}
        self.cells: list[dict] = []
        if args.json.exists():
            found = json.loads(args.json.read_text(encoding="utf-8"))
            if changed := [name for name, value in self.settings.items() if found["settings"].get(name) != value]:
                then = found["settings"].get(changed[0])
                raise ValueError(
                    f"{str(args.json)!r} was measured with {changed[0]}={then}, not {self.settings[changed[0]]}; give "
                    "another --json, or the options that it was begun with."
                )
            self.cells = found["cells"]
        self.tokenizer = load_tokenizer(args.data / "tokenizer")
        self.tasks: dict[str, Any] = {}
        self.most_inputs, self.batch_size = 0, 64

    def run(self) -> None:
        """Measure what is missing, until time is up."""
        gc.freeze()  # or every collection would look through the libraries
        with quiet_harness(), contextlib.suppress(TimeIsUp):
            for preset in self.args.models:
                left = [each for each in self.plan() if not self.has(preset, *each)]
                if not left:
                    continue
                model = self.build(preset)
                for method in METHODS:  # compiles and allocates
                    self.score(model, left[0][0], method)
                for inputs, method in left:
                    self.add(preset, model, inputs, method)
                del model

    def plan(self) -> list[tuple[Inputs, str]]:
        """What is scored and how, in the order in which it is."""
        tokens, longest = table_tokens(), self.args.lengths[0]
        groups = [Inputs(task, shots, longest) for task in self.args.tasks for shots in SHOTS]
        groups.sort(key=lambda each: -tokens[each.task, each.num_fewshot])
        middle = groups[len(groups) // 2]
        # Inputs of RACE are the longest.
        cut = max(groups, key=lambda each: (each.task.startswith("race"), each.num_fewshot))
        ordered = [middle, *(each for each in groups if each != middle)]
        ordered += [cut._replace(max_length=length) for length in self.args.lengths[1:]]
        return [(middle, REFERENCE), *((each, method) for each in ordered for method in METHODS)]

    def has(self, preset: str, inputs: Inputs, method: str) -> bool:
        return any(_key(cell) == (preset, *inputs, method) for cell in self.cells)

    def build(self, preset: str) -> PreTrainedModel:
        gc.collect()  # of the model before
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
            shares = method == METHODS[0]
            scorer = Package(model, shared_prefixes=shares, oov_policy="clamp", on_progress=lambda *_: None, **options)
            samples = self.samples(scorer, task)
            counts = {name: len(of) if isinstance(of, set) else of for name, of in scorer.counts().items()}
            return counts | samples
        if method == REFERENCE:
            model = copy.deepcopy(model).to(WIDER[model.dtype])

        # The harness looks for a size by five passes over the longest input beforehand; this meets what is scored.
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
            task.dataset["scored"] = rows.select(spread_places(len(rows), self.args.limit))
        task = self.tasks[name]
        task.set_config(key="num_fewshot", value=inputs.num_fewshot)
        task.set_fewshot_seed(seed=DEFAULT_SEED)
        return task

    def samples(self, scorer: Timed, task: Any) -> dict[str, Any]:
        name = task.config.task
        results = run_harness(scorer, {"tasks": {name: task}, "groups": {}, "group_map": {}}, bootstrap_iters=0)
        found = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
        return {
            "seconds": scorer.seconds,
            "documents": len(found),
            "prompts": json_digest([each["arguments"] for each in found]),
            "log_likelihoods": [[float(score) for score, _ in each["filtered_resps"]] for each in found],
            "correct": [float(each["acc"]) for each in found],
        }

    def missing(self) -> list[dict]:
        return [
            {"model": preset, **inputs._asdict(), "method": method}
            for preset in self.args.models
            for inputs, method in self.plan()
            if not self.has(preset, inputs, method)
        ]

    def write(self) -> None:
        content = {
            "settings": self.settings,
            "cells": self.cells,
            "comparisons": self.comparisons(),
            "whole_table": self.whole_table(),
            "missing": self.missing(),
        }
        self.args.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.args.json, json.dumps(content, indent=1) + "\n")

    def groups(self) -> Iterator[tuple[dict, dict[str, dict]]]:
        """Model and inputs -> method -> cell."""
        for name in dict.fromkeys(_key(cell)[:-1] for cell in self.cells):
            cells = [cell for cell in self.cells if _key(cell)[:-1] == name]
            yield {"model": name[0], **Inputs(*name[1:])._asdict()}, {cell["method"]: cell for cell in cells}

    def comparisons(self) -> list[dict]:
        """Scores of the package beside the harness's, in units of what rounding does to the harness's."""
        groups = list(self.groups())
        rounding = {
            group["model"]: max(_error(cells[HARNESS], cells[REFERENCE]), torch.finfo(torch.float32).eps)
            for group, cells in groups
            if {HARNESS, REFERENCE} <= cells.keys()
        }
        found = []
        for group, cells in groups:
            for method in METHODS[:2]:
                if not {method, HARNESS} <= cells.keys():
                    continue
                ours, theirs = cells[method], cells[HARNESS]
                error = _error(ours, theirs)
                unit = rounding.get(group["model"])
                is_same = ours["prompts"] == theirs["prompts"]
                found.append(
                    {
                        **group,
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
        return found

    def whole_table(self) -> list[dict]:
        """What all documents of the chosen tasks would take, by cells that all methods have finished."""
        tokens = table_tokens()
        wanted = {(task, shots) for task in self.args.tasks for shots in SHOTS}
        found = []
        for preset in self.args.models:
            cells = {
                (group["task"], group["num_fewshot"]): cells
                for group, cells in self.groups()
                if group["model"] == preset
                and group["max_length"] == self.args.lengths[0]
                and set(METHODS) <= cells.keys()
            }
            if not cells:
                continue
            measured = sum(tokens[each] for each in cells)
            total = sum(tokens[each] for each in wanted)
            minutes = {}
            for method in METHODS:
                seconds = sum(
                    own[method]["seconds"] * tokens[each] / own[METHODS[1]]["input_tokens"]
                    for each, own in cells.items()
                )
                minutes[method] = seconds * total / measured / 60  # what is missing at the rate of what is there
            found.append(
                {
                    "model": preset,
                    "tokens": total,
                    "share_measured": measured / total,
                    "minutes": minutes,
                    "tokens_per_second": {method: total / each / 60 for method, each in minutes.items()},
                    "times_less_than_the_harness": {name: minutes[HARNESS] / minutes[name] for name in METHODS[:2]},
                    "peak_memory_gib": {
                        method: max(own[method]["peak_memory_gib"] or 0 for own in cells.values()) or None
                        for method in METHODS
                    },
                }
            )
        return found


def _key(cell: dict) -> tuple:
    return (cell["model"], cell["task"], cell["num_fewshot"], cell["max_length"], cell["method"])


def _error(ours: dict, theirs: dict) -> float:
    """The norm of the difference of all log-likelihoods over that of theirs."""
    one, other = (
        torch.tensor([*itertools.chain(*cell["log_likelihoods"])], dtype=torch.float64) for cell in (ours, theirs)
    )
    return float((one - other).norm() / other.norm())


def _line(cell: dict) -> str:
    name = f"{cell['model']}, {cell['task']} {cell['num_fewshot']}-shot in {cell['max_length']:,}, {cell['method']}"
    memory = cell["peak_memory_gib"]
    parts = [f"{cell['seconds']:.2f} s", f"{cell['most_inputs_at_once']} inputs at once"]
    return f"{name}: {', '.join(parts + ([] if memory is None else [f'{memory:.1f} GiB']))}"


def show(session: Session) -> None:
    comparisons, tables = session.comparisons(), session.whole_table()
    for each in tables:
        rows = [
            [name, f"{minutes:.1f}", f"{rate:,.0f}", f"{memory or 0:.1f}"]
            for (name, minutes), rate, memory in zip(
                each["minutes"].items(), each["tokens_per_second"].values(), each["peak_memory_gib"].values()
            )
        ]
        print(f"\n{each['model']}: the whole table, by {each['share_measured']:.0%} of its tokens")
        measure.show_table(["method", "minutes", "tokens/s", "GiB"], rows)
    if missing := session.missing():
        print(f"{len(missing)} cells are missing: run the same command again.")
    others = sum(each["other_decisions"] for each in comparisons)
    print(f"{others} of {sum(each['decisions'] for each in comparisons)} decisions differ from the harness's.")
    for each in comparisons:
        if each["agrees"] is False:
            print("DIFFERS:", {name: each[name] for name in each if name != "speedup"})


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if scores differ by more than rounding."""
    parser = argparse.ArgumentParser(
        prog="gpu_table4", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "run"):
        command = commands.add_parser(name)
        command.add_argument("--data", type=Path, required=True, help="folder of data and tokenizer")
    commands.choices["prepare"].add_argument("--out", type=Path, required=True, help="folder to write")
    commands.choices["prepare"].add_argument("--has", nargs="*", default=[], help="packages that are there already")
    command.add_argument("--json", type=Path, required=True, help="file of all figures and scores")
    command.add_argument("--minutes", type=float, default=5.5, help="stop after so long (default: 5.5)")
    command.add_argument("--limit", type=int, help="documents of each task (default: 40, tiny: 2)")
    command.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    command.add_argument("--tasks", nargs="+", choices=TABLE4_COLUMNS, default=list(TABLE4_COLUMNS))
    command.add_argument("--lengths", type=int, nargs="+", help="context: of all, and of RACE once more (2048 1024)")
    command.add_argument("--device", help="default: the first GPU, else the CPU")
    command.add_argument("--dtype", choices=[str(each)[6:] for each in WIDER], help="default: bfloat16, tiny: float32")
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
    return int(any(each["agrees"] is False for each in session.comparisons()))


if __name__ == "__main__":
    sys.exit(main())
