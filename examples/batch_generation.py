"""Answer thousands of prompts from a JSONL file, by vLLM's engine or by Transformers in padded batches.

python examples/batch_generation.py dcformer-tiny prompts.jsonl answers.jsonl --max-new-tokens 64

Every line of the input is {"prompt": "..."} or {"prompt_token_ids": [...]}, with an "id" and other fields if wanted.
Every line of the output is that of the input with "generated_text" and "finish_reason" ("stop" or "length"), in the
same order; an answer to token ids has "generated_token_ids" too. A run that was cut goes on where it stopped when the
same command is run again: until all answers are there they are in OUTPUT.unfinished, and OUTPUT.settings.json says what
they were made from.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dcformer.cli.options import DoSample, Dtype, MinP, RepetitionPenalty, Revision, Temperature, TopK, TopP
from dcformer.cli.running import running_command
from dcformer.common.files import write_atomically
from dcformer.common.locks import LockHeldError, file_lock
from dcformer.common.quiet import quiet_libraries
from dcformer.common.quoting import quoted
from dcformer.common.terminal import progress_bar


if TYPE_CHECKING:
    from transformers import GenerationConfig

TEXT, TOKENS = "prompt", "prompt_token_ids"
# Options of vLLM that say how fast answers come, not which: they may change when a run goes on.
_OF_SPEED = (
    "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs",
    "tensor_parallel_size",
)  # fmt: skip
app = typer.Typer(add_completion=False)

_CHANGED = {
    "input": "from other prompts than the file holds now",
    "files_of_the_model": "by other files of the model than are there now",
}
_IN_FLIGHT = 1024  # requests that vLLM holds at once
_SECONDS_BETWEEN_LINES = 30.0  # of progress, where stderr is no terminal
_OF_GENERATE = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_WEIGHTS = ("*.json", "*.safetensors", "*.bin")


@dataclass(frozen=True)
class Job:
    """What all prompts are answered by: the model, its tokenizer and what ends an answer."""

    model: str
    tokenizer: Any
    generation: GenerationConfig
    options: dict[str, Any]
    stop: tuple[str, ...]
    new_tokens: int
    eos: tuple[int, ...]

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn, not the likeliest taken."""
        return bool(self.options.get("do_sample", self.generation.do_sample))

    def answer(self, record: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        """What is written for new token ids."""
        from dcformer.generation.stopping import text_before

        whole = self.tokenizer.decode(ids, skip_special_tokens=True)
        text = text_before(self.stop, whole)
        is_cut = len(ids) >= self.new_tokens and ids[-1] not in self.eos and text == whole
        answer = {"generated_text": text, "finish_reason": "length" if is_cut else "stop"}
        return answer | ({"generated_token_ids": ids} if TOKENS in record else {})


def read_records(content: bytes, name: str) -> list[dict[str, Any]]:
    """The lines of the input; raises ValueError with the number of the first that is no prompt."""
    records: list[dict[str, Any]] = []
    lines_of_ids: dict[str, int] = {}
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, start=1):
        where = f"Line {number} of {name!r}"
        try:
            record = json.loads(line.decode())
        except ValueError as error:
            raise ValueError(f"{where} is no JSON ({error}); correct it or take it out.") from error
        if not isinstance(record, dict) or (TEXT in record) == (TOKENS in record):
            raise ValueError(f'{where} needs one of "prompt" and "prompt_token_ids", and is {quoted(record)}.')
        prompt = record.get(TEXT, record.get(TOKENS))
        if TEXT in record and not (isinstance(prompt, str) and prompt.strip()):
            raise ValueError(f'{where} has {quoted(prompt)} as its "prompt"; write text there.')
        if TOKENS in record and not (
            isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt)
        ):
            raise ValueError(f'{where} has {quoted(prompt)} as its "prompt_token_ids"; write a list of token ids.')
        if "id" in record:
            first = lines_of_ids.setdefault(json.dumps(record["id"], sort_keys=True), number)
            if first != number:
                raise ValueError(f"{where} has the same id as line {first}, {quoted(record['id'])}; give each its own.")
        records.append(record)
    if not records:
        raise ValueError(f"{name!r} is empty; write a prompt on each line.")
    return records


def encode(records: Sequence[dict[str, Any]], tokenizer: Any, config: Any, name: str) -> list[list[int]]:
    """Token ids of every prompt; raises ValueError with the number of a line that the model cannot read."""
    rows, clamps = config.get_text_config().vocab_size, getattr(config, "oov_policy", None) == "clamp"
    prompts = []
    for number, record in enumerate(records, start=1):
        ids = record[TOKENS] if TOKENS in record else tokenizer(record[TEXT])["input_ids"]
        if not ids:
            raise ValueError(f"The tokenizer makes no token of line {number} of {name!r}; write other text there.")
        if max(ids) >= rows and not clamps:
            raise ValueError(
                f"Line {number} of {name!r} has token id {max(ids)}, and the model has embeddings for ids below {rows}."
            )
        prompts.append(ids)
    return prompts


