"""The study of language modelling: its text, its classes of tokens, the cost of equal loss, and its report."""

import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny_recipes import tiny_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dcformer import pretrained_path
from dcformer.analysis import ablated, record
from dcformer.bench.measure import Timing
from dcformer.experiments import plan_sweep
from dcformer.training import load_recipe
from research import sweeps
from research.language_modelling import inside, report, speed
from research.language_modelling.breakdown import LENGTH, classified_parts
from research.language_modelling.prepare import prepare, train_tokenizer
from research.language_modelling.run import SWEEPS
from research.upcycling import run as upcycling


TEXT = "int total = first + second;\nreturn total + 42; /* second */\n"


def rows_of(file):
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", SWEEPS)
def test_every_run_of_the_study_is_planned(name):
    sweep, runs = plan_sweep(load_recipe(str(Path(report.__file__).parent / "recipes" / f"{name}.yaml")))
    assert len(runs) == len(sweep.variants) * len(sweep.seeds)


def test_text_is_divided_by_its_hash_and_nothing_is_there_twice(tmp_path):
    (tmp_path / "text" / "below").mkdir(parents=True)
    for number in range(200):
        (tmp_path / "text" / f"{number}.c").write_text(f"int number_{number};\n" + TEXT * 5)
    shutil.copy(tmp_path / "text" / "7.c", tmp_path / "text" / "below" / "copy.c")
    (tmp_path / "text" / "short.c").write_text(TEXT)
    (tmp_path / "text" / "other.log").write_text(TEXT * 5)
    found = []
    for folder in ("first", "again"):
        prepare("code", tmp_path / "text", tmp_path / folder)
        found.append(
            {name: rows_of(tmp_path / folder / "code" / f"{name}.jsonl") for name in ("train", "validation", "test")}
        )
    assert found[0] == found[1]
    texts = [text for split in found[0].values() for text in split]
    assert len(texts) == len(set(texts)) == 200 and len(found[0]["train"]) > 150
    with pytest.raises(ValueError, match="too few documents"):
        prepare("prose", tmp_path / "text", tmp_path / "nothing")
    with pytest.raises(NotADirectoryError, match="no folder"):
        prepare("prose", tmp_path / "nowhere", tmp_path / "nothing")


def test_tokens_are_classed_by_their_word_and_whether_the_part_has_had_it():
    tokenizer = train_tokenizer([TEXT] * 3)
    text = TEXT + "x" * LENGTH + " total"
    parts = list(classified_parts(text, tokenizer, frozenset({"int", "return"})))
    assert [token for part in parts for token, _ in part] == tokenizer(text)["input_ids"]
    words = [(tokenizer.decode([token]).strip(), kind) for token, kind in parts[0]]
    kinds = {}
    for word, kind in words:
        kinds.setdefault(word, []).append(kind)
    assert kinds["total"] == ["new word", "repeated word"] and kinds["second"] == ["new word", "repeated word"]
    assert kinds["int"] == kinds["return"] == ["frequent word"] and kinds["4"] == ["number"]
    assert kinds[";"] == ["punctuation"] * 2


@pytest.mark.parametrize("ratio", [0.9, 1.8])
def test_the_cost_of_equal_loss_is_found_from_laws_of_a_known_ratio(ratio):
    rows = []
    for size, flops in (("small", 1e12), ("middle", 4e12), ("large", 2e13)):
        for model, factor, more in (("transformer", 1.0, 1.0), ("dcformer", ratio, 1.1)):
            cost = flops * more
            row = {"size": size, "model": model, "flops": cost, "loss": 30 * (factor * cost) ** -0.08}
            rows += [row | {"seed": seed} for seed in range(3)]
    found = report.compute_ratios(pd.DataFrame(rows), "flops")
    assert list(found.index) == ["small", "middle", "large", "all"]
    for column in found:
        assert list(found[column]) == pytest.approx([ratio] * 4)
    noisy = pd.DataFrame(rows)
    noisy["loss"] *= 1 + 0.005 * noisy["seed"]
    spread = report.compute_ratios(noisy, "flops").loc["all"]
    assert spread["low"] < spread["high"] and spread["low"] <= ratio + 1e-6


