"""Table 5: the head tasks as lm-eval runs them, against the authors' texts and against plain forward passes."""

import json
import math

import pytest
import torch
from tiny_models import tiny_model

from dcformer.eval.table4_tasks import tasks_folder
from dcformer.head_tasks import authors_texts


lm_eval = pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")

TASKS = tasks_folder()
FIRST_CONTEXT = (
    "\n< Elizabeth has jeans. Steven has strawberries. Steven has a fox. >. Steven does not have a kind of clothing"
    "\n< Karen has a taxi. Karen has a pig. Paul has a cocktail. >. Karen does not have a kind of drink"
    "\n< Ruth has a sweater. Steven has a taxi. Ruth has a handgun. >. Ruth does not have a kind of"
)
SECOND_LINE = " vehicle\n< Ruth has cake. Ruth has a pineapple. Mark has a mosquito. >. Ruth does not have a kind of"


@pytest.fixture(scope="module")
def all_shots(data_dir, tokenizer):
    return {
        shots: authors_texts.load_authors_texts(shots, data_dir=data_dir, tokenizer=tokenizer)["test"]
        for shots in authors_texts.SHOTS
    }


def test_counts(all_shots):
    lengths = [n_tokens for rows in all_shots.values() for n_tokens in rows["n_tokens"]]
    assert [len(rows) for rows in all_shots.values()] == [888] * 6
    assert len(lengths) == 5328
    assert sum(length > 1 for length in lengths) == 622
    assert max(lengths) == 5
    assert len(set(all_shots[2]["task_id"])) == 74


def test_the_first_text(all_shots):
    assert all_shots[2][0] == {
        "task_id": "task0",
        "context": FIRST_CONTEXT,
        "continuations": [" vehicle"],
        "n_tokens": 1,
    }
    assert all_shots[3][0]["context"] == FIRST_CONTEXT + SECOND_LINE
    assert all_shots[3][0]["continuations"] == [" insect"]


def test_brackets_can_be_kept(data_dir, tokenizer):
    row = authors_texts.load_authors_texts(3, data_dir=data_dir, tokenizer=tokenizer, brackets=True)["test"][0]
    assert row["context"] == FIRST_CONTEXT + " [" + SECOND_LINE.replace(" vehicle", " vehicle ]") + " ["
    assert row["continuations"] == [" insect"]


def test_every_example_line_is_in_the_context(all_shots):
    for shots, rows in all_shots.items():
        assert all(context.count("\n") == shots + 1 for context in rows["context"])


