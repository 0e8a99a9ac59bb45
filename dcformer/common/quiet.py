"""Silence for libraries, so that their messages and progress bars do not mix with those of a command."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_libraries(*, messages: bool = True, datasets: bool = False) -> Iterator[None]:
    """Switch off the progress bars of Transformers, the Hub and optionally datasets, and with `messages` warnings."""
    import huggingface_hub.utils as hub
    from transformers.utils import logging as transformers_logging

    libraries: list[Any] = [transformers_logging]
    if datasets:  # which takes a second to import
        from datasets.utils import logging as datasets_logging

        libraries.append(datasets_logging)
    with contextlib.ExitStack() as before:
        # Restored last: Transformers also switches the Hub's bars.
        before.callback(hub.disable_progress_bars if hub.are_progress_bars_disabled() else hub.enable_progress_bars)
        hub.disable_progress_bars()
        for library in libraries:
            if library.is_progress_bar_enabled():
                before.callback(library.enable_progress_bar)
                library.disable_progress_bar()
        if messages:
            for library in (*libraries, hub.logging):
                before.callback(library.set_verbosity, library.get_verbosity())
                library.set_verbosity_error()
        yield
