"""How a command runs: with the models registered, errors in one line, and without the noise of other libraries."""

import contextlib
import logging
import os
from collections.abc import Iterator

from ..common.quiet import quiet_libraries
from ..common.terminal import one_line_errors


def is_first_process() -> bool:
    """Whether this is the only process, or the first of those that `torchrun` or `accelerate launch` started."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def running_command(
    debug: bool, interrupted: str = "Interrupted.", is_first: bool = True, loads_models: bool = True
) -> Iterator[None]:
    """Run the body of a command as `one_line_errors` does, with the models registered if it loads any."""
    with one_line_errors(debug, interrupted, is_first):
        if loads_models:
            # What they say at their import concerns nobody who runs a command.
            for name in ("torchao", "torch.utils._pytree"):
                logging.getLogger(name).setLevel(logging.ERROR)
            from .. import public  # noqa: F401
        yield


@contextlib.contextmanager
def running_on_checkpoints(debug: bool, interrupted: str = "Interrupted.") -> Iterator[None]:
    """Run the body of a command that reads checkpoints, whose own progress bar others would tear."""
    with running_command(debug, interrupted), quiet_libraries():
        yield
