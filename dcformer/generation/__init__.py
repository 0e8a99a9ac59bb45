"""Text from a model: streamed, in batches, or for a file of prompts."""

from .generator import Generated, TextGenerator
from .prompts import answer_line, read_prompts, write_answers
from .with_vllm import vllm_answers


__all__ = ["Generated", "TextGenerator", "answer_line", "read_prompts", "vllm_answers", "write_answers"]
