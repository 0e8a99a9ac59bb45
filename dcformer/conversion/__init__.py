"""Converting checkpoints between the authors' JAX and torch formats and Transformers folders.

detect.py          which format a checkpoint has; formats/ has one file for each
mapping.py         which array becomes which parameter, as tables for both directions
pieces.py          the engine's words (leaf, box, piece, span, ...) and its arithmetic; leaves.py, plan.py
convert.py         to Transformers folders; shard_writer.py writes the weights, destination.py builds the folder
to_maxtext.py      the way back
inspection.py      what a checkpoint is; comparison.py, whether two are the same model
verification.py    checks after writing; hash_check.py, against the hashes in a report
stores.py          local folders and buckets
"""

from .comparison import Comparison, compare
from .convert import convert_maxtext, convert_pax, convert_torch
from .hash_check import HashCheck, HashProblem, verify_hashes
from .inspection import Inspection, inspect_checkpoint
from .report import ConversionReport
from .to_maxtext import MaxTextReport, convert_to_maxtext


__all__ = [
    "Comparison",
    "ConversionReport",
    "HashCheck",
    "HashProblem",
    "Inspection",
    "MaxTextReport",
    "compare",
    "convert_maxtext",
    "convert_pax",
    "convert_to_maxtext",
    "convert_torch",
    "inspect_checkpoint",
    "verify_hashes",
]
