"""`dcformer analyse`: a web page that shows what the heads of a model do before and after composition."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ..common.terminal import progress_bar
from .options import Debug, Device, Dtype, Model, Revision, Tokenizer
from .running import running_quietly, status


def analyse_command(
    model: Model,
    text: Annotated[str | None, Option(help="Text to analyse.")] = None,
    data: Annotated[Path | None, Option(metavar="FILE", help="Text file to analyse, in UTF-8.")] = None,
    output: Annotated[Path, Option(metavar="DIR", help="Folder for the page and its images.")] = Path("analysis"),
    length: Annotated[int, Option(help="Maximum tokens of a window of text.", min=2)] = 256,
    windows: Annotated[int, Option(help="Maximum number of windows.", min=1)] = 4,
    layer: Annotated[
        list[int] | None, Option(help="Plot the heads of this layer; repeatable.", show_default="up to 64 heads")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """Write a web page about a model's heads. It shows their maps, their diversity, and the effect of every branch."""
    if (text is None) == (data is None):
        raise typer.BadParameter("Give either --text or --data.")
    with running_quietly(debug):
        from ..analysis import analyse
        from ..common.contexts import refuse_surrogates
        from ..loading import load_model

        if data is not None:
            text = data.read_text(encoding="utf-8-sig", errors="surrogateescape")
        refuse_surrogates(str(text), "--text" if data is None else repr(str(data)))
        with status("Loading"):
            options = {"dtype": dtype, "device": device, "tokenizer": tokenizer, "revision": revision}
            loaded = load_model(model, attn_implementation="eager", **options)
        ids = loaded.tokenizer(text, verbose=False)["input_ids"]
        length = min(length, loaded.model.config.max_position_embeddings)
        texts = [ids[start : start + length] for start in range(0, min(len(ids), windows * length), length)]
        texts = [window for window in texts if len(window) > 1]  # one token predicts none
        if not texts:
            raise ValueError("The text has fewer than two tokens, and one predicts none; give a longer text.")
        name = model.rstrip("/").split("/")[-1]
        with progress_bar("Loading") as (update, _):

            def report(what: str, done: int, total: int) -> None:
                update(description=what, completed=done, total=total)

            path = analyse(loaded.model, texts, output, loaded.tokenizer, name=name, layers=layer, progress=report)
        print(path, flush=True)