def test_the_report_of_the_recorded_results_is_written(tmp_path, monkeypatch, capsys):
    for file in report.RESULTS.glob("*.json"):
        shutil.copy(file, tmp_path)
    runs = [{"variant": "pre", "seed": seed, "test": {"loss": 1.9 + 0.01 * seed}} for seed in range(3)]
    runs.append({"variant": "post", "seed": 0, "test": {"loss": 1.8}})
    (tmp_path / "ablation.json").write_text(json.dumps({"runs": runs}))
    monkeypatch.setattr(sys, "argv", ["report", "--results", str(tmp_path)])
    report.main()
    printed = capsys.readouterr().out
    assert "## Pairs" in printed and (tmp_path / "curves.png").is_file()
    rows = [line.split(" | ") for line in printed[printed.index("## Ablation") :].splitlines()[4:9]]
    names = ["post", "rank_2", "pre", "none"]
    assert [row[0][2:].strip() for row in rows[:4]] == [report.ROWS_OF_TABLE_9[name] for name in names]
    assert not rows[0][3].strip() and "to" in rows[1][3] and "to" in rows[2][3]  # one seed has no interval


def test_seconds_of_the_pairs_are_those_of_steps_measured_in_turns(tmp_path, monkeypatch):
    class OneStep:
        def __init__(self, device, seconds):
            pass

        def __call__(self, steps):
            steps["dcformer_small"]()
            return {name: Timing(0.5, 0.25, 1) for name in steps}

    monkeypatch.setattr(speed, "Timer", OneStep)
    monkeypatch.setattr(sys, "argv", ["speed", "--results", str(tmp_path)])
    speed.main()
    shutil.copy(report.RESULTS / "code.json", tmp_path)
    for _, run in report.read_pairs(tmp_path).iterrows():
        assert run["seconds"] == pytest.approx(0.25 * run["tokens"] / 2048)
        assert run["curve"]["seconds"][-1] == pytest.approx(run["seconds"], rel=0.01)


def test_runs_are_added_to_those_recorded_unless_their_settings_are_others(tmp_path, monkeypatch):
    def run_sweep(recipe):
        runs = [
            {"variant": "small", "seed": seed, "rate": recipe.training.learning_rate} for seed in recipe.sweep["seeds"]
        ]
        for seed in recipe.sweep["seeds"]:
            log = tmp_path / "small" / f"seed-{seed}" / "log.jsonl"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text('{"step": 1, "flops": 2.0, "seconds": 3.0, "eval_loss": 4.0}\n')
        return {"recipe": recipe.to_mapping(), "runs": runs, "failures": []}

    monkeypatch.setattr(sweeps, "run_sweep", run_sweep)
    (tmp_path / "recipe.yaml").write_text("model: {}\nsweep: {variants: {small: {}, large: {}}}\n")
    text = tmp_path / "text.txt"
    text.write_text("some text")
    settings = [f"output={tmp_path}", f"data.source={text}", "tokenizer=tokenizer", "data.sequence_length=8"]
    settings += ["training.batch_tokens=64", "training.max_steps=1", "training.learning_rate=0.1"]
    file = tmp_path / "results.json"
    for seeds in ([0, 1], [1, 7]):
        sweeps.record(load_recipe(str(tmp_path / "recipe.yaml"), [*settings, f"sweep.seeds={seeds}"]), file)
    found = json.loads(file.read_text())["runs"]
    assert [run["seed"] for run in found] == [0, 1, 7] and found[2]["curve"]["loss"] == [4.0]
    (tmp_path / "recipe.yaml").write_text("model: {}\nsweep: {variants: {small: {}}}\n")  # large has no runs
    sweeps.record(load_recipe(str(tmp_path / "recipe.yaml"), [*settings, "sweep.seeds=[7]"]), file)
    compiled = [*settings, "training.compile_mode=reduce-overhead", "sweep.seeds=[7]"]
    sweeps.record(load_recipe(str(tmp_path / "recipe.yaml"), compiled), file)
    with pytest.raises(ValueError, match="other settings"):
        other = [*settings[:-1], "training.learning_rate=0.2", "sweep.seeds=[8]"]
        sweeps.record(load_recipe(str(tmp_path / "recipe.yaml"), other), file)
    text.write_text("another text")
    with pytest.raises(ValueError, match=r"another text than .*text\.txt"):
        sweeps.record(load_recipe(str(tmp_path / "recipe.yaml"), [*settings, "sweep.seeds=[8]"]), file)
    assert json.loads(file.read_text())["runs"] == found


def mark(recipe, model_folder):
    """A measure that other processes find by its name."""
    return [model_folder.parent.parent.name, recipe.data.sequence_length, (model_folder / "config.json").is_file()]


