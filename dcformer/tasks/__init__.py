"""Head-composition tasks: a generator, a tokenizer for them and the scores of a model on them."""

from .composition import TASK_KINDS, composition_documents, iterate_documents
from .tokenizer import build_tokenizer


__all__ = ["TASK_KINDS", "build_tokenizer", "composition_documents", "iterate_documents"]
