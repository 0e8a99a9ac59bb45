"""Tuned configurations: a file that survives, the nearest shape that is known, and the search that writes it."""

import json
from types import SimpleNamespace

import pytest
import torch

from dcformer.bench import tune
from dcformer.bench.__main__ import main
from dcformer.bench.machine import device_name
from dcformer.ops import tuning


GPU = "Some GPU"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("DCFORMER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tuning._known.cache_clear()
    yield
    tuning._known.cache_clear()


def entry(heads, channels, kernel="probs", block=32, **more):
    return {"heads": heads, "channels": channels, "kernel": kernel, "BLOCK_KEYS": block, "time": 1e-3, **more}


def test_what_is_saved_is_found_and_replaces_only_its_own_shape():
    path = tuning.user_file()
    tuning.save_configurations(path, GPU, [entry(32, 128, num_warps=4), entry(32, 80, block=16)])
    tuning.save_configurations(path, GPU, [entry(32, 128, block=64, num_warps=8)])
    tuning.save_configurations(path, "Another GPU", [entry(8, 64)])

    assert tuning.tuned_config("probs", 32, 128, GPU) == {"BLOCK_KEYS": 64, "num_warps": 8}
    assert tuning.tuned_config("probs", 32, 80, GPU) == {"BLOCK_KEYS": 16}
    assert set(tuning.load_configurations(path)) == {GPU, "Another GPU"}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "heads, channels, block",
    [(32, 128, 1), (40, 128, 1), (30, 64, 2), (7, 128, 3), (6, 16, 4), (20, 128, 3)],
    ids=["known", "more-heads", "other-channels", "fewer-heads", "both", "between"],
)
def test_the_nearest_shape_goes_by_heads_first_then_by_channels(heads, channels, block):
    known = [entry(32, 128, block=1), entry(32, 80, block=2), entry(8, 128, block=3), entry(8, 64, block=4)]
    tuning.save_configurations(tuning.user_file(), GPU, known)

    assert tuning.tuned_config("probs", heads, channels, GPU) == {"BLOCK_KEYS": block}


def test_the_cache_folder_can_be_named(tmp_path, monkeypatch):
    assert tuning.user_file() == tmp_path / "cache" / "dcformer" / "tuned_configurations.json"
    monkeypatch.setenv("DCFORMER_CACHE", str(tmp_path / "own"))
    assert tuning.user_file() == tmp_path / "own" / "tuned_configurations.json"


def test_another_device_or_kernel_has_the_default():
    tuning.save_configurations(tuning.user_file(), GPU, [entry(32, 128)])

    assert tuning.tuned_config("probs", 32, 128, "Another GPU", {"BLOCK_KEYS": 8}) == {"BLOCK_KEYS": 8}
    assert tuning.tuned_config("lse", 32, 128, GPU) == {}


def test_the_users_own_file_goes_before_that_of_the_package(tmp_path, monkeypatch):
    packaged = tmp_path / "packaged.json"
    tuning.save_configurations(packaged, GPU, [entry(32, 128, block=1), entry(16, 64, block=2)])
    monkeypatch.setattr(tuning, "_PACKAGED", packaged)
    tuning.save_configurations(tuning.user_file(), GPU, [entry(32, 128, block=3)])

    assert tuning.tuned_config("probs", 32, 128, GPU) == {"BLOCK_KEYS": 3}
    assert tuning.tuned_config("probs", 16, 64, GPU) == {"BLOCK_KEYS": 2}


def test_the_package_carries_a_file_that_can_be_read():
    assert tuning._PACKAGED.exists()
    tuning.load_configurations(tuning._PACKAGED)


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"GPU": [{"heads": 1, "channels": 2}]}', '{"GPU": [{"heads": "x"}]}', '{"GPU": 3}'],
    ids=["list", "cut", "no kernel", "text", "number"],
)
def test_a_file_of_something_else_is_an_error_that_names_it(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.json.*delete it"):
        tuning.load_configurations(path)


def _operator(wrong_block=None, broken_block=None):
    """A stand-in of two kernels that computes a sum; blocks of 4 are the fastest."""
    seen = []

    def tuning_example(heads, channels, dtype, device):
        operand = torch.ones(heads, channels, dtype=dtype, device=device)

        def call(configs):
            seen.append(configs)
            block = configs.get("first", {}).get("BLOCK", 8)
            for _ in range(1 if block == 4 else 200):
                result = operand.sum(1)
            if block == broken_block:
                raise RuntimeError("no such tile")
            return result + (block == wrong_block)

        return call

    kernels = {"first": [{"BLOCK": 8}, {"BLOCK": 4}, {"BLOCK": 2}], "second": [{"num_warps": 4}]}
    return SimpleNamespace(__name__="dcformer.ops.adding", KERNELS=kernels, tuning_example=tuning_example, seen=seen)


def _tune(tmp_path, monkeypatch, operator, *more):
    monkeypatch.setattr(tune, "tunable_operators", lambda: [operator])
    arguments = ["tune", "--quick", "--device", "cpu", "--heads", "4", "--channels", "8", *more]
    status = main([*arguments, "--json", str(tmp_path / "out.json")])
    return status, json.loads((tmp_path / "out.json").read_text())["rows"]


def test_tuning_keeps_the_fastest_configuration_of_each_kernel(tmp_path, monkeypatch, capsys):
    operator = _operator()

    status, rows = _tune(tmp_path, monkeypatch, operator)

    device = device_name(torch.device("cpu"))
    assert status == 0
    assert tuning.tuned_config("first", 4, 8, device) == {"BLOCK": 4}
    assert tuning.tuned_config("second", 4, 8, device) == {"num_warps": 4}
    assert operator.seen[-1] == {"first": {"BLOCK": 4}, "second": {"num_warps": 4}}  # the second with the best first
    assert [row["name"] for row in rows] == ["BLOCK 8", "BLOCK 4", "BLOCK 2", "num_warps 4"]
    assert str(tuning.user_file()) in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["wrong_block", "broken_block"])
def test_a_configuration_with_other_values_is_not_kept(tmp_path, monkeypatch, fault):
    path = tmp_path / "tuned.json"

    status, rows = _tune(tmp_path, monkeypatch, _operator(**{fault: 4}), "--output", str(path))

    assert status == 1
    assert [row["has_failed"] for row in rows] == [False, True, False, False]
    (first, _) = tuning.load_configurations(path)[device_name(torch.device("cpu"))]
    assert first["BLOCK"] != 4


def test_a_search_that_was_cut_short_writes_nothing(tmp_path, monkeypatch, capsys):
    status, rows = _tune(tmp_path, monkeypatch, _operator(), "--seconds", "1e-9")

    assert status == 0 and rows == []
    assert not tuning.user_file().exists()
    assert "no time left" in capsys.readouterr().out


def test_only_operators_that_say_what_can_be_tuned_are_found():
    for operator in tune.tunable_operators():
        assert all(candidates and isinstance(candidates[0], dict) for candidates in operator.KERNELS.values())
