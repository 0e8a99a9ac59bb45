"""Train the sweeps of the study, or resume them, and record their results.

python -m research.head_tasks.run                   # all three, a night of two CPU cores
python -m research.head_tasks.run rates claim       # some
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..sweeps import record


FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
SWEEPS = ("rates", "claim", "ablation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", default=SWEEPS, help=f"some of {', '.join(SWEEPS)} (default: all)")
    for name in parser.parse_args().sweeps:
        record(name, FOLDER / "recipes" / f"{name}.yaml", RESULTS / f"{name}.json")


if __name__ == "__main__":
    main()
