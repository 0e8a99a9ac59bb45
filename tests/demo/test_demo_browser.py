"""The page in a real browser: a prompt is typed, the answer comes, and another head is another picture."""

import shutil
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import sync_playwright

from dcformer.analysis import analyse
from dcformer.demo import serve_page


PROMPT = "There are Paris, Paris, Mumbai. Which is different? The city in"
NAMES = ("google-chrome", "chromium", "chromium-browser")  # the last may only say how to get it
# No requests by the browser itself; no display or sandbox is needed.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    with browser.new_page() as page:
        yield page


def test_a_visitor_gets_an_answer_and_sees_the_attention_of_a_head(page, server):
    hosts, errors = set(), []
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(server.local_url)
    picture = page.locator("#attention .attention")
    picture.locator("svg").nth(1).wait_for()  # of the prompt with which the page opens
    assert page.locator("#answer textarea").input_value() == ""
    page.locator("#prompt textarea").fill(PROMPT)
    page.locator("#generate").click()
    page.wait_for_function("document.querySelector('#answer textarea').value.trim() === 'India'")
    picture.locator("text", has_text="Mumbai").first.wait_for()
    assert picture.locator("svg").count() == 2
    assert "Rows need not sum to one" in picture.inner_text()
    seen = [picture.inner_html()]
    for control in ("#layer", "#head"):
        number = page.locator(f"{control} input[type=number]")
        number.fill(str((int(number.input_value()) + 1) % 4))
        page.keyboard.press("Enter")
        page.wait_for_function(
            "before => document.querySelector('#attention .attention').innerHTML !== before", arg=seen[-1]
        )
        seen.append(picture.inner_html())
    layer = page.locator("#layer input[type=number]").input_value()
    assert f"A query of layer {layer} sees" in page.locator("#attention").inner_text()
    assert len(set(seen)) == 3
    assert hosts - {None} == {"127.0.0.1"} and errors == []


def test_an_example_is_drawn_when_it_is_chosen_and_nothing_is_wider_than_the_window(page):
    serving = serve_page("dcformer-tiny")
    page.goto(serving.local_url)
    picture = page.locator("#attention .attention")
    picture.locator("text", has_text="sizeof").first.wait_for()
    page.get_by_text("Generation options").click()
    assert page.get_by_label("Seed").input_value() == ""
    page.get_by_role("button", name="IMAGE_H").click()
    picture.locator("text", has_text="include").first.wait_for()
    assert picture.locator("text", has_text="sizeof").count() == 0
    for width in (1280, 400):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    serving.close(verbose=False)


# The texts of a picture that reach beyond it.
CLIPPED = """picture => { const edge = picture.getBoundingClientRect(); return [...picture.querySelectorAll('text')]
    .filter(text => { const box = text.getBoundingClientRect(); return box.left < edge.left - 1 ||
    box.right > edge.right + 1 || box.bottom > edge.bottom + 1 }).map(text => text.textContent) }"""


def test_the_page_of_an_analysis_opens_offline_and_cuts_nothing_off(page, bundled, tmp_path, monkeypatch):
    monkeypatch.setattr("dcformer.analysis.analysis_page._draw_panels", lambda *_: None)  # files that no page shows
    path = analyse(bundled.model, [bundled.tokenizer(PROMPT)["input_ids"]], tmp_path, bundled.tokenizer, layers=[3])
    asked = []
    page.on("request", lambda request: asked.append(urlsplit(request.url).scheme))
    page.goto(path.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    pictures = page.locator("svg").all()
    assert len(pictures) == 1 + 2 + 4 * 2  # what matters, who lends, and every head before and after
    assert [picture.evaluate(CLIPPED) for picture in pictures] == [[]] * len(pictures)
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert set(asked) <= {"file", "data"}
