"""Text generation by itself: stop strings, streams and padded batches."""

import contextlib
import copy
import json
import math
import os
import re
import threading
from contextvars import ContextVar

import pytest
from tiny_models import tiny_model
from tokenizers import processors
from transformers import GenerationConfig

from dcformer.common.contexts import encode_context
from dcformer.generation import TextGenerator, read_prompts, write_answers
from dcformer.generation.text_generator import text_before
from dcformer.head_tasks import build_tokenizer
from dcformer.loading import LoadedModel


def finish(pieces):
    """The pieces of a stream, and its result."""
    texts = []
    while True:
        try:
            texts.append(next(pieces))
        except StopIteration as end:
            return texts, end.value


@pytest.fixture(scope="module")
def loaded():
    """A model that never ends a text; its window is 6, so that texts leave it."""
    tokenizer = build_tokenizer(64)
    tokenizer.eos_token = tokenizer.pad_token = None
    return LoadedModel("tiny", tiny_model(vocab_size=len(tokenizer)), tokenizer)


@pytest.mark.parametrize("size", [1, 2, 5, 20])
@pytest.mark.parametrize("strings", [(), ("c",), ("cd", "b"), ("cd", "abx"), ("d ab",), ("x",)], ids=repr)
def test_pieces_end_before_the_first_stop_string_wherever_they_are_cut(size, strings):
    text = "ab cd abab cd"
    cut = [text[start : start + size] for start in range(0, len(text), size)]
    pieces = list(text_before(strings, cut))
    assert strings or pieces == cut  # nothing is held back for no string
    ends = [text.index(string) for string in strings if string in text]
    assert "".join(pieces) == text[: min(ends, default=len(text))] and all(pieces)


def test_generation_ends_with_a_stop_string_of_several_words(loaded):
    ids = TextGenerator(loaded).encode("Ruth likes Paris")
    (whole,) = TextGenerator(loaded, max_new_tokens=30).generate([ids])
    words = whole.text.split()
    stop = f"{words[3]} {words[4]}"
    pieces, answer = finish(TextGenerator(loaded, max_new_tokens=30, stop_strings=[stop, "nowhere"]).stream(ids))
    assert answer.ids == whole.ids[: len(answer.ids)] and len(answer.ids) < 12
    assert answer.text == whole.text[: whole.text.index(stop)] == "".join(pieces) and len(pieces) > 2
    assert answer.sequence == [*ids, *answer.ids]


BATCHES = {
    "greedy": {"max_new_tokens": 6},
    "beams": {"max_new_tokens": 6, "num_beams": 2},
    "limit with the prompt": {"max_length": 12, "eos_token_id": 2},
    "limit of beams": {"max_length": 12, "num_beams": 3},
    "drafts": {"max_new_tokens": 6, "prompt_lookup_num_tokens": 2},
    "penalty": {"max_new_tokens": 12, "repetition_penalty": 3.0, "sequence_bias": [[[1], 8.0]]},
    "scores": {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True, "output_attentions": True},
    "a draft's model": {"max_new_tokens": 6, "is_assistant": True},
    "the context": {},
}


@pytest.mark.parametrize(
    ("options", "place"),
    [(options, "argument") for options in BATCHES.values()]
    + [(BATCHES[name], place) for name in ("limit of beams", "scores") for place in ("configuration", "object")],
)
def test_a_padded_batch_writes_what_single_prompts_do(loaded, options, place, monkeypatch):
    texts = ["Paris " * 50, "Paris", "Who likes Mumbai, Ruth has Paris"][1 if "max_length" in options else 0 :]
    prompts = [TextGenerator(loaded).encode(text)[1:] for text in texts]  # without the token 0 that begins texts
    if place == "configuration":
        monkeypatch.setattr(loaded.model, "generation_config", GenerationConfig(**options))
    given = {"argument": options, "configuration": {}, "object": {"generation_config": GenerationConfig(**options)}}
    generator = TextGenerator(loaded, **given[place])
    answers = generator.generate(prompts)
    streamed = [finish(generator.stream(prompt)) for prompt in prompts]
    assert answers == [answer for _, answer in streamed]
    assert ["".join(pieces) for pieces, _ in streamed] == [answer.text for answer in answers]
    for prompt, answer in zip(prompts, answers):
        left = options.get("max_length", 64) - len(prompt)
        assert len(answer.ids) == options.get("max_new_tokens", left)