def number_of_new_tokens(given: int | None, own: int | None, prompts: Sequence[list[int]], config: Any) -> int:
    """As given, else what generation_config.json says, else 256 or what the longest prompt leaves of the context."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    length = len(prompts[longest])
    wanted = given or own
    if context is None:
        return wanted or 256
    if length + (wanted or 1) > context:
        raise ValueError(
            f"Line {longest + 1} has a prompt of {length} tokens, which leaves {max(context - length, 0)} of the "
            f"{context} that the model was made for, and {wanted or 1} new ones are asked for; shorten the prompt or "
            "give a smaller --max-new-tokens."
        )
    return wanted or min(256, context - length)


class Answers:
    """
    The file that answers are added to, one line at a time, until all are there.

    Args:
        output: Where they are in the end, in the order of the prompts.
        settings: What they are made from.

    Raises:
        ValueError: if there are answers already which were made from something else.
    """

    def __init__(self, output: Path, settings: dict[str, Any]):
        self.output, self.partial = output, output.with_name(f"{output.name}.unfinished")
        self.description = output.with_name(f"{output.name}.settings.json")
        self.settings = settings
        self.done: dict[int, dict[str, Any]] = {}
        self.lost_line = False
        self._check_settings()
        self.is_finished = output.exists()
        if self.is_finished:
            self.partial.unlink(missing_ok=True)  # all of it is in the other
        elif self.partial.exists():
            self._read()

    def _check_settings(self) -> None:
        there = [path for path in (self.output, self.partial) if path.exists()]
        if not self.description.exists():
            if there:
                raise ValueError(
                    f"{str(there[0])!r} is there, without {self.description.name!r} that says what it was made from; "
                    "move it away, or give another file for the answers."
                )
            return
        begun = json.loads(self.description.read_text(encoding="utf-8"))
        changed = [name for name in {**begun, **self.settings} if begun.get(name) != self.settings.get(name)]
        if there and changed:
            name = changed[0]
            what = _CHANGED.get(name) or (
                f"with {name} {quoted(begun.get(name))}, which is {quoted(self.settings.get(name))} now"
            )
            raise ValueError(
                f"The answers in {str(there[0])!r} were made {what}; make it as it was, or give another file for the "
                "answers."
            )

    def _read(self) -> None:
        content = self.partial.read_bytes()
        end = content.rfind(b"\n") + 1
        self.lost_line = end < len(content)
        for number, line in enumerate(content[:end].splitlines(), start=1):
            try:
                entry = json.loads(line)
                self.done[entry["line"]] = entry["answer"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"Line {number} of {str(self.partial)!r} is damaged; take it out, and its prompt is answered again."
                ) from error
        if self.lost_line:
            os.truncate(self.partial, end)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[int, dict[str, Any]], None]]:
        """Yields what adds the answer to the prompt on a line; each is on its way to the disk when it returns."""
        write_atomically(self.description, json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n")
        with self.partial.open("ab", buffering=0) as stream:

            def write(line: int, answer: dict[str, Any]) -> None:
                text = json.dumps({"line": line, "answer": answer}, ensure_ascii=False) + "\n"
                if stream.write(text.encode()) != len(text.encode()):
                    raise OSError(f"The disk has no room for {str(self.partial)!r}; free some and start again.")
                self.done[line] = answer

            yield write

    def finish(self, records: Sequence[dict[str, Any]]) -> None:
        """Put all answers in order, with their prompts."""
        lines = (
            json.dumps({**record, **self.done[number]}, ensure_ascii=False) + "\n"
            for number, record in enumerate(records, start=1)
        )
        write_atomically(self.output, "".join(lines))
        self.partial.unlink()


@dataclass(frozen=True)
class Work:
    """Prompts by the numbers of their lines, those that are answered already, and where the others' answers go."""

    records: Sequence[dict[str, Any]]
    prompts: Sequence[list[int]]
    done: set[int]
    write: Callable[[int, dict[str, Any]], None]

    def add(self, job: Job, line: int, ids: list[int]) -> None:
        self.write(line, job.answer(self.records[line - 1], ids))


