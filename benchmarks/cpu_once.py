"""Rows of the CPU table that are counted, or timed in processes of their own: compiled graphs, and the command line."""

import resource
import subprocess
import sys
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dcformer import DCFormerConfig, DCFormerForCausalLM

from . import common
from .cpu_options import Options
from .results import Findings, Row, Time


LENGTHS = (24, 32, 48, 65, 80, 100, 128, 150, 200, 256)
GRAPHS_TARGET, DYNAMIC_GRAPHS_TARGET = 2, 1
HELP_TARGET = 0.5


def graphs(options: Options) -> Findings:
    """How many graphs torch.compile makes of a forward pass, as a whole and without a cache, at ten lengths."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 512}
    makers = {
        "DCFormer": lambda: DCFormerForCausalLM(DCFormerConfig(**sizes, sliding_window=32)),
        "Llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
    }
    findings = Findings()
    for dynamic, target in ((None, GRAPHS_TARGET), (True, DYNAMIC_GRAPHS_TARGET)):
        for name, make in makers.items():
            number, error = count_graphs(make(), LENGTHS, dynamic)
            case = f"{name}, {len(LENGTHS)} lengths{', dynamic=True' if dynamic else ''}"
            measure = f"graphs, then {error}" if error else "graphs"
            # One that fails has no number that could reach a target.
            ratio = float("inf") if error else number
            wanted = target if name == "DCFormer" else None
            row = Row("torch.compile", case, measure, 0, ratio, float("nan"), float("nan"), wanted)
            findings.rows.append(row)
    return findings


def count_graphs(of: torch.nn.Module, lengths: tuple[int, ...], dynamic: bool | None) -> tuple[int, str | None]:
    """Graphs of forward passes at these lengths, and the name of the error that ended them, if any."""
    number = 0

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        nonlocal number
        number += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(of.eval(), fullgraph=True, dynamic=dynamic, backend=backend)
    error = None
    with torch.no_grad():
        try:
            for length in lengths:
                compiled(torch.zeros(1, length, dtype=torch.long), use_cache=False)
        except torch._dynamo.exc.TorchDynamoException as caught:
            error = type(caught).__name__
    torch._dynamo.reset()
    return number, error


def command(options: Options) -> Findings:
    """Processor seconds of `dcformer --help`, and of importing the packages that draw it."""
    times = {name: [] for name in ("dcformer --help", "import typer, rich")}
    for _ in range(2 if options.is_quick else 5):
        times["dcformer --help"].append(processor_seconds("-m", "dcformer.cli", "--help"))
        times["import typer, rich"].append(processor_seconds("-c", "import typer, rich"))
    timings = {name: common.summarize(taken) for name, taken in times.items()}
    findings = Findings([Time("command", "one process", name, 1, timing) for name, timing in timings.items()])
    ours, least = timings.values()
    findings.rows.append(
        Row(
            "command",
            "dcformer --help",
            "processor seconds",
            0,
            ours.processor_minimum,
            ours.processor_median,
            ours.processor_minimum,
            HELP_TARGET,
            bounds={"typer and rich": least.processor_minimum},
        )
    )
    return findings


def processor_seconds(*arguments: str) -> common.Sample:
    """Time of a Python process with these arguments, its children included."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    run = common.sample(
        lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True), torch.device("cpu")
    )
    return common.Sample(run.wall, used() - before)
