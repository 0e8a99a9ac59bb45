"""The web page of the demo: its controls, what they do, and the server."""

import functools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from ..common.optional import import_optional
from ..configuration_dcformer import DCFormerConfig
from ..generation import TextGenerator
from ..loading import LoadedModel, load_model
from .attention_picture import copying_head, draw


_MOST_NEW = 512
# For the bundled models, which were trained on C; a blank line ends the function. Other models start with prose.
_EXAMPLES = (
    """static struct buffer *buffer_create(size_t size)
{
    struct buffer *buffer = malloc(sizeof(*buffer));
    if (!""",
    "static inline uint32_t max(uint32_t left, uint32_t right)\n{\n   return left > right ?",
    "#ifndef IMAGE_H\n#define IMAGE_H\n\n#include",
)
_PROSE = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
_ABOUT_ATTENTION = """## Attention before and after composition
The weights of one head, in one forward pass over the prompt and the answer: as they leave the softmax, and as the layer
uses them, composed with those of its other heads. Blue is above zero, orange below, grey masked. The page opens on the
head that copies most: it attends to earlier occurrences of the token that comes next."""
_CSS = """
.gradio-container {max-width: 1180px !important; margin: 0 auto !important}
.attention {display: flex; flex-wrap: wrap; gap: 1rem}
.attention figure {flex: 1 1 340px; min-width: 0; margin: 0; color: var(--body-text-color)}
.attention svg {width: 100%; height: auto}
"""


