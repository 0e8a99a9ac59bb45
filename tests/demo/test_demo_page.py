"""The page without a browser, the command that serves it, and the Space that shows it."""

import itertools
import re
import runpy
import urllib.request
from pathlib import Path
from unittest.mock import Mock

import gradio
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from huggingface_hub import SpaceCard
from tiny_models import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from dcformer.analysis import record
from dcformer.cli import app
from dcformer.demo import build_page
from dcformer.demo.page import write_text
from dcformer.demo.picture import copying_head, draw
from dcformer.head_tasks import build_tokenizer
from dcformer.loading import LoadedModel, load_model


ROOT = Path(__file__).parents[2]
PROMPT = "There are Paris, Paris, Mumbai. Which is different? The city in"


@pytest.fixture(scope="module")
def tiny():
    tokenizer = build_tokenizer(64)
    return LoadedModel("tiny", tiny_model(vocab_size=len(tokenizer)), tokenizer)


def test_a_text_grows_and_a_seed_draws_it_again(tiny):
    written = [
        list(write_text(tiny, "Ruth likes Paris", 8, False, True, 1.0, 0, 1.0, 1.0, seed)) for seed in ("1", "1", "2")
    ]
    assert written[0][-1] == written[1][-1] != written[2][-1]
    *growing, (_, ids) = written[0]
    assert len(growing) > 1 and not any(ids for _, ids in growing)
    assert all(later.startswith(text) for (text, _), (later, _) in itertools.pairwise(growing))
    prompt = tiny.tokenizer("Ruth likes Paris")["input_ids"]
    assert ids[: len(prompt)] == prompt and len(ids) == len(prompt) + 8


def test_another_program_can_ask_the_page_which_loads_from_no_other_machine(server):
    client = Client(server.address, verbose=False, analytics_enabled=False)
    job = client.submit(PROMPT, 8, False, False, 1.0, 50, 1.0, 1.0, "", api_name="/generate")
    assert job.result(timeout=60).strip() == "India"
    with pytest.raises(AppError, match="The prompt"):
        client.predict(" ", 8, False, True, 1.0, 50, 1.0, 1.0, "", api_name="/generate")
    for path in ("", "theme.css"):
        text = urllib.request.urlopen(server.address + path).read().decode()
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
    assert "sees all keys up to its position." in shown and "sees 32 keys up to" in draw(bundled, ids, 0, 0)
    assert len({shown, draw(bundled, ids, 1, 1), draw(bundled, ids, 0, 0)}) == 3
    assert f"Rows sum to one. Colour scale: up to {plain.max():.2f}." in shown


@pytest.mark.parametrize("name", ["dcformer-tiny", "transformer-tiny"])
def test_every_prompt_that_the_page_offers_has_a_sensible_answer(name):
    page = build_page(name)
    (generate,) = (function for function in page.fns.values() if function.api_name == "generate")
    prompt, limit, *options = (component.value for component in generate.inputs)
    (offered,) = (block.samples for block in page.blocks.values() if isinstance(block, gradio.Dataset))
    assert [prompt] == offered[0] and len(offered) == 3
    tokenizer = load_model(name).tokenizer
    for (text,) in offered:
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


@pytest.mark.parametrize("variant", ["post_only", "pre_only", "plain_gated_transformer"])
def test_weights_that_are_not_composed_after_the_softmax_are_the_same_in_both_pictures(tiny, variant):
    model = tiny_model(variant, vocab_size=len(tiny.tokenizer))
    shown = draw(LoadedModel(variant, model, tiny.tokenizer), [3, 4, 5], 0, 0)
    before, after = re.findall("<rect.*?</svg>", shown)
    assert ("does not compose its weights" in shown) == (before == after) == (variant != "post_only")


def test_of_a_long_text_the_last_tokens_are_drawn(tiny):
    ids = tiny.tokenizer("Ruth " * 11 + "Mark " + "Paul " * 47)["input_ids"]
    shown = draw(tiny, ids, 0, 0)
    assert "The last 48 of 60 tokens" in shown and shown.count(">Mark<") == 4 and ">Ruth<" not in shown
    assert "The first 512 of 600 tokens are read. The last 48 of 512 tokens" in draw(tiny, ids * 10, 0, 0)


def test_other_models_have_a_page_without_attention(tiny):
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tiny.tokenizer), **shape))
    config = str(build_page(LoadedModel("some/llama", model, tiny.tokenizer)).get_config_file()["components"])
    assert "It is a llama model, of which this page shows no attention." in config and "Layer" not in config


def test_the_command_prints_the_address_and_ends_by_ctrl_c(monkeypatch):
    page = Mock(address="http://127.0.0.1:9/", wait=Mock(side_effect=KeyboardInterrupt))
    serve = Mock(return_value=page)
    monkeypatch.setattr("dcformer.demo.serve_page", serve)
    done = CliRunner().invoke(app, ["demo", "--no-browser", "--port", "9", "--host", "0.0.0.0"])
    assert done.exit_code == 130 and "http://127.0.0.1:9/" in done.stdout
    wanted = {"host": "0.0.0.0", "port": 9, "opens_browser": False}
    assert serve.call_args.args == ("dcformer-tiny",) and wanted.items() <= serve.call_args.kwargs.items()


def test_the_space_builds_the_page_and_its_card_is_what_the_hub_takes():
    page = runpy.run_path(str(ROOT / "examples/space/app.py"))["page"]
    assert isinstance(page, gradio.Blocks) and "dcformer-tiny" in page.title
    data = SpaceCard.load(ROOT / "examples/space/README.md").data
    assert (data.sdk, data.app_file, data.license) == ("gradio", "app.py", "apache-2.0")
    assert f"gradio=={data.sdk_version}\n" in (ROOT / "constraints.txt").read_text()
    assert len(data.short_description) <= 60 and data.title