def test_stop_strings_and_ends_are_those_of_the_configuration_unless_others_are_given(loaded, monkeypatch):
    (whole,) = TextGenerator(loaded, max_new_tokens=9).generate(["Ruth likes Paris"])
    words = whole.text.split()
    monkeypatch.setattr(loaded.model, "generation_config", copy.deepcopy(loaded.model.generation_config))
    for strings in (words[4], [words[5], words[4]]):
        loaded.model.generation_config.stop_strings = strings
        (ended,) = TextGenerator(loaded, max_new_tokens=9).generate(["Ruth likes Paris"])
        assert ended.text == whole.text[: whole.text.index(words[4])]
    with pytest.raises(ValueError, match="stop_strings holds an empty string"):
        TextGenerator(loaded, stop_strings=["", "x"])
    (other,) = TextGenerator(loaded, max_new_tokens=9, stop_strings=[words[6]]).generate(["Ruth likes Paris"])
    assert other.text == whole.text[: whole.text.index(words[6])]
    (ended,) = TextGenerator(loaded, max_new_tokens=9, eos_token_id=whole.ids[3]).generate(["Ruth likes Paris"])
    assert ended.ids == whole.ids[: whole.ids.index(whole.ids[3]) + 1]
    once = TextGenerator(loaded, max_new_tokens=9, stop_strings=["x"], stopping_criteria=[lambda ids, _: ids[:, 0] > 0])
    assert len(once.generate([[5, 6]])[0].ids) == 1


@pytest.mark.parametrize("field, value", [("num_return_sequences", 2), ("token_healing", True)])
def test_what_a_prompt_with_one_answer_cannot_have_is_refused_by_name(loaded, field, value, monkeypatch):
    with pytest.raises(ValueError, match=f"^{field}={value}, an option or in .* 'tiny'"):
        TextGenerator(loaded, do_sample=True, **{field: value})
    monkeypatch.setattr(loaded.model, "generation_config", GenerationConfig(do_sample=True, **{field: value}))
    with pytest.raises(ValueError, match=f"^{field}={value}"):
        TextGenerator(loaded)
    with pytest.raises(ValueError, match="max_length=4 includes the prompt, which has 4 tokens"):
        TextGenerator(loaded, max_length=4, **{field: value - 1}).generate([[2, 3], [2, 3, 4, 5]])


def test_a_prompt_is_continued_although_its_tokenizer_ends_texts(loaded):
    tokenizer = build_tokenizer(64)
    tokenizer.backend_tokenizer.post_processor = processors.RobertaProcessing(("<|padding|>", 1), ("<|endoftext|>", 0))
    assert tokenizer("Paris")["input_ids"] == [*loaded.tokenizer("Paris")["input_ids"], 1]
    assert encode_context(tokenizer, "") == tokenizer("")["input_ids"][:-1] == [0]  # what a text begins with
    ending, plain = (
        TextGenerator(LoadedModel("tiny", loaded.model, used), max_new_tokens=6)
        for used in (tokenizer, build_tokenizer(64))
    )
    prompts = ["Paris", "Who likes Mumbai, Ruth has Paris"]
    assert ending.generate(prompts) == plain.generate(prompts)
    assert finish(ending.stream(prompts[0])) == finish(plain.stream(prompts[0]))
    assert ending.encode([5, 1]) == [5, 1]


