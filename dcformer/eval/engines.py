"""What computes an evaluation: Transformers, or vLLM, which may not be installed or may be built for another device."""

from __future__ import annotations

import os
from types import ModuleType

from ..common.optional import import_optional


TRANSFORMERS, VLLM = ENGINES = ("transformers", "vllm")


def check_engine(engine: str, *, stock: bool, processes: int) -> None:
    """
    Raises:
        ValueError: for an engine that there is not, or for what it cannot do.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}.")
    if engine == VLLM and stock:
        raise ValueError(
            "--stock (stock=True) scores by a class that computes with Transformers, and engine is 'vllm'; leave one "
            "of them out."
        )
    if processes > 1 and (stock or engine == VLLM):
        what = "--stock (stock=True)" if stock else "--engine vllm (engine='vllm')"
        raise ValueError(f"{what} scores in one process, and there are {processes}; start one.")


def import_vllm() -> ModuleType:
    """
    vLLM, which tells of errors only, on stderr, unless the environment says otherwise.

    Raises:
        ImportError: if it is not installed.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    return import_optional("vllm", "--engine vllm (engine='vllm') needs vLLM: pip install 'dcformer[vllm]'.")


def check_device_of_vllm(device: str, asked: str | None) -> None:
    """
    That the engine will compute where it is asked to.

    Args:
        device: What [`dcformer.eval.devices.choose_device`] has chosen.
        asked: What it was given.

    Raises:
        ImportError: if vLLM is not installed.
        ValueError: for a device that the installed build of vLLM does not compute on, or a GPU other than the first.
    """
    import_vllm()
    from vllm.platforms import current_platform

    kind, _, index = device.partition(":")
    if kind != current_platform.device_type:
        said = f"device is {asked!r}" if asked else f"PyTorch finds {device!r} here"
        raise ValueError(
            f"The installed vLLM computes on {current_platform.device_type or 'nothing here'!r}, and {said}; install "
            "the build of vLLM for that device, or give another --device."
        )
    if index not in ("", "0"):
        raise ValueError(
            f"vLLM takes the first GPU that it sees, and device is {asked!r}; leave --device out and set "
            f"CUDA_VISIBLE_DEVICES={index}."
        )
