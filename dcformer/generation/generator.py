"""One call of generate() for one prompt or a padded batch, streamed where that can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteria

from .models import LoadedModel, context_warning
from .options import check_options, new_tokens
from .stopping import StopStrings, text_before
from .streaming import TextWriter


@dataclass
class Generated:
    """
    What a model wrote after a prompt.

    Attributes:
        ids: Of the new tokens, the one that ends the text included.
        text: Of these, up to the first stop string, without special tokens.
        sequence: Ids of the prompt and what followed.
        cache: Keys and values of the sequence but its last token, if it can be continued from there.
    """

    ids: list[int]
    text: str
    sequence: list[int]
    cache: Any = None


class TextGenerator:
    """
    A loaded model with its options of generate().

    Args:
        loaded: From [`load_model`].
        stop_strings (*optional*): A text ends before the first of them.
        assistant (*optional*): A small model whose drafts the large one checks; single prompts only.
        warn (*optional*): Called once with a sentence if a prompt is longer than the model was made for.
        options: As [`check_options`] takes them.

    Raises:
        ValueError: if an option is out of its range, or cannot be used with another.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        stop_strings: Sequence[str] = (),
        assistant: LoadedModel | None = None,
        warn: Callable[[str], None] | None = None,
        **options: Any,
    ):
        if "" in stop_strings:
            raise ValueError("A stop string is empty, which ends every text before it begins; leave it out.")
        self.loaded = loaded
        self.stop_strings = tuple(stop_strings)
        self.options = check_options(options)
        self.assistant = assistant
        self._warn = warn
        if assistant is not None and self.uses_beams:
            raise ValueError("An assistant model cannot draft for several beams; leave it or num_beams out.")

    @property
    def uses_beams(self) -> bool:
        """Whether several texts are followed at once, of which none is certain before the end."""
        return (self.options.get("num_beams") or self.loaded.model.generation_config.num_beams or 1) > 1

    def generate(
        self,
        ids: Sequence[int],
        write: Callable[[str], None] | None = None,
        *,
        cache: Any = None,
        keeps_cache: bool = False,
        criteria: Sequence[StoppingCriteria] = (),
    ) -> Generated:
        """
        Continue one prompt.

        Args:
            ids: Of the prompt, with those that the cache holds.
            write (*optional*): Called with the new text piece by piece, with beams once at the end.
            cache (*optional*): Of the first of these ids, from an earlier call.
            keeps_cache (defaults to `False`): Return the cache, if the text can be continued from it.
            criteria (*optional*): Further reasons to end.
        """
        streamer = None
        if write is not None and not self.uses_beams:
            streamer = TextWriter(self.loaded.tokenizer, write, self.stop_strings)
        (answer,) = self._run([ids], streamer, cache, keeps_cache, criteria)
        if write is not None and streamer is None:
            write(answer.text)
        return answer

    def generate_batch(self, prompts: Sequence[Sequence[int]]) -> list[Generated]:
        """Continue several prompts at once, padded on the left."""
        if self.assistant is not None and len(prompts) > 1:
            raise ValueError("An assistant model drafts for one prompt at a time; use a batch size of 1.")
        return self._run(prompts, None, None, False, ())

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        streamer: TextWriter | None,
        cache: Any,
        keeps_cache: bool,
        criteria: Sequence[StoppingCriteria],
    ) -> list[Generated]:
        loaded = self.loaded
        length = max(map(len, prompts))
        padding = loaded.pad_token_id
        ids = torch.tensor([[padding] * (length - len(row)) + list(row) for row in prompts])  # (batch, length)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in prompts])
        most = new_tokens(self.options, loaded, length)
        self._warn_of_context(prompts, most)
        options = {**self.options, "pad_token_id": padding, "eos_token_id": list(loaded.eos_token_ids) or None}
        if most is not None:
            options["max_new_tokens"] = most
        if self.stop_strings:
            criteria = [*criteria, StopStrings(self.stop_strings, loaded.tokenizer, length)]
        if cache is not None:
            options.pop("cache_implementation", None)
            options["past_key_values"] = cache
        device = loaded.model.device
        out = loaded.model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            streamer=streamer,
            stopping_criteria=list(criteria),
            return_dict_in_generate=True,
            **options,
            **self._assistance(),
        )
        is_kept = keeps_cache and self.assistant is None and not self.uses_beams
        kept = out.past_key_values if is_kept and isinstance(out.past_key_values, DynamicCache) else None
        new = [self._ended(row) for row in out.sequences[:, length:].tolist()]
        texts = loaded.tokenizer.batch_decode(new, skip_special_tokens=True)
        return [
            Generated(row, text_before(self.stop_strings, text), [*prompt, *row], kept)
            for prompt, row, text in zip(prompts, new, texts)
        ]

    def _assistance(self) -> dict[str, Any]:
        """Arguments for an assistant; with another vocabulary than the model's, its text is translated."""
        if self.assistant is None:
            return {}
        given: dict[str, Any] = {"assistant_model": self.assistant.model}
        sizes = (each.model.config.get_text_config().vocab_size for each in (self.loaded, self.assistant))
        if len(set(sizes)) > 1:
            given |= {"tokenizer": self.loaded.tokenizer, "assistant_tokenizer": self.assistant.tokenizer}
        return given

    def _ended(self, row: list[int]) -> list[int]:
        """New ids up to the first that ends the text; the rest fills the batch."""
        ends = [position for position, number in enumerate(row) if number in self.loaded.eos_token_ids]
        return row[: ends[0] + 1] if ends else row

    def _warn_of_context(self, prompts: Sequence[Sequence[int]], most: int | None) -> None:
        if self._warn is None:
            return
        sentence = context_warning(prompts, most, self.loaded)
        if sentence is not None:
            self._warn(sentence)
            self._warn = None
