"""Write the files of model_cards/ anew: `python scripts/write_model_cards.py`."""

from __future__ import annotations

from pathlib import Path

from dcformer.cards import published_cards


FOLDER = Path(__file__).resolve().parents[1] / "model_cards"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in published_cards().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
