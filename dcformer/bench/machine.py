"""Where a benchmark runs: number types, versions and hardware that its figures depend on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch
import transformers


DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def chosen_device(name: str | None) -> torch.device:
    """
    The device of a name, or else a GPU if there is one.

    Raises:
        ValueError: unless it is cpu, cuda or cuda:N, or if there is no such GPU.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}.")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"There is no device {name!r} here: torch sees {torch.cuda.device_count()} GPUs.")
    return device


def device_name(device: torch.device) -> str:
    """The name of the GPU as torch reports it, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Versions, threads and hardware that the figures depend on."""
    hardware = device_name(device)
    if device.type != "cuda":
        hardware = f"{hardware} ({torch.backends.cpu.get_cpu_capability()})"
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": str(device),
        "hardware": hardware,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def processor_flags() -> set[str]:
    """Names of the instruction sets that Linux lists for the processor; empty elsewhere."""
    return set(_cpu_info("flags", "Features").split())


def _processor() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_info(*names: str) -> str:
    """The first entry under one of these names, "" without one."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
