"""Whether a process is the `dcformer` command, by how its interpreter was started."""

import sys

import pytest

from dcformer.common.command_line import is_dcformer_command


SPAWNED = ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()", "--multiprocessing-fork"]


@pytest.mark.parametrize(
    ("started", "arguments", "expected"),
    [
        (["python", "/bin/dcformer", "eval", "m"], ["/bin/dcformer", "eval", "m"], True),
        (["python", "-X", "importtime", "/bin/dcformer"], ["/bin/dcformer"], True),
        (["python.exe", "Scripts/dcformer.exe", "--help"], ["Scripts/dcformer.exe", "--help"], True),
        (["python", "-m", "dcformer.cli", "--help"], ["-m", "--help"], True),
        (["python", "-um", "dcformer.cli"], ["-m"], True),
        (["python", "-m", "dcformer.training", "dcformer.cli"], ["-m", "dcformer.cli"], False),
        (["python", "-m", "pytest", "dcformer.cli"], ["-m", "dcformer.cli"], False),
        (["python", "train.py", "/bin/dcformer"], ["train.py", "/bin/dcformer"], False),
        (["python", "-c", "import dcformer", "/bin/dcformer"], ["-c", "/bin/dcformer"], False),
        (["python"], [""], False),
        (["python"], [], False),
        # A process that multiprocessing has spawned takes over the arguments of the command.
        (SPAWNED, ["/bin/dcformer", "train", "r"], False),
        (SPAWNED, ["/bin/dcformer"], False),
    ],
    ids=[
        "script",
        "options-of-python",
        "windows",
        "module",
        "module-unbuffered",
        "other-module",
        "tests",
        "argument-of-a-script",
        "argument-of-code",
        "interactive",
        "embedded",
        "spawned-with-arguments",
        "spawned",
    ],
)
def test_only_the_command_is_the_command(monkeypatch, started, arguments, expected):
    monkeypatch.setattr(sys, "orig_argv", started)
    monkeypatch.setattr(sys, "argv", arguments)
    assert is_dcformer_command() is expected
