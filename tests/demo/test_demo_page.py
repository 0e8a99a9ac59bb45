"""The page without a browser, the command that serves it, and the Space that shows it."""

import itertools
import re
import runpy
import urllib.request
from pathlib import Path
from unittest.mock import ANY, Mock, call

import command_line
import pytest
from huggingface_hub import SpaceCard
from tiny_models import tiny_model
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from dcformer.analysis import heat_map, record
from dcformer.demo import build_page
from dcformer.demo.attention_picture import copying_head, draw
from dcformer.demo.page import launch_options, write_text
from dcformer.generation import TextGenerator
from dcformer.head_tasks import build_tokenizer
from dcformer.loading import LoadedModel, load_model


ROOT = Path(__file__).parents[2]
PROMPT = "There are Paris, Paris, Mumbai. Which is different? The city in"


@pytest.fixture(scope="module")
def tiny():
    tokenizer = build_tokenizer(64)
    return LoadedModel("tiny", tiny_model(vocab_size=len(tokenizer)), tokenizer)


def test_a_text_grows_by_the_options_of_the_page_and_a_seed_draws_it_again(tiny, monkeypatch):
    monkeypatch.setattr("dcformer.demo.page.TextGenerator", generator := Mock(wraps=TextGenerator))
    sampling = {"temperature": 0.9, "top_k": 60, "top_p": 0.95}
    for samples, stops, seeds in ((False, True, [""]), (True, False, ["1", "1", "2"])):
        values = (8.0, stops, samples, *sampling.values(), 1.1)
        written = [list(write_text(tiny, "Ruth likes Paris", *values, seed)) for seed in seeds]
        given = {"max_new_tokens": 8, "do_sample": samples, "repetition_penalty": 1.1, **(sampling if samples else {})}
        assert generator.call_args == call(tiny, stop_strings=["\n\n"] * stops, **given)
    assert written[0][-1] == written[1][-1] != written[2][-1]
    *growing, (_, ids) = written[0]
    assert len(growing) > 1 and not any(ids for _, ids in growing)
    assert all(later.startswith(text) for (text, _), (later, _) in itertools.pairwise(growing))
    prompt = tiny.tokenizer("Ruth likes Paris")["input_ids"]
    assert ids[: len(prompt)] == prompt and len(ids) == len(prompt) + 8


def test_another_program_can_ask_the_page_which_loads_from_no_other_machine(server, gradio):
    from gradio_client import Client
    from gradio_client.exceptions import AppError

    client = Client(server.local_url, verbose=False, analytics_enabled=False)
    job = client.submit(PROMPT, 8, False, False, 1.0, 50, 1.0, 1.0, "", api_name="/generate")
    assert job.result(timeout=60).strip() == "India"
    with pytest.raises(AppError, match="The prompt"):
        client.predict(" ", 8, False, True, 1.0, 50, 1.0, 1.0, "", api_name="/generate")
    for path in ("", "theme.css"):
        text = urllib.request.urlopen(server.local_url + path).read().decode()
        assert re.findall(r"(?:src|href)=[\"']?(https?:[^\"'> ]+)|url\(['\"]?(https?:[^)'\"]+)|@import", text) == []
    assert gradio.analytics.analytics_enabled() is False


def test_a_picture_shows_both_weights_and_says_what_they_are(bundled):
    ids = bundled.tokenizer(PROMPT)["input_ids"]
    shown = draw(bundled, ids, 1, 0)
    recording = record(bundled.model, ids)
    plain, composed = (recording[name][1][0, 0] for name in ("weights", "composed_weights"))
    assert f"Signed: {int((composed < 0).sum())} of 136 weights are negative" in shown
    assert f"sum to {composed.sum(-1).min():.2f} to {composed.sum(-1).max():.2f}." in shown
    assert shown.count("<svg") == 2 and shown.count("<rect") == 2 * (16 * 16 + 1)
    for token in ("Mumbai", "&lt;|endoftext|&gt;", "different"):
        assert shown.count(f">{token}</text>") == 4  # on two axes of two pictures
    assert "A query of layer 1 sees all keys up to its position." in shown
    assert "A query of layer 0 sees 32 keys up to" in draw(bundled, ids, 0, 1)
    assert len({shown, draw(bundled, ids, 1, 1), draw(bundled, ids, 0, 0)}) == 3
    assert f"Rows sum to one. Colour scale: up to {plain.max():.2f}." in shown


