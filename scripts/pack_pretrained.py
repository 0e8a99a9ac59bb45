"""Put a trained model among the bundled models of the package: `python scripts/pack_pretrained.py RUN/final NAME`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dcformer


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="folder `final` of a run of dcformer-tiny or transformer-tiny")
    parser.add_argument("name", help="name of the bundled model")
    arguments = parser.parse_args()
    pack_model(arguments.source, Path(dcformer.pretrained.__file__).parent / arguments.name)


if __name__ == "__main__":
    main()
