"""Text generation by Transformers' generate(), streamed or in batches."""

import contextvars
import copy
import math
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TextIteratorStreamer

from ..common.contexts import encode_context, refuse_surrogates
from ..loading import NOT_A_NUMBER, LoadedModel


_NEW_TOKENS = 256
# Options without effect on a text, or whose work is done here.
_UNUSED: dict[str, bool | None] = {"return_dict_in_generate": False, "output_attentions": False}
_UNUSED |= {"output_hidden_states": False, "is_assistant": False, "stop_strings": None, "max_length": None}
# Options with which generate() returns other sequences than a prompt and its one continuation, and what to set instead.
_OTHER_SEQUENCES = {"num_return_sequences": 1, "token_healing": False}


@dataclass(frozen=True)
class Generated:
    """A continuation of a prompt."""

    ids: list[int]  # new token ids, with the one that ended the text
    text: str  # the new text up to the first stop string, without special tokens
    sequence: list[int]  # ids of the prompt and the continuation


class TextGenerator:
    """
    Generates texts with a loaded model and options of generate().

    Args:
        loaded: From [`dcformer.loading.load_model`].
        stop_strings (defaults to those of generation_config.json): A text ends before the first of them, however it is
            tokenized.
        assistant (*optional*): A small model that drafts tokens.
        warn (defaults to `warnings.warn`): Called once with a sentence if texts exceed the model's context.
        options: Arguments of generate(); for those that are `None` generation_config.json holds. A `temperature`,
            `top_k`, `top_p` or `min_p` turns sampling on, and `temperature=0` off, whatever the others. Without a limit
            there are at most 256 new tokens, within the context.

    Attributes:
        config: What generate() is asked for: generation_config.json with `options`.
        drafts: Whether tokens are drafted, by an assistant or otherwise; prompts are then continued one after another.

    Raises:
        ValueError: if a stop string is empty, an option of sampling comes with `do_sample=False`, an assistant with
            beams, or an option, also one of generation_config.json, asks for several answers to a prompt.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        stop_strings: Sequence[str] = (),
        assistant: LoadedModel | None = None,
        warn: Callable[[str], Any] = warnings.warn,
        **options: Any,
    ):
        self.loaded, self.options = loaded, _sampling_options(options)
        self.config = copy.deepcopy(loaded.model.generation_config)
        self.config.update(**self.options)
        for field, value in _OTHER_SEQUENCES.items():
            if (asked := getattr(self.config, field)) not in (None, value):
                raise ValueError(
                    f"{field}={asked!r}, an option or in generation_config.json of {loaded.name!r}, is not supported: "
                    f"a prompt is continued, by one answer; set it to {value}."
                )
        strings = stop_strings or self.config.stop_strings or ()
        self.stop_strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if "" in self.stop_strings:
            raise ValueError("stop_strings holds an empty string, which ends every text; leave it out.")
        self.drafts = self.config.get_generation_mode(assistant and assistant.model) == "assisted_generation"
        self._warn: Callable[[str], Any] | None = warn
        eos, vocab_size = self.config.eos_token_id, loaded.model.config.get_text_config().vocab_size
        eos = loaded.tokenizer.eos_token_id if eos is None else eos
        self._eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        self._context: int = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or 0
        if assistant is not None:
            if (beams := self.config.num_beams or 1) > 1:  # Transformers would silently not use it
                raise ValueError(f"assistant={assistant.name!r} drafts for num_beams=1, got {beams}; leave it out.")
            self.options["assistant_model"] = assistant.model
            if assistant.model.config.get_text_config().vocab_size != vocab_size:
                self.options |= {"tokenizer": loaded.tokenizer, "assistant_tokenizer": assistant.tokenizer}

    def encode(
        self, prompt: str | Sequence[int], what: str = "The prompt", *, add_special_tokens: bool = True
    ) -> list[int]:
        """
        Token ids of a prompt, a text or ids; `what` names it in errors. Texts from a chat template already have special
        tokens.

        Raises:
            ValueError: if it is empty or not UTF-8, or an id has no embedding and `oov_policy` does not clamp it.
        """
        tokenizer, config = self.loaded.tokenizer, self.loaded.model.config
        if isinstance(prompt, str):
            refuse_surrogates(prompt, what)
            ids = [] if prompt.isspace() else encode_context(tokenizer, prompt, add_special_tokens=add_special_tokens)
        else:
            ids = [int(number) for number in prompt]
        if not prompt or not ids:
            raise ValueError(f"{what} must hold text to continue, got {prompt!r}.")
        vocab_size = config.get_text_config().vocab_size  # of an embedding that someone has wrapped or replaced
        rows = getattr(self.loaded.model.get_input_embeddings(), "num_embeddings", vocab_size)
        if max(ids) >= rows and getattr(config, "oov_policy", None) != "clamp":
            raise ValueError(
                f"{what} has token id {max(ids)} at position {ids.index(max(ids))}, and {self.loaded.name!r} has "
                f"embeddings for ids below {rows}; use the model's tokenizer, or oov_policy clamp."
            )
        return ids

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Generator[str, None, Generated]:
        """
        Continue a prompt, text or token ids, with further options of generate(); return the continuation.

        Pieces of the new text are yielded as they are generated, with beams at the end. Closing the iterator stops.
        """
        ids = self.encode(prompt)
        if (self.config.num_beams or 1) > 1:
            (answer,) = self._generate([ids], threading.Event(), **options)
            yield answer.text
            return answer
        streamer = TextIteratorStreamer(self.loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        closed = threading.Event()
        results: list[Generated | BaseException] = []

        def run() -> None:
            try:
                results.extend(self._generate([ids], closed, streamer=streamer, **options))
            except BaseException as error:
                results.append(error)
            finally:
                streamer.text_queue.put(streamer.stop_signal)

        # In the caller's context, by which a web demo knows which visitor a warning is for.
        thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
        thread.start()
        try:
            yield from text_before(self.stop_strings, streamer)
        finally:
            closed.set()
            thread.join()
        (result,) = results
        if isinstance(result, BaseException):
            raise result
        return result

    def generate(self, prompts: Sequence[str | Sequence[int]]) -> list[Generated]:
        """Continue several prompts, texts or token ids: at once, padded on the left, unless tokens are drafted."""
        rows, open_end = [self.encode(prompt) for prompt in prompts], threading.Event()
        batches = [[row] for row in rows] if self.drafts else [rows]
        return [answer for batch in batches for answer in self._generate(batch, open_end)]

    def _generate(self, prompts: Sequence[Sequence[int]], closed: threading.Event, **options: Any) -> list[Generated]:
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        length = max(map(len, prompts))
        # Padded with a token of the prompt's own: the mask hides it from the model, but not from penalties.
        ids = torch.tensor([[row[0]] * (length - len(row)) + list(row) for row in prompts])  # (batch, length)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in prompts])
        limits = [self._most_new_tokens(len(row)) for row in prompts]
        new = self._most_new_tokens(length)
        if self._warn is not None and self._context and length + new > self._context:
            self._warn(f"{length} tokens and {new} new ones exceed the {self._context} that the model was made for.")
            self._warn = None
        # Tokens have at least one byte; the first ones of a decoded slice may give other characters than in their text.
        seen = max((len(string.encode()) for string in self.stop_strings), default=0) + 4

        def is_done(sequences: Tensor, scores: Any, **_: Any) -> Tensor:
            new, beams = sequences[:, length:], len(sequences) // len(prompts)
            ends = tokenizer.batch_decode(new[:, -seen:]) if self.stop_strings else [""] * len(new)
            done = [
                closed.is_set() or new.shape[1] >= limit or any(string in end for string in self.stop_strings)
                for end, limit in zip(ends, (limit for limit in limits for _ in range(beams)), strict=True)
            ]
            return torch.tensor(done, device=sequences.device)

        def refuse_nan(_: Tensor, scores: Tensor) -> Tensor:  # whose likeliest token would be the first, or none
            if scores.isnan().any():
                raise ValueError(f"The scores of tokens hold NaN: {NOT_A_NUMBER}")
            return scores

        given = self.options | options | _UNUSED | {"max_new_tokens": max(limits)}
        given |= {"pad_token_id": next(iter(self._eos), 0), "eos_token_id": self._eos or None}
        given["logits_processor"] = [refuse_nan, *self.options.get("logits_processor", ())]
        given["stopping_criteria"] = [is_done, *self.options.get("stopping_criteria", ())]
        try:
            sequences = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **given)
        except ValueError as error:
            if not str(error).startswith("Group size"):
                raise
            size = _fitting_group_size(model, self.config.cache_config or {})
            sentence = f"{error}; q_group_size={size} in cache_config of generation_config.json fits every text."
            raise ValueError(sentence) from error
        answers = []
        for prompt, row, limit in zip(prompts, sequences[:, length:].tolist(), limits, strict=True):
            end = next((index + 1 for index, token in enumerate(row) if token in self._eos), limit)
            new = row[: min(end, limit)]  # padding of the batch follows
            text = "".join(text_before(self.stop_strings, [tokenizer.decode(new, skip_special_tokens=True)]))
            answers.append(Generated(new, text, [*prompt, *new]))
        return answers

    def _most_new_tokens(self, length: int) -> int:
        """Maximum of new tokens after a prompt; ValueError if `max_length`, which includes the prompt, leaves none."""
        most: int | None = self.config.max_length
        if self.config.max_new_tokens is not None:
            return int(self.config.max_new_tokens)
        if most is None:
            return min(_NEW_TOKENS, self._context - length) if length < self._context else _NEW_TOKENS
        if length >= most:
            raise ValueError(f"max_length={most} includes the prompt, which has {length} tokens; give max_new_tokens.")
        return most - length


def _sampling_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options that are not None, those of a `generation_config` among them, with `do_sample` if they imply it."""
    sampling = ("temperature", "top_k", "top_p", "min_p")
    if (config := options.pop("generation_config", None)) is not None:
        options = config.to_diff_dict() | options
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("temperature") == 0:  # greedy, as for other engines and APIs; generate() refuses it
        return {name: value for name, value in given.items() if name not in sampling} | {"do_sample": False}
    if asking := [name for name in sampling if name in given]:
        if given.get("do_sample") is False:
            raise ValueError(f"{asking[0]}={given[asking[0]]} has no meaning for greedy decoding; leave one out.")
        given["do_sample"] = True
    return given


def _fitting_group_size(model: Any, cache_config: dict[str, Any]) -> int:
    """The largest `q_group_size`, up to the one asked for, that divides what a quantised cache holds per token."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = [width, *(width + channels for channels in getattr(config, "compose_cache_channels", ()))]
    if -1 in (cache_config.get("axis_key"), cache_config.get("axis_value")):  # groups of one channel
        rows = [1]
    numbers = heads * math.gcd(*rows)
    return next(size for size in range(cache_config.get("q_group_size") or 64, 0, -1) if numbers % size == 0)


def text_before(strings: Sequence[str], pieces: Iterable[str]) -> Iterator[str]:
    """Pieces of a text up to the first of the strings; an end that may be the start of one is held back."""
    held = ""
    longest = max(map(len, strings), default=1)
    for piece in pieces:
        held += piece
        starts = [held.index(string) for string in strings if string in held]
        end = min(starts) if starts else max(0, len(held) - longest + 1)
        if end:
            yield held[:end]
        if starts:
            return
        held = held[end:]
    if held:
        yield held
