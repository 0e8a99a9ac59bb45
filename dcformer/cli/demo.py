"""`dcformer demo`: a page in the browser, with text from a model and pictures of its attention."""

from __future__ import annotations

from typing import Annotated

import typer

from ..common.quiet import quiet_libraries
from .options import Debug, Device, Dtype, Model, Revision, Tokenizer
from .printing import status
from .running import running_command


def demo_command(
    model: Model = "dcformer-tiny",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port.", show_default="the first free one from 7860")] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    dtype: Dtype = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """Open a page to try a model on: streamed text, and attention before and after composition."""
    with running_command(debug, interrupted="Stopped."), quiet_libraries():
        from ..demo import serve_page

        options = {"tokenizer": tokenizer, "revision": revision, "dtype": dtype, "device": device}
        with status("Loading"):
            server = serve_page(model, host=host, port=port, opens_browser=browser, **options)
        typer.echo(f"{model} is at {server.address}; Ctrl-C ends it.")
        server.wait()
