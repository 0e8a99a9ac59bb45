"""Compiling the C++ operator: by `pip install` (setup.py loads this file alone) or where it is first used.

There is one library for each instruction set, of plain C functions. It uses nothing of torch or Python, so that it
compiles in seconds and works with every version of both. Its name holds digests of the sources and of itself: one of
other sources is ignored, and so is a damaged one, which could end the process.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path


SOURCES = Path(__file__).with_name("csrc")
FLAGS = ("-O2", "-ftree-vectorize", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-math-errno")
INSTRUCTION_SETS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
    "avx2": ("-mavx2", "-mfma"),
    "neon": (),
}


def instruction_sets() -> tuple[str, ...]:
    """Names of the instruction sets that machines of this kind may have."""
    known = {"x86_64": ("avx512", "avx2"), "amd64": ("avx512", "avx2"), "aarch64": ("neon",), "arm64": ("neon",)}
    return known.get(platform.machine().lower(), ())


def find_library(instruction_set: str, folder: Path) -> Path | None:
    """The library that `compile_library` made of these sources in a folder, if it is there as it was made."""
    paths = folder.glob(f"{_stem(instruction_set)}-*.so")
    return next((path for path in paths if path.stem.endswith(_digest(path.read_bytes()))), None)


def _stem(instruction_set: str) -> str:
    """The beginning of the file name of every library that these sources make."""
    sources = [path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]
    return f"dcformer-{instruction_set}-{_digest(repr((FLAGS, INSTRUCTION_SETS[instruction_set])).encode(), *sources)}"


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()[:12]


def compile_library(instruction_set: str, folder: Path) -> Path:
    """Compile the library for one instruction set into a folder, all at once or, with an OSError, not at all."""
    given = shlex.split(os.environ.get("CXX", ""))  # as `ccache g++`
    names = given[:1] or ["c++", "g++", "clang++"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise OSError("there is no C++ compiler")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "library.so"
        flags = (*FLAGS, *INSTRUCTION_SETS[instruction_set], "-o", str(made))
        command = [compiler, *given[1:], *flags, str(SOURCES / "attention.cpp")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise OSError(f"{compiler} failed with status {done.returncode}: {done.stderr.strip()}")
        return made.replace(folder / f"{_stem(instruction_set)}-{_digest(made.read_bytes())}.so")
