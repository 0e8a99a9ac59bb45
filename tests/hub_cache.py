"""A cache of the Hub as huggingface_hub lays it out, made by hand and read without a network."""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


def add_to_cache(
    cache: Path, name: str, folder: Path | str, refs: Iterable[str] = ("main",), kind: str = "models"
) -> str:
    """Put the files of a folder into the cache as a commit, which is returned; the refs are its branches and tags."""
    repository = cache / f"{kind}--{name.replace('/', '--')}"
    files = {path.relative_to(folder): path for path in sorted(Path(folder).rglob("*")) if path.is_file()}
    digests = {part: hashlib.sha256(path.read_bytes()).hexdigest() for part, path in files.items()}
    commit = hashlib.sha1(f"{name} {digests}".encode()).hexdigest()
    for part, digest in digests.items():
        blob, link = repository / "blobs" / digest, repository / "snapshots" / commit / part
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files[part], blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for ref in refs:
        (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    return commit
