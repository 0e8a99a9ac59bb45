"""
Write the digests of the facts in the authors' texts, which the generator keeps out of training documents.

    python scripts/write_authors_facts.py FOLDER       # with synthetic/synthetic_dataset.jsonl
"""

import sys

from dcformer.eval import authors_texts
from dcformer.head_tasks.facts import AUTHORS_FACTS, facts_digest, parse_line


if __name__ == "__main__":
    texts = (text.replace(" [ ", " ").replace(" ]", "") for _, text in authors_texts(sys.argv[1]))
    digests = {facts_digest(parse_line(line)[0]) for text in texts for line in text.strip().split("\n")}
    AUTHORS_FACTS.write_bytes(b"".join(sorted(digests)))
