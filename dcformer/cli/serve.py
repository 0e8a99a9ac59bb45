"""`dcformer serve`, an OpenAI-compatible API for a model, and `dcformer demo`, a web demo."""

import os
import time
from typing import Annotated, Literal

import typer
from typer import Option

from .options import Debug, Device, Dtype, Host, Model, Revision, Tokenizer
from .running import running_quietly, status


# Other options than those of `dcformer serve` are passed to the engine.
PASS_OPTIONS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve_command(
    context: typer.Context,
    model: Model,
    engine: Annotated[
        Literal["auto", "vllm", "transformers"], Option(help="Server; auto: vllm if it is installed.")
    ] = "auto",
    host: Host = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    dtype: Dtype = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """
    Serve a model with an OpenAI-compatible API.

    All other options after MODEL are passed to the engine.
    """
    if model.startswith("-"):
        raise typer.BadParameter(f"Give MODEL before options of the engine, got {model!r}.")
    with running_quietly(debug, interrupted="Stopped."):
        from ..loading import find_folder, find_model
        from ..serving import choose_engine, serve

        trusts = "--trust-remote-code" in context.args
        tokenizer = tokenizer and find_folder(tokenizer)
        unread = find_model(model, tokenizer=tokenizer, revision=revision, trust_remote_code=trusts)
        chosen = choose_engine(engine)
        print(f"Starting {chosen}: {model} will be at http://{host}:{port}/v1 (OpenAI's API); Ctrl-C ends it.")
        serve(unread, chosen, host=host, port=port, dtype=dtype, tokenizer=tokenizer, arguments=context.args)


def demo_command(
    model: Model = "dcformer-tiny",
    host: Host = "127.0.0.1",
    port: Annotated[
        int | None, Option(min=1, max=65535, help="Port.", show_default="the first free one from 7860")
    ] = None,
    browser: Annotated[bool, Option(help="Open the demo in a browser.")] = True,
    dtype: Dtype = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """Open a web demo of a model: streamed text, and its attention."""
    with running_quietly(debug, interrupted="Stopped."):
        from ..demo import serve_page

        # gradio asks the page whether it is there, which a proxy cannot know.
        others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        os.environ["no_proxy"] = ",".join(filter(None, (others, host, "localhost")))
        options = {"tokenizer": tokenizer, "revision": revision, "dtype": dtype, "device": device}
        with status("Loading"):
            page = serve_page(model, host=host, port=port, opens_browser=browser, **options)
        print(f"{model} is at {page.local_url}; Ctrl-C ends it.", flush=True)
        try:
            while True:
                time.sleep(3600)
        finally:
            page.close(verbose=False)
