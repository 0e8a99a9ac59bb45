"""Tile sizes, warps and stages of the kernels of this folder, by heads, channels and the name of the device.

They are looked up, never searched for, where a kernel is launched: first in the user's own file, which
`dcformer bench tune` writes, then in the one that lies beside this file. Both are JSON:

    {"NAME OF THE DEVICE": [{"heads": 32, "channels": 128, "kernel": "NAME", "time": 0.001, "num_warps": 4, ...}]}

where `time` is in seconds. Whatever is not `heads`, `channels`, `kernel` or `time` is the configuration: whole numbers
under names of the operator's own.

What an operator has to offer, as a module of this folder, so that it can be tuned:
- `KERNELS`: candidate configurations by the name of a kernel, the first of each being the default.
- `tuning_example(heads, channels, dtype, device)`: makes random operands of a usual length, and returns a call which
  takes configurations by the name of a kernel (the default for a kernel that is missing) and returns the operator's
  output, a tensor or a tuple of tensors.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path


Entry = dict[str, int | float | str]
_PACKAGED = Path(__file__).with_name("tuned_configurations.json")
_ABOUT = ("heads", "channels", "kernel", "time")


def user_file() -> Path:
    """
    The user's own configurations: in `$DCFORMER_CACHE`, or else in `dcformer` in `$XDG_CACHE_HOME` or `~/.cache`, which
    is the cache folder of the whole package.
    """
    own = os.environ.get("DCFORMER_CACHE")
    folder = Path(own or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (folder if own else folder / "dcformer") / "tuned_configurations.json"


def tuned_config(
    kernel: str, heads: int, channels: int, device_name: str, default: Mapping[str, int] | None = None
) -> dict[str, int]:
    """
    The configuration with which to launch a kernel.

    Args:
        kernel (`str`): Its name.
        heads (`int`): Query heads.
        channels (`int`): Of a head.
        device_name (`str`): As `torch.cuda.get_device_name` has it.
        default (`Mapping`, *optional*): What is returned where nothing is known of the kernel on this device; empty
            unless given.

    Returns:
        `dict[str, int]`: of the tuned shape that is nearest in heads, and among those in channels.

    Raises:
        ValueError: if a file holds something else than configurations; the message names it.
    """
    own = [entry for entry in _known(str(user_file()), device_name) if entry["kernel"] == kernel]
    if not own:
        return dict(default or {})

    def distance(entry: Entry) -> tuple[int, int, int, int]:
        # Of two that are as far away, the smaller shape: its tiles fit anywhere.
        entry_heads, entry_channels = int(entry["heads"]), int(entry["channels"])
        return abs(entry_heads - heads), abs(entry_channels - channels), entry_heads, entry_channels

    nearest = min(own, key=distance)
    return {name: int(value) for name, value in nearest.items() if name not in _ABOUT}


def load_configurations(path: str | os.PathLike) -> dict[str, list[Entry]]:
    """
    All entries of a file by the name of the device; none if there is no such file.

    Raises:
        ValueError: if it holds something else.
    """
    path = Path(path)
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for entries in found.values():
            for entry in entries:
                for name, value in entry.items():
                    expected = {"kernel": str, "time": int | float}.get(name, int)
                    if not isinstance(value, expected) or isinstance(value, bool):
                        raise TypeError(f"{name} is {value!r}")
                if missing := {"heads", "channels", "kernel"} - set(entry):
                    raise KeyError(f"{', '.join(sorted(missing))} missing")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{str(path)!r} holds no tuned configurations ({error}); delete it, or write it again by "
            "`dcformer bench tune`."
        ) from None
    return found


def save_configurations(path: str | os.PathLike, device_name: str, entries: Iterable[Entry]) -> None:
    """
    Put entries of one device into a file; those of the same kernel, heads and channels are replaced, all else stays.

    Raises:
        ValueError: if there is a file which holds something else.
    """
    path = Path(path)
    known = load_configurations(path)
    known[device_name] = _merged(known.get(device_name, []), entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process that reads meanwhile finds the old file or the new one, never half of it.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(known, indent=2) + "\n")
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _known.cache_clear()


@functools.cache
def _known(own_path: str, device_name: str) -> list[Entry]:
    """What is known of a device; the user's own entries replace those of the package."""
    packaged, own = (load_configurations(path).get(device_name, []) for path in (_PACKAGED, own_path))
    return _merged(packaged, own)


def _merged(earlier: Iterable[Entry], later: Iterable[Entry]) -> list[Entry]:
    by_shape = {(entry["kernel"], entry["heads"], entry["channels"]): entry for entry in (*earlier, *later)}
    return list(by_shape.values())


__all__ = ["Entry", "load_configurations", "save_configurations", "tuned_config", "user_file"]
