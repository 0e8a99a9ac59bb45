"""The synthetic tasks of section 4.3, which ask heads to work together: a generator, a tokenizer, scores, a suite."""

from .generator import generate_documents, iterate_documents
from .kinds import TASK_KINDS
from .practice import iterate_practice
from .tokenizer import build_tokenizer


__all__ = ["TASK_KINDS", "build_tokenizer", "generate_documents", "iterate_documents", "iterate_practice"]
