"""An OpenAI-compatible API for a model, by the server of vLLM or of Transformers."""

from .engines import choose_engine, serve


__all__ = ["choose_engine", "serve"]
