"""What is on the page and what its controls do."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..analysis import LayerAttention, layer_attention
from ..configuration_dcformer import DCFormerConfig
from ..generation import LoadedModel, TextGenerator, load_model
from ..generation.streaming import iterate_pieces
from .optional import import_gradio
from .picture import draw_attention, import_matplotlib


MOST_READ = 512  # tokens of a text whose attention is computed, which takes memory by their square
_MOST_NEW = 512
# Questions of the kind that the bundled models were trained on.
_EXAMPLES = (
    "There are Paris, Paris, Mumbai. Which is different? The city in",
    "< Helen likes Vancouver. Christopher likes Sydney. John likes Florence. >. Helen longs for the city in",
    "< Daniel has strawberries. Robert has a goat. Anthony has cake. >. Who owns goat?",
)
_NOTHING_YET = "<p>Generate a text to see how its tokens attend to each other.</p>"
CSS = """
.gradio-container {max-width: 1180px !important; margin: 0 auto !important}
.attention {display: flex; flex-wrap: wrap; gap: 1rem}
.attention figure {flex: 1 1 340px; min-width: 0; margin: 0; color: var(--body-text-color)}
.attention h4 {margin: 0 0 .4rem; font-weight: 600}
.attention svg {width: 100%; height: auto; display: block}
.attention figcaption {opacity: .8; font-size: .9em}
"""


@dataclass
class Written:
    """A text as far as it is there, with the ids of its tokens once it is finished."""

    text: str
    ids: list[int]


def write_text(loaded: LoadedModel, prompt: str, *, seed: int | None = None, **options: Any) -> Iterator[Written]:
    """
    Continue a prompt.

    Args:
        loaded: From [`dcformer.generation.load_model`].
        prompt: What the model continues.
        seed (*optional*): Of the random numbers; `None`: others each time.
        options: As [`dcformer.generation.TextGenerator`] takes them.

    Yields:
        The new text, longer each time, and at last the ids of prompt and text.

    Raises:
        ValueError: for an empty prompt, or an option out of its range.
    """
    generator = TextGenerator(loaded, **options)
    ids = loaded.encode(prompt)
    if seed is not None:
        torch.manual_seed(seed)
    text = ""
    for piece in iterate_pieces(lambda write, criterion: generator.generate(ids, write, criteria=[criterion])):
        if isinstance(piece, str):
            text += piece
            yield Written(text, [])
        else:
            yield Written(piece.text, piece.sequence)


class Attention:
    """
    Pictures of a model's attention; the last texts are kept, so that another head of theirs comes at once.

    Args:
        loaded: A DCFormer or DCPythia.
    """

    def __init__(self, loaded: LoadedModel):
        self.loaded = loaded
        self._of_layer = functools.lru_cache(maxsize=2)(self._compute)

    def _compute(self, ids: tuple[int, ...], layer: int) -> LayerAttention:
        return layer_attention(self.loaded.model, ids, layer)

    def draw(self, ids: list[int], layer: int, head: int) -> str:
        """
        HTML for a layer and a head, both from 0, over a text.

        A text is read up to 512 tokens: what follows changes no weight before it.
        """
        if not ids:
            return _NOTHING_YET
        read = tuple(ids[:MOST_READ])
        tokens = [self.loaded.tokenizer.decode([number]) for number in read]
        picture = draw_attention(self._of_layer(read, int(layer)), int(head), tokens)
        note = "" if len(ids) <= MOST_READ else f" The first {MOST_READ} of {len(ids)} tokens are read."
        return f"{picture}<p>{self.describe(int(layer))}{note}</p>"

    def describe(self, layer: int) -> str:
        """What a layer's queries see, in a sentence."""
        config = self.loaded.model.config
        if config.layer_types[layer] == "sliding_attention":
            return f"A query of layer {layer} sees {config.sliding_window} keys, its own included."
        return f"A query of layer {layer} sees its own key and all before it."


