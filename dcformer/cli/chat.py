"""`dcformer chat`: a conversation."""

import itertools
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from .generate import as_utf8, load_generator, open_stdin, print_text
from .options import Debug, GenerationOptions, Model, with_options
from .running import running_quietly


@with_options
def chat_command(
    model: Model,
    message: Annotated[str | None, Argument(metavar="MESSAGE", help="First message.")] = None,
    *,
    options: GenerationOptions,
    chat_template: Annotated[
        Path | None, Option(metavar="FILE", help="Chat template in Jinja.", show_default="the tokenizer's")
    ] = None,
    debug: Debug = False,
) -> None:
    """
    Converse with a model: it answers every line of stdin.

    Only answers go to stdout; messages of the command go to stderr.
    """
    with running_quietly(debug):
        from transformers import DynamicCache

        from ..common.contexts import refuse_surrogates
        from ..inputs_dcformer import CACHE_NAME

        generator = load_generator(model, options)
        loaded, config = generator.loaded, generator.config
        if chat_template is not None:
            loaded.tokenizer.chat_template = chat_template.read_text(encoding="utf-8-sig", errors="surrogateescape")
            refuse_surrogates(loaded.tokenizer.chat_template, repr(str(chat_template)))
        # Other caches than this one, and those of beams and drafts, cannot be continued.
        keeps_cache = not generator.drafts and (config.num_beams or 1) == 1
        keeps_cache = keeps_cache and config.cache_implementation is None and config.use_cache is not False
        messages: list[dict[str, str]] = []
        read: list[int] = []
        cache: dict[str, Any] = {}
        for line in itertools.chain([] if message in (None, "-") else [message], open_stdin()):
            line = as_utf8(line).rstrip("\r\n")
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
                cache[CACHE_NAME] = DynamicCache(config=loaded.model.config)
            answer = print_text(generator.stream(ids, **cache))
            read = answer.sequence[:-1]
            messages.append({"role": "assistant", "content": answer.text})
