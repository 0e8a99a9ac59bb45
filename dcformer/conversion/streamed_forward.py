"""A float32 forward that never holds more than one weight: for checking models larger than memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..configuration_dcformer import DCFormerConfig
from .plan import meta_model


# Rows of the output matrix that are multiplied at a time.
_ROWS = 8192


class NotFiniteError(ValueError):
    """A model that computes NaN or infinity."""


@torch.no_grad()
def streamed_logits(
    config: DCFormerConfig,
    read: Callable[[str], Tensor],
    tokens: Tensor,
    read_rows: Callable[[str, int, int], Tensor] | None = None,
) -> Tensor:
    """
    Logits in float32 of a model whose weights are read one by one.

    Args:
        config (`DCFormerConfig`): The model's configuration.
        read: Returns the values of a parameter, given its name.
        tokens (`Tensor`): (batch, length) token ids.
        read_rows (*optional*): As `read`, for the rows from start to stop only. None: `read` all and cut.

    Returns:
        (batch, length, vocabulary) logits.

    Raises:
        NotFiniteError: if the output of a layer, or a logit, is not finite; the message names the layer.
    """
    rows_of = read_rows or (lambda name, start, stop: read(name)[start:stop])
    model = meta_model(config)
    decoder = model.model
    if decoder.rotary_emb is not None:
        decoder.rotary_emb.to_empty(device="cpu")
    for name, module in decoder.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            _stream(module, f"model.{name}", read)
    for index, layer in enumerate(decoder.layers):
        layer.register_forward_hook(_finite_check(index))
    embeddings = torch.stack([rows_of("model.embed_tokens.weight", i, i + 1)[0] for i in tokens.flatten().tolist()])
    embeddings = embeddings.view(*tokens.shape, -1).float()  # (batch, length, hidden)
    hidden = decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    starts = range(0, config.vocab_size, _ROWS)
    logits = torch.cat(
        [hidden @ rows_of(head, start, min(start + _ROWS, config.vocab_size)).float().T for start in starts], dim=-1
    )
    if not logits.isfinite().all():
        raise NotFiniteError("The logits are not finite: the last norm or the output matrix holds NaN or infinity")
    return logits


def _stream(module: nn.Module, prefix: str, read: Callable[[str], Tensor]) -> None:
    """Give a module its own parameters for the time of its forward."""
    names = [name for name, _ in module.named_parameters(recurse=False)]

    def load(module, arguments):
        for name in names:
            setattr(module, name, nn.Parameter(read(f"{prefix}.{name}").float(), requires_grad=False))

    def free(module, arguments, output):
        for name in names:
            setattr(module, name, nn.Parameter(getattr(module, name).to("meta"), requires_grad=False))

    module.register_forward_pre_hook(load)
    module.register_forward_hook(free)


def _finite_check(index: int):
    def check(module, arguments, output):
        if not output.isfinite().all():
            raise NotFiniteError(
                f"The output of layer {index} is not finite: the weights of that layer (or of one before it) hold NaN, "
                "infinity or numbers that are too large, as after a run that diverged"
            )

    return check
