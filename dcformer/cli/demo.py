"""`dcformer demo`: a page in the browser, with text from a model and pictures of its attention."""

from __future__ import annotations

from typing import Annotated

import typer

from ..common.quiet import quiet_libraries
from .options import Debug, Device, Dtype, Revision, Tokenizer
from .printing import status
from .running import running_command


def demo_command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A bundled model, a folder or a name on the Hub."),
    ] = "dcformer-tiny",
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 lets other machines open the page.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="The port to listen on; the first free one from 7860 on unless given.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser on this machine.")
    ] = True,
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
