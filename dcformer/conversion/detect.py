"""Which format a checkpoint has, told by what is there; and opening any of them without having to know it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from .formats.authors_torch import plan_torch, torch_contents
from .formats.contents import Contents
from .formats.maxtext import maxtext_contents, plan_maxtext
from .formats.pax import pax_contents, plan_pax
from .formats.transformers_folder import local_folder
from .plan import Plan
from .stores import Store, is_remote


FormatName = Literal["torch", "pax", "maxtext"]

_CONTENTS: dict[FormatName, Callable[[str | os.PathLike, int | None], Contents]] = {
    "torch": torch_contents,
    "pax": pax_contents,
    "maxtext": maxtext_contents,
}
# What the name of a PAX checkpoint's parameters holds.
_PAX_NAME = "mdl_vars.params.lm"


def detect_format(path: str | os.PathLike) -> FormatName:
    """
    The format of a checkpoint: `"torch"` for a folder with `config.json`, the authors' or ours, `"pax"` or `"maxtext"`.

    Args:
        path: A folder, local, remote or a name on the Hub; or a PAX `.npz` file.

    Raises:
        FileNotFoundError: if there is nothing there.
        ValueError: if it is another file.
    """
    if is_remote(path):
        return "pax" if any(_PAX_NAME in name for name in Store(path).names()) else "maxtext"
    local = Path(path)
    if not local.exists():
        local = local_folder(path)
    if local.is_file():
        if local.suffix == ".npz":
            return "pax"
        raise ValueError(f"{str(path)!r} is a file; give the folder of a checkpoint, or a PAX .npz file.")
    if (local / "config.json").is_file():
        return "torch"
    if any(local.glob("*.npy")) or any(local.rglob(f"*{_PAX_NAME}*")):
        return "pax"
    return "maxtext"


def list_contents(path: str | os.PathLike, *, step: int | None = None) -> Contents:
    """
    What any checkpoint that this package reads stores. Only metadata are read.

    Args:
        path: As in [`detect_format`].
        step (`int`, *optional*): Step of a run folder. None: the latest.

    Raises:
        FileNotFoundError, ValueError: if it is none, or its arrays cannot be listed.
    """
    return _CONTENTS[detect_format(path)](path, step)


def open_checkpoint(
    path: str | os.PathLike,
    *,
    step: int | None = None,
    train_config: str | os.PathLike | None = None,
    config: str | os.PathLike | None = None,
) -> Plan:
    """
    The plan of any checkpoint that this package reads.

    Args:
        path: As in [`detect_format`].
        step (`int`, *optional*): Step of a run folder. None: the latest.
        train_config (*optional*): Training YAML of a MaxText run.
        config (*optional*): `config.json` of a PAX checkpoint, which needs one.

    Raises:
        FileNotFoundError, ValueError: if it is none, or cannot be converted whole.
    """
    name = detect_format(path)
    if name == "torch":
        return plan_torch(path)
    if name == "pax":
        if config is None:
            raise ValueError(f"{str(path)!r} is a PAX checkpoint, which needs its configuration: pass --config.")
        return plan_pax(path, config, step=step)
    return plan_maxtext(path, step=step, train_config=train_config)
