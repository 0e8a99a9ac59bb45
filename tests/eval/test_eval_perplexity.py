"""Perplexities as lm-eval measures them, against plain loops over windows and against hand-made data."""

import json
import math

import pytest
import torch
from tiny_models import tiny_model
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast


pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")

from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM

import dcformer
from dcformer.eval import DCFormerLM, perplexity, task_manager


WINDOW = 64
END_OF_TEXT = 0


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=50304, max_position_embeddings=WINDOW)


@pytest.fixture(scope="module")
def reader(tokenizer):
    """The tokenizer, but it appends an end of text, which changes no count and no score."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    appending = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", add_eos_token=True)
    assert appending("heads")["input_ids"] == [*tokenizer("heads")["input_ids"], END_OF_TEXT]
    return appending


def write_lines(folder, name, rows):
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def evaluate(model, tokenizer, task, metadata, kind=DCFormerLM, **options):
    metadata = {"tokenizer": tokenizer, "max_length": WINDOW, "window": WINDOW, **metadata}
    scorer = kind(model, tokenizer=tokenizer, batch_size=4, max_length=WINDOW, **options)
    # Standard errors are not looked at here; `simple_evaluate` would also describe the machine, which takes seconds.
    return evaluator.evaluate(scorer, task_manager(metadata).load([task]), bootstrap_iters=0)


def pile(folder, tokenizer, **options):
    return perplexity.load_pile(str(folder), tokenizer=tokenizer, **{"max_length": 2048, **options})["test"]


def test_streams_have_the_tokens_of_their_documents_also_of_compressed_files(tokenizer, tmp_path):
    import pyarrow

    texts = ["One line.\n", "", "Größe, 日本語,\u2028and a  gap", "The end\n\n", "a" * 40]
    file = write_lines(tmp_path, "pile/val.jsonl", [{"text": text} for text in texts])
    (stream,) = plain = pile(tmp_path, tokenizer)
    ids = tokenizer(stream["text"])["input_ids"]
    assert ids == [token for text in texts for token in [*tokenizer(text)["input_ids"], END_OF_TEXT]]
    assert (stream["n_tokens"], stream["n_documents"]) == (len(ids), 5)
    assert stream["n_bytes"] == sum(len(text.encode()) for text in texts)
    drawn = [pile(tmp_path, tokenizer, subset=3, seed=seed)[0]["text"].split("<|endoftext|>")[:-1] for seed in range(4)]
    assert all(len(sample) == 3 and sorted(sample, key=texts.index) == sample for sample in drawn)
    assert len(set(map(tuple, drawn))) > 1
    lines = file.read_bytes().splitlines(keepends=True)
    parts = [pyarrow.compress(b"".join(part), codec="zstd", asbytes=True) for part in (lines[:2], lines[2:])]
    (tmp_path / "pile" / "val.jsonl.zst").write_bytes(b"".join(parts))
    file.unlink()
    assert list(pile(tmp_path, tokenizer)) == list(plain)


def test_streams_have_about_64_windows(tokenizer, tmp_path):
    write_lines(tmp_path, "pile/val.jsonl", [{"text": "word " * 200} for _ in range(20)])
    streams = pile(tmp_path, tokenizer, max_length=8, window=8)
    assert sum(streams["n_documents"]) == 20 and streams["n_documents"][0] == 3
    assert all(64 * 8 <= n_tokens < 64 * 8 + 202 for n_tokens in streams["n_tokens"][:-1])


def test_perplexity_equals_a_plain_loop_over_windows(model, tokenizer, reader, data_dir):
    task = "dcformer_wikitext2_ppl"
    output = evaluate(model, reader, task, {"data_dir": data_dir, "subset": 2, "windows": 5})
    (sample,) = output["samples"][task]
    ids = tokenizer(sample["doc"]["text"])["input_ids"]
    assert len(ids) == 5 * WINDOW
    total = 0.0
    for start in range(0, len(ids), WINDOW):
        targets = ids[start : start + WINDOW]
        given = [END_OF_TEXT if start == 0 else ids[start - 1], *targets[:-1]]
        with torch.no_grad():
            logits = model(torch.tensor([given])).logits[0]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum").item()
    results = output["results"][task]
    n_bytes = len(sample["doc"]["text"].replace("<|endoftext|>", "").encode())
    assert math.log(results["token_perplexity,none"]) == pytest.approx(total / len(ids), abs=1e-4)
    assert results["bits_per_byte,none"] == pytest.approx(total / n_bytes / math.log(2), abs=1e-4)


@pytest.mark.parametrize("adds_bos", [None, True, False])
def test_packed_texts_and_examples_begin_as_with_the_harness(adds_bos, tmp_path):
    folder = dcformer.pretrained_path("dcformer-tiny")
    write_lines(tmp_path, "pile/val.jsonl", [{"text": f"int value_{number};\n" * 15} for number in range(3)])
    pairs = [("", "static int one"), ("int", "x;"), ("int many " * 30, "= 3;")]
    write_lines(tmp_path, "flan/part.jsonl", [dict(zip(("inputs", "targets"), pair)) for pair in pairs])
    metadata = {"data_dir": str(tmp_path), "add_bos_token": adds_bos}
    for task in ("dcformer_pile_ppl", "dcformer_flan_ppl"):
        options = {"dtype": "float32", "device": "cpu", "add_bos_token": adds_bos}
        # The harness adds it where it reads the tokenizer itself.
        reader = AutoTokenizer.from_pretrained(folder, **({} if adds_bos is None else {"add_bos_token": adds_bos}))
        ours = evaluate(folder, folder, task, metadata, **options)
        theirs = evaluate(folder, reader, task, metadata, HFLM, backend="causal", **options)
        documents = [sample["doc"]["n_tokens"] for sample in ours["samples"][task]]
        if task == "dcformer_pile_ppl":
            assert documents == [len(reader(ours["samples"][task][0]["doc"]["text"])["input_ids"])]
        first, second = (output["results"][task]["token_perplexity,none"] for output in (ours, theirs))
        assert math.log(first) == pytest.approx(math.log(second), rel=1e-6)


def test_flan_is_scored_on_the_tokens_of_targets_that_fit(reader, tmp_path, caplog):
    pairs = [("Is water wet? Answer:\n", "Yes, it is."), ("Count.  " + "one two " * 30, " five")]
    pairs += [("No answer", "  "), ("Too long", "word " * (WINDOW + 1))]
    write_lines(tmp_path, "flan/part.jsonl", [dict(zip(("inputs", "targets"), pair)) for pair in pairs])
    rows = perplexity.load_flan(str(tmp_path), tokenizer=reader, max_length=WINDOW, window=WINDOW)["test"]
    assert rows["context"][:] == ["Is water wet? Answer:", pairs[1][0].strip()]
    assert rows["continuation"][:] == [" Yes, it is.", " five"] and rows["n_tokens"][:] == [5, 1]
    assert perplexity.score_target(rows[0], [(-3.5, False)]) == {"token_perplexity": (-3.5, 5)}
    assert "leaves out 2 of 4 examples" in caplog.text


def test_windows_are_of_documents_spread_over_all_and_the_last_is_cut(tmp_path, tokenizer):
    write_lines(tmp_path, "pile/val.jsonl", [{"text": f"{number} " + "word " * 40} for number in range(16)])

    def taken(windows):
        (stream,) = pile(tmp_path, tokenizer, max_length=WINDOW, window=WINDOW, windows=windows)
        return stream, [text.split()[0] for text in stream["text"].split("<|endoftext|>")[:-1]]

    stream, numbers = taken(2)
    assert stream["n_tokens"] == 2 * WINDOW and stream["n_unscored"] == 1
    assert numbers == ["0", "4", "8"] and stream["n_artificial_ends"] == 1
    whole, numbers = taken(100)
    assert numbers == [str(number) for number in range(16)]
    assert whole["n_artificial_ends"] == whole["n_unscored"] == 0 and whole == taken(None)[0]


def test_wikitext_articles_are_the_text_again(fixtures):
    text = (fixtures / "benchdata" / "wikitext2" / "wikitext2_test.txt").read_text(encoding="utf-8")
    articles = perplexity.wikitext_articles(text)
    assert "".join(articles) == text and len(articles) == 60
    assert articles[0].startswith(" \n = Robert <unk> = \n")


def test_other_windows_and_unknown_tokenizers_are_refused(tokenizer, tokenizer_folder, data_dir):
    with pytest.raises(ValueError, match="512"):
        perplexity.load_pile(data_dir, pretrained=tokenizer_folder)
    with pytest.raises(ValueError, match="None"):
        perplexity.load_wikitext2(data_dir, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="tokenizer"):
        perplexity.load_flan(data_dir, max_length=2048)
