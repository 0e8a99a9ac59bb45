"""The synthetic tasks of section 4.3, which ask heads to work together: documents, questions and a tokenizer."""

from .generator import generate_documents, held_out_questions, iterate_documents
from .kinds import TASK_KINDS
from .practice import FORMS, iterate_practice
from .references import BLIND_CHOICE, LONE_NAME, ODD_ONE_OUT, REFERENCES, reference_answers
from .tokenizer import build_tokenizer


__all__ = ["BLIND_CHOICE", "FORMS", "LONE_NAME", "ODD_ONE_OUT", "REFERENCES", "TASK_KINDS"]
__all__ += ["build_tokenizer", "generate_documents", "held_out_questions", "iterate_documents", "iterate_practice"]
__all__ += ["reference_answers"]