def answer_by_vllm(job: Job, work: Work, seed: int | None, options: dict[str, Any]) -> None:
    """Answer all prompts, each written as soon as it is finished."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    length = max(map(len, work.prompts)) + job.new_tokens
    options = {"max_model_len": length, "use_tqdm_on_load": False, "skip_tokenizer_init": not job.stop, **options}
    engine = LLM(job.model, **options).llm_engine
    values = _sampling_by_vllm(job)
    waiting = deque(line for line in range(1, len(work.records) + 1) if line not in work.done)
    in_flight = 0
    while waiting or in_flight:
        while waiting and in_flight < _IN_FLIGHT:
            line = waiting.popleft()
            params = SamplingParams(**values, seed=None if seed is None else seed + line)
            engine.add_request(str(line), {"prompt_token_ids": work.prompts[line - 1]}, params)
            in_flight += 1
        for output in engine.step():
            if output.finished:
                in_flight -= 1
                work.add(job, int(output.request_id), list(output.outputs[0].token_ids))


def _sampling_by_vllm(job: Job) -> dict[str, Any]:
    """Options by which vLLM draws tokens and ends answers as generate() does."""
    from vllm.sampling_params import RequestOutputKind

    own = {**job.generation.to_dict(), **job.options}
    defaults = {"repetition_penalty": 1.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    values = {name: default if own.get(name) is None else own[name] for name, default in defaults.items()}
    if not job.draws:
        values = {"repetition_penalty": values["repetition_penalty"], "temperature": 0.0}
    return values | {
        "max_tokens": job.new_tokens,
        "stop": list(job.stop) or None,
        "stop_token_ids": list(job.eos),
        "ignore_eos": True,  # those that end an answer are named
        "detokenize": bool(job.stop),
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }


def answer_by_transformers(job: Job, work: Work, seed: int | None, options: dict[str, Any]) -> None:
    """Answer all prompts in batches of similar length, padded on the left, the longest first."""
    from transformers import set_seed

    from dcformer.generation import TextGenerator, load_model

    size = options.pop("batch_size")
    generator = TextGenerator(
        load_model(job.model, **options), stop_strings=job.stop, **{**job.options, "max_new_tokens": job.new_tokens}
    )
    lines = sorted(range(1, len(work.prompts) + 1), key=lambda line: -len(work.prompts[line - 1]))
    for start in range(0, len(lines), size):
        batch = lines[start : start + size]
        missing = [line for line in batch if line not in work.done]
        if not missing:
            continue
        # What a row draws depends on the rows beside it.
        batch = batch if job.draws else missing
        if seed is not None:
            set_seed(seed + start)
        for line, found in zip(batch, generator.generate_batch([work.prompts[line - 1] for line in batch])):
            if line in missing:
                work.add(job, line, found.ids)


def folder_state(model: str) -> str | None:
    """A digest that changes with the files of a model's folder; None for a name on the Hub."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(states).encode()).hexdigest()


