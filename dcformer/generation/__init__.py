"""Text from a model: streamed, in batches, or for a file of prompts."""

from .prompts import read_prompts, write_answers
from .text_generator import Generated, TextGenerator


__all__ = ["Generated", "TextGenerator", "read_prompts", "write_answers"]
