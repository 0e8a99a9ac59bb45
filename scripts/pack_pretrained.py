"""
Make the bundled models of the package from finished runs of the study in research/language_modelling.

    python scripts/pack_pretrained.py runs/language-modelling/code --seed 0

Decide on the seed before looking at losses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dcformer  # noqa: F401  registers the models


FOLDER = Path(__file__).parents[1] / "dcformer" / "pretrained"
VARIANTS = {"dcformer-tiny": "dcformer_middle", "transformer-tiny": "transformer_middle"}


def pack_model(source: str | Path, destination: str | Path) -> None:
    """
    Save a model as the package bundles it: bfloat16, greedy, and padded with the token that ends a document.

    Args:
        source: Folder `final` of a run, with model and tokenizer.
        destination: Folder to write; a model card in it stays.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.eos_token
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.generation_config.do_sample = False  # a pipeline would draw tokens otherwise
    model.generation_config._from_model_config = False
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="output of the sweep")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs to pack (default: 0)")
    arguments = parser.parse_args()
    for name, variant in VARIANTS.items():
        pack_model(arguments.sweep / variant / f"seed-{arguments.seed}" / "final", FOLDER / name)


if __name__ == "__main__":
    main()
