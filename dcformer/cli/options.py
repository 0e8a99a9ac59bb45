"""Options that several commands share, one by one or as a dataclass."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from typer import Argument, Option


# Without this typer would import pydantic for the missing value of --help, which takes a third of a help's time.
QUICK_HELP = {"default_map": {"help": False}}

Model = Annotated[str, Argument(metavar="MODEL", help="A bundled model, a folder, or a name on the Hub.")]
Host = Annotated[str, Option(help="Address to listen on; 0.0.0.0: also for other machines.")]
Step = Annotated[int | None, Option(help="Training step to read from a run folder.", show_default="the latest")]
TrainConfig = Annotated[
    str | None, Option(help="Training YAML of a MaxText run.", show_default="train_config.yml beside the step, if any")
]
PaxConfig = Annotated[str | None, Option("--config", help="The config.json that describes a PAX checkpoint.")]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"] | None,
    Option(help="Data type of the parameters.", show_default="as stored"),
]
Device = Annotated[str | None, Option(help="Such as cuda:1, mps or cpu.", show_default="the first GPU, else cpu")]
Tokenizer = Annotated[
    str | None, Option(help="Bundled model, folder, tokenizer.json or Hub name.", show_default="the model's")
]
Revision = Annotated[str | None, Option(help="Branch, tag or commit on the Hub.", show_default="main")]
Json = Annotated[bool, Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, Option("--debug", help="Show the full traceback of an error.")]

_CONFIG = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options of the commands that generate text."""

    max_new_tokens: Annotated[
        int | None, Option(min=1, help="Maximum number of new tokens.", show_default=f"{_CONFIG}, else 256")
    ] = None
    do_sample: Annotated[
        bool | None, Option("--do-sample/--greedy", help="Sample, or decode greedily.", show_default=_CONFIG)
    ] = None
    temperature: Annotated[float | None, Option(min=0, help="Sampling temperature; 0: decode greedily.")] = None
    top_k: Annotated[int | None, Option(min=0, help="Sample from the k likeliest tokens; 0: all.")] = None
    top_p: Annotated[float | None, Option(min=0, max=1, help="Sample from the likeliest that sum to this.")] = None
    min_p: Annotated[float | None, Option(min=0, max=1, help="Least probability, as a share of the top.")] = None
    repetition_penalty: Annotated[float | None, Option(help="Above 1, repeat tokens less often.")] = None
    num_beams: Annotated[int | None, Option(min=1, help="Number of beams of a beam search.")] = None
    seed: Annotated[int | None, Option(min=0, max=2**32 - 1, help="Seed of sampling.")] = None
    stop: Annotated[
        list[str] | None, Option(help="End the text before this string; repeatable.", show_default=_CONFIG)
    ] = None
    dtype: Dtype = None
    device: Device = None
    attn_implementation: Annotated[str | None, Option(help="Such as dcmha_plain.", show_default="auto")] = None
    oov_policy: Annotated[
        Literal["error", "clamp"] | None,
        Option(help="Token ids without embedding: refuse them, or use the last.", show_default="config.json"),
    ] = None
    cache_implementation: Annotated[
        Literal["dynamic", "static", "offloaded", "offloaded_static", "quantized"] | None,
        Option("--cache", help="Kind of cache.", show_default="dynamic"),
    ] = None
    assistant_model: Annotated[str | None, Option(help="Small model that drafts tokens.")] = None
    tokenizer: Tokenizer = None
    revision: Revision = None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `options`, a dataclass, is an option for each of its fields on the command line."""
    signature = inspect.signature(command, eval_str=True)
    kind = signature.parameters["options"].annotation
    fields = inspect.signature(kind).parameters

    @functools.wraps(command)
    def call(**given: Any) -> None:
        command(options=kind(**{name: given.pop(name) for name in fields}), **given)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += fields.values() if name == "options" else [parameter]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call