def build_page(model: str | LoadedModel = "dcformer-tiny", **options: Any) -> Any:
    """
    The page, not yet served.

    Args:
        model (defaults to `"dcformer-tiny"`): A loaded model, or what [`dcformer.generation.load_model`] takes.
        options: Further arguments of that function.

    Returns:
        `gradio.Blocks`; [`dcformer.demo.launch_options`] are for its `launch`.

    Raises:
        ImportError: if gradio or matplotlib is not installed.
        FileNotFoundError, ValueError: as `load_model`.
    """
    gr = import_gradio()
    import_matplotlib()
    loaded = model if isinstance(model, LoadedModel) else load_model(model, **options)
    config = loaded.model.config
    with gr.Blocks(title=f"{_title(loaded)} - dcformer", analytics_enabled=False) as page:
        gr.Markdown(f"# {_title(loaded)}\n{_describe(loaded)}")
        ids = gr.State([])
        with gr.Row(equal_height=False):
            with gr.Column():
                prompt = gr.Textbox(_EXAMPLES[0], label="Prompt", lines=3, max_lines=12, elem_id="prompt")
                with gr.Row():
                    start = gr.Button("Generate", variant="primary", elem_id="generate")
                    stop = gr.Button("Stop", elem_id="stop")
                if loaded.name in ("dcformer-tiny", "transformer-tiny"):
                    gr.Examples(
                        [[text] for text in _EXAMPLES], prompt, label="Questions of the kind that it was trained on"
                    )
            with gr.Column():
                answer = gr.Textbox(label="What the model writes", lines=7, max_lines=20, elem_id="answer")
                sampling = _sampling_controls(gr, loaded)
        started = {"fn": functools.partial(_write, gr, loaded), "inputs": [prompt, *sampling], "outputs": [answer, ids]}
        started["concurrency_id"] = "generate"  # one text at a time, whichever way it was asked for
        runs = [start.click(**started, api_name="generate"), prompt.submit(**started, api_name=False)]
        if isinstance(config, DCFormerConfig):
            picture, controls = _attention_controls(gr, config)
            drawn = {"fn": Attention(loaded).draw, "inputs": [ids, *controls], "outputs": picture}
            runs += [run.success(**drawn, api_name=False, show_progress="hidden") for run in runs]
            for control in controls:
                control.change(**drawn, api_name=False, show_progress="hidden", trigger_mode="always_last")
        stop.click(None, cancels=runs)
    return page


def _title(loaded: LoadedModel) -> str:
    return loaded.name.rstrip("/").split("/")[-1]


def _describe(loaded: LoadedModel) -> str:
    config, count = loaded.model.config, loaded.model.num_parameters()
    size = f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count:,}"
    shape = f"{size} parameters, {config.num_hidden_layers} layers of {config.num_attention_heads} heads"
    if not isinstance(config, DCFormerConfig):
        return f"{shape}. It is a {config.model_type} model, of which this page shows no attention."
    kind = "composed anew for every query and key" if config.composes_heads else "that each work alone"
    return f"{shape} {kind}."


def _sampling_controls(gr: Any, loaded: LoadedModel) -> list[Any]:
    """Controls in the order of `_write`; they begin with what generation_config.json says."""
    own = loaded.model.generation_config
    with gr.Accordion("How tokens are chosen", open=False):
        most = gr.Slider(1, _MOST_NEW, min(own.max_new_tokens or 64, _MOST_NEW), step=1, label="New tokens at most")
        samples = gr.Checkbox(bool(own.do_sample), label="Draw tokens by their probability, not always the likeliest")
        temperature = gr.Slider(0.1, 2.0, own.temperature or 1.0, step=0.05, label="Temperature")
        top_k = gr.Slider(0, 100, 50 if own.top_k is None else min(own.top_k, 100), step=1, label="Top k (0 for all)")
        top_p = gr.Slider(0.05, 1.0, own.top_p or 1.0, step=0.05, label="Top p")
        penalty = gr.Slider(0.5, 2.0, own.repetition_penalty or 1.0, step=0.05, label="Repetition penalty")
        seed = gr.Textbox("", label="Seed", placeholder="a number; if empty, another text each time", max_lines=1)
    return [most, samples, temperature, top_k, top_p, penalty, seed]


def _attention_controls(gr: Any, config: DCFormerConfig) -> tuple[Any, list[Any]]:
    gr.Markdown(
        "## Attention before and after composition\n"
        "One head in one forward pass over the prompt and the answer: first the softmax of its own scores, then the "
        "weights that the layer uses, for which the heads were composed before and after the softmax. Composed weights "
        "are signed, and their rows need not sum to one; each picture has a scale of its own. Grey is out of sight."
    )
    with gr.Row():
        last = config.num_hidden_layers - 1, config.num_attention_heads - 1
        layer = gr.Slider(0, max(last[0], 1), 0, step=1, label="Layer", elem_id="layer", interactive=last[0] > 0)
        head = gr.Slider(0, max(last[1], 1), 0, step=1, label="Head", elem_id="head", interactive=last[1] > 0)
    return gr.HTML(_NOTHING_YET, elem_id="attention"), [layer, head]


def _write(
    gr: Any,
    loaded: LoadedModel,
    prompt: str,
    max_new_tokens: int,
    samples: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    repetition_penalty: float,
    seed: str,
) -> Iterator[tuple[str, Any]]:
    """The handler of the button: text for the answer, and ids for the pictures, none before the text is finished."""
    options: dict[str, Any] = {"do_sample": samples, "max_new_tokens": int(max_new_tokens)}
    options["repetition_penalty"] = repetition_penalty
    if samples:
        options |= {"temperature": temperature, "top_k": int(top_k), "top_p": top_p}
    try:
        for written in write_text(loaded, prompt, seed=_number(seed), warn=gr.Warning, **options):
            yield written.text, written.ids
    except ValueError as error:
        raise gr.Error(str(error), print_exception=False) from error


def _number(seed: str) -> int | None:
    try:
        return int(seed) if seed.strip() else None
    except ValueError:
        raise ValueError(f"The seed must be a whole number or nothing, got {seed!r}.") from None
