"""Converting checkpoints between the authors' JAX and torch formats and Transformers folders."""

from .convert import convert_hub, convert_maxtext, convert_pax
from .convert import convert_hub as convert_torch
from .hash_check import HashCheck, HashProblem, verify_hashes
from .inspection import Inspection, inspect_checkpoint
from .report import ConversionReport
from .to_maxtext import MaxTextReport, convert_to_maxtext
from .verification import Comparison, compare


__all__ = [
    "Comparison",
    "ConversionReport",
    "HashCheck",
    "HashProblem",
    "Inspection",
    "MaxTextReport",
    "compare",
    "convert_hub",
    "convert_maxtext",
    "convert_pax",
    "convert_to_maxtext",
    "convert_torch",
    "inspect_checkpoint",
    "verify_hashes",
]
