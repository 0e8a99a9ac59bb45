"""`dcformer card`: measured scores into a model card."""

from typing import Annotated

import typer

from ..common.terminal import make_console
from .options import Debug
from .running import running_on_checkpoints


def card_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The folder of the model whose card, README.md, is written.")
    ],
    results: Annotated[str, typer.Option(help="The folder with the results of `dcformer eval`.")] = "results",
    evaluated_as: Annotated[
        str | None,
        typer.Option(
            help="The name by which the model was evaluated, such as its name on the Hub; unless given, the results "
            "must be of the very weights in MODEL."
        ),
    ] = None,
    paper_row: Annotated[
        str | None,
        typer.Option(
            help="The row of the paper's Table 4 whose figures are added as the paper's, such as DCFormer++2.8B, or "
            "none; the row that the model's name says unless given."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """
    Write the scores of `dcformer eval` into a model card.

    They go into the metadata of README.md (model-index), into a table in its text, and into .eval_results/*.yaml, where
    the Hub looks for them. What you wrote in the card stays, and running the command again changes nothing.
    """
    with running_on_checkpoints(debug):
        from ..cards.update import update_card

        updated = update_card(model, results, evaluated_as=evaluated_as, paper_row=paper_row)
    console = make_console(pipe_width=160)
    for line in updated.left_out:
        console.print(line, soft_wrap=True, markup=False)
    papers = f" and {updated.from_paper} figures of the paper" if updated.from_paper else ""
    console.print(
        f"{updated.card}: {updated.measured} measured scores{papers}; {len(updated.files)} files in .eval_results",
        soft_wrap=True,
        markup=False,
    )
