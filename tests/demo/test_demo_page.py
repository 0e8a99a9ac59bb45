"""What the page does, without a browser; the command that serves it; the Space that is made of it."""

import itertools
import re
import runpy
import socket
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import gradio
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from huggingface_hub import SpaceCard, SpaceCardData
from tiny_models import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from dcformer.analysis import layer_attention
from dcformer.cli import app
from dcformer.demo import build_page, launch_options, serve_page
from dcformer.demo.page import Attention, write_text
from dcformer.demo.picture import MOST_TOKENS, draw_attention
from dcformer.generation import LoadedModel
from dcformer.head_tasks import build_tokenizer


ROOT = Path(__file__).parents[2]
PROMPT = "There are Paris, Paris, Mumbai. Which is different? The city in"


@pytest.fixture(scope="module")
def tiny():
    tokenizer = build_tokenizer(64)
    return LoadedModel("tiny", tiny_model(vocab_size=len(tokenizer)), tokenizer)


def test_a_text_grows_and_ends_with_the_ids_of_all_tokens(tiny):
    ids = tiny.encode("Ruth likes Paris")
    *growing, last = write_text(tiny, "Ruth likes Paris", max_new_tokens=8)
    assert len(growing) > 3 and all(not each.ids for each in growing)
    assert all(later.text.startswith(each.text) for each, later in itertools.pairwise(growing))
    assert last.ids[: len(ids)] == ids and len(last.ids) == len(ids) + 8


def test_a_seed_draws_the_same_text(tiny):
    first, again, other = (
        list(write_text(tiny, "Ruth", seed=seed, do_sample=True, max_new_tokens=8))[-1].ids for seed in (1, 1, 2)
    )
    assert first == again != other


def test_another_program_can_ask_the_page(server):
    client = Client(server.address, verbose=False, analytics_enabled=False)
    job = client.submit(PROMPT, 8, False, 1.0, 50, 1.0, 1.0, "", api_name="/generate")
    assert job.result(timeout=60) == "India\n"
    for prompt, seed, sentence in (
        (" ", "", "The prompt is empty; give some text"),
        ("a", "x", "The seed must be a whole number or nothing, got 'x'"),
    ):
        with pytest.raises(AppError, match=sentence):
            client.predict(prompt, 8, True, 1.0, 50, 1.0, 1.0, seed, api_name="/generate")


def test_the_page_names_no_other_machine_to_load_from(server):
    for path in ("", "theme.css"):
        text = urllib.request.urlopen(server.address + path).read().decode()
        loaded = re.findall(r"(?:src|href)=[\"']?(https?:[^\"'> ]+)|url\(['\"]?(https?:[^)'\"]+)|@import", text)
        assert loaded == []
    assert gradio.analytics.analytics_enabled() is False


def test_a_picture_shows_both_weights_and_says_what_they_are(bundled):
    ids = bundled.encode(PROMPT)
    shown = Attention(bundled).draw(ids, 1, 0)
    assert shown.count("<svg") == shown.count("<figcaption>") == 2
    assert "Rows sum to one." in shown and "Rows need not sum to one: these sum to" in shown
    composed = layer_attention(bundled.model, ids, 1).composed[0]
    assert f"Signed: {int((composed < 0).sum())} of 136 weights are negative." in shown
    assert f"sum to {composed.sum(-1).min():.2f} to {composed.sum(-1).max():.2f}." in shown
    for token in ("Mumbai", "&lt;|endoftext|&gt;", "different"):
        assert shown.count(token) == 4  # on two axes of two pictures
    assert "A query of layer 1 sees its own key and all before it." in shown
    assert "http" not in re.sub(r"xmlns(:\w+)?=\"[^\"]*\"", "", shown.replace("http://www.w3.org", ""))


def test_another_layer_or_head_is_another_picture(bundled):
    attention, ids = Attention(bundled), bundled.encode("Ruth likes Paris")
    shown = [attention.draw(ids, layer, head) for layer, head in ((0, 0), (1, 0), (1, 3))]
    assert len(set(shown)) == 3 and "A query of layer 0 sees 32 keys, its own included." in shown[0]
    assert "Generate a text" in attention.draw([], 0, 0)


def test_a_model_without_composition_says_that_both_are_the_same(tiny):
    plain = LoadedModel("plain", tiny_model("plain_gated_transformer", vocab_size=len(tiny.tokenizer)), tiny.tokenizer)
    assert "This model composes nothing" in Attention(plain).draw(plain.encode("Ruth likes"), 0, 0)


def test_of_a_long_text_the_last_tokens_are_drawn(tiny):
    ids = tiny.encode("Paris " * 49)
    attention = layer_attention(tiny.model, ids, 0)
    shown = draw_attention(attention, 0, [f"word{number}" for number in range(50)])
    assert f"The last {MOST_TOKENS} of 50 tokens are drawn." in shown
    assert ">word10<" in shown and ">word9<" not in shown
    with pytest.raises(ValueError, match="head must be from 0 to 3, got 4"):
        draw_attention(attention, 4, ["word"] * 50)


def test_other_models_have_a_page_without_attention(tiny):
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tiny.tokenizer), **shape))
    config = str(build_page(LoadedModel("some/llama", model, tiny.tokenizer)).get_config_file()["components"])
    assert "It is a llama model, of which this page shows no attention." in config and "Layer" not in config


def test_a_port_that_is_taken_is_one_sentence(tiny):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"^The page cannot be served at 127.0.0.1:{port}: it is in use"):
            serve_page(tiny, port=port)
    with pytest.raises(ValueError, match="port must be from 1 to 65535, got 0"):
        serve_page(tiny, port=0)


def test_the_command_prints_the_address_and_ends_by_ctrl_c(monkeypatch):
    given = {}

    def interrupted():
        raise KeyboardInterrupt

    def serve(model, **options):
        given.update(options, model=model)
        return SimpleNamespace(address="http://127.0.0.1:9/", wait=interrupted)

    monkeypatch.setattr("dcformer.demo.serve_page", serve)
    done = CliRunner().invoke(app, ["demo", "--no-browser", "--port", "9", "--host", "0.0.0.0"])
    assert (done.exit_code, done.stderr) == (130, "Stopped.\n")
    assert done.stdout == "dcformer-tiny is at http://127.0.0.1:9/; Ctrl-C ends it.\n"
    wanted = {"model": "dcformer-tiny", "host": "0.0.0.0", "port": 9, "opens_browser": False}
    assert wanted.items() <= given.items()


@pytest.mark.parametrize("package", ["gradio", "matplotlib"])
def test_a_missing_package_names_the_extra(package, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'dcformer\[demo\]'"):
        build_page(tiny)


def test_the_space_builds_the_page():
    page = runpy.run_path(str(ROOT / "examples/space/app.py"))["page"]
    assert isinstance(page, gradio.Blocks) and "dcformer-tiny" in page.title
    assert launch_options()["footer_links"] == []


def test_the_space_says_what_the_hub_wants_to_know():
    card = SpaceCard.load(ROOT / "examples/space/README.md")
    assert isinstance(card.data, SpaceCardData)
    assert (card.data.sdk, card.data.app_file, card.data.license) == ("gradio", "app.py", "apache-2.0")
    constraints = (ROOT / "constraints.txt").read_text()
    assert f"gradio=={card.data.sdk_version}\n" in constraints
    assert len(card.data.short_description) <= 60 and card.data.title  # what the Hub takes
