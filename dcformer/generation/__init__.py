"""Text from a model: streamed, in batches, or for a file of prompts."""

from .generator import Generated, TextGenerator
from .prompts import read_prompts, write_answers


__all__ = ["Generated", "TextGenerator", "read_prompts", "write_answers"]
