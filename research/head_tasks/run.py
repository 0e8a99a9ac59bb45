"""Train the sweeps of the study, or resume them, and record their results.

python -m research.head_tasks.run                   # all three, a night of two CPU cores
python -m research.head_tasks.run rates claim       # some
"""

from pathlib import Path

from ..sweeps import main


if __name__ == "__main__":
    main(__doc__, Path(__file__).parent, ("rates", "claim", "ablation"))
