"""Files that are written completely or not at all, locks that end with their process, and silent libraries."""

import errno
import multiprocessing
import signal

import huggingface_hub.utils as hub
import pytest
from transformers.utils import logging

from dcformer.common.files import LockHeldError, file_digest, file_lock, write_atomically
from dcformer.common.quiet import quiet_libraries


def test_a_file_holds_what_was_written(tmp_path):
    file = tmp_path / "file"
    for content in ("ä\r\nb\n", b"\xff\x00", ""):
        write_atomically(file, content)
        assert file.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert list(tmp_path.iterdir()) == [file]
    assert file_digest(file) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize("fails", ["os.fsync", "pathlib.Path.replace"])
def test_a_file_that_cannot_be_written_stays_as_it_was(fails, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "file"
    file.write_text("old")
    monkeypatch.setattr(fails, full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def hold(path, sender):
    with file_lock(path):
        sender.send("locked")
        signal.pause()


def test_a_lock_is_held_by_one_process_and_ends_when_that_is_killed(tmp_path):
    path, context = tmp_path / "folder" / "lock", multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(path, sender))
    process.start()
    assert receiver.recv() == "locked"
    with pytest.raises(LockHeldError, match="lock"), file_lock(path):
        pass
    process.kill()
    process.join()
    with file_lock(path):
        pass


@pytest.mark.parametrize("messages", [True, False])
def test_libraries_are_quiet_in_the_block_and_as_before_after_it(messages):
    def state():
        return logging.is_progress_bar_enabled(), hub.are_progress_bars_disabled(), logging.get_verbosity()

    before = state()
    with pytest.raises(RuntimeError), quiet_libraries(messages=messages):
        assert state() == (False, True, logging.ERROR if messages else before[2])
        raise RuntimeError
    assert state() == before
