"""Requests that Transformers' server would compute beyond a model's context, or end with an empty error: status 400."""

import functools
from collections.abc import Callable
from typing import Any


def refuse_what_does_not_fit() -> None:
    """Make Transformers' server end texts with the context, and answer requests that cannot be computed by a 400."""
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError
    from transformers.cli.serving import server
    from transformers.cli.serving.utils import GenerateManager

    build = server.build_server

    def build_server(*handlers: Any, **options: Any) -> Any:
        app = build(*handlers, **options)
        for kind in (ValueError, TypeError, TemplateError):  # which Transformers' server would answer by an empty 500
            app.add_exception_handler(kind, refuse)
        return app

    def refuse(request: Any, error: Exception) -> JSONResponse:
        return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, status_code=400)

    server.build_server = build_server
    for name in ("generate_streaming", "generate_non_streaming"):
        setattr(GenerateManager, name, _within_context(getattr(GenerateManager, name)))


def _within_context(generate: Callable[..., Any]) -> Callable[..., Any]:
    """A generating method of the server that stays within the model's context; ValueError if that leaves no token."""

    @functools.wraps(generate)
    def limited(self: Any, model: Any, processor: Any, inputs: Any, config: Any, *rest: Any, **options: Any) -> Any:
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        length = inputs["input_ids"].shape[-1]
        if length == 0:
            raise ValueError("The prompt holds no token to continue.")
        if context is not None and length >= context:
            raise ValueError(f"The prompt has {length:,} tokens, and the context of {context:,} holds the answer too.")
        asked = context if config.max_new_tokens is None and not config.max_length else config.max_new_tokens
        if context is not None and asked is not None:
            config.max_new_tokens = min(asked, context - length)
        return generate(self, model, processor, inputs, config, *rest, **options)

    return limited
