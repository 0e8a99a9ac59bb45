"""Text generation by Transformers' generate(), streamed or in batches, or by vLLM."""

import contextvars
import math
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, TextIteratorStreamer

from ..common.contexts import encode_context
from ..common.dtypes import dtype_name
from ..common.optional import import_vllm
from ..loading import FoundModel, LoadedModel, find_folder


_NEW_TOKENS = 256


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
        stop_strings (defaults to none): A text ends before the first of them, however it is tokenized.
        assistant (*optional*): A small model that drafts tokens, for one prompt at a time.
        warn (defaults to `warnings.warn`): Called once with a sentence if texts exceed the model's context.
        options: Arguments of generate(); for those that are `None` generation_config.json holds. A `temperature`,
            `top_k`, `top_p` or `min_p` turns sampling on, and `temperature=0` off, whatever the others. Without a limit
            there are at most 256 new tokens, within the context.

    Raises:
        ValueError: if a stop string is empty, or an option of sampling comes with `do_sample=False`.
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
        if "" in stop_strings:
            raise ValueError("stop_strings holds an empty string, which ends every text; leave it out.")
        self.loaded, self.stop_strings, self.options = loaded, tuple(stop_strings), _sampling_options(options)
        self._warn: Callable[[str], Any] | None = warn
        self._eos = _eos_token_ids(loaded.model.generation_config, loaded.tokenizer)
        named = (loaded.model.generation_config.pad_token_id, loaded.tokenizer.pad_token_id, *self._eos, 0)
        self._padding = next(number for number in named if number is not None)  # the mask hides it
        if assistant is not None:
            self.options["assistant_model"] = assistant.model
            if assistant.model.config.get_text_config().vocab_size != loaded.model.config.get_text_config().vocab_size:
                self.options |= {"tokenizer": loaded.tokenizer, "assistant_tokenizer": assistant.tokenizer}

    def encode(
        self, prompt: str | Sequence[int], what: str = "The prompt", *, add_special_tokens: bool = True
    ) -> list[int]:
        """
        Token ids of a prompt, a text or ids; `what` names it in errors. Texts from a chat template already have special
        tokens.

        Raises:
            ValueError: if it is empty, or an id has no embedding and `oov_policy` does not clamp it.
        """
        if not prompt or (isinstance(prompt, str) and prompt.isspace()):
            raise ValueError(f"{what} must hold text to continue, got {prompt!r}.")
        if isinstance(prompt, str):
            prompt = encode_context(self.loaded.tokenizer, prompt, add_special_tokens=add_special_tokens)
        ids, config = [int(number) for number in prompt], self.loaded.model.config
        vocab_size = config.get_text_config().vocab_size  # of an embedding that someone has wrapped or replaced
        rows = getattr(self.loaded.model.get_input_embeddings(), "num_embeddings", vocab_size)
        if ids and max(ids) >= rows and getattr(config, "oov_policy", None) != "clamp":
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
        if (self.options.get("num_beams") or self.loaded.model.generation_config.num_beams or 1) > 1:
            (answer,) = self.generate([ids])
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
        """Continue several prompts at once, texts or token ids, padded on the left."""
        return self._generate([self.encode(prompt) for prompt in prompts], threading.Event())

    def _generate(self, prompts: Sequence[Sequence[int]], closed: threading.Event, **options: Any) -> list[Generated]:
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        length = max(map(len, prompts))
        ids = torch.tensor([[self._padding] * (length - len(row)) + list(row) for row in prompts])  # (batch, length)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in prompts])
        limit = _new_tokens(self.options, model.generation_config, model.config, length)
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if self._warn is not None and context is not None and length + (limit or 0) > context:
            self._warn(f"{length} tokens and {limit or 0} new ones exceed the {context} that the model was made for.")
            self._warn = None
        # Tokens have at least one byte; the first ones of a decoded slice may give other characters than in their text.
        seen = max((len(string.encode()) for string in self.stop_strings), default=0) + 4

        def is_done(sequences: Tensor, scores: Any, **_: Any) -> Tensor:
            ends = tokenizer.batch_decode(sequences[:, length:][:, -seen:]) if self.stop_strings else sequences
            done = [closed.is_set() or any(string in end for string in self.stop_strings) for end in ends]
            return torch.tensor(done, device=sequences.device)

        given = {"pad_token_id": self._padding, "eos_token_id": self._eos or None, "stopping_criteria": [is_done]}
        given |= self.options | options | ({} if limit is None else {"max_new_tokens": limit})
        try:
            sequences = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **given)
        except ValueError as error:
            if not str(error).startswith("Group size"):
                raise
            size = _fitting_group_size(model, given.get("cache_config") or model.generation_config.cache_config or {})
            sentence = f"{error}; q_group_size={size} in cache_config of generation_config.json fits every text."
            raise ValueError(sentence) from error
        answers = []
        for prompt, row in zip(prompts, sequences[:, length:].tolist()):
            ends = [index + 1 for index, token in enumerate(row) if token in self._eos]
            new = row[: ends[0]] if ends else row  # padding of the batch follows
            text = "".join(text_before(self.stop_strings, [tokenizer.decode(new, skip_special_tokens=True)]))
            answers.append(Generated(new, text, [*prompt, *new]))
        return answers


