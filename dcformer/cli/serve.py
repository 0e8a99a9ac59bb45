"""`dcformer serve`: OpenAI's API for a model, from the server of vLLM or of Transformers."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ..common.quiet import quiet_libraries
from .options import Debug, Dtype, Model, Revision, Tokenizer
from .running import running_command


# Options that this command lacks are the engine's.
PASS_OPTIONS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve_command(
    context: typer.Context,
    model: Model,
    engine: Annotated[
        Literal["auto", "vllm", "transformers"], typer.Option(help="Server; auto is vllm where it is installed.")
    ] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    dtype: Dtype = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """
    Serve a model by OpenAI's API.

    The engine takes all other options after MODEL as they are.
    """
    if model.startswith("-"):
        raise typer.BadParameter(f"Give MODEL before options of the engine, got {model!r}.")
    with running_command(debug, interrupted="Stopped."):
        from ..loading import find_model
        from ..serving import choose_engine, serve

        trusts = "--trust-remote-code" in context.args
        with quiet_libraries():
            found = find_model(model, tokenizer=tokenizer, revision=revision, trust_remote_code=trusts)
        chosen = choose_engine(engine)
        typer.echo(f"Starting {chosen}: {model} will be at http://{host}:{port}/v1 (OpenAI's API); Ctrl-C ends it.")
        serve(found, chosen, host=host, port=port, dtype=dtype, tokenizer=tokenizer, arguments=context.args)
