"""The engines that `benchmarks.serving` compares, each served in a process of its own by `run_engine`."""

import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria
from transformers.utils import logging as transformers_logging

import dcformer  # noqa: F401  registers the models


class Request(NamedTuple):
    """Ids of a prompt, and how many tokens the answer to it has."""

    prompt: list[int]
    answer: int


class Served(NamedTuple):
    """Seconds after which a request was sent, its first token was there, and the whole answer was."""

    sent: float
    first: float
    done: float


class Turn(NamedTuple):
    """All requests once: when each was served, seconds in all by the clock and of processor time, and model steps."""

    served: list[Served]
    wall: float
    processor: float
    steps: int


class Step(NamedTuple):
    """A token of a greedy text, the second likeliest, and how far their logits lie apart."""

    token: int
    second: int
    margin: float


class Settings(NamedTuple):
    """What an engine is made from: the folder of its model, and what `benchmarks.serving` was asked for."""

    folder: str
    dtype: str
    device: str
    threads: int
    concurrency: int
    length: int
    compile: bool
    cache_bytes: int


class GenerateEngine:
    """`generate()` of Transformers with batches of `rows` requests, padded on the left."""

    def __init__(self, settings: Settings, rows: int):
        self.rows = rows
        self.concurrency = settings.concurrency
        dtype = getattr(torch, settings.dtype)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=dtype)
        self.model.eval().to(settings.device)

    def facts(self) -> dict[str, Any]:
        return {"threads": torch.get_num_threads(), "attention": self.model.config._attn_implementation}

    def greedy(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """Likeliest tokens after each prompt, computed `rows` prompts at a time."""
        requests = [Request(prompt, new_tokens) for prompt in prompts]
        return [answer for start in range(0, len(requests), self.rows) for answer in self._answers(requests, start)[0]]

    def margins(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[Step]]:
        """As `greedy`, one prompt at a time, with what the second likeliest token would have been."""
        texts = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=self.model.device)
            found = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True,
                **_greedy_options(new_tokens),
            )  # fmt: skip
            best = torch.cat(found.logits).float().topk(2)  # (new tokens, 2)
            tokens, seconds = best.indices.T.tolist()
            margins = (best.values[:, 0] - best.values[:, 1]).tolist()
            texts.append([Step(*step) for step in zip(tokens, seconds, margins)])
        return texts

    def serve(self, requests: Sequence[Request]) -> Turn:
        """Batches in the order in which the requests come; a client sends its next when its last is answered."""
        served: list[Served] = []
        steps = 0
        begin, processor = time.perf_counter(), time.process_time()
        for start in range(0, len(requests), self.rows):
            answers, first, taken = self._answers(requests, start)
            done = time.perf_counter() - begin
            steps += taken
            for number in range(start, start + len(answers)):
                # With as many clients as `concurrency`, this one waited for the answer before the others' turns.
                sent = served[number - self.concurrency].done if number >= self.concurrency else 0.0
                served.append(Served(sent, first - begin, done))
        return Turn(served, time.perf_counter() - begin, time.process_time() - processor, steps)

    def _answers(self, requests: Sequence[Request], start: int) -> tuple[list[list[int]], float, int]:
        """Ids of one batch, when its first tokens were there, and the steps that it took."""
        batch = requests[start : start + self.rows]
        length = max(len(request.prompt) for request in batch)
        padding = [length - len(request.prompt) for request in batch]
        ids = torch.tensor([[0] * missing + request.prompt for missing, request in zip(padding, batch)])
        mask = torch.tensor([[0] * missing + [1] * (length - missing) for missing in padding])  # (rows, length)
        ends = _AnswerEnds([request.answer for request in batch], length)
        out = self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            stopping_criteria=[ends],
            **_greedy_options(max(request.answer for request in batch)),
        )
        answers = [row[: request.answer] for row, request in zip(out[:, length:].tolist(), batch)]
        return answers, ends.first, out.shape[1] - length


def _greedy_options(new_tokens: int) -> dict[str, Any]:
    return {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0}


