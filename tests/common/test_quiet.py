"""Libraries are silent in the block and as they were after it."""

import huggingface_hub.utils as hub
import pytest
from transformers.utils import logging

from dcformer.common.quiet import quiet_libraries


def state():
    bars = logging.is_progress_bar_enabled(), hub.are_progress_bars_disabled()
    return *bars, logging.get_verbosity(), hub.logging.get_verbosity()


@pytest.mark.parametrize("had_bars", [True, False], ids=["with-bars", "without-bars"])
@pytest.mark.parametrize("hub_had_bars", [True, False], ids=["hub-with-bars", "hub-without-bars"])
@pytest.mark.parametrize("messages", [True, False], ids=["messages-off", "bars-off"])
def test_what_was_on_is_off_in_the_block_and_on_after_it(had_bars, hub_had_bars, messages):
    first = state()
    try:
        (logging.enable_progress_bar if had_bars else logging.disable_progress_bar)()
        (hub.enable_progress_bars if hub_had_bars else hub.disable_progress_bars)()
        logging.set_verbosity_info()
        before = state()
        with pytest.raises(RuntimeError), quiet_libraries(messages=messages):
            within = state()
            raise RuntimeError
        assert state() == before == (had_bars, not hub_had_bars, logging.INFO, first[3])
        assert within[:2] == (False, True)
        assert within[2:] == ((logging.ERROR, logging.ERROR) if messages else before[2:])
    finally:
        logging.set_verbosity(first[2])
        hub.logging.set_verbosity(first[3])
        (logging.enable_progress_bar if first[0] else logging.disable_progress_bar)()
        (hub.disable_progress_bars if first[1] else hub.enable_progress_bars)()


def test_the_bars_of_datasets_are_switched_off_where_it_is_used():
    datasets_logging = pytest.importorskip("datasets.utils.logging")
    before = datasets_logging.is_progress_bar_enabled()
    with quiet_libraries():
        assert datasets_logging.is_progress_bar_enabled() == before
    with quiet_libraries(datasets=True):
        assert not datasets_logging.is_progress_bar_enabled()
    assert datasets_logging.is_progress_bar_enabled() == before