@pytest.mark.parametrize("name", ["dcformer-tiny", "transformer-tiny"])
def test_every_prompt_that_the_page_offers_has_a_sensible_answer(name, gradio):
    page = build_page(name)
    (generate,) = (function for function in page.fns.values() if function.api_name == "generate")
    prompt, limit, *options = (component.value for component in generate.inputs)
    (offered,) = (block.samples for block in page.blocks.values() if isinstance(block, gradio.Dataset))
    assert [prompt] == offered[0] and len(offered) == 3
    tokenizer = load_model(name).tokenizer
    (choose,) = (function for function in page.fns.values() if function.outputs == generate.outputs[::-1])
    for (text,) in offered:
        assert choose.fn(text) == (tokenizer(text)["input_ids"], "")  # without the answer to another prompt
        *_, (answer, ids) = generate.fn(text, limit, *options)
        assert len(ids) - len(tokenizer(text)["input_ids"]) < limit, f"not ended: {answer}"
        assert not re.search(r"\b(\w+)(\W+\1\b){2}", answer), answer
        assert all((text + answer).count(left) == (text + answer).count(right) for left, right in ("()", "{}")), answer


def test_the_page_opens_on_the_head_that_copies_with_its_prompt_drawn():
    loaded = load_model("dcformer-tiny")
    page = build_page(loaded)
    by_id = {block.elem_id: block.value for block in page.blocks.values() if getattr(block, "elem_id", None)}
    ids = loaded.tokenizer(by_id["prompt"])["input_ids"]
    copies = [(query, key) for query in range(len(ids) - 1) for key in range(query + 1) if ids[key] == ids[query + 1]]
    sums = {
        (layer, head): sum(rows[query][key] for query, key in copies)
        for layer, weights in record(loaded.model, ids, ["weights"])["weights"].items()
        for head, rows in enumerate(weights[0].tolist())
    }
    layer, head = max(sums, key=sums.get)
    assert (layer, head) == (by_id["layer"], by_id["head"]) == copying_head(loaded.model, ids)
    assert layer == 3 and head in (1, 2)  # the heads that docs/inside.md describes
    assert by_id["attention"] == draw(loaded, ids, layer, head) and ">malloc<" not in by_id["attention"]


@pytest.mark.parametrize(
    "variant, layer, composes",
    [
        ("post_only", 0, 1),
        ("one_layer", 1, 1),
        ("one_layer", 0, 0),
        ("pre_only", 0, 0),
        ("plain_gated_transformer", 1, 0),
    ],
)
def test_weights_that_are_not_composed_after_the_softmax_are_the_same_in_both_pictures(tiny, variant, layer, composes):
    model = tiny_model(variant, vocab_size=len(tiny.tokenizer))
    shown = draw(LoadedModel(variant, model, tiny.tokenizer), [3, 4, 5], layer, 0)
    before, after = re.findall("<rect.*?</svg>", shown)
    assert ("does not compose its weights" in shown) == (before == after) == (not composes)


def test_of_a_long_text_the_last_tokens_are_drawn(tiny):
    ids = tiny.tokenizer("Ruth " * 11 + "Mark " + "Paul " * 47)["input_ids"]
    shown = draw(tiny, ids, 0, 0)
    assert "The last 48 of 60 tokens" in shown and shown.count(">Mark<") == 4 and ">Ruth<" not in shown
    last, labels = record(tiny.model, ids)["weights"][0][0, 0, -48:, -48:], ["Mark", *["Paul"] * 47]
    assert heat_map(last, labels, labels, "Before composition, queries down, keys across") in shown
    assert "are read" not in draw(tiny, ids[:8] * 64, 0, 0) and "are drawn" not in draw(tiny, ids[:48], 0, 0)
    assert "The first 512 of 600 tokens are read. The last 48 of 512 tokens" in draw(tiny, ids * 10, 0, 0)


OTHERS = {"max_new_tokens": 900, "do_sample": True, "temperature": 0.5, "top_k": 0, "top_p": 0.25}