class _AnswerEnds(StoppingCriteria):
    """Ends each row after its own number of tokens, and takes the time of the first."""

    def __init__(self, answers: list[int], prompt_length: int):
        self.answers = torch.tensor(answers)
        self.prompt_length = prompt_length
        self.first = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.first == 0.0:
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            self.first = time.perf_counter()
        return (input_ids.shape[1] - self.prompt_length >= self.answers).to(input_ids.device)


class VLLMEngine:
    """vLLM's engine, in this process, with at most `concurrency` sequences at once and no prefix caching."""

    def __init__(self, settings: Settings):
        from vllm import LLM
        from vllm.platforms import current_platform

        place = settings.device.partition(":")[0]
        if current_platform.device_type != place:
            raise ValueError(f"This build of vLLM runs on {current_platform.device_type}, not on {place}.")
        self.concurrency = settings.concurrency
        self.llm = LLM(
            settings.folder,
            skip_tokenizer_init=True,
            dtype=settings.dtype,
            max_model_len=settings.length,
            max_num_seqs=settings.concurrency,
            # Turns repeat the prompts.
            enable_prefix_caching=False,
            enforce_eager=not settings.compile,
            kv_cache_memory_bytes=settings.cache_bytes,
            use_tqdm_on_load=False,
        )

    def facts(self) -> dict[str, Any]:
        """Threads, and what vLLM itself says a token takes in the cache."""
        import vllm

        groups = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        per_layer = {
            type(group.kv_cache_spec).__name__: group.kv_cache_spec.page_size_bytes // group.kv_cache_spec.block_size
            for group in groups
        }
        return {"threads": torch.get_num_threads(), "vllm": vllm.__version__, "bytes per token and layer": per_layer}

    def greedy(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """Likeliest tokens after each prompt, all prompts at once."""
        tokens: dict[int, list[int]] = {}
        self._run([Request(prompt, new_tokens) for prompt in prompts], tokens)
        return [tokens[number] for number in range(len(prompts))]

    def serve(self, requests: Sequence[Request]) -> Turn:
        """`concurrency` clients, each of which sends its next request when its last is answered."""
        return self._run(requests, {})

    def _run(self, requests: Sequence[Request], tokens: dict[int, list[int]]) -> Turn:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        waiting = deque(range(len(requests)))
        sent: dict[int, float] = {}
        first: dict[int, float] = {}
        done: dict[int, float] = {}
        steps = 0
        begin, processor = time.perf_counter(), time.process_time()
        while len(done) < len(requests):
            while waiting and len(sent) - len(done) < self.concurrency:
                number = waiting.popleft()
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=requests[number].answer,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                )
                sent[number] = time.perf_counter() - begin
                engine.add_request(str(number), {"prompt_token_ids": requests[number].prompt}, params)
            outputs = engine.step()
            steps += 1
            now = time.perf_counter() - begin
            for output in outputs:
                number = int(output.request_id)
                tokens.setdefault(number, []).extend(output.outputs[0].token_ids)
                first.setdefault(number, now)
                if output.finished:
                    done[number] = now
        for number, request in enumerate(requests):
            if len(tokens[number]) != request.answer:
                raise RuntimeError(f"Request {number} has {len(tokens[number])} tokens, not {request.answer}.")
        served = [Served(sent[number], first[number], done[number]) for number in range(len(requests))]
        return Turn(served, time.perf_counter() - begin, time.process_time() - processor, steps)


def run_engine(kind: str, settings: Settings, connection: Connection) -> None:
    """
    Make an engine and call its methods as they are asked for, until the other end is closed.

    Args:
        kind: "vllm", "one by one" or "padded batches".
        connection: Sends names of methods with their arguments, and receives (whether it worked, result or message).
    """
    torch.set_num_threads(settings.threads)
    transformers_logging.disable_progress_bar()
    try:
        if kind == "vllm":
            engine: Any = VLLMEngine(settings)
        else:
            engine = GenerateEngine(settings, settings.concurrency if kind == "padded batches" else 1)
        connection.send((True, engine.facts()))
        while True:
            method, *arguments = connection.recv()
            connection.send((True, getattr(engine, method)(*arguments)))
    except EOFError:
        pass
    except Exception as error:
        connection.send((False, f"{type(error).__name__}: {error}"))
        raise
