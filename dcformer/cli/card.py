"""`dcformer card`: measured scores into a model card."""

from pathlib import Path
from typing import Annotated

import typer

from ..common.terminal import make_console
from .options import Debug
from .running import running_on_checkpoints


def card_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of the model, whose README.md is the card.")],
    results: Annotated[Path, typer.Option(help="Folder with results of `dcformer eval`.")] = Path("results"),
    evaluated_as: Annotated[
        str | None,
        typer.Option(help="Name under which the model was evaluated.", show_default="any, with the weights in MODEL"),
    ] = None,
    paper_row: Annotated[
        str | None,
        typer.Option(help="Row of Table 4 to add, such as DCFormer++2.8B, or none.", show_default="by MODEL's name"),
    ] = None,
    debug: Debug = False,
) -> None:
    """
    Write the scores of `dcformer eval` into a model card.

    They go into the card's metadata (model-index), a table in its text, and .eval_results/*.yaml for the Hub. Your own
    text stays, and repeating the command changes nothing.
    """
    with running_on_checkpoints(debug):
        from ..cards.update import update_card

        updated = update_card(str(model), str(results), evaluated_as=evaluated_as, paper_row=paper_row)
    console = make_console(pipe_width=160)
    for line in updated.left_out:
        console.print(line, soft_wrap=True)
    papers = f" and {updated.from_paper} figures of the paper" if updated.from_paper else ""
    summary = f"{updated.card}: {updated.measured} measured scores{papers}"
    console.print(f"{summary}; {len(updated.files)} files in .eval_results", soft_wrap=True)
