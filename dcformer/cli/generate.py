"""`dcformer generate`: continue a prompt, or answer a file of prompts."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

from typer import Argument, Option

from ..common.terminal import progress_bar
from .options import Debug, GenerationOptions, Model, with_options
from .running import running_quietly, status


if TYPE_CHECKING:
    from ..generation import Generated, TextGenerator


@with_options
def generate_command(
    model: Model,
    prompt: Annotated[str | None, Argument(metavar="PROMPT", help="Text to continue.", show_default="stdin")] = None,
    *,
    options: GenerationOptions,
    prompts: Annotated[Path | None, Option(metavar="FILE", help="Answer prompts: lines, or JSONL.")] = None,
    field: Annotated[str | None, Option(help="JSONL field: text or token ids.", show_default="prompt")] = None,
    output: Annotated[Path | None, Option(metavar="FILE", help="JSONL of answers; repeat to resume.")] = None,
    batch_size: Annotated[int | None, Option(min=1, help="Prompts per batch.", show_default="8")] = None,
    debug: Debug = False,
) -> None:
    """
    Continue a prompt, or all prompts of a file.

    Only generated text goes to stdout, as it is generated; messages go to stderr.
    """
    with running_quietly(debug, "Interrupted; repeat the command to resume." if output else "Interrupted."):
        if prompts is None:
            for option, value in {"--output": output, "--field": field, "--batch-size": batch_size}.items():
                if value is not None:
                    raise ValueError(f"{option} {value} goes only with --prompts; add that, or leave it out.")
            is_given = prompt not in (None, "-")
            text = as_utf8(str(prompt) if is_given else open_stdin().read().removesuffix("\n").removeprefix("\ufeff"))
            generator = load_generator(model, options)
            print_text(generator.stream(generator.encode(text, "The prompt" if is_given else "The standard input")))
        elif output is None or prompt is not None:
            raise ValueError(f"--prompts {prompts} goes only with --output, and without PROMPT.")
        else:
            _answer_file(model, options, prompts, output, field or "prompt", batch_size or 8)


def open_stdin() -> TextIO:
    """The standard input, in which what is not UTF-8 stays until it is encoded, and then is named."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def as_utf8(text: str) -> str:
    """Text in which bytes that Python did not decode, as those beyond ASCII in some locales, are read as UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


def load_generator(model: str, options: GenerationOptions) -> TextGenerator:
    """Load a model, and the one that drafts for it if there is one."""
    import torch

    from ..generation import TextGenerator
    from ..loading import load_model

    given = asdict(options)
    names = ("dtype", "device", "attn_implementation", "oov_policy", "tokenizer", "revision")
    of_loading = {name: given.pop(name) for name in names}
    seed, stop, assistant = (given.pop(name) for name in ("seed", "stop", "assistant_model"))
    with status("Loading"):
        loaded = load_model(model, **of_loading)
        assistant = load_model(assistant, dtype=options.dtype, device=options.device) if assistant else None
    if seed is not None:
        torch.manual_seed(seed)

    def warn(sentence: str) -> None:
        print(f"Warning: {sentence}", file=sys.stderr)

    return TextGenerator(loaded, stop_strings=[*map(as_utf8, stop or ())], assistant=assistant, warn=warn, **given)


def _answer_file(model: str, options: GenerationOptions, file: Path, output: Path, field: str, batch_size: int) -> None:
    import torch

    from ..common.files import json_digest
    from ..common.hub import find_commit
    from ..generation import read_prompts, write_answers
    from ..loading import find_folder, fingerprint_tokenizer, looks_like_path

    records = read_prompts(file, field)
    generator = load_generator(model, options)
    where = f"of {str(file)!r}"
    prompts = [generator.encode(record[field], f"Line {line} {where}") for line, record in enumerate(records, start=1)]

    def answer(start: int, end: int) -> list[str]:
        if options.seed is not None:  # so that a resumed run samples what an uninterrupted one does
            torch.manual_seed(options.seed + start)
        return [answer.text for answer in generator.generate(prompts[start:end])]

    # Everything that answers depend on; a resumed run must have the same.
    settings = asdict(options) | {"model": model, "field": field, "batch_size": batch_size}
    settings |= {"prompts": json_digest(records), "tokenizer": fingerprint_tokenizer(generator.loaded.tokenizer)}
    del settings["device"]
    for name, revision in (("model", options.revision), ("assistant_model", None)):
        if (source := settings[name]) and looks_like_path(folder := find_folder(source)):
            for path in Path(folder).glob("*"):
                # Not of answers that are written there. A copy may keep the time of modification.
                if path.is_file() and path.suffix not in (".lock", ".partial", ".unfinished"):
                    settings[str(path)] = [path.stat().st_size, path.stat().st_ctime_ns]
        elif source:
            settings[name] = [source, find_commit(folder, revision)]
    with progress_bar("Answering") as (update, _):

        def report(done: int) -> None:
            update(completed=done, total=len(records))

        write_answers(records, answer, output, batch_size=batch_size, settings=settings, on_progress=report)


def print_text(pieces: Generator[str, None, Generated]) -> Generated:
    """Print text as it is generated, with a line feed at the end if the text has none."""
    text = ""
    with contextlib.closing(pieces):
        while True:
            try:
                text = next(pieces)
            except StopIteration as end:
                print(end="" if text.endswith("\n") else "\n", flush=True)
                answer: Generated = end.value
                return answer
            print(text, end="", flush=True)
