"""How a command runs: with the models registered, errors in one line, and without the noise of other libraries."""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator

from ..common.quiet import quiet_libraries
from ..common.terminal import one_line_errors


# What they say while Transformers imports them concerns the one who installed them: kernels of torchao for other
# machines, and the names by which it registers its classes.
_TALKATIVE_IMPORTS = ("torchao", "torch.utils._pytree")


def is_first_process() -> bool:
    """Whether this is the only process, or the first of those that `torchrun` or `accelerate launch` started."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def running_command(
    debug: bool, interrupted: str = "Interrupted.", is_first: bool = True, loads_models: bool = True
) -> Iterator[None]:
    """
    Run the body of a command.

    Args:
        debug (`bool`): Let exceptions through, with their traceback.
        interrupted (`str`): What is printed after Ctrl-C or another signal that ends the command.
        is_first (`bool`): Whether this is the first of several processes, the only one that prints errors of input.
        loads_models (`bool`): Whether the body may load models through the Auto classes, which takes importing torch
            and Transformers; `False` for commands that only print what is written somewhere.
    """
    with one_line_errors(debug, interrupted, is_first):
        if loads_models:
            # `import dcformer` leaves this out where a command starts, so that its help is quick.
            with _without_messages(_TALKATIVE_IMPORTS):
                from .. import public  # noqa: F401
        yield


@contextlib.contextmanager
def _without_messages(names: Iterable[str]) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before):
            logger.setLevel(level)


@contextlib.contextmanager
def running_on_checkpoints(debug: bool, interrupted: str = "Interrupted.") -> Iterator[None]:
    """Run the body of a command that reads checkpoints, whose own progress bar others would tear."""
    with running_command(debug, interrupted), quiet_libraries():
        yield
