"""Files that are written completely or not at all, locks that end with their process, and silent libraries."""

import contextlib
import errno
import hashlib
import multiprocessing
import os
import re
import signal
from pathlib import Path

import huggingface_hub.utils as hub
import pytest
from transformers.utils import logging

from dcformer.common.files import (
    LockHeldError,
    file_lock,
    find_damage,
    make_manifest,
    read_sealed,
    seal,
    write_atomically,
)
from dcformer.common.quiet import quiet_libraries


def test_a_file_holds_what_was_written(tmp_path):
    file = tmp_path / "file"
    for content in ("ä\r\nb\n", b"\xff\x00", ""):
        write_atomically(file, content)
        assert file.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("kind", ["file", "nothing", "terminal", "pipe", "open file", "folder"])
def test_a_link_is_followed_and_what_is_no_file_stays_what_it_is(kind, tmp_path):
    link, target, reader = tmp_path / "link", tmp_path / "target", None
    if kind == "terminal":
        reader, terminal = os.openpty()
        target = os.ttyname(terminal)
    elif kind == "pipe":
        os.mkfifo(target)
        reader = os.open(target, os.O_RDWR)
    elif kind == "folder":
        target.mkdir()
    elif kind != "nothing":
        target.write_text("old ")
    if kind == "open file":  # as /dev/stdout is of `>> target`
        reader = os.open(target, os.O_RDWR | os.O_APPEND)
        target = f"/dev/fd/{reader}"
    link.symlink_to(target)
    with pytest.raises(IsADirectoryError) if kind == "folder" else contextlib.nullcontext():
        write_atomically(link, "new")
        text = os.read(reader, 9) if reader else target.read_bytes()
        assert text == (b"old new" if kind == "open file" else b"new")
    assert link.is_symlink() and {path.name for path in tmp_path.iterdir()} <= {"link", "target"}
    assert kind != "pipe" or target.is_fifo()


def test_bytes_are_on_the_disk_before_a_name_or_a_manifest_says_so(tmp_path, monkeypatch):
    done, replace = [], Path.replace
    monkeypatch.setattr("os.fsync", lambda number: done.append(os.fstat(number).st_size))
    monkeypatch.setattr("pathlib.Path.replace", lambda self, path: done.append(path.name) or replace(self, path))
    for name, text in (("c", "12345"), ("a", "1"), ("b", "123")):
        write_atomically(tmp_path / name, text)
    assert done == [5, "c", 1, "a", 3, "b"]
    done.clear()
    assert list(make_manifest(tmp_path)) == ["a", "b", "c"] and done == [1, 3, 5]
    assert list(make_manifest(tmp_path, [tmp_path / "c", tmp_path / "gone"])) == ["c"]


def test_damage_is_found_wherever_it_is_and_only_inside_the_folder(tmp_path):
    contents = {"a": b"1", "b/c": bytes(5_000_000), "d": bytes(2 * 2**20), "e": b""}
    (tmp_path / "b").mkdir()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    manifest = make_manifest(tmp_path)
    assert manifest == {n: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in contents.items()}
    assert find_damage(tmp_path, manifest) is None
    for name, position in (("a", 0), ("b/c", 0), ("b/c", 2**20), ("b/c", 4_999_999), ("d", 2**21 - 1)):
        changed = bytearray(contents[name])
        changed[position] ^= 1
        (tmp_path / name).write_bytes(changed)
        assert f"{name}' was changed" in find_damage(tmp_path, manifest)
        (tmp_path / name).write_bytes(contents[name])
    (tmp_path / "e").write_bytes(b"more")
    assert find_damage(tmp_path, manifest) == f"'{tmp_path}/e' has 4 bytes instead of 0."
    (tmp_path / "e").unlink()
    assert find_damage(tmp_path, manifest) == f"'{tmp_path}/e' is missing."
    for name in ("../a", "/etc/hostname", "b/../../a", "b\\c", "c:a", "", ".", 3, None):
        with pytest.raises(ValueError, match="must stay inside its folder"):
            find_damage(tmp_path / "b", {name: {"size": 1, "sha256": manifest["a"]["sha256"]}})


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


def test_a_sealed_file_is_read_as_it_was_written_or_called_damaged(tmp_path):
    path, values = tmp_path / "sealed", {"step": 12, "name": "é", "files": {"a": [1, None]}}
    path.write_text(seal(values), encoding="utf-8")
    assert read_sealed(path) == values
    whole = seal(values)
    for text in (whole.replace("12", "13"), whole.replace("name", "nam"), whole[:-4], "[]", '{"step": 12}', "\xff"):
        path.write_text(text, encoding="latin-1" if text == "\xff" else "utf-8")
        with pytest.raises(ValueError, match=f"^{re.escape(repr(str(path)))} is damaged"):
            read_sealed(path)


def hold(path, sender):
    with file_lock(path):
        sender.send("locked")
        signal.pause()


def test_a_lock_is_held_by_one_process_and_ends_when_that_is_killed(tmp_path):
    path, context = tmp_path / "link" / "lock", multiprocessing.get_context("fork")
    (tmp_path / "link").symlink_to("folder")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(path, sender))
    process.start()
    assert receiver.poll(60) and receiver.recv() == "locked"
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
