"""A comparison of composition, LoRA, and both in a pretrained model, with equally many trained parameters.

python -m research.upcycling.run SOURCE --data runs/language-modelling/data/code      # hours of a CPU

Every method has the same text and three learning rates, of which the one with the lowest validation loss (seed 100) is
used for the other seeds. Finished runs are kept in the file of results and not repeated; processes that are given
different methods may share that file.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

from dcformer.conversion import upcycle
from dcformer.experiments import seed_interval

from ..language_modelling.breakdown import token_losses
from ..sweeps import recorded


LENGTH = 512
RATES = (3e-4, 1e-3, 3e-3)
SWEEP_SEED = 100
RANKS = {"composition": 2, "LoRA": None, "both": 1}  # of the composition


def blocks(file: Path, tokenizer: Any, count: int) -> torch.Tensor:
    """The first tokens of documents, one after another: (count, LENGTH)."""
    ids: list[int] = []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            ids += [*tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            if len(ids) >= count * LENGTH:
                return torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)
    raise ValueError(f"{str(file)!r} has {len(ids)} tokens, but {count * LENGTH} are needed; give more text.")


def composition_size(model: Any) -> int:
    return sum(weight.numel() for name, weight in model.named_parameters() if ".compose." in name)


def make_model(source: str, method: str, budget: int, seed: int) -> Any:
    """A model whose trained parameters are those of the method, as near to `budget` as LoRA's rank allows."""
    with tempfile.TemporaryDirectory() as folder:
        upcycle(source, Path(folder, "model"), rank=RANKS[method], seed=seed, verify=False)
        model = AutoModelForCausalLM.from_pretrained(Path(folder, "model"), dtype=torch.float32)
    if method == "composition":
        model.freeze_all_but_composition()
        return model
    linear = [module for name, module in model.named_modules() if name.endswith((".qkv_proj", ".o_proj"))]
    per_rank = sum(module.in_features + module.out_features for module in linear)
    own = composition_size(model) if method == "both" else 0
    rank = max(round((budget - own) / per_rank), 1)
    kept = {"modules_to_save": ["compose"]} if method == "both" else {}
    return get_peft_model(
        model,
        LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["qkv_proj", "o_proj"], task_type="CAUSAL_LM", **kept),
    )


def block_losses(model: Any, ids: torch.Tensor) -> list[float]:
    """Mean loss of each block, in nats per token."""
    model.eval()
    return [token_losses(model, block).mean().item() for block in ids.split(1)]


def train(model: Any, ids: torch.Tensor, rate: float, seed: int) -> None:
    """Train for one pass over the blocks, in an order by the seed, by Transformers' trainer."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"learning_rate": rate, "warmup_steps": 0.05, "lr_scheduler_type": "cosine", "weight_decay": 0.0}
        options |= {"num_train_epochs": 1, "per_device_train_batch_size": 4, "report_to": "none", "save_strategy": "no"}
        # Autocast: parameters, their gradients and the optimizer's moments stay in float32.
        options |= {"bf16": True, "use_cpu": not torch.cuda.is_available()}
        arguments = TrainingArguments(folder, seed=seed, data_seed=seed, logging_steps=10, **options)
        rows = [{"input_ids": block, "labels": block} for block in ids]
        Trainer(model=model, args=arguments, train_dataset=rows).train()


def best_rates(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Method -> the rate with the lowest validation loss."""
    sweep = [run for run in runs if run["seed"] == SWEEP_SEED]
    return {run["method"]: run["rate"] for run in sorted(sweep, key=lambda run: -sum(run["validation"]))}


def table(results: list[dict[str, Any]], before: list[float]) -> pd.DataFrame:
    """Perplexity on the test text, and the difference in loss from the untouched model and from LoRA by block."""
    rows, rates = [], best_rates(results)
    final = [run for run in results if run["seed"] != SWEEP_SEED and run["rate"] == rates.get(run["method"])]
    means = {method: pd.DataFrame([run["test"] for run in final if run["method"] == method]).mean() for method in RANKS}
    for method in RANKS:
        runs = [run for run in final if run["method"] == method]
        if not runs:
            continue
        row = {"method": method, "parameters": f"{runs[0]['parameters']:,}", "rate": f"{runs[0]['rate']:g}"}
        row["test perplexity by seed"] = ", ".join(f"{math.exp(pd.Series(run['test']).mean()):.3f}" for run in runs)
        for name, other in (("the untouched model", pd.Series(before)), ("LoRA", means["LoRA"])):
            mean, half = seed_interval(list(means[method] - other))
            of_blocks = f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"
            row[f"loss over {name}"] = "" if method == name else of_blocks
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder or name on the Hub of a pretrained model, or a .gguf file")
    parser.add_argument("--data", type=Path, required=True, help="folder with train, validation and test.jsonl")
    parser.add_argument("--tokens", type=int, default=102_400, help="tokens that every run is trained on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--methods", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        upcycle(arguments.source, Path(folder, "model"))
        untouched = AutoModelForCausalLM.from_pretrained(Path(folder, "model"), dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(Path(folder, "model"))
    budget = composition_size(untouched)
    counts = {"validation": 32, "test": 64}
    texts = {name: blocks(arguments.data / f"{name}.jsonl", tokenizer, count) for name, count in counts.items()}
    training = blocks(arguments.data / "train.jsonl", tokenizer, arguments.tokens // LENGTH)
    found = recorded(arguments.results)
    if "before" not in found:
        found["before"] = block_losses(untouched, texts["test"])
        arguments.results.write_text(json.dumps(found, indent=1) + "\n")

    def run(method: str, rate: float, seed: int, split: str) -> None:
        known = {"method": method, "rate": rate, "seed": seed, "tokens": arguments.tokens}
        if any(known.items() <= earlier.items() for earlier in recorded(arguments.results)["runs"]):
            return
        set_seed(seed)
        model = make_model(arguments.source, method, budget, seed)
        train(model, training, rate, seed)
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        result = known | {"parameters": trained, split: block_losses(model, texts[split])}
        found = recorded(arguments.results)
        found["runs"].append(result)
        arguments.results.write_text(json.dumps(found, indent=1) + "\n")

    def comparable() -> list[dict[str, Any]]:
        return [run for run in recorded(arguments.results)["runs"] if run["tokens"] == arguments.tokens]

    for method in arguments.methods:
        for rate in RATES:
            run(method, rate, SWEEP_SEED, "validation")
        best = best_rates(comparable())[method]
        for seed in arguments.seeds:
            run(method, best, seed, "test")
    before = recorded(arguments.results)["before"]
    print(f"Untouched: perplexity {math.exp(sum(before) / len(before)):.3f}")
    print(table(comparable(), before).to_markdown(index=False))


if __name__ == "__main__":
    main()
