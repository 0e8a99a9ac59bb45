"""Perplexities as lm-eval measures them, against plain loops over windows and against hand-made data."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from dcformer.eval import perplexity
from dcformer.eval.origin import documents_hash, origin_of


lm_eval = pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")

TASKS = Path(perplexity.__file__).parent / "tasks"
WINDOW = 64
END_OF_TEXT = 0


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=50304, max_position_embeddings=WINDOW)


@pytest.fixture
def documents(tmp_path):
    """Five short documents, one of them empty, one with a line separator inside."""
    texts = ["One line.\n", "", "Größe, 日本語,\u2028and a  gap", "The end\n\n", "a" * 40]
    (tmp_path / "pile").mkdir()
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (tmp_path / "pile" / "val.jsonl").write_text(lines, encoding="utf-8")
    return str(tmp_path), texts


def evaluate(model, tokenizer, task, metadata):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    metadata = {"tokenizer": tokenizer, "max_length": WINDOW, "window": WINDOW, **metadata}
    return lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=WINDOW, backend="causal"),
        tasks=[task],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata),
        bootstrap_iters=0,  # standard errors are not looked at here
    )


def loss(model, given: list[int], targets: list[int]) -> float:
    """Sum of the negative log-probabilities of targets, each after all that is given before it."""
    with torch.no_grad():
        logits = model(torch.tensor([given])).logits[0, -len(targets) :]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum").item()


def test_streams_have_the_tokens_of_their_documents(documents, tokenizer):
    folder, texts = documents
    (stream,) = perplexity.load_pile(folder, tokenizer=tokenizer, max_length=2048)["test"]
    ids = tokenizer(stream["text"])["input_ids"]
    assert ids == [token for text in texts for token in [*tokenizer(text)["input_ids"], END_OF_TEXT]]
    assert stream["n_tokens"] == len(ids)
    assert stream["n_documents"] == 5
    assert stream["n_bytes"] == sum(len(text.encode()) for text in texts)
    assert stream["window"] == 2048


def test_streams_of_the_sample_have_about_64_windows(data_dir, tokenizer):
    streams = perplexity.load_pile(data_dir, tokenizer=tokenizer, max_length=WINDOW, window=WINDOW)["test"]
    assert sum(streams["n_documents"]) == 20
    assert all(n_tokens >= 64 * WINDOW for n_tokens in streams["n_tokens"][:-1])
    assert sum(streams["n_tokens"]) == 354_678 + 20  # and one end-of-text token for each document


def test_subset_is_drawn_by_seed_in_order(documents, tokenizer):
    folder, texts = documents

    def drawn(**options):
        (stream,) = perplexity.load_pile(folder, tokenizer=tokenizer, max_length=2048, **options)["test"]
        return stream["text"].split("<|endoftext|>")[:-1]

    assert drawn(subset=9) == texts
    assert drawn(subset=3) == drawn(subset=3, seed=1234)
    samples = [drawn(subset=3, seed=seed) for seed in range(5)]
    assert len({tuple(sample) for sample in samples}) > 1
    for sample in samples:
        assert len(sample) == 3
        assert sorted(sample, key=texts.index) == sample
    with pytest.raises(ValueError, match="subset must be at least 1, got 0"):
        drawn(subset=0)


@pytest.mark.parametrize("task", ["dcformer_pile_ppl", "dcformer_wikitext2_ppl"])
def test_perplexity_equals_a_plain_loop_over_windows(task, model, tokenizer, data_dir):
    output = evaluate(model, tokenizer, task, {"data_dir": data_dir, "subset": 2, "windows": 5})
    (sample,) = output["samples"][task]
    ids = tokenizer(sample["doc"]["text"])["input_ids"]
    assert len(ids) == 5 * WINDOW
    total = 0.0
    for start in range(0, len(ids), WINDOW):
        targets = ids[start : start + WINDOW]
        given = [END_OF_TEXT if start == 0 else ids[start - 1], *targets[:-1]]
        total += loss(model, given, targets)
    found = output["results"][task]
    n_bytes = len(sample["doc"]["text"].replace("<|endoftext|>", "").encode())
    assert math.log(found["token_perplexity,none"]) == pytest.approx(total / len(ids), abs=1e-4)
    assert found["bits_per_byte,none"] == pytest.approx(total / n_bytes / math.log(2), abs=1e-4)


def test_flan_equals_plain_forward_passes(model, tokenizer, tmp_path, caplog):
    examples = [
        {"inputs": "Is water wet? Answer:\n", "targets": "Yes, it is."},
        {"inputs": "Count.  " + "one two three four " * 30, "targets": " five"},
        {"inputs": "No answer", "targets": "  "},
        {"inputs": "Too long", "targets": "word " * (WINDOW + 1)},
    ]
    (tmp_path / "flan").mkdir()
    (tmp_path / "flan" / "part.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    output = evaluate(model, tokenizer, "dcformer_flan_ppl", {"data_dir": str(tmp_path)})
    total = count = 0
    for example in examples[:2]:
        context = tokenizer(example["inputs"].strip())["input_ids"]
        targets = tokenizer(" " + example["targets"].strip())["input_ids"]
        total += loss(model, (context + targets)[-WINDOW - 1 : -1], targets)
        count += len(targets)
    found = output["results"]["dcformer_flan_ppl"]
    assert math.log(found["token_perplexity,none"]) == pytest.approx(total / count, abs=1e-4)
    assert [sample["doc"]["n_tokens"] for sample in output["samples"]["dcformer_flan_ppl"]] == [5, 1]
    assert "leaves out 2 of 4 examples" in caplog.text


def test_windows_are_of_documents_spread_over_all_and_the_last_is_cut(tmp_path, tokenizer):
    texts = [f"{place} " + "word " * 40 for place in range(16)]
    (tmp_path / "pile").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "pile" / "val.jsonl").write_text(lines)

    def taken(windows):
        (stream,) = perplexity.load_pile(
            str(tmp_path), tokenizer=tokenizer, max_length=WINDOW, window=WINDOW, windows=windows
        )["test"]
        return stream, [text.split()[0] for text in stream["text"].split("<|endoftext|>")[:-1]]

    stream, places = taken(2)
    assert stream["n_tokens"] == 2 * WINDOW and stream["n_unscored"] == 1
    assert places == ["0", "4", "8"] and stream["n_artificial_ends"] == 1
    whole, places = taken(100)
    assert places == [str(place) for place in range(16)]
    assert whole["n_artificial_ends"] == whole["n_unscored"] == 0 and whole == taken(None)[0]


def test_a_compressed_file_of_several_parts_is_read(documents, tokenizer, tmp_path):
    import pyarrow

    folder, _ = documents
    options = {"tokenizer": tokenizer, "max_length": 2048}
    plain = perplexity.load_pile(folder, **options)["test"]
    file = tmp_path / "pile" / "val.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    parts = [b"".join(lines[:2]), b"".join(lines[2:])]
    compressed = b"".join(pyarrow.compress(part, codec="zstd", asbytes=True) for part in parts)
    (tmp_path / "pile" / "val.jsonl.zst").write_bytes(compressed)
    file.unlink()
    found = perplexity.load_pile(folder, **options)["test"]
    assert list(found) == list(plain) and origin_of(found) == origin_of(plain)


def test_the_pile_must_be_its_own_file_or_have_the_hash_that_is_given(documents, tokenizer, monkeypatch, tmp_path):
    import huggingface_hub

    folder, texts = documents
    # As the Hub's cache has it.
    revision = "0123456789abcdef" * 2 + "01234567"
    file = tmp_path / "snapshots" / revision / "val.jsonl"
    file.parent.mkdir(parents=True)
    shutil.copy(Path(folder) / "pile" / "val.jsonl", file)
    asked = []

    def download(path, name, **options):
        asked.append((path, name, options["revision"]))
        return str(file)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    options = {"tokenizer": tokenizer, "max_length": 2048}
    with pytest.raises(
        ValueError, match=r"mit-han-lab/pile-val-backup/val\.jsonl\.zst has the sha256 .* no hash is known"
    ):
        perplexity.load_pile(**options)
    assert [path for path, *_ in asked] == [
        "mit-han-lab/pile-val-backup",
        "EleutherAI/pile_val_test",
        "monology/pile-test-val",
    ]
    given = documents_hash(((text,) for text in texts), is_ordered=True)
    found = origin_of(perplexity.load_pile(data_hash=given, **options)["test"])
    assert found == {"source": "EleutherAI/pile_val_test", "hash": given, "as_known": None, "revision": revision}


def test_articles_of_wikitext(fixtures):
    text = (fixtures / "benchdata" / "wikitext2" / "wikitext2_test.txt").read_text(encoding="utf-8")
    articles = perplexity.wikitext_articles(text)
    assert len(articles) == 60
    assert "".join(articles) == text
    assert all(article.lstrip(" \n").startswith("= ") for article in articles)


def test_the_copy_on_the_hub_gives_the_text_of_the_file(fixtures, tokenizer, data_dir, monkeypatch):
    import datasets

    text = (fixtures / "benchdata" / "wikitext2" / "wikitext2_test.txt").read_text(encoding="utf-8")
    lines = ["" if line == " \n" else line for line in text.splitlines(keepends=True)]
    rows = datasets.Dataset.from_dict({"text": lines})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"test": rows})
    options = {"tokenizer": tokenizer, "max_length": 2048, "windows": 2}
    assert perplexity.load_wikitext2(**options)["test"][0] == perplexity.load_wikitext2(data_dir, **options)["test"][0]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_length": 1024}, "scores windows of 2048 tokens, but the model would take 1024"),
        ({"max_length": 8192}, "give `max_length=2048` to the model"),
        ({}, "must know the length of the model's windows"),
        ({"pretrained": True}, "but the model would take 512"),
        ({"max_length": 2048, "window": 512}, "scores windows of 512 tokens"),
    ],
    ids=["shorter", "longer", "unknown", "of the configuration", "other window"],
)
@pytest.mark.parametrize("load", [perplexity.load_pile, perplexity.load_wikitext2, perplexity.load_flan])
def test_another_window_is_refused(load, settings, message, tokenizer, tokenizer_folder, data_dir):
    if settings.get("pretrained"):
        settings = {"pretrained": tokenizer_folder}
    with pytest.raises(ValueError, match=message):
        load(data_dir, tokenizer=tokenizer, **settings)


def test_the_window_may_follow_the_model(documents, tokenizer_folder):
    folder, _ = documents
    (stream,) = perplexity.load_pile(folder, pretrained=tokenizer_folder, window=512)["test"]
    assert stream["window"] == 512


def test_missing_and_damaged_files(tokenizer, tmp_path):
    options = {"tokenizer": tokenizer, "max_length": 2048}
    with pytest.raises(FileNotFoundError, match=r"There is no file .*pile_sample/test\.jsonl'; put documents"):
        perplexity.load_pile(str(tmp_path), **options)
    with pytest.raises(FileNotFoundError, match=r"There is no file .*wikitext2_test\.txt'; put the test split there"):
        perplexity.load_wikitext2(str(tmp_path), **options)
    with pytest.raises(FileNotFoundError, match=r"There is no file .*flan/\*\.jsonl'; put examples of Flan there"):
        perplexity.load_flan(str(tmp_path), **options)
    (tmp_path / "pile").mkdir()
    (tmp_path / "pile" / "a.jsonl").write_text('{"text": "a"}\nno JSON\n')
    with pytest.raises(ValueError, match=r'Line 2 of .*a\.jsonl\' is not a JSON object with "text"'):
        perplexity.load_pile(str(tmp_path), **options)
    (tmp_path / "pile" / "a.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="is empty; it must hold one JSON object per line"):
        perplexity.load_pile(str(tmp_path), **options)
    with pytest.raises(ValueError, match="windows must be at least 1, got 0"):
        (tmp_path / "pile" / "a.jsonl").write_text('{"text": "a"}\n')
        perplexity.load_pile(str(tmp_path), windows=0, **options)


@pytest.mark.parametrize("load", [perplexity.load_pile, perplexity.load_wikitext2, perplexity.load_flan])
def test_without_network_the_error_names_the_folder(load, tokenizer, monkeypatch):
    import datasets
    import huggingface_hub

    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(FileNotFoundError, match=r"cannot be downloaded.*; check the network, or give a --data-dir"):
        load(tokenizer=tokenizer, max_length=2048)
