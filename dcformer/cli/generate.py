"""`dcformer generate`: what a model writes after a prompt, in a conversation, or for a file of prompts."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..common.quiet import quiet_libraries
from ..common.terminal import progress_bar
from .options import (
    Debug,
    Device,
    DoSample,
    Dtype,
    MinP,
    RepetitionPenalty,
    Revision,
    Temperature,
    Tokenizer,
    TopK,
    TopP,
)
from .printing import status
from .running import running_command


if TYPE_CHECKING:
    from ..generation import LoadedModel, TextGenerator

_FROM_STDIN = "-"
_OF_GENERATE = (
    "max_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "num_beams",
)
_OF_LOADING = ("tokenizer", "revision", "dtype", "device", "attn_implementation", "oov_policy")
_BATCH_SIZE = 8


def generate_command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A bundled model such as dcformer-tiny, a folder or a name on the Hub."),
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The text to continue; read from stdin if it is - or not given."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Hold a conversation: every line of stdin is a message, which the model answers."),
    ] = False,
    chat_template: Annotated[
        str | None, typer.Option(help="A file with a chat template to use in place of the tokenizer's own.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="The largest number of tokens to write; what the model's generation_config.json says unless given, "
            "else 256."
        ),
    ] = None,
    do_sample: DoSample = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    num_beams: Annotated[
        int | None, typer.Option(help="Follow so many texts at once and print the best one when it is finished.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random numbers, so that the same text is drawn again.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the text before this string; may be given several times."),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Answer all prompts of a file: one on each line, or JSONL with a field."),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(help="The field that holds the prompt in a JSONL file of prompts; prompt if not given."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The JSONL file to write answers to, for --prompts; stdout unless given."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="The number of prompts answered at once, for --prompts; 8 unless given.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    attn_implementation: Annotated[
        str | None,
        typer.Option(help="How attention is computed, such as eager or dcmha_plain; chosen by itself unless given."),
    ] = None,
    oov_policy: Annotated[
        Literal["error", "clamp", "pad"] | None,
        typer.Option(
            help="What to do with token ids that have no embedding: stop with an error, use the last embedding, or "
            "add embeddings; what the model's configuration says unless given."
        ),
    ] = None,
    cache: Annotated[
        Literal["dynamic", "static", "offloaded", "offloaded_static", "quantized"] | None,
        typer.Option(help="The kind of cache that keys and values are kept in; one that grows unless given."),
    ] = None,
    assistant_model: Annotated[
        str | None,
        typer.Option(help="A small model that drafts tokens for the large one to check, named as MODEL is."),
    ] = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """
    Continue a prompt with a model and print the text as it comes.

    Only generated text goes to stdout, and messages to stderr.
    """
    given = dict(locals())
    interrupted = "Interrupted."
    if prompts is not None and output is not None:
        interrupted = f"Interrupted; the answers that were finished are in {output}.partial."
    with running_command(debug, interrupted), _until_the_reader_leaves():
        _check_combinations(given)
        found = None if prompts is None else _read_prompts(prompts, field, output)
        text = None if chat or prompts is not None else _prompt_or_stdin(prompt)
        with quiet_libraries():
            generator = _load(given)
            if found is not None:
                _answer_all(generator, found, output, batch_size)
            elif chat:
                _converse(generator, None if prompt == _FROM_STDIN else prompt)
            elif text is not None:
                _write_line(lambda write: generator.generate(generator.loaded.encode(text), write))


def _check_combinations(given: dict[str, Any]) -> None:
    """Refuse options that contradict each other, before anything is loaded."""
    of_files = [name for name in ("field", "output", "batch_size") if given[name] is not None]
    if given["prompts"] is not None:
        if given["prompt"] is not None:
            raise ValueError("Both a prompt and --prompts are given; leave one of them out.")
        if given["chat"]:
            raise ValueError("--chat reads messages from stdin, not from a file; leave --chat or --prompts out.")
        if given["assistant_model"] is not None and (given["batch_size"] or 1) > 1:
            raise ValueError("--assistant-model drafts for one prompt at a time; leave --batch-size out.")
    elif of_files:
        raise ValueError(f"--{of_files[0].replace('_', '-')} is for --prompts only; leave it out.")
    if given["chat_template"] is not None and not given["chat"]:
        raise ValueError("--chat-template is for --chat only; leave it out, or hold a conversation by --chat.")
    if given["batch_size"] is not None and given["batch_size"] < 1:
        raise ValueError(f"--batch-size must be at least 1, got {given['batch_size']}.")
    from ..generation.options import check_options

    check_options(_generate_options(given))


def _generate_options(given: dict[str, Any]) -> dict[str, Any]:
    return {**{name: given[name] for name in _OF_GENERATE}, "cache_implementation": given["cache"]}


def _read_prompts(path: str, field: str | None, output: str | None) -> list:
    from ..generation.prompts import check_output, read_prompts

    if output is not None:
        check_output(output, path)
    return read_prompts(path, field)


def _prompt_or_stdin(prompt: str | None) -> str:
    """The prompt, from stdin without the end of its last line, which `echo` adds and no model should see."""
    if prompt not in (None, _FROM_STDIN):
        text = str(prompt)
    else:
        if _is_terminal():
            typer.echo("Type the prompt, and end it by Ctrl-D on a line of its own.", err=True)
        text = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    if not text.strip():
        raise ValueError("The prompt is empty; give it as an argument, through stdin, or many of them by --prompts.")
    return text


def _load(given: dict[str, Any]) -> TextGenerator:
    from ..generation import TextGenerator, load_model

    options = {name: given[name] for name in _OF_LOADING}
    with status("Loading"):
        loaded = load_model(given["model"], **options)
        assistant: LoadedModel | None = None
        if given["assistant_model"] is not None:
            assistant = load_model(given["assistant_model"], dtype=given["dtype"], device=given["device"])
    if given["chat_template"] is not None:
        from ..generation.chat import set_chat_template

        set_chat_template(loaded.tokenizer, given["chat_template"])
    if given["seed"] is not None:
        from transformers import set_seed

        set_seed(given["seed"])
    return TextGenerator(
        loaded,
        stop_strings=given["stop"] or (),
        assistant=assistant,
        warn=lambda sentence: typer.echo(f"Warning: {sentence}", err=True),
        **_generate_options(given),
    )


def _converse(generator: TextGenerator, first: str | None) -> None:
    from ..generation.chat import Conversation

    conversation = Conversation(generator)
    if _is_terminal():
        typer.echo("Ctrl-D ends the conversation.", err=True)
    for message in _messages(first):
        _write_line(functools.partial(conversation.answer, message))


def _messages(first: str | None) -> Iterator[str]:
    """What the person says, line by line; empty lines say nothing."""
    if first is not None:
        yield first
    while True:
        if _is_terminal():
            typer.echo("> ", err=True, nl=False)
        line = ""
        try:
            line = sys.stdin.readline()
        finally:
            if not line and _is_terminal():
                typer.echo(err=True)  # Ctrl-C and Ctrl-D end no line
        if not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")


def _answer_all(generator: TextGenerator, prompts: list, output: str | None, batch_size: int | None) -> None:
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    from ..generation.prompts import answer_prompts, whole_lines

    size = batch_size or (_BATCH_SIZE if generator.assistant is None else 1)
    target = contextlib.nullcontext(_write) if output is None else whole_lines(output)
    with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as (bar, _), target as write:
        row = bar.add_task("Answering", total=len(prompts))
        answer_prompts(
            generator,
            prompts,
            write,
            batch_size=size,
            on_progress=lambda done, total: bar.update(row, completed=done, total=total),
        )


def _write_line(produce: Callable[[Callable[[str], None]], Any]) -> None:
    """Write text as it comes, and end its line if the text itself does not."""
    last = ""

    def write(piece: str) -> None:
        nonlocal last
        _write(piece)
        last = piece or last

    try:
        produce(write)
    except BaseException:
        if last and not last.endswith("\n"):
            _write("\n")  # a message follows on the terminal
        raise
    if not last.endswith("\n"):
        _write("\n")


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _is_terminal() -> bool:
    return sys.stdin.isatty()


@contextlib.contextmanager
def _until_the_reader_leaves() -> Iterator[None]:
    """End without a word when the reader of stdout has gone, as `head` does when it has seen enough."""
    try:
        yield
    except BrokenPipeError:
        # Python writes what is left at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