def import_gradio() -> ModuleType:
    """Gradio without telemetry and checks for newer versions, which it decides on when it is imported."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    return import_optional("gradio", "The page", "demo")


def build_page(model: str | LoadedModel = "dcformer-tiny", **options: Any) -> Any:
    """
    Build the page without serving it.

    Args:
        model (defaults to `"dcformer-tiny"`): A loaded model, or a name for [`dcformer.loading.load_model`].
        options: Further arguments of that function.

    Returns:
        `gradio.Blocks`; [`dcformer.demo.launch_options`] has the arguments for its `launch`.

    Raises:
        ImportError: if gradio is not installed.
        OSError, ValueError: from `load_model`.
    """
    gr = import_gradio()
    loaded = model if isinstance(model, LoadedModel) else load_model(model, **options)
    config = loaded.model.config
    title = loaded.name.rstrip("/").split("/")[-1]
    is_bundled = loaded.name in ("dcformer-tiny", "transformer-tiny")
    first = _EXAMPLES[0] if is_bundled else _PROSE
    with gr.Blocks(title=f"{title} - dcformer", analytics_enabled=False) as page:
        gr.Markdown(f"# {title}\n{_describe(loaded)}")
        encode = TextGenerator(loaded).encode
        ids = gr.State(encode(first))
        with gr.Row(equal_height=False):
            with gr.Column():
                prompt = gr.Textbox(first, label="Prompt", lines=4, max_lines=12, elem_id="prompt")
                with gr.Row():
                    start = gr.Button("Generate", variant="primary", elem_id="generate")
                    stop = gr.Button("Stop", elem_id="stop")
                if is_bundled:
                    examples = gr.Examples([[text] for text in _EXAMPLES], prompt, label="C, which it was trained on")
            with gr.Column():
                answer = gr.Textbox(label="Answer", lines=7, max_lines=20, elem_id="answer")
                sampling = _sampling_controls(gr, loaded.model.generation_config, is_bundled)

        def write(prompt: str, *values: Any) -> Iterator[tuple[str, Any]]:
            try:
                for text, sequence in write_text(loaded, prompt, *values, warn=gr.Warning):
                    yield text, sequence or gr.skip()  # the picture stays until the text is complete
            except ValueError as error:
                raise gr.Error(str(error), print_exception=False) from error

        started = {"fn": write, "inputs": [prompt, *sampling], "outputs": [answer, ids], "concurrency_id": "generate"}
        runs = [start.click(**started, api_name="generate"), prompt.submit(**started, api_name=False)]
        if isinstance(config, DCFormerConfig):
            gr.Markdown(_ABOUT_ATTENTION)
            counts = {"Layer": config.num_hidden_layers, "Head": config.num_attention_heads}
            shown = copying_head(loaded.model, ids.value)
            with gr.Row():
                controls = [
                    gr.Slider(0, max(n - 1, 1), value, step=1, label=label, elem_id=label.lower(), interactive=n > 1)
                    for (label, n), value in zip(counts.items(), shown)
                ]
            picture = gr.HTML(draw(loaded, ids.value, *shown), elem_id="attention")
            drawn = {"fn": functools.partial(draw, loaded), "inputs": [ids, *controls], "outputs": picture}
            # Not while a text is written, since all forward passes of the model would be recorded.
            drawn |= {"api_name": False, "show_progress": "hidden", "concurrency_id": "generate"}
            runs += [run.success(**drawn) for run in runs]
            for control in controls:
                control.change(**drawn, trigger_mode="always_last")
            if is_bundled:
                chosen = examples.load_input_event
                chosen.then(lambda text: (encode(text), ""), prompt, [ids, answer], api_name=False).success(**drawn)
        stop.click(None, cancels=runs)
    return page


def _describe(loaded: LoadedModel) -> str:
    config, count = loaded.model.config, loaded.model.num_parameters()
    size = f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count:,}"
    shape = f"{size} parameters, {config.num_hidden_layers} layers of {config.num_attention_heads} heads"
    if not isinstance(config, DCFormerConfig):
        return f"{shape}. It is a {config.model_type} model, of which this page shows no attention."
    kind = "composed for every query and key" if config.composes_heads else "that are not composed"
    return f"{shape} {kind}."


def _sampling_controls(gr: Any, defaults: Any, stops: bool) -> list[Any]:
    """Controls in the order of `write_text`, with the values of generation_config.json at first."""
    most, top_k = min(defaults.max_new_tokens or 48, _MOST_NEW), defaults.top_k
    with gr.Accordion("Generation options", open=False):
        return [
            gr.Slider(1, _MOST_NEW, most, step=1, label="Max new tokens"),
            gr.Checkbox(stops, label="Stop at a blank line"),
            gr.Checkbox(bool(defaults.do_sample), label="Sample instead of greedy decoding"),
            gr.Slider(0.1, 2.0, defaults.temperature or 1.0, step=0.05, label="Temperature"),
            gr.Slider(0, 100, 50 if top_k is None else min(top_k, 100), step=1, label="Top k (0 for all)"),
            gr.Slider(0.05, 1.0, defaults.top_p or 1.0, step=0.05, label="Top p"),
            gr.Slider(0.5, 2.0, defaults.repetition_penalty or 1.0, step=0.05, label="Repetition penalty"),
            # As text: an empty number becomes 0 when the options are opened.
            gr.Textbox("", label="Seed (a whole number; if empty, a new one each time)"),
        ]


def write_text(loaded: LoadedModel, prompt: str, *values: Any, **options: Any) -> Iterator[tuple[str, list[int]]]:
    """
    Yield the growing text after a prompt and an empty list; at the end the whole text and the ids of prompt and text.

    `values` are those of the controls, in their order.
    """
    max_new_tokens, stops, samples, temperature, top_k, top_p, repetition_penalty, seed = values
    options |= {"stop_strings": ["\n\n"] if stops else []}
    options |= {"max_new_tokens": int(max_new_tokens), "do_sample": samples, "repetition_penalty": repetition_penalty}
    if samples:
        options |= {"temperature": temperature, "top_k": int(top_k), "top_p": top_p}
    if seed:
        torch.manual_seed(int(seed))
    pieces = TextGenerator(loaded, **options).stream(prompt)
    text = ""
    while True:
        try:
            text += next(pieces)
        except StopIteration as end:
            yield end.value.text, end.value.sequence
            return
        yield text, []


def launch_options() -> dict[str, Any]:
    """Arguments for `gradio.Blocks.launch`: fonts that the reader has, and no public link."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    theme = import_gradio().themes.Soft(primary_hue="blue", neutral_hue="slate", **fonts)
    return {"theme": theme, "css": _CSS, "footer_links": [], "ssr_mode": False, "quiet": True, "share": False}


def serve_page(
    model: Any = "dcformer-tiny",
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    opens_browser: bool = False,
    **options: Any,
) -> Any:
    """
    Serve the page in a thread, until its `close()`.

    Args:
        model, options: As for [`dcformer.demo.build_page`].
        host (defaults to `"127.0.0.1"`): Address to listen on; `"0.0.0.0"` lets other machines open the page.
        port (*optional*): By default the first free port from 7860.
        opens_browser (defaults to `False`): Open the page in a browser on this machine.

    Returns:
        `gradio.Blocks`, whose `local_url` is the address.

    Raises:
        OSError: from gradio, if the port is taken.
    """
    page = build_page(model, **options)
    options = launch_options() | {"server_name": host, "server_port": port, "inbrowser": opens_browser}
    page.launch(prevent_thread_lock=True, **options)
    return page
