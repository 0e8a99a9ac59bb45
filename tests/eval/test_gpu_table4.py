"""`scripts/gpu_table4` with tiny models on a CPU: what it writes, how it resumes, and how it reports wrong scores."""

import functools
import json

import pytest
import torch


pytest.importorskip("lm_eval")

from scripts import gpu_table4
from scripts.gpu_table4 import HARNESS, METHODS, REFERENCE, main


MODEL = "dcformer-2.8b"
N_CELLS = 3 * 3 + 1  # methods, by 0 and 5 examples and a shorter context; and the reference


@pytest.fixture(scope="module")
def run(data_dir):
    def run(json_file, *options):
        asked = ["--data", data_dir, "--json", str(json_file), "--models", MODEL, "--tasks", "winogrande"]
        return main(["run", "--tiny", "--device", "cpu", *asked, *options])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_table4, "load_tokenizer", functools.cache(gpu_table4.load_tokenizer))
        yield run


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory):
    """A file of all cells, measured where memory is enough for batches of two."""
    file, build = tmp_path_factory.mktemp("table4") / "table4.json", gpu_table4.Session.build

    def refuse_large_batches(_, given):
        if len(given[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more.")

    def build_in_little_memory(session, preset):
        model = build(session, preset)
        model.register_forward_pre_hook(refuse_large_batches)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_table4.Session, "build", build_in_little_memory)
        assert run(file) == 0
    return file


def read(file):
    return json.loads(file.read_text())


def by_method(content, shots=0):
    cells = content["cells"]
    return {cell["method"]: cell for cell in cells if (cell["num_fewshot"], cell["max_length"]) == (shots, 256)}


def test_every_cell_has_the_scores_of_the_harness(finished):
    content = read(finished)
    assert len(content["cells"]) == N_CELLS and content["missing"] == []
    assert len(content["comparisons"]) == 6
    for compared in content["comparisons"]:
        assert compared["agrees"] and compared["same_prompts"]
        assert (compared["other_decisions"], compared["decisions"]) == (0, 2)
        assert compared["relative_error"] < 1e-6
    cells = by_method(content)
    for method in METHODS:
        for mine, reference in zip(cells[method]["log_likelihoods"], cells[REFERENCE]["log_likelihoods"]):
            assert mine == pytest.approx(reference, rel=1e-5)
    cells = by_method(content, shots=5)
    assert cells["shared prefixes"]["cached_tokens"] > cells["whole inputs"]["cached_tokens"] == 0
    lengths = {(cell["num_fewshot"], cell["max_length"]) for cell in content["cells"]}
    assert lengths == {(0, 256), (5, 256), (5, 128)}


def test_the_whole_table_takes_its_tokens_at_the_measured_rates(finished):
    content = read(finished)
    (whole,) = content["whole_table"]
    tokens = {0: 54479, 5: 364735}  # of WinoGrande in benchmarks/results/evaluation_tokens.json
    assert whole["tokens"] == sum(tokens.values()) and whole["share_measured"] == 1
    for method in METHODS:
        cells = [(total, by_method(content, shots)) for shots, total in tokens.items()]
        rates = [(total, cell["whole inputs"]["input_tokens"] / cell[method]["seconds"]) for total, cell in cells]
        assert whole["minutes"][method] == pytest.approx(sum(total / rate for total, rate in rates) / 60)
    less = whole["times_less_than_the_harness"]["shared prefixes"]
    assert less == pytest.approx(whole["minutes"][HARNESS] / whole["minutes"]["shared prefixes"])


def test_a_killed_run_resumes_and_time_that_is_up_ends_one(run, finished, tmp_path, monkeypatch, capsys):
    file = tmp_path / "table4.json"
    assert run(file, "--minutes", "0") == 0
    assert (len(read(file)["missing"]), read(file)["cells"]) == (N_CELLS, [])
    assert f"{N_CELLS} cells are missing" in capsys.readouterr().out
    scored, score = [], gpu_table4.run_harness

    def score_and_die(*given, **options):
        scored.append(given)
        if len(scored) == 3 + 5:  # after the warm-up and four cells
            raise KeyboardInterrupt
        return score(*given, **options)

    monkeypatch.setattr(gpu_table4, "run_harness", score_and_die)
    with pytest.raises(KeyboardInterrupt):
        run(file)
    before = read(file)
    assert (len(before["cells"]), len(before["missing"])) == (4, N_CELLS - 4)
    assert run(file) == 0
    after = read(file)
    assert after["cells"][:4] == before["cells"] and after["missing"] == []
    for cell, other in zip(after["cells"], read(finished)["cells"]):  # by the same weights
        for scores, expected in zip(cell["log_likelihoods"], other["log_likelihoods"], strict=True):
            assert scores == pytest.approx(expected, rel=1e-5)
    largest = [{cell["most_inputs_at_once"] for cell in read(path)["cells"]} for path in (file, finished)]
    assert max(largest[0]) == 4 and largest[1] <= {1, 2}
    calls = len(scored)
    assert run(file) == 0 and len(scored) == calls


def test_wrong_scores_and_prompts_end_with_status_1_and_other_options_are_refused(run, finished, tmp_path, capsys):
    for wrong in ("log_likelihoods", "prompts"):
        content = read(finished)
        cell = by_method(content)["whole inputs"]
        cell[wrong] = "others" if wrong == "prompts" else [[1.001 * value for value in each] for each in cell[wrong]]
        file = tmp_path / f"{wrong}.json"
        file.write_text(json.dumps(content))
        assert run(file) == 1
        assert capsys.readouterr().out.count("DIFFERS") == 1
    for option, value, words in (
        ("--limit", "3", "was measured with limit=2, not 3; give another --json"),
        ("--limit", "0", "--limit must be at least 1, got 0"),
        ("--lengths", "4096", r"from 1 to 2048, the models' positions, got \[4096\]"),
    ):
        with pytest.raises(ValueError, match=words):
            run(finished, option, value)


def test_prepare_copies_data_and_lists_what_else_is_needed(tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    for name in (*gpu_table4.TABLE4_COLUMNS, "tokenizer", "wikitext2"):
        (data / name).mkdir(parents=True)
        (data / name / ("20B_tokenizer.json" if name == "tokenizer" else "test.parquet")).write_text(name)
    assert main(["prepare", "--data", str(data), "--out", str(out), "--has", "pandas", "PyArrow"]) == 0
    assert (out / "piqa" / "test.parquet").read_text() == "piqa" and not (out / "wikitext2").exists()
    assert (out / "tokenizer" / "20B_tokenizer.json").read_text() == "tokenizer"
    wheels = {line.split("==")[0] for line in (out / "wheels.txt").read_text().splitlines()}
    assert wheels >= {"lm-eval", "datasets", "dill"}
    assert not wheels & {"pandas", "pyarrow", "torch", "transformers", "numpy", "dcformer"}
