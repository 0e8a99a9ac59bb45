"""Text from a model for people: streamed, as a conversation, or for a file of prompts; generate() does the work."""

from .generator import TextGenerator
from .models import LoadedModel, load_model


__all__ = ["LoadedModel", "TextGenerator", "load_model"]
