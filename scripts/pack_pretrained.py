"""
Make the bundled models of the package from a finished sweep.

    python scripts/pack_pretrained.py SWEEP --seed 0   # output of `dcformer train head-tasks-seeds`

Decide on the seed before looking at scores. The scores in the cards are those of
`dcformer eval --suite head_tasks,head_tasks_authors`, run on what was packed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dcformer


NAMES = ("dcformer-tiny", "transformer-tiny")


def pack_model(source: str | Path, destination: str | Path) -> None:
    """
    Save a model of the head tasks as the package bundles it: bfloat16, and generation that ends with the line.

    Args:
        source: Folder `final` of a run, with model and tokenizer.
        destination: Folder to write; a model card in it stays.
    """
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="output of the sweep")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs to pack (default: 0)")
    arguments = parser.parse_args()
    for name in NAMES:
        pack_model(arguments.sweep / name / f"seed-{arguments.seed}" / "final", dcformer.pretrained_path(name))


if __name__ == "__main__":
    main()
