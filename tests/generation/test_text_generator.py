"""The parts of text generation by themselves: stop strings, streams, batches, conversations."""

import threading
from contextvars import ContextVar

import pytest
import torch
from tiny_models import tiny_model
from transformers import DynamicCache, TextStreamer

from dcformer.generation import LoadedModel, TextGenerator, load_model
from dcformer.generation.chat import Conversation, set_chat_template
from dcformer.generation.stopping import StopStrings, possible_start, text_before
from dcformer.generation.streaming import TextWriter, iterate_pieces
from dcformer.head_tasks import build_tokenizer


# The window of the tiny models is 6, so that a conversation leaves it at once.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %} ? {% else %} . {% endif %}{% endfor %}"
)
WORDS = ("Paris", "Mumbai", "Ruth", "likes", "Who", "different", ".", ",", "?", "\n", "has")


@pytest.fixture(scope="module")
def loaded():
    tokenizer = build_tokenizer(64)
    tokenizer.eos_token = tokenizer.pad_token = None
    return LoadedModel("tiny", tiny_model(vocab_size=len(tokenizer)), tokenizer)


@pytest.fixture
def talking(loaded):
    tokenizer = build_tokenizer(64)
    tokenizer.chat_template = PLAIN_TEMPLATE
    return LoadedModel("tiny", loaded.model, tokenizer)


def test_text_ends_before_the_first_of_several_strings():
    assert text_before(("c", "bc", "x"), "abcabc") == "a"
    assert text_before((), "abc") == "abc"


@pytest.mark.parametrize(
    "text, start", [("ab\n", 2), ("ab\n\n", 2), ("ab", 2), ("abE", 2), ("abEN", 2), ("E N", 3), ("", 0)]
)
def test_what_may_begin_a_stop_string_is_known(text, start):
    assert possible_start(("\n\nQ", "END"), text) == start


@pytest.mark.parametrize("stop", [(), ("Mumbai",), ("likes .",), ("s.",), ("nothing",), ("Who\n", "r")], ids=repr)
def test_pieces_that_are_written_are_the_text_before_the_stop(loaded, stop):
    """The text of all tokens at once decides what is right."""
    words = [word for seed in range(40) for word in (WORDS[seed * 7 % 11], WORDS[seed * 5 % 11])]
    ids = loaded.tokenizer.convert_tokens_to_ids(words)
    pieces = []
    writer = TextWriter(loaded.tokenizer, pieces.append, stop)
    writer.put(torch.tensor([[1, 2]]))  # the prompt
    for number in ids:
        writer.put(torch.tensor([number]))
    writer.end()
    plain = []
    stream = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    stream.on_finalized_text = lambda text, stream_end=False: plain.append(text)
    for number in [[1], *([number] for number in ids)]:
        stream.put(torch.tensor(number))
    stream.end()
    assert "".join(pieces) == text_before(stop, "".join(plain)) and all(pieces)


def test_a_row_ends_where_a_string_of_several_tokens_is_whole(loaded):
    encode = loaded.tokenizer.convert_tokens_to_ids
    rows = [["Who", "Paris", "likes"], ["Paris", "likes", "Who"], ["Who", "likes", "Paris"]]
    criterion = StopStrings(["Paris likes"], loaded.tokenizer, prompt_length=0)
    ids = torch.tensor([encode(row) for row in rows])
    assert criterion(ids, None).tolist() == [True, True, False]
    assert StopStrings(["Paris likes"], loaded.tokenizer, prompt_length=2)(ids, None).tolist() == [False] * 3


def test_generation_ends_with_the_string_and_is_no_longer(loaded):
    ids = loaded.encode("Ruth likes Paris")
    whole = TextGenerator(loaded, max_new_tokens=30).generate(ids)
    third = loaded.tokenizer.decode([whole.ids[2]])
    stopped = TextGenerator(loaded, max_new_tokens=30, stop_strings=[third]).generate(ids)
    assert stopped.ids == whole.ids[: len(stopped.ids)] and len(stopped.ids) <= 3
    assert stopped.text == text_before([third], whole.text)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=["greedy", "beams", "static"]
)
def test_a_padded_batch_writes_what_single_prompts_do(loaded, options):
    prompts = [loaded.encode(text) for text in ("Paris", "Who likes Mumbai, Ruth has Paris", "Ruth likes")]
    generator = TextGenerator(loaded, max_new_tokens=6, **options)
    assert [row.ids for row in generator.generate_batch(prompts)] == [generator.generate(ids).ids for ids in prompts]


