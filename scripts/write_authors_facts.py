"""
Writes the digests of what the authors' texts say, which the generator keeps out of training documents.

    python scripts/write_authors_facts.py FOLDER       # with synthetic/synthetic_dataset.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dcformer.head_tasks.facts import AUTHORS_FACTS, facts_digest, parse_line


if __name__ == "__main__":
    rows = Path(sys.argv[1], "synthetic", "synthetic_dataset.jsonl").read_text(encoding="utf-8").splitlines()
    texts = (json.loads(row)["texts"].replace(" [ ", " ").replace(" ]", "") for row in rows)
    digests = {facts_digest(parse_line(line)[0]) for text in texts for line in text.strip().split("\n")}
    AUTHORS_FACTS.write_bytes(b"".join(sorted(digests)))
