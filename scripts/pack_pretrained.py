"""
Make the bundled models of the package from a finished sweep: weights, results of all seeds, scores in the cards.

    python scripts/pack_pretrained.py SWEEP --seed 0 --data-dir DIR   # output of `dcformer train head-tasks-seeds`

The scores are those of the packed weights, so that `dcformer eval --suite head_tasks` gives the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dcformer
from dcformer.common.files import write_atomically
from dcformer.experiments.results import read_results
from dcformer.head_tasks.card_scores import BEGIN, score_section, with_scores
from dcformer.head_tasks.references import reference_summaries
from dcformer.head_tasks.scoring import summarise
from dcformer.head_tasks.suite import BATCH_SIZE, document_sets, score_sets


SEEDS, CARD = "seeds.json", "README.md"


def pack_model(source: str | Path, destination: str | Path) -> None:
    """
    Save a model of the head tasks as the package bundles it: bfloat16, and generation that ends with the line.

    Args:
        source: Folder `final` of a run, with model and tokenizer.
        destination: Folder to write; a model card in it stays.

    Raises:
        FileNotFoundError: if `source` is no folder.
    """
    if not Path(source).is_dir():
        raise FileNotFoundError(f"There is no folder {str(source)!r}; name the folder `final` of a finished run.")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source)
    # An answer ends its line, and what would follow is another example of the same kind.
    line_feed = tokenizer.convert_tokens_to_ids("\n")
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, line_feed]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.do_sample = False  # a pipeline would draw answers otherwise
    model.generation_config._from_model_config = False
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def pack_sweep(
    sweep: str | Path, seed: int, folder: str | Path, data_dir: str | None = None, documents: int | None = None
) -> dict[str, Any]:
    """
    Pack a model of every variant of a sweep, evaluate what was packed, and write `seeds.json` and cards with scores.

    Args:
        sweep: Output of the sweep, with its `results.json`.
        seed: Of the runs whose weights are packed; decide on it before looking at scores.
        folder: That of the bundled models, with a folder for every variant, whose card marks where scores stand.
        data_dir (*optional*): Folder with the authors' texts; their repository if not given.
        documents (*optional*): Held-out documents to score, by default those of the suite.

    Returns:
        What was written to `seeds.json`.

    Raises:
        FileNotFoundError: if the sweep, a run or the authors' texts are not there.
        ValueError: if no card marks where its scores stand.
    """
    sweep, folder = Path(sweep), Path(folder)
    results = read_results(sweep / "results.json")
    names = list(results["recipe"]["sweep"]["variants"])
    sets = document_sets(data_dir) if documents is None else document_sets(data_dir, documents)
    cards = {name: (folder / name / CARD).read_text(encoding="utf-8") for name in names}
    # The card of a baseline may leave scores to that of the model beside it.
    cards = {name: card for name, card in cards.items() if BEGIN in card} or cards
    for card in cards.values():
        with_scores(card, "")  # fails before anything is written
    evaluation = {}
    for name in names:
        pack_model(sweep / name / f"seed-{seed}" / "final", folder / name)
        # Float32 arithmetic on the rounded weights, as the suite does by default.
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
        scores = score_sets(model, AutoTokenizer.from_pretrained(folder / name), sets, BATCH_SIZE, None)
        evaluation[name] = {which: summarise(sets[which], scores[which]) for which in sets}
    packed = {**results, "packed": {"seed": seed, "evaluation": evaluation}}
    write_atomically(folder / SEEDS, json.dumps(packed, indent=1) + "\n")
    section = score_section(packed, {name: reference_summaries(rows) for name, rows in sets.items()})
    for name, card in cards.items():
        write_atomically(folder / name / CARD, with_scores(card, section))
    return packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", help="output of the sweep, with results.json")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs whose weights are packed (default: 0)")
    parser.add_argument(
        "--data-dir", help="folder with synthetic/synthetic_dataset.jsonl; else the authors' repository"
    )
    arguments = parser.parse_args()
    pack_sweep(arguments.sweep, arguments.seed, Path(dcformer.pretrained.__file__).parent, arguments.data_dir)


if __name__ == "__main__":
    main()