@pytest.mark.parametrize(
    "options, wanted",
    [({}, [48, False, 1, 50, 1, 1]), (OTHERS | {"repetition_penalty": 1.5}, [512, True, 0.5, 0, 0.25, 1.5])],
)
def test_a_page_has_the_options_of_its_model_and_draws_what_was_written_unless_it_is_stopped(
    tiny, options, wanted, gradio, monkeypatch
):
    model = tiny_model(vocab_size=len(tiny.tokenizer), num_hidden_layers=1, num_attention_heads=3, head_dim=8)
    model.generation_config = GenerationConfig(**options)
    monkeypatch.setattr(gradio, "Warning", warned := Mock())
    page = build_page(LoadedModel("tiny", model, tiny.tokenizer))
    by_id = {block.elem_id: block for block in page.blocks.values() if getattr(block, "elem_id", None)}
    events = {
        (page.blocks[source].elem_id, event): f for f in page.fns.values() for source, event in f.targets if source
    }
    click, submit = (events.pop(key) for key in (("generate", "click"), ("prompt", "submit")))
    limit, stops, *sampling, seed = (component.value for component in click.inputs[1:])
    assert [limit, *sampling] == wanted and (stops, seed) == (False, "") and click.inputs == submit.inputs
    drawing = [f for f in page.fns.values() if f.outputs == [by_id["attention"]]]
    assert all(f.inputs == [click.outputs[1], by_id["layer"], by_id["head"]] for f in drawing)
    after = [f._id for f in drawing if f.trigger_after in (click._id, submit._id)]
    assert len(after) == 2 and all(events[name, "change"] in drawing for name in ("layer", "head"))
    # One at a time: all forward passes are recorded while a picture is drawn.
    assert {f.concurrency_id for f in (click, submit, *drawing)} == {"generate"}
    (stopping,) = (f.cancels for f in page.fns.values() if f.cancels)
    assert {*stopping} == {click._id, submit._id, *after}
    ranges = [(by_id[name].maximum, by_id[name].interactive) for name in ("layer", "head")]
    assert ranges == [(1, False), (2, True)]
    given = [component.value for component in click.inputs[2:]]
    *growing, (_, ids) = click.fn("Ruth", 70, *given)
    assert len(ids) == 72 and {str(skipped) for _, skipped in growing} == {str(gradio.skip())}
    assert warned.call_args == call("2 tokens and 70 new ones exceed the 64 that the model was made for.")


def test_a_page_says_what_model_it_is_and_other_models_have_one_without_attention(tiny, monkeypatch):
    def described(model):
        page = build_page(LoadedModel("some/model/", model, tiny.tokenizer))
        assert page.title == "model - dcformer"
        return str(page.get_config_file()["components"])

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = described(LlamaForCausalLM(LlamaConfig(vocab_size=len(tiny.tokenizer), **shape)))
    assert "1 layers of 2 heads. It is a llama model, of which this page shows no attention." in config
    assert "Layer" not in config
    plain = tiny_model("plain_gated_transformer", vocab_size=len(tiny.tokenizer))
    assert f"{plain.num_parameters():,} parameters, 2 layers of 4 heads that are not composed." in described(plain)
    monkeypatch.setattr(tiny.model, "num_parameters", lambda: 2_800_000_000)
    words = "2.80 billion parameters, 2 layers of 4 heads composed for every query and key."
    assert words in described(tiny.model)


def test_the_command_serves_what_is_asked_for_prints_the_address_and_ends_by_ctrl_c(tiny, gradio, monkeypatch):
    load, close, launched = Mock(return_value=tiny), Mock(), []

    def launch(page, **given):
        page.local_url = "http://127.0.0.1:9/"
        launched.append(given)

    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.setattr("dcformer.demo.page.load_model", load)
    monkeypatch.setattr("dcformer.cli.serve.time", Mock(sleep=Mock(side_effect=KeyboardInterrupt)))
    monkeypatch.setattr(gradio.Blocks, "launch", launch)
    monkeypatch.setattr(gradio.Blocks, "close", close)
    asked = ["--no-browser", "--port", "9", "--host", "0.0.0.0", "--dtype", "float16", "--device", "cpu"]
    for words in ([], [*asked, "--tokenizer", "t", "--revision", "v1", "some/model"]):
        done = command_line.call("demo", *words)
        assert done.exit_code == 130 and "http://127.0.0.1:9/" in done.stdout and close.call_count == 1 + bool(words)
        assert urllib.request.proxy_bypass_environment("localhost")
        assert urllib.request.proxy_bypass_environment("0.0.0.0" if words else "127.0.0.1")
        address = {"server_name": words[4] if words else "127.0.0.1", "server_port": 9 if words else None}
        given = launch_options() | address | {"inbrowser": not words, "prevent_thread_lock": True, "theme": ANY}
        assert launched[-1] == given and given["share"] is False
    options = {"tokenizer": "t", "revision": "v1", "dtype": "float16", "device": "cpu"}
    nothing = dict.fromkeys(options)
    assert load.call_args_list == [call("dcformer-tiny", **nothing), call("some/model", **options)]


def test_the_space_builds_the_page_and_its_card_is_what_the_hub_takes(gradio):
    page = runpy.run_path(str(ROOT / "examples/space/app.py"))["page"]
    assert isinstance(page, gradio.Blocks) and "dcformer-tiny" in page.title
    data = SpaceCard.load(ROOT / "examples/space/README.md").data
    assert (data.sdk, data.app_file, data.license) == ("gradio", "app.py", "apache-2.0")
    assert f"gradio=={data.sdk_version}\n" in (ROOT / "constraints.txt").read_text()
    assert len(data.short_description) <= 60 and data.title
