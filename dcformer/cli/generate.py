"""`dcformer generate`: continue a prompt, chat, or answer a file of prompts."""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..common.terminal import progress_bar
from .options import Debug, Device, Dtype, Model, Revision, Tokenizer
from .running import running_quietly, status


if TYPE_CHECKING:
    from ..generation import Generated, TextGenerator

_OF_GENERATE = ["max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"]
_CONFIG = "generation_config.json"
# Options that have no effect without another.
_ONLY_WITH = {
    "prompts": "--output",
    **dict.fromkeys(["output", "field", "batch_size"], "--prompts"),
    "chat_template": "--chat",
}


def generate_command(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.", show_default="stdin")] = None,
    chat: Annotated[bool | None, typer.Option("--chat", help="Answer every line of stdin as a message.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="File with a chat template, for --chat.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of new tokens.", show_default=f"{_CONFIG}, else 256")
    ] = None,
    do_sample: Annotated[
        bool | None, typer.Option("--do-sample/--greedy", help="Sample, or decode greedily.", show_default=_CONFIG)
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0: decode greedily.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens; 0: all.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Sample from the likeliest tokens that sum to this.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Minimum probability, relative to the highest.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1, repeat tokens less often.")] = None,
    num_beams: Annotated[int | None, typer.Option(min=1, help="Number of beams of a beam search.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this string; repeatable.", show_default=_CONFIG)
    ] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Answer prompts: lines, or JSONL.")] = None,
    field: Annotated[str | None, typer.Option(help="JSONL field: text or token ids.", show_default="prompt")] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="JSONL of answers; repeat to resume.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Prompts per batch.", show_default="8")] = None,
    dtype: Dtype = None,
    device: Device = None,
    attn_implementation: Annotated[str | None, typer.Option(help="Such as dcmha_plain.", show_default="auto")] = None,
    oov_policy: Annotated[
        Literal["error", "clamp"] | None,
        typer.Option(help="Token ids without embedding: refuse them, or use the last.", show_default="config.json"),
    ] = None,
    cache_implementation: Annotated[
        Literal["dynamic", "static", "offloaded", "offloaded_static", "quantized"] | None,
        typer.Option("--cache", help="Kind of cache.", show_default="dynamic"),
    ] = None,
    assistant_model: Annotated[str | None, typer.Option(help="Small model that drafts tokens.")] = None,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """
    Continue a prompt and print the text as it is generated.

    Only generated text goes to stdout; messages go to stderr.
    """
    given = dict(locals())
    with running_quietly(debug, "Interrupted; repeat the command to resume." if output else "Interrupted."):
        if prompts is not None and (chat or prompt is not None):
            raise ValueError("--prompts replaces PROMPT and --chat; leave one of them out.")
        others = {"--prompts": prompts, "--output": output, "--chat": chat}
        for name, other in _ONLY_WITH.items():
            if given[name] is not None and not others[other]:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} {given[name]} goes only with {other}; add that, or leave it out.")
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # what is not UTF-8 is named when it is encoded
        given["stop"] = [_as_utf8(string) for string in stop or ()]
        if prompts is not None:
            _answer_file(given)
        elif chat:
            _converse(_load(given), prompt or "-")
        else:
            is_given = prompt not in (None, "-")
            text = _as_utf8(str(prompt) if is_given else sys.stdin.read().removesuffix("\n").removeprefix("\ufeff"))
            generator = _load(given)
            _print(generator.stream(generator.encode(text, "The prompt" if is_given else "The standard input")))


