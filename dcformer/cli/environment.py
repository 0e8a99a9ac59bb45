"""`dcformer env`: what a report of a fault needs to say."""

from typing import Annotated

from typer import Option

from .options import Debug, Device
from .running import running_command


def env_command(
    check: Annotated[
        bool, Option("--check", help="Compare kernels with plain PyTorch, within a minute; status 1: wrong.")
    ] = False,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """Print versions, the device and which kernels are chosen. A report of a fault needs them."""
    with running_command(debug):
        import torch

        from ..loading import choose_device
        from .kernel_check import count_wrong, described

        torch.manual_seed(0)
        where = choose_device(device)
        print(*described(where), sep="\n", flush=True)
        if check and (wrong := count_wrong(where)):
            raise ValueError(f"{wrong} rows are WRONG; please report it, and use attn_implementation='dcmha_plain'.")
