"""`dcformer analyse`: a page of what the heads of a model do before and after composition."""

from pathlib import Path
from typing import Annotated

import typer

from ..common.terminal import progress_bar
from .options import Debug, Device, Dtype, Model, Revision, Tokenizer
from .running import running_quietly, status


def analyse_command(
    model: Model,
    text: Annotated[str | None, typer.Option(help="Text to look at.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="File of text to look at, in UTF-8.")] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the page and the pictures.")] = Path(
        "analysis"
    ),
    length: Annotated[int, typer.Option(help="Most tokens of a window of text.", min=2)] = 256,
    windows: Annotated[int, typer.Option(help="Most windows of FILE.", min=1)] = 4,
    layer: Annotated[
        list[int] | None, typer.Option(help="Layer whose heads are drawn; repeatable.", show_default="up to 64 heads")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """Write a page of a model's inside: maps of every head, diversity, branches, and what breaks without them."""
    if (text is None) == (data is None):
        raise typer.BadParameter("Give either --text or --data.")
    with running_quietly(debug):
        from ..analysis import analyse
        from ..loading import load_model

        if data is not None:
            text = data.read_text(encoding="utf-8")
        with status("Loading"):
            options = {"dtype": dtype, "device": device, "tokenizer": tokenizer, "revision": revision}
            loaded = load_model(model, attn_implementation="eager", **options)
        ids = loaded.tokenizer(text, verbose=False)["input_ids"]
        length = min(length, loaded.model.config.max_position_embeddings)
        texts = [ids[start : start + length] for start in range(0, min(len(ids), windows * length), length)]
        with progress_bar() as (bar, _):
            row = bar.add_task("Loading", total=None)
            path = analyse(
                loaded.model,
                [each for each in texts if len(each) > 1],  # one token predicts none
                output,
                loaded.tokenizer,
                name=model.rstrip("/").split("/")[-1],
                layers=layer,
                progress=lambda what, done, total: bar.update(row, description=what, completed=done, total=total),
            )
        typer.echo(str(path))