# Fields of generation_config.json that are passed to vLLM, or that change no text.
_READ_BY_VLLM = {"bos_token_id", "eos_token_id", "pad_token_id", "max_new_tokens", "max_length", "do_sample"}
_READ_BY_VLLM |= {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "use_cache", "cache_implementation"}
_READ_BY_VLLM |= {"transformers_version", "_from_model_config"}
_NEUTRAL = (None, False, 1, [], {})  # values of other fields without effect, such as one beam; False equals 0


class VLLMGenerator:
    """
    Generates texts with vLLM and options of generate().

    Args:
        model: From [`dcformer.loading.find_model`].
        stop_strings (defaults to none), options: As of [`TextGenerator`], without beams and drafts.
        dtype (*optional*): Such as `"bfloat16"`; `None`: that in which the weights are stored.
        tokenizer (*optional*): Bundled model, folder or name on the Hub, instead of the model's.

    Raises:
        ImportError: without vLLM.
        ValueError: if generation_config.json has an option that is not passed to vLLM.
    """

    def __init__(
        self,
        model: FoundModel,
        *,
        stop_strings: Sequence[str] = (),
        dtype: str | None = None,
        tokenizer: str | None = None,
        **options: Any,
    ):
        # On a CPU the cache would take nine tenths of the memory; this is in GiB.
        settings = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_LOGGING_LEVEL": "WARNING"}
        self._vllm: Any = import_vllm("--engine vllm", **settings)
        self.model, self.stop_strings, self.options = model, tuple(stop_strings), _sampling_options(options)
        try:
            self._config = GenerationConfig.from_pretrained(model.path, revision=model.revision)
        except OSError:  # a model without the file
            self._config = GenerationConfig.from_model_config(model.config)
        for name, value in self._config.to_diff_dict().items():
            if name not in _READ_BY_VLLM and value not in _NEUTRAL:
                raise ValueError(
                    f"generation_config.json of {model.name!r} has {name}={value!r}, which --engine vllm ignores; "
                    "remove it there, or use --engine transformers."
                )
        stored = model.config.get_text_config().dtype  # by default vLLM rounds float32 weights to 16 bits
        dtype = dtype or ("auto" if stored is None else dtype_name(stored))
        tokenizer = tokenizer and find_folder(tokenizer)
        self._llm = self._vllm.LLM(model.path, dtype=dtype, tokenizer=tokenizer, revision=model.revision)

    def encode(self, prompt: str | Sequence[int], what: str = "The prompt") -> list[int]:
        """Token ids of a prompt; vLLM refuses those without an embedding."""
        return encode_context(self.model.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)

    def generate(self, prompts: Sequence[Sequence[int]], seed: int | None = None) -> list[str]:
        """The texts that continue prompts, which are token ids; `seed` makes sampling repeatable."""
        given = {**self._config.to_dict(), **self.options}
        defaults = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0} if given.get("do_sample") else {}
        values = {"temperature": 0.0, "repetition_penalty": 1.0, **defaults}
        values |= {name: given[name] for name in ("repetition_penalty", *defaults) if given.get(name) is not None}
        limits = [_new_tokens(self.options, self._config, self.model.config, len(ids)) for ids in prompts]
        params = [
            self._vllm.SamplingParams(
                **values,
                max_tokens=self._config.max_length - len(ids) if limit is None else limit,
                seed=None if seed is None else seed + index,
                stop=list(self.stop_strings),
                stop_token_ids=_eos_token_ids(self._config, self.model.tokenizer),
            )
            for index, (ids, limit) in enumerate(zip(prompts, limits))
        ]
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        # The text of vLLM lacks the token that ended it, which generate() keeps.
        rows = [output.outputs[0].token_ids for output in outputs]
        texts = self.model.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return ["".join(text_before(self.stop_strings, [text])) for text in texts]


def _sampling_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options that are not None, with `do_sample` if they imply it."""
    sampling = ("temperature", "top_k", "top_p", "min_p")
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


def _eos_token_ids(config: Any, tokenizer: Any) -> list[int]:
    """Ids that end a text: those of generation_config.json, else the tokenizer's."""
    ids = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _new_tokens(options: dict[str, Any], config: Any, model_config: Any, length: int) -> int | None:
    """Maximum of new tokens; `None` if generation_config.json limits the length including the prompt."""
    given = options.get("max_new_tokens") or config.max_new_tokens
    if given is not None or config.max_length is not None:
        return given
    left = getattr(model_config.get_text_config(), "max_position_embeddings", 0) - length
    return min(_NEW_TOKENS, left) if left > 0 else _NEW_TOKENS


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
