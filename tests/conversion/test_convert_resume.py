"""Interrupted conversions go on from their finished shards and end with the same bytes; the rest of the folder too."""

import json
import random
import time
from pathlib import Path

import killable
import pytest
from orbax_writer import maxtext_leaves, write_checkpoint

from dcformer.conversion import convert_maxtext
from dcformer.conversion.shard_writer import ShardWriter


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    leaves = maxtext_leaves(0, layers=8, embed=32, heads=4, channels=8, mlp=64, vocab=64)
    write_checkpoint(folder / "checkpoints" / "7" / "state", leaves)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def expected(run, tmp_path_factory):
    destination = tmp_path_factory.mktemp("whole") / "model"
    report = convert_maxtext(run, destination, max_shard_size="100KB")
    assert report.resumed_shards == 0
    assert len(list(destination.glob("*.safetensors"))) > 4
    return contents(destination)


def partial_of(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.partial")


def stop_after(monkeypatch, shards: int):
    """End the conversion as soon as so many shards are finished."""
    complete = ShardWriter._complete

    def stopping(self, shard, name):
        complete(self, shard, name)
        if sum(map(self._is_done, self.shards)) >= shards:
            raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "_complete", stopping)


@pytest.mark.parametrize("shards", [1, 3, 5])
def test_resumes_from_finished_shards(run, expected, tmp_path, monkeypatch, shards):
    destination = tmp_path / "model"
    with monkeypatch.context() as patch:
        stop_after(patch, shards)
        with pytest.raises(KeyboardInterrupt):
            convert_maxtext(run, destination, max_shard_size="100KB", workers=1)
    assert not destination.exists()
    report = convert_maxtext(run, destination, max_shard_size="100KB")
    assert report.resumed_shards == shards
    assert contents(destination) == expected
    assert not partial_of(destination).exists()


def test_a_finished_shard_that_was_damaged_is_written_again(run, expected, tmp_path, monkeypatch):
    destination = tmp_path / "model"
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            convert_maxtext(run, destination, max_shard_size="100KB", workers=1)
    note = next(partial_of(destination).glob("progress/*.json"))
    shard = partial_of(destination) / "model" / note.name.removesuffix(".json")
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    assert convert_maxtext(run, destination, max_shard_size="100KB").resumed_shards == 1
    assert contents(destination) == expected


def test_other_options_start_anew(run, tmp_path, monkeypatch):
    destination = tmp_path / "model"
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            convert_maxtext(run, destination, max_shard_size="100KB", workers=1)
    report = convert_maxtext(run, destination, max_shard_size="100KB", dtype="bfloat16")
    assert report.resumed_shards == 0
    assert {record["dtype"] for record in report.tensors} == {"bfloat16"}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_killed_at_a_random_moment(run, expected, tmp_path, seed):
    destination = tmp_path / "model"
    process = killable.start(convert_maxtext, run, destination, max_shard_size="100KB")
    deadline = time.monotonic() + 60
    while not partial_of(destination).exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(random.Random(seed).uniform(0, 0.15))
    process.kill()
    process.join()
    assert partial_of(destination).exists() or destination.exists()
    if not destination.exists():
        convert_maxtext(run, destination, max_shard_size="100KB")
    assert contents(destination) == expected


def test_an_existing_destination_is_kept_without_force(run, tmp_path):
    destination = tmp_path / "model"
    convert_maxtext(run, destination, dtype="bfloat16")
    before = contents(destination)
    with pytest.raises(FileExistsError, match="--force"):
        convert_maxtext(run, destination)
    assert contents(destination) == before
    convert_maxtext(run, destination, force=True)
    assert json.loads((destination / "config.json").read_text())["dtype"] == "float32"


def test_every_chunk_is_read_once(run, tmp_path, monkeypatch):
    from dcformer.conversion.formats.zarr_array import ZarrLeaf

    boxes, read = [], ZarrLeaf.read
    monkeypatch.setattr(ZarrLeaf, "read", lambda self, box: boxes.append((self.name, box)) or read(self, box))
    report = convert_maxtext(run, tmp_path / "model", verify=False)
    assert len(boxes) == len(set(boxes)) == len({source["leaf"] for r in report.tensors for source in r["sources"]})
    assert not any(name.startswith("opt_state") for name, _ in boxes)
