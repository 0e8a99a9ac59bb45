"""Files that are written whole or not at all, and locks that end with their process."""

import errno
import multiprocessing
import os
import signal

import pytest

from dcformer.common.files import unfinished_path, write_atomically
from dcformer.common.locks import LockHeldError, file_lock


@pytest.mark.parametrize("content", ["ä\r\nb\n", b"\xff\x00", ""], ids=["text", "bytes", "nothing"])
def test_a_file_holds_what_was_written_and_replaces_what_was_there(content, tmp_path):
    file = tmp_path / "file.json"
    file.write_text("old")
    write_atomically(file, content)
    assert file.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("fails", ["os.fsync", "pathlib.Path.replace"], ids=["on_the_disk", "renaming"])
def test_a_file_that_cannot_be_written_stays_as_it_was(fails, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "file.json"
    file.write_text("old")
    monkeypatch.setattr(fails, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_what_a_killed_process_left_unfinished_is_replaced(tmp_path):
    file = tmp_path / "file.json"
    unfinished_path(file).write_text("half of a ")
    write_atomically(file, "new")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_a_lock_is_held_by_one_and_free_after_the_block(tmp_path):
    path = tmp_path / "folder" / ".lock"
    for _ in range(2):
        with file_lock(path) as unsupported:
            assert unsupported is None
            with pytest.raises(LockHeldError, match=r"holds the lock .*folder/\.lock'; wait for it"), file_lock(path):
                pytest.fail("two held it")
    assert path.is_file()


def test_a_lock_that_removes_itself_leaves_nothing_but_what_others_wrote(tmp_path):
    with file_lock(tmp_path / "a" / "b" / ".lock", removes=True):
        pass
    assert list(tmp_path.iterdir()) == []
    with file_lock(tmp_path / "a" / "b" / ".lock", removes=True):
        (tmp_path / "a" / "result").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "result"]


def test_the_holder_may_remove_the_file_and_its_folder(tmp_path):
    path = tmp_path / "folder" / "lock"
    with file_lock(path):
        path.unlink()
        path.parent.rmdir()
        with file_lock(path):  # another file of the same name, which nobody holds
            assert path.is_file()


def test_a_lock_that_was_removed_before_it_was_had_is_made_again(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "lock"
    taken = []

    def take(file, operation):
        taken.append(file)
        if len(taken) == 1:  # as if the process that held it had ended and tidied up just now
            path.unlink()
            path.parent.rmdir()

    monkeypatch.setattr("fcntl.flock", take)
    with file_lock(path):
        assert len(taken) == 2 and os.path.samestat(os.fstat(taken[1].fileno()), path.stat())


def test_a_file_system_without_locks_gives_its_reason(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with file_lock(tmp_path / "lock") as reason:
        assert reason.errno == errno.EOPNOTSUPP


def test_a_lock_ends_with_a_process_that_is_killed(tmp_path):
    def hold(sender):
        with file_lock(tmp_path / "lock", removes=True):
            sender.send("locked")
            signal.pause()

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(sender,))
    process.start()
    assert receiver.recv() == "locked"
    with pytest.raises(LockHeldError), file_lock(tmp_path / "lock"):
        pass
    process.kill()
    process.join()
    with file_lock(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("blocked", ["file", "link"])
def test_a_folder_that_cannot_be_made_is_an_error_at_once(blocked, tmp_path):
    if blocked == "file":
        (tmp_path / "file").touch()
    else:
        (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(OSError, match=blocked), file_lock(tmp_path / blocked / "folder" / "lock"):
        pass