DAMAGES = {
    "an answer": lambda lines: [*lines[:2], lines[2].replace(b"text 1", b"text 7"), *lines[3:]],
    "the settings": lambda lines: [lines[0].replace(b"seed", b"sead"), *lines[1:]],
    "a hole": lambda lines: [*lines[:2], *lines[3:]],
    "a line twice": lambda lines: [*lines[:2], *lines[1:]],
    "none": lambda lines: lines,
    "a cut end": lambda lines: [*lines[:-1], lines[-1][:-5]],
    "nothing left": lambda lines: [],
    "no answers at all": lambda lines: [b"[1, 2]\n", b"\x00\xff\n"],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_answers_are_made_again(damage, tmp_path, caplog):
    records = [{"prompt": f"prompt {number}"} for number in range(6)]
    output, unfinished, asked = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.unfinished", []

    def answer(start, end):
        asked.append(start)
        assert unfinished.read_bytes().count(b"\n") == 1 + start  # no answer waits in a buffer
        if asked == [0, 2, 4]:
            raise KeyboardInterrupt
        return [f"text {number}" for number in range(start, end)]

    options = {"batch_size": 2, "settings": {"seed": 3}}
    with pytest.raises(KeyboardInterrupt):
        write_answers(records, answer, output, **options)
    lines = unfinished.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    unfinished.write_bytes(b"".join(DAMAGES[damage](lines)))
    write_answers(records, answer, output, **options)
    expected = [{**record, "generated_text": f"text {number}"} for number, record in enumerate(records)]
    assert [json.loads(line) for line in output.read_text().splitlines()] == expected
    assert asked[3:] == {"none": [4], "a cut end": [2, 4]}.get(damage, [0, 2, 4])
    warns = damage not in ("none", "a cut end", "nothing left")  # a killed run leaves the last two as well
    assert [str(unfinished) in record.getMessage() for record in caplog.records] == [True] * warns


def test_answers_go_into_a_pipe_batch_by_batch_and_to_where_a_link_points(tmp_path):
    records, pipe, link = [{"prompt": str(number)} for number in range(5)], tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    reader, seen = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), [b""]
    link.symlink_to("elsewhere/answers.jsonl")

    def answer(start, end):
        if output == pipe:
            with contextlib.suppress(BlockingIOError):
                seen.append(os.read(reader, 4096))
        return [f"text {number}" for number in range(start, end)]

    for output in (pipe, link):
        write_answers(records, answer, output, batch_size=2, settings={})
    written = b"".join([*seen, os.read(reader, 4096)])
    os.close(reader)
    assert [piece.count(b"\n") for piece in seen] == [0, 2, 2] and pipe.is_fifo() and link.is_symlink()
    assert [json.loads(line)["generated_text"] for line in written.splitlines()] == [f"text {n}" for n in range(5)]
    assert (tmp_path / "elsewhere" / "answers.jsonl").read_bytes() == written
    assert {path.name for path in tmp_path.rglob("*")} == {"pipe", "link", "elsewhere", "answers.jsonl"}


@pytest.mark.parametrize("ending", ["txt", "JSONL", "ndjson"])
def test_prompts_are_read_whatever_the_line_ends_and_lines_that_are_no_text_named(tmp_path, ending):
    path, texts = tmp_path / f"prompts.{ending}", ["one é", "\u2028two", "three"]
    lines = [(text if ending == "txt" else json.dumps({"prompt": text}, ensure_ascii=False)).encode() for text in texts]
    for end, more in ((b"\n", b"\n"), (b"\r\n", b"\r\n"), (b"\n", b"")):
        path.write_bytes(b"\xef\xbb\xbf" + end.join(lines) + more)
        assert [record["prompt"] for record in read_prompts(path)] == texts
    records = (b'{"prompt": "x", "other": "\\ud800"}', b'{"text": "x"}')
    for bad in (lines[0].replace("é".encode(), b"\xe9"), b"", b"\xff\xfe", *records):
        path.write_bytes(b"\n".join([*lines[:2], bad, lines[2]]))
        if ending != "txt" or bad not in records:
            with pytest.raises(ValueError, match=f"^Line 3 of {re.escape(repr(str(path)))}"):
                read_prompts(path)


def test_new_tokens_stay_within_the_context_unless_more_are_asked_for(loaded, monkeypatch):
    ids, warnings = TextGenerator(loaded).encode("Paris " * 57), []
    assert len(TextGenerator(loaded, warn=warnings.append).generate([ids])[0].ids) == 64 - 58 and warnings == []
    more = TextGenerator(loaded, warn=warnings.append, max_new_tokens=9)
    assert all(len(answer.ids) == 9 for _ in range(2) for answer in more.generate([ids[:3], ids, ids[:3]]))
    assert len(warnings) == 1 and warnings[0].startswith("58 tokens and 9 new ones")
    monkeypatch.setattr("dcformer.generation.text_generator._NEW_TOKENS", 5)
    assert [len(answer.ids) for answer in TextGenerator(loaded).generate([ids[:3], [*ids, 5, 5]])] == [5, 4]


def test_a_stream_that_is_closed_ends_its_thread(loaded):
    before = threading.active_count()
    pieces = TextGenerator(loaded, max_new_tokens=100_000, warn=lambda _: None).stream("Ruth likes Paris")
    assert isinstance(next(pieces), str)
    pieces.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
def test_weights_that_are_not_finite_write_nothing(loaded, options):
    damaged = copy.deepcopy(loaded)
    damaged.model.model.norm.weight.data[3] = math.nan
    with pytest.raises(ValueError, match="the weights hold NaN"):
        TextGenerator(damaged, **options).generate(["Ruth likes Paris"])


def test_errors_and_warnings_reach_the_reader_of_the_stream(loaded):
    visitor, warned = ContextVar("visitor"), []
    visitor.set("somebody")
    generator = TextGenerator(loaded, max_new_tokens=70, warn=lambda _: warned.append(visitor.get()), temperature=-1.0)
    with pytest.raises(ValueError, match="temperature"):
        next(generator.stream("Ruth"))
    assert warned == ["somebody"]
