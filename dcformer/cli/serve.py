"""`dcformer serve`: OpenAI's API for a model, from the server of vLLM or of Transformers."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from .options import Debug, Dtype, Revision
from .printing import status
from .running import running_command


# What is no option of this command is one of the engine's.
PASS_OPTIONS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve_command(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A bundled model such as dcformer-tiny, a folder or a name on the Hub."),
    ],
    engine: Annotated[
        Literal["auto", "vllm", "transformers"],
        typer.Option(
            help="The server to start: vLLM's computes many requests at once, Transformers' one after another; auto "
            "takes vLLM if it is installed."
        ),
    ] = "auto",
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 lets other machines ask.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8000,
    dtype: Dtype = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A tokenizer folder or Hub name in place of the model's; vLLM alone takes another."),
    ] = None,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """
    Serve a model by OpenAI's API, and print its address and a request to begin with.

    Options after MODEL that are not listed here are handed to the engine as they are, and so is all that follows --.
    """
    with running_command(debug, interrupted="Stopped."):
        from ..serving import base_url, check_address, choose_engine, curl_line, find_served_model, run_server

        arguments = context.args
        with status("Looking at the model"):
            served = find_served_model(model, revision=revision, tokenizer=tokenizer, arguments=arguments)
            chosen = choose_engine(engine)
            launch = chosen.launch(served, host, port, dtype=dtype, arguments=arguments)
        check_address(host, port)
        url = base_url(host, port, arguments)
        has_key = chosen.engine == "vllm" and bool(os.environ.get("VLLM_API_KEY"))
        curl = curl_line(served, launch.model_name, url, arguments, has_key=has_key)

        def say_where() -> None:
            typer.echo(f"{launch.model_name} is at {url}/v1 for clients of OpenAI's API; Ctrl-C ends it. To try it:")
            typer.echo(curl)

        typer.echo(chosen.reason)
        run_server(launch.command, url, title=chosen.title, environment=launch.environment, on_ready=say_where)