def test_new_tokens_stay_within_the_context_unless_more_are_asked_for(loaded):
    ids = loaded.encode("Paris " * 57)
    said = []
    assert len(TextGenerator(loaded, warn=said.append).generate(ids).ids) == 64 - 58 and said == []
    assert len(TextGenerator(loaded, warn=said.append, max_new_tokens=9).generate(ids).ids) == 9
    assert said == [
        "58 tokens of the prompt and 9 new ones are more than the 64 that the model was made for; what it writes "
        "beyond them may be poor."
    ]


def test_a_conversation_goes_on_from_its_cache_and_says_the_same(talking):
    generator = TextGenerator(talking, max_new_tokens=5)
    conversation, read = Conversation(generator), []
    for turn, message in enumerate(("Ruth likes Paris", "Who has Mumbai", "Which is different")):
        anew = Conversation(generator)
        anew.messages = list(conversation.messages)
        assert conversation.answer(message) == anew.answer(message)
        read.append(conversation.reused_tokens)
        assert anew.reused_tokens == 0 and len(conversation.messages) == 2 * turn + 2
    # Of the answers all but the last token has been read.
    assert read[0] == 0 and 0 < read[1] < read[2]


def test_a_template_that_changes_answers_makes_the_conversation_be_read_anew(talking):
    talking.tokenizer.chat_template = PLAIN_TEMPLATE.replace("m['content']", "m['content'].split(' ')[0]")
    conversation = Conversation(TextGenerator(talking, max_new_tokens=5))
    for message in ("Ruth", "Paris"):
        conversation.answer(message)
    assert conversation.reused_tokens == 0


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"cache_implementation": "static"}], ids=["beams", "static cache"]
)
def test_caches_that_cannot_go_on_are_not_kept(talking, options):
    kept = TextGenerator(talking, max_new_tokens=3).generate(talking.encode("Ruth"), keeps_cache=True).cache
    assert isinstance(kept, DynamicCache)
    conversation = Conversation(TextGenerator(talking, max_new_tokens=3, **options))
    for message in ("Ruth", "Paris"):
        assert conversation.answer(message) is not None
    assert conversation.reused_tokens == 0


def test_a_template_that_fails_is_one_sentence(talking, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ raise_exception('only one message') }}")
    set_chat_template(talking.tokenizer, file)
    with pytest.raises(ValueError, match="The chat template of 'tiny' cannot be used: only one message"):
        Conversation(TextGenerator(talking)).answer("Ruth")
    file.write_text(" ")
    with pytest.raises(ValueError, match="is empty"):
        set_chat_template(talking.tokenizer, file)


def test_an_iterator_that_is_closed_ends_the_thread(loaded):
    generator, before = TextGenerator(loaded, max_new_tokens=100_000), threading.active_count()
    ids = loaded.encode("Ruth likes Paris")
    pieces = iterate_pieces(lambda write, criterion: generator.generate(ids, write, criteria=[criterion]))
    assert isinstance(next(pieces), str)
    pieces.close()
    assert threading.active_count() == before


def test_the_thread_belongs_to_the_task_that_reads_the_pieces():
    visitor = ContextVar("visitor", default="nobody")
    visitor.set("somebody")
    assert list(iterate_pieces(lambda write, criterion: visitor.get())) == ["somebody"]


def test_an_error_in_the_thread_is_raised_where_the_pieces_are_read():
    def fail(write, criterion):
        write("some")
        raise ValueError("and no more")

    pieces = iterate_pieces(fail)
    assert next(pieces) == "some"
    with pytest.raises(ValueError, match="and no more"):
        next(pieces)


def test_a_bundled_name_gives_way_to_a_folder_of_that_name(tmp_path, monkeypatch, loaded):
    loaded.model.save_pretrained(tmp_path / "dcformer-tiny")
    loaded.tokenizer.save_pretrained(tmp_path / "dcformer-tiny")
    assert load_model("dcformer-tiny").model.config.hidden_size == 64
    monkeypatch.chdir(tmp_path)
    assert load_model("dcformer-tiny").model.config.hidden_size == 32


def test_the_authors_files_generate_with_a_tokenizer_beside_them(fixtures, tokenizer_folder):
    folder = fixtures / "golden/B_torch/B1_dcformer_9769ae6"
    found = load_model(str(folder), tokenizer=tokenizer_folder, oov_policy="clamp", dtype="float32")
    answer = TextGenerator(found, max_new_tokens=3).generate(found.encode("a"))
    assert len(answer.ids) == 3
