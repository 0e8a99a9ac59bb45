"""The study of language modelling: its text, its classes of tokens, the cost of equal loss, and its report."""

import json
import math
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
from research.language_modelling import gpu, inside, report, speed
from research.language_modelling.breakdown import LENGTH, classified_parts
from research.language_modelling.pack import pack
from research.language_modelling.prepare import prepare, train_tokenizer
from research.language_modelling.run import SWEEPS
from research.upcycling import run as upcycling


TEXT = "int total = first + second;\nreturn total + 42; /* second */\n"


def rows_of(file):
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", [*SWEEPS, "gpu"])
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
    tokenizer = train_tokenizer([TEXT] * 3, 2048)
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


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A packed text of 200 files, the folder of the files, and their texts."""
    folder = tmp_path_factory.mktemp("packed")
    texts = [f"int number_{number};\n" + TEXT * (4 + number % 7) for number in range(200)]
    (folder / "text").mkdir()
    for number, text in enumerate(texts):
        (folder / "text" / f"{number}.c").write_text(text)
    return pack(folder / "text", "code", 30_000, folder), folder / "text", texts


def tiny_gpu_recipe(folder, *changes):
    """The recipe `gpu` with models of a few channels and four steps of two rows."""
    model = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
    }
    training = {"tokens": 256, "batch_tokens": 64, "per_device_batch_size": 1, "compile": "false"}
    training |= {"logging_steps": 2, "evaluation_steps": 3, "precision": "fp32"}
    settings = [f"model.{key}={value}" for key, value in model.items()] + ["model.sliding_window=8"]
    settings += [f"training.{key}={value}" for key, value in training.items()]
    settings += ["data.sequence_length=32", f"data.source={folder / 'train.xz'}"]
    return load_recipe(str(Path(gpu.__file__).parent / "recipes" / "gpu.yaml"), [*settings, *changes])


def test_packed_tokens_are_the_texts_and_damage_is_seen(packed, capsys):
    folder, source, texts = packed
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    found, sizes = [], {}
    for split in ("train", "validation", "test"):
        tokens = gpu.read_rows(folder / f"{split}.xz", 1, torch.device("cpu")).flatten()
        found += tokenizer.decode(tokens).split("<|endoftext|>")[:-1]
        sizes[split] = tokens.shape[0]
    assert set(found) < set(texts) and len(found) == len(set(found)) and sum(map(len, found)) > 30_000
    assert gpu.check(folder)["tokens"] == sizes
    assert pack(source, "code", 30_000, folder.parent) == folder and "is there" in capsys.readouterr().out
    with pytest.raises(ValueError, match="packed with 30,000 characters, not 40,000"):
        pack(source, "code", 40_000, folder.parent)
    with pytest.raises(ValueError, match="less than a row"):
        gpu.read_rows(folder / "test.xz", 10**6, torch.device("cpu"))
    shutil.copytree(folder, folder.parent / "damaged")
    (folder.parent / "damaged" / "test.xz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"test\.xz.* has 0 bytes"):
        gpu.check(folder.parent / "damaged")


def test_the_gpu_recipe_is_trained_and_recorded_as_the_report_reads_it(packed, tmp_path, monkeypatch, capsys):
    folder = packed[0]
    only = "sweep.only=[transformer_11m,dcformer_11m,transformer_11m-half]"
    more = "sweep.variants.transformer_11m-half.training.tokens=128"
    results = gpu.run(tiny_gpu_recipe(folder, only, more), tmp_path / "code-0.json", 5, [1e-3, 1e-2])
    assert json.loads((tmp_path / "code-0.json").read_text()) == results
    runs = {run["variant"]: run for run in results["runs"]}
    assert [run["training"]["steps"] for run in runs.values()] == [4, 4, 2]
    for run in runs.values():
        steps, rates = run["training"]["steps"], results["rates"].get(run["variant"])
        assert [step for step, _ in run["losses"]] == ([2, 3, 4] if steps == 4 else [2])
        assert run["curve"]["step"] == ([3, 4] if steps == 4 else [2])
        assert rates is None or run["training"]["learning_rate"] == float(min(rates, key=rates.get))
        tokens, total = (sum(part) for part in zip(*run["test"]["positions"].values()))
        assert run["test"]["tokens"] == tokens and run["test"]["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert set(results["rates"]) == {"transformer_11m", "dcformer_11m"}
    with pytest.raises(FileExistsError, match="give another"):
        gpu.run(tiny_gpu_recipe(folder), tmp_path / "code-0.json", 5)
    monkeypatch.setattr(sys, "argv", ["report", "--results", str(tmp_path)])
    report.main()
    printed = capsys.readouterr().out
    assert "11m" in printed[printed.index("## Pairs") :] and "## Cost of equal loss by more tokens" in printed
    assert (tmp_path / "curves.png").is_file()


def test_steps_of_several_passes_are_those_of_a_plain_loop(packed):
    recipe, device = tiny_gpu_recipe(packed[0], "seed=3"), torch.device("cpu")
    rows = {name: gpu.read_rows(packed[0] / f"{name}.xz", 32, device) for name in ("train", "validation")}
    learner = gpu.Learner(recipe, 8192, device)
    for _ in range(2):  # the second run begins with the same weights
        *_, outcome = learner.train(recipe, 4, 0.01, rows)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(learner.model.config)
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    order, losses = torch.randperm(len(rows["train"]), generator=torch.Generator().manual_seed(3 * 1_000_003)), []
    for step in range(4):
        for group in optimizer.param_groups:  # a cosine down to a tenth; 5 % of four steps is no warm-up
            group["lr"] = 0.01 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 4)) / 2)
        batch = rows["train"][order[2 * step : 2 * step + 2]].long()
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert outcome["losses"][0] == [2, pytest.approx(sum(losses[:2]) / 2, rel=1e-5)]
    assert outcome["losses"][-1] == [4, pytest.approx(losses[3], rel=1e-4)]


def test_a_gpu_run_that_is_short_of_time_takes_fewer_steps_or_stops_early(packed, tmp_path, monkeypatch):
    recipe = tiny_gpu_recipe(packed[0], "training.tokens=640000")  # 10,000 steps

    def choose_rate(learner, recipe, rates, rows):
        learner.step_seconds = 1.0
        return {}

    monkeypatch.setattr(gpu.Learner, "choose_rate", choose_rate)
    monkeypatch.setattr(gpu, "_LEAST_SHARE", 0.0)
    monkeypatch.setattr(gpu, "_RESERVED", 10.0)
    results = gpu.run(recipe, tmp_path / "code-0.json", 5)
    first, second = (run["training"]["planned_steps"] for run in results["runs"])
    assert first == second <= math.ceil(0.97 * 290 / 20_000 * 10_000)  # 290 of 20,000 seconds
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"Of 0 minutes .* s are left for runs of .* s; give more --minutes"):
        gpu.run(tiny_gpu_recipe(packed[0]), tmp_path / "code-1.json", 0, [1e-3])
    learner, rows = gpu.Learner(recipe, 8192, torch.device("cpu")), {}
    for name in ("train", "validation"):
        rows[name] = gpu.read_rows(packed[0] / f"{name}.xz", 32, torch.device("cpu"))
    *_, outcome = learner.train(recipe, 10_000, 1e-3, rows, deadline=0.0)
    assert outcome["steps"] == 2 and math.isfinite(outcome["evaluation_loss"])


def test_a_loss_that_is_not_finite_ends_a_gpu_run(packed):
    recipe = tiny_gpu_recipe(packed[0])
    rows = {"train": gpu.read_rows(packed[0] / "train.xz", 32, torch.device("cpu"))}
    learner = gpu.Learner(recipe, 8192, torch.device("cpu"))
    with pytest.raises(FloatingPointError, match="at a rate of inf; lower it"):
        list(learner.train(recipe, 4, math.inf, rows | {"validation": rows["train"]}))


@pytest.mark.parametrize("ratio", [0.9, 1.4])
def test_more_tokens_of_the_baseline_for_equal_loss_follow_a_law_of_a_known_ratio(ratio):
    rows = [
        {"model": "transformer", "size": size, "tokens": tokens, "flops": flops, "loss": 30 * flops**-0.08}
        for size, tokens, flops in (("11m", 200, 2e16), ("11m-half", 100, 1e16))
    ]
    rows.append({"model": "dcformer", "size": "11m", "tokens": 200, "flops": 2.1e16})
    rows[-1]["loss"] = 30 * (ratio * 2.1e16) ** -0.08
    runs = pd.DataFrame([row | {"text": "code", "seed": 0} for row in rows])
    assert list(report.length_table(runs)["FLOPs"]) == [f"{ratio:.3f}"]
    assert len(report.length_table(runs[runs["size"] == "11m"])) == 0


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


def test_variants_are_compared_with_intervals_that_hold_together():
    losses = {
        name: {seed: loss + noise * seed for seed in range(3)}
        for name, loss, noise in (("none", 2.0, 0.01), ("rank_2", 1.9, 0.012), ("pre", 1.95, 0.009))
    }
    table = report.rows_table(losses, {"none": 11.68}, report.ROWS_OF_TABLE_9, "none")
    assert list(table["variant"]) == [report.ROWS_OF_TABLE_9[name] for name in ("rank_2", "pre", "none")]
    assert table["over no composition"][0].startswith("-0.098 (-0.10") and table["over no composition"][2] == ""


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