@pytest.mark.parametrize("brackets", [False, True], ids=["without brackets", "with brackets"])
def test_context_and_answer_have_the_tokens_of_the_whole_text(brackets, fixtures, tokenizer):
    lines = (fixtures / "benchdata" / "synthetic" / "synthetic_dataset.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        text = json.loads(line)["texts"]
        whole = tokenizer(text if brackets else text.replace(" [", "").replace(" ]", ""))["input_ids"]
        for context, answer in authors_texts.bracketed_answers(text, brackets).values():
            joined = tokenizer(context)["input_ids"] + tokenizer(answer)["input_ids"]
            assert joined == whole[: len(joined)]


def few_texts(fixtures, folder):
    """Texts with answers of one and of several tokens, in a folder of their own."""
    lines = (fixtures / "benchdata" / "synthetic" / "synthetic_dataset.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "synthetic").mkdir()
    (folder / "synthetic" / "synthetic_dataset.jsonl").write_text("\n".join([*lines[288:292], *lines[500:502]]) + "\n")
    return str(folder)


def test_scores_equal_plain_forward_passes(fixtures, tokenizer, tokenizer_folder, tmp_path):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    data_dir = few_texts(fixtures, tmp_path)
    rows = {
        shots: authors_texts.load_authors_texts(shots, data_dir=data_dir, tokenizer=tokenizer)["test"]
        for shots in authors_texts.SHOTS
    }
    model = tiny_model(vocab_size=50304, max_position_embeddings=512, seed=6)
    # Only first tokens of answers get logits, so that a random model is sometimes right; with this seed it is.
    firsts = sorted({tokenizer(row["continuations"][0])["input_ids"][0] for part in rows.values() for row in part})
    with torch.no_grad():
        kept = model.lm_head.weight[firsts].clone()
        model.lm_head.weight.zero_()
        model.lm_head.weight[firsts] = kept

    expected = {}
    for shots, part in rows.items():
        scores = {"acc": [], "acc_first_token": [], "loss": [], "first_loss": [], "n_tokens": []}
        for row in part:
            context = tokenizer(row["context"])["input_ids"]
            answer = tokenizer(row["continuations"][0])["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1]
            losses = torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="none")
            right = logits.argmax(-1) == torch.tensor(answer)
            scores["acc"].append(right.all().item())
            scores["acc_first_token"].append(right[0].item())
            scores["loss"].append(losses.sum().item())
            scores["first_loss"].append(losses[0].item())
            scores["n_tokens"].append(len(answer))
        expected[shots] = scores

    metadata = {"tokenizer": tokenizer_folder, "data_dir": data_dir}
    output = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, backend="causal"),
        tasks=["dcformer_head_tasks_authors"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata),
        num_fewshot=5,
        bootstrap_iters=0,  # standard errors are not looked at here
    )
    for shots, scores in expected.items():
        found = output["results"][f"dcformer_head_tasks_authors_k{shots}"]
        n = len(scores["acc"])
        assert found["acc,none"] == sum(scores["acc"]) / n
        assert found["acc_first_token,none"] == sum(scores["acc_first_token"]) / n
        assert math.log(found["token_perplexity,none"]) == pytest.approx(
            sum(scores["loss"]) / sum(scores["n_tokens"]), abs=1e-4
        )
        assert math.log(found["answer_perplexity,none"]) == pytest.approx(sum(scores["loss"]) / n, abs=1e-4)
        assert math.log(found["first_token_perplexity,none"]) == pytest.approx(sum(scores["first_loss"]) / n, abs=1e-4)
    # Else the two accuracies would not be told apart.
    both = [sum(sum(scores[name]) for scores in expected.values()) for name in ("acc", "acc_first_token")]
    assert 0 < both[0] < both[1] < 36
    # `num_fewshot=5` adds nothing: the lines before an answer are its examples.
    assert output["samples"]["dcformer_head_tasks_authors_k2"][0]["arguments"][0][0] == rows[2][0]["context"]
    mean = sum(sum(scores["acc"]) / len(scores["acc"]) for scores in expected.values()) / 6
    group = output["groups"]["dcformer_head_tasks_authors"]
    assert group["acc,none"] == pytest.approx(mean)
    assert not any("perplexity" in name for name in group)


def test_errors(data_dir, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="shots must be one of 2, 3, 4, 5, 6, 7, got 8"):
        authors_texts.load_authors_texts(8, data_dir=data_dir, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="give `pretrained` or `tokenizer`"):
        authors_texts.load_authors_texts(2, data_dir=data_dir)
    with pytest.raises(ValueError, match="There is no tokenizer in 'nowhere/at/all'"):
        authors_texts.load_authors_texts(2, data_dir=data_dir, tokenizer="nowhere/at/all")
    with pytest.raises(FileNotFoundError, match=r"synthetic_dataset\.jsonl'; put data/synthetic_dataset\.jsonl of"):
        authors_texts.load_authors_texts(2, data_dir=str(tmp_path), tokenizer=tokenizer)
    file = tmp_path / "synthetic" / "synthetic_dataset.jsonl"
    file.parent.mkdir()
    file.write_text('{"task_id": "task0", "texts": "\\na\\nb [ c ]\\n"}\n')
    with pytest.raises(ValueError, match="Text 1 of the authors' texts must have one answer in brackets"):
        authors_texts.load_authors_texts(2, data_dir=str(tmp_path), tokenizer=tokenizer)
    file.write_text('{"task_id": "task0"}\n')
    with pytest.raises(ValueError, match=r'Line 1 of .* is not a JSON object with "task_id" and "texts"'):
        authors_texts.load_authors_texts(2, data_dir=str(tmp_path), tokenizer=tokenizer)


def test_a_first_token_that_is_half_a_character_is_refused(fixtures, tokenizer, tmp_path):
    text = "".join(f"\n{line} is [ 🦤 ]" if line > 2 else f"\n{line} is x" for line in range(1, 9)) + "\n"
    (tmp_path / "synthetic").mkdir()
    (tmp_path / "synthetic" / "synthetic_dataset.jsonl").write_text(json.dumps({"task_id": "t", "texts": text}))
    with pytest.raises(ValueError, match="The first token of the answer ' 🦤' is"):
        authors_texts.load_authors_texts(2, data_dir=str(tmp_path), tokenizer=tokenizer)


def test_without_network_the_error_names_the_folder(tokenizer, monkeypatch):
    import datasets

    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(FileNotFoundError, match=r"check the network, or give a --data-dir that holds synthetic"):
        authors_texts.load_authors_texts(2, tokenizer=tokenizer)