def _as_utf8(text: str) -> str:
    """Text in which bytes that Python did not decode, as those beyond ASCII in some locales, are read as UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


def _load(given: dict[str, Any]) -> TextGenerator:
    from transformers import set_seed

    from ..common.contexts import refuse_surrogates
    from ..generation import TextGenerator
    from ..loading import load_model

    shared = {name: given[name] for name in ("dtype", "device")}
    options = {name: given[name] for name in ("tokenizer", "revision", "attn_implementation", "oov_policy")}
    with status("Loading"):
        loaded = load_model(given["model"], **shared, **options)
        assistant = load_model(given["assistant_model"], **shared) if given["assistant_model"] else None
    beams = given["num_beams"] or loaded.model.generation_config.num_beams or 1
    if assistant is not None and beams > 1:  # Transformers would silently not use it
        raise ValueError(f"assistant_model={assistant.name!r} drafts for num_beams=1, got {beams}; leave it out.")
    if (template := given["chat_template"]) is not None:
        loaded.tokenizer.chat_template = template.read_text(encoding="utf-8-sig", errors="surrogateescape")
        refuse_surrogates(loaded.tokenizer.chat_template, repr(str(template)))
    if given["seed"] is not None:
        set_seed(given["seed"])
    return TextGenerator(
        loaded,
        stop_strings=given["stop"] or (),
        assistant=assistant,
        warn=lambda sentence: print(f"Warning: {sentence}", file=sys.stderr),
        **{name: given[name] for name in (*_OF_GENERATE, "num_beams", "cache_implementation")},
    )


def _converse(generator: TextGenerator, first: str) -> None:
    """Answer a conversation, message by message, until stdin ends."""
    from transformers import DynamicCache

    from ..common.contexts import refuse_surrogates
    from ..modeling_dcformer import CACHE_NAME

    loaded, config = generator.loaded, generator.config
    messages: list[dict[str, str]] = []
    read: list[int] = []
    # Other caches than this one, and those of beams and drafts, cannot be continued.
    keeps_cache = not generator.drafts and (config.num_beams or 1) == 1
    keeps_cache = keeps_cache and config.cache_implementation is None and config.use_cache is not False
    options: dict[str, Any] = {}
    for line in itertools.chain([] if first == "-" else [first], sys.stdin):
        line = _as_utf8(line).rstrip("\r\n")
        refuse_surrogates(line, "A message")
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            text = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except ValueError as error:  # the tokenizer has no template, or several
            raise ValueError(f"{error}; or give a file with one by --chat-template.") from error
        ids = generator.encode(text, "The conversation", add_special_tokens=False)
        if keeps_cache and (not read or ids[: len(read)] != read):
            options[CACHE_NAME] = DynamicCache(config=loaded.model.config)
        answer = _print(generator.stream(ids, **options))
        read = answer.sequence[:-1]
        messages.append({"role": "assistant", "content": answer.text})


def _answer_file(given: dict[str, Any]) -> None:
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn
    from transformers import set_seed

    from ..common.files import json_digest
    from ..common.hub import find_commit
    from ..generation import read_prompts, write_answers
    from ..loading import find_folder, fingerprint_tokenizer, looks_like_path

    seed, field = given["seed"], "prompt" if given["field"] is None else given["field"]
    records = read_prompts(given["prompts"], field)
    generator = _load(given)
    where = f"of {str(given['prompts'])!r}"
    prompts = [generator.encode(record[field], f"Line {line} {where}") for line, record in enumerate(records, start=1)]

    def answer(start: int, end: int) -> list[str]:
        if seed is not None:  # so that a resumed run samples what an uninterrupted one does
            set_seed(seed + start)
        return [answer.text for answer in generator.generate(prompts[start:end])]

    # Everything that answers depend on; a resumed run must have the same.
    settings = {name: value for name, value in given.items() if name not in ("output", "device", "debug")}
    settings["prompts"] = json_digest(records)
    sources = (given[name] for name in ("model", "tokenizer", "assistant_model"))
    folders = [Path(find_folder(source)) for source in sources if source]
    for name, revision in (("model", given["revision"]), ("assistant_model", None)):
        if given[name] and not looks_like_path(find_folder(given[name])):
            settings[name] = [given[name], find_commit(given[name], revision)]
    if given["tokenizer"]:
        settings["tokenizer"] = fingerprint_tokenizer(generator.loaded.tokenizer)
    for file in [file for folder in folders for file in (folder, *folder.glob("*")) if file.is_file()]:
        if file.suffix not in (".lock", ".partial", ".unfinished"):  # of answers that are written there
            settings[str(file)] = [
                file.stat().st_size,
                file.stat().st_ctime_ns,
            ]  # a copy may keep the modification time
    with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as (bar, _):
        row = bar.add_task("Answering", total=len(records))
        write_answers(
            records,
            answer,
            given["output"],
            batch_size=given["batch_size"] or 8,
            settings=settings,
            on_progress=lambda done: bar.update(row, completed=done),
        )


def _print(pieces: Generator[str, None, Generated]) -> Generated:
    """Print text as it is generated, with a line feed at the end if the text has none."""
    text = ""
    with contextlib.closing(pieces):
        while True:
            try:
                text = next(pieces)
            except StopIteration as end:
                print(end="" if text.endswith("\n") else "\n", flush=True)
                return end.value
            print(text, end="", flush=True)