def engine_options(pairs: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; values are JSON, or else text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, is_pair, value = pair.partition("=")
        if not (name.isidentifier() and is_pair):
            raise ValueError(f"--engine-option {pair!r} is no NAME=VALUE, such as gpu_memory_utilization=0.5.")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def choose_engine(engine: str, given: dict[str, Any]) -> str:
    """The engine that runs; raises ValueError for options of the other one."""
    is_there = importlib.util.find_spec("vllm") is not None
    if engine == "vllm" and not is_there:
        raise ValueError("vLLM is not installed; pip install 'dcformer[vllm]', or give --engine transformers.")
    chosen = engine if engine != "auto" else "vllm" if is_there else "transformers"
    foreign = ("engine_option",) if chosen == "transformers" else ("device", "batch_size")
    for name in foreign:
        if given[name]:
            other = "vllm" if chosen == "transformers" else "transformers"
            raise ValueError(f"--{name.replace('_', '-')} is for --engine {other}, and this is {chosen}; leave it out.")
    return chosen


@app.command()
def main(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A bundled model such as dcformer-tiny, a folder or a name on the Hub."),
    ],
    prompts: Annotated[Path, typer.Argument(metavar="INPUT", help="The JSONL file with a prompt on each line.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The JSONL file to write the answers to.")],
    engine: Annotated[
        Literal["auto", "vllm", "transformers"],
        typer.Option(help="What computes the answers; auto takes vLLM if it is installed."),
    ] = "auto",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="The largest number of tokens of an answer; what the model's generation_config.json says unless "
            "given, else 256, or what the longest prompt leaves of the context."
        ),
    ] = None,
    do_sample: DoSample = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random numbers, so that the same answers are drawn again.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End an answer before this string; may be given several times.")
    ] = None,
    dtype: Dtype = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer folder or Hub name in place of the model's.")
    ] = None,
    revision: Revision = None,
    device: Annotated[
        str | None, typer.Option(help="The device that Transformers runs on; a CUDA GPU if there is one unless given.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Prompts that Transformers answers at once; 8 unless given.")
    ] = None,
    engine_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An option of vLLM's LLM, such as gpu_memory_utilization=0.5; may be given several times.",
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Answer all prompts of a JSONL file; run the same command again to go on where it stopped."""
    given = dict(locals())
    interrupted = f"Interrupted; the answers so far are in {output}.unfinished. Run the same command to go on."
    with running_command(debug, interrupted), quiet_libraries():
        chosen = choose_engine(engine, given)
        content = read_input(prompts, output)
        with _only_writer(output):
            run(given, chosen, content)


def read_input(prompts: Path, output: Path) -> bytes:
    if not prompts.is_file():
        raise FileNotFoundError(f"There is no file of prompts {str(prompts)!r}; check the path.")
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"{str(output)!r} cannot be written; give a file in a folder that exists.")
    if output.exists() and output.samefile(prompts):
        raise ValueError(f"{str(output)!r} holds the prompts; give another file for the answers.")
    return prompts.read_bytes()


@contextlib.contextmanager
def _only_writer(output: Path) -> Iterator[None]:
    lock = file_lock(output.with_name(f"{output.name}.lock"), removes=True)
    try:
        lock.__enter__()
    except LockHeldError:
        raise ValueError(f"Another process writes {str(output)!r}; wait for it, or give another file.") from None
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def run(given: dict[str, Any], engine: str, content: bytes) -> None:
    """Answer what is not answered yet, and put all in order."""
    from dcformer.generation.options import check_options

    records = read_records(content, str(given["prompts"]))
    options = check_options({name: given[name] for name in _OF_GENERATE})
    values = engine_options(given["engine_option"] or ())
    settings = {
        "input": hashlib.sha256(content).hexdigest(),
        **{name: given[name] for name in ("model", "tokenizer", "revision", "dtype", "seed", "stop")},
        **{name: given[name] for name in _OF_GENERATE},
        "engine": engine,
        "engine_options": {name: value for name, value in values.items() if name not in _OF_SPEED},
    }
    job, ids, settings["files_of_the_model"] = prepare(given, records, options)
    if job.draws and engine == "transformers":
        settings["batch_size"] = given["batch_size"]
    answers = Answers(given["output"], settings)
    if answers.lost_line:
        typer.echo(f"The last line of {answers.partial} was cut; its prompt is answered again.", err=True)
    if answers.is_finished:
        typer.echo(f"All {len(records)} answers are in {given['output']} already.", err=True)
        return
    loading = {name: given[name] for name in ("tokenizer", "revision", "dtype") if given[name] is not None}
    if engine == "vllm":
        answer = answer_by_vllm
        loading |= values
    else:
        answer = answer_by_transformers
        loading |= {"device": given["device"], "batch_size": given["batch_size"] or 8}
    begin, before = time.monotonic(), len(answers.done)
    if before:
        typer.echo(f"{before} of {len(records)} answers are there; going on with the others.", err=True)
    if before < len(records):
        with answers.writing() as write, _progress(len(records), before) as count:

            def write_and_count(line: int, found: dict[str, Any]) -> None:
                write(line, found)
                count()

            answer(job, Work(records, ids, set(answers.done), write_and_count), given["seed"], loading)
    answers.finish(records)
    seconds = time.monotonic() - begin
    typer.echo(f"{len(records) - before} prompts answered in {seconds:.0f} s: {given['output']}", err=True)


def prepare(
    given: dict[str, Any], records: Sequence[dict[str, Any]], options: dict[str, Any]
) -> tuple[Job, list[list[int]], str | None]:
    """What answers are made by, the prompts' token ids, and the state of the model's files; no weights are read."""
    from transformers import GenerationConfig

    from dcformer.eval.provenance import find_model
    from dcformer.pretrained import find_model_folder

    where = os.fspath(find_model_folder(given["model"]))
    found = find_model(where, revision=given["revision"], tokenizer=given["tokenizer"], begins_texts=False)
    try:
        own = GenerationConfig.from_pretrained(where, revision=found.revision, local_files_only=found.local_files_only)
    except OSError:  # a model without the file
        own = GenerationConfig.from_model_config(found.config)
    ends = own.eos_token_id if own.eos_token_id is not None else found.tokenizer.eos_token_id
    ids = encode(records, found.tokenizer, found.config, str(given["prompts"]))
    job = Job(
        model=where,
        tokenizer=found.tokenizer,
        generation=own,
        options=options,
        stop=tuple(given["stop"] or ()),
        new_tokens=number_of_new_tokens(given["max_new_tokens"], own.max_new_tokens, ids, found.config),
        eos=() if ends is None else (ends,) if isinstance(ends, int) else tuple(ends),
    )
    return job, ids, folder_state(where)


@contextlib.contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[], None]]:
    """A bar, or a line now and then where stderr is no terminal; yields what counts an answer."""
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as (bar, console):
        row = bar.add_task("Answering", total=total, completed=done)
        said = time.monotonic()

        def count() -> None:
            nonlocal done, said
            done += 1
            bar.update(row, completed=done)
            if console is not None and time.monotonic() - said > _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                console.print(f"{done} of {total} prompts answered")

        yield count


if __name__ == "__main__":
    app()
