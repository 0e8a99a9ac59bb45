"""The device of an evaluation: one that PyTorch finds on this machine, or an error before anything is loaded.

lm-eval takes a device that it does not know, or that is not there, for none at all, and computes on another.
"""

from __future__ import annotations

import difflib
import os

import torch


AUTO = "auto"

# The kinds of accelerators that lm-eval places a model on.
_ACCELERATORS = ("cuda", "mps", "xpu", "npu", "hpu")
# Other spellings of a device than those by which lm-eval finds it.
_SPELLINGS = {"cpu:0": "cpu", "mps:0": "mps", "xpu": "xpu:0", "npu": "npu:0", "hpu": "hpu:0"}


def available_devices() -> list[str]:
    """`"cpu"`, and every accelerator that PyTorch can use here: `"cuda:0"`, `"cuda:1"`, `"mps:0"`."""
    names = ["cpu"]
    for kind in _ACCELERATORS:
        backend = getattr(torch, kind, None)  # those of other makers come with packages of their own
        if backend is not None and backend.is_available():
            names += [f"{kind}:{index}" for index in range(backend.device_count())]
    return names


def choose_device(device: str | torch.device | None = None, processes: int = 1) -> str:
    """
    The device to compute on.

    Args:
        device (*optional*): `"cpu"`, `"cuda"`, `"cuda:0"`, `"mps"` and the like; `None` or `"auto"`: the first CUDA GPU
            if there is one, else the CPU.
        processes (`int`, defaults to 1): How many processes on this machine share the work. On GPUs each takes one of
            its own.

    Returns:
        Its name as lm-eval knows it; `"cuda"` is the process's own GPU.

    Raises:
        ValueError: if this machine has no such device, or not one for every process.
    """
    there = available_devices()
    gpus = [name for name in there if name.startswith("cuda:")]
    if device is None or str(device) == AUTO:
        name = "cuda" if gpus else "cpu"
    else:
        name = str(device)
        kinds = dict.fromkeys(each.partition(":")[0] for each in there)
        if name not in (*there, *kinds, "cpu:0"):
            raise ValueError(_not_there(name, there, [*kinds, *there]))
    if processes > 1 and name not in ("cpu", "cpu:0", "cuda"):
        raise ValueError(
            f"device {name!r} is one device, and there are {processes} processes, each with a GPU of its own; give "
            "cuda or cpu, or start one process."
        )
    if processes > max(1, len(gpus)) and name == "cuda":
        raise ValueError(
            f"{processes} processes need as many GPUs, and PyTorch finds {', '.join(gpus)} here; start fewer, or give "
            "cpu as the device."
        )
    return _SPELLINGS.get(name, name)


def describe_device(device: str) -> str:
    """A chosen device in words, such as `"cuda, NVIDIA A100-SXM4-80GB"`."""
    if device.startswith("cuda"):
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return f"{device}, {os.cpu_count()} cores" if device == "cpu" else device


def _not_there(name: str, there: list[str], known: list[str]) -> str:
    close = difflib.get_close_matches(name.strip().lower(), known, n=1, cutoff=0.75)
    hint = f"did you mean {close[0]}? " if close and not name.startswith(close[0]) else ""
    only = "only " if len(there) == 1 else ""
    return f"There is no device {name!r}: {hint}PyTorch finds {only}{', '.join(there)} on this machine{_reason(name)}."


def _reason(name: str) -> str:
    """Why no GPU, or not this one, is found."""
    if not name.startswith("cuda"):
        return ""
    if not torch.backends.cuda.is_built():
        return ", as it is built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f", where CUDA_VISIBLE_DEVICES is {visible!r}"