def test_runs_that_another_process_finished_are_recorded(tmp_path, monkeypatch):
    training = {"max_steps": 2, "evaluation_steps": 2}
    variants = {"plain": {"model": {"compose_pre": False, "compose_post": False}}, "composed": None}
    recipe = tiny_recipe(tmp_path, training=training, sweep={"seeds": [0], "variants": variants})
    sweeps.finish_runs([recipe], 1, mark)
    monkeypatch.setattr("dcformer.experiments.runner.train", None)
    results = sweeps.record(recipe, tmp_path / "results.json", mark)
    assert [run["test"] for run in results["runs"]] == [["plain", 16, True], ["composed", 16, True]]


def test_variants_are_compared_with_intervals_that_hold_together(tmp_path):
    losses = {
        name: {seed: loss + noise * seed for seed in range(3)}
        for name, loss, noise in (("none", 2.0, 0.01), ("rank_2", 1.9, 0.012), ("pre", 1.95, 0.009))
    }
    table = report.rows_table(losses, {"none": 11.68}, report.ROWS_OF_TABLE_9, "none")
    assert list(table["variant"]) == [report.ROWS_OF_TABLE_9[name] for name in ("rank_2", "pre", "none")]
    assert table["over no composition"][0].startswith("-0.098 (-0.10") and table["over no composition"][2] == ""
    report.plot_rows(losses, report.ROWS_OF_TABLE_9, "none", tmp_path / "rows.png")
    assert (tmp_path / "rows.png").is_file()


def test_attention_on_copied_words_and_losses_without_a_branch_or_a_head(tmp_path):
    folder = pretrained_path("dcformer-tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    lines = [f"first_{number} = second_{number} + first_{number};\n" for number in range(150)]
    parts = inside.whole_parts(["".join(lines), TEXT * 40], tokenizer, 4)
    attention = inside.attention_on_copied(model, parts).set_index(["map", "layer", "head"]).attention
    sums, count = {}, 0
    for part in parts:
        recording = record(model, [token for token, _ in part], list(inside.MAPS))
        for place, (token, kind) in enumerate(part[1:]):
            earlier = [key for key in range(place + 1) if part[key][0] == token]
            if kind != "repeated word" or not earlier:
                continue
            count += 1
            for name in inside.MAPS:
                for layer, value in recording[name].items():
                    for head in range(value.shape[1]):
                        found = value[0, head, place, earlier].sum().item()
                        sums[name, layer, head] = sums.get((name, layer, head), 0.0) + found
    assert count > 20
    for place, total in sums.items():
        assert attention[place] == pytest.approx(total / count, abs=1e-4)

    losses = inside.rises(model, parts)
    inside.draw(attention.reset_index(), losses, tmp_path / "inside.png")
    found = losses.set_index(["layer", "without", "class"])
    before = inside.losses_of(model, parts)
    with ablated(model, 1, "query_gate"):
        difference = inside.losses_of(model, parts) - before
    mean = difference[inside.of_kind(parts, "new word")].mean().item()
    assert found.rise[1, "query_gate", "new word"] == pytest.approx(mean, abs=1e-4)
    assert found.rise[3, "head 1", "repeated word"] != found.rise[3, "head 2", "repeated word"]


def test_the_methods_of_the_upcycling_study_train_as_many_parameters_from_the_same_function(tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
    source = LlamaForCausalLM(LlamaConfig(vocab_size=97, **shape)).eval()
    source.save_pretrained(tmp_path / "source")
    ids = torch.arange(97)[None, : upcycling.LENGTH]
    sizes, budget = {}, 0
    for method in upcycling.RANKS:
        model = upcycling.make_model(str(tmp_path / "source"), method, budget, seed=0)
        assert upcycling.block_losses(model, ids) == pytest.approx(upcycling.block_losses(source, ids), abs=1e-5)
        sizes[method] = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        budget = budget or sizes[method]
    assert all(size == pytest.approx(budget, rel=0.1) for size in sizes.values())

    runs = [
        {"method": method, "rate": rate, "seed": seed, "parameters": 9}
        | {"validation" if seed == upcycling.SWEEP_SEED else "test": [loss, loss + 0.2, loss + 0.1 * seed]}
        for method, level in (("composition", 1.0), ("LoRA", 1.1))
        for rate, loss in ((1e-3, level), (3e-3, level + 0.5))  # the second is not the best, and not in the table
        for seed in (0, 1, upcycling.SWEEP_SEED)
    ]
    table = upcycling.table(runs, [1.5, 1.7, 1.55]).set_index("method")
    assert table.loc["composition", "loss over LoRA"].startswith("-0.1000 (-0.1000")
    assert table.loc["LoRA", "loss over the untouched model"].startswith("-0.4000")
