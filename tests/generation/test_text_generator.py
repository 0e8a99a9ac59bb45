"""Text generation by itself: stop strings, streams and padded batches."""

import json
import threading
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
from tiny_models import tiny_model
from tokenizers import processors

from dcformer.generation import TextGenerator, VLLMGenerator, write_answers
from dcformer.generation.generator import text_before
from dcformer.head_tasks import build_tokenizer
from dcformer.loading import LoadedModel, load_model


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
@pytest.mark.parametrize("strings", [(), ("c",), ("cd", "abx"), ("d ab",), ("x",)], ids=repr)
def test_pieces_end_before_the_first_stop_string_wherever_they_are_cut(size, strings):
    text = "ab cd abab cd"
    pieces = list(text_before(strings, [text[start : start + size] for start in range(0, len(text), size)]))
    ends = [text.index(string) for string in strings if string in text]
    assert "".join(pieces) == text[: min(ends, default=len(text))] and all(pieces)


def test_a_stream_is_the_text_word_by_word(loaded):
    generator = TextGenerator(loaded, max_new_tokens=12)
    pieces, answer = finish(generator.stream("Ruth likes Paris"))
    (whole,) = generator.generate(["Ruth likes Paris"])
    assert answer == whole and "".join(pieces) == whole.text and len(pieces) > 6
    assert answer.sequence == [*generator.encode("Ruth likes Paris"), *answer.ids]


def test_generation_ends_with_a_stop_string_of_several_words(loaded):
    ids = TextGenerator(loaded).encode("Ruth likes Paris")
    (whole,) = TextGenerator(loaded, max_new_tokens=30).generate([ids])
    words = whole.text.split()
    stop = f"{words[3]} {words[4]}"
    pieces, answer = finish(TextGenerator(loaded, max_new_tokens=30, stop_strings=[stop, "nowhere"]).stream(ids))
    assert answer.ids == whole.ids[: len(answer.ids)] and len(answer.ids) < 12
    assert answer.text == whole.text[: whole.text.index(stop)] == "".join(pieces)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_a_padded_batch_writes_what_single_prompts_do(loaded, options):
    prompts = ["Paris", "Who likes Mumbai, Ruth has Paris", "Ruth likes"]
    generator = TextGenerator(loaded, max_new_tokens=6, **options)
    assert generator.generate(prompts) == [finish(generator.stream(prompt))[1] for prompt in prompts]


def test_a_prompt_is_continued_although_its_tokenizer_ends_texts(loaded):
    tokenizer = build_tokenizer(64)
    tokenizer.backend_tokenizer.post_processor = processors.RobertaProcessing(("<|padding|>", 1), ("<|endoftext|>", 0))
    assert tokenizer("Paris")["input_ids"] == [*loaded.tokenizer("Paris")["input_ids"], 1]
    ending, plain = (
        TextGenerator(LoadedModel("tiny", loaded.model, used), max_new_tokens=6)
        for used in (tokenizer, build_tokenizer(64))
    )
    prompts = ["Paris", "Who likes Mumbai, Ruth has Paris"]
    assert ending.generate(prompts) == plain.generate(prompts)
    assert finish(ending.stream(prompts[0])) == finish(plain.stream(prompts[0]))
    by_vllm = VLLMGenerator.__new__(VLLMGenerator)
    by_vllm.model = SimpleNamespace(tokenizer=tokenizer)
    assert [by_vllm.encode(prompt) for prompt in (*prompts, [5, 1])] == [*map(plain.encode, prompts), [5, 1]]


DAMAGES = {
    "an answer": lambda lines: [*lines[:2], lines[2].replace(b"text 1", b"text 7"), *lines[3:]],
    "the settings": lambda lines: [lines[0].replace(b"seed", b"sead"), *lines[1:]],
    "an order": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
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
    output, asked = tmp_path / "answers.jsonl", []

    def answer(start, end):
        asked.append(start)
        if asked == [0, 2, 4]:
            raise KeyboardInterrupt
        return [f"text {number}" for number in range(start, end)]

    options = {"batch_size": 2, "settings": {"seed": 3}}
    with pytest.raises(KeyboardInterrupt):
        write_answers(records, answer, output, **options)
    unfinished = tmp_path / "answers.jsonl.unfinished"
    lines = unfinished.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    unfinished.write_bytes(b"".join(DAMAGES[damage](lines)))
    write_answers(records, answer, output, **options)
    expected = [{**record, "generated_text": f"text {number}"} for number, record in enumerate(records)]
    assert [json.loads(line) for line in output.read_text().splitlines()] == expected
    assert asked[3:] == {"none": [4], "a cut end": [2, 4]}.get(damage, [0, 2, 4])
    warns = damage not in ("none", "a cut end", "nothing left")  # a killed run leaves the last two as well
    assert [str(unfinished) in record.getMessage() for record in caplog.records] == [True] * warns


def test_new_tokens_stay_within_the_context_unless_more_are_asked_for(loaded):
    ids, warnings = TextGenerator(loaded).encode("Paris " * 57), []
    assert len(TextGenerator(loaded, warn=warnings.append).generate([ids])[0].ids) == 64 - 58 and warnings == []
    assert len(TextGenerator(loaded, warn=warnings.append, max_new_tokens=9).generate([ids])[0].ids) == 9
    assert len(warnings) == 1 and warnings[0].startswith("58 tokens and 9 new ones")


def test_a_stream_that_is_closed_ends_its_thread(loaded):
    before = threading.active_count()
    pieces = TextGenerator(loaded, max_new_tokens=100_000, warn=lambda _: None).stream("Ruth likes Paris")
    assert isinstance(next(pieces), str)
    pieces.close()
    assert threading.active_count() == before


def test_errors_and_warnings_reach_the_reader_of_the_stream(loaded):
    visitor, warned = ContextVar("visitor"), []
    visitor.set("somebody")
    generator = TextGenerator(loaded, max_new_tokens=70, warn=lambda _: warned.append(visitor.get()), temperature=-1.0)
    with pytest.raises(ValueError, match="temperature"):
        next(generator.stream("Ruth"))
    assert warned == ["somebody"]


def test_an_empty_stop_string_is_refused(loaded):
    with pytest.raises(ValueError, match="stop_strings"):
        TextGenerator(loaded, stop_strings=[""])


def test_the_authors_files_generate_with_a_tokenizer_beside_them(golden, tokenizer_folder):
    folder = golden / "B_torch/B1_dcformer_9769ae6"
    model = load_model(folder, tokenizer=tokenizer_folder, oov_policy="clamp", dtype="float32")
    assert len(TextGenerator(model, max_new_tokens=3).generate(["a"])[0].ids) == 3
