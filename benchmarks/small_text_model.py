"""A DCFormer and its Transformer++ twin, small enough to be trained on the bytes of a text within minutes.

No pretrained model is needed to see what quantisation does to real text: these have learnt enough of it that their
loss depends on every weight. All layers have full attention, without which Transformers quantises no cache.
"""

import math
from typing import Any

import torch

from dcformer import DCFormerConfig, DCFormerForCausalLM


STEPS = 400
_BATCH, _LENGTH = 8, 256
_LEARNING_RATE = 3e-3
_WARM_UP = 50
_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "DCFormer++": {},
    "Transformer++": {"compose_pre": False, "compose_post": False},
}


def train(text: bytes, values: dict[str, Any], steps: int = STEPS) -> DCFormerForCausalLM:
    """
    Train one model; the same call gives the same model on the same machine.

    Args:
        text: Each byte is a token.
        values: Configuration fields, one of [`VARIANTS`].
        steps: Of 8 x 256 bytes at random places, by AdamW.

    Raises:
        ValueError: for a text that is too short for a row.
    """
    if len(text) <= _LENGTH:
        raise ValueError(f"The text to train on has {len(text)} bytes; it needs more than {_LENGTH}.")
    torch.manual_seed(0)
    model = DCFormerForCausalLM(DCFormerConfig(**_SHAPE, **values)).train()
    token_ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        places = torch.randint(0, len(token_ids) - _LENGTH, (_BATCH,), generator=generator)
        rows = torch.stack([token_ids[place : place + _LENGTH] for place in places])  # (batch, length)
        loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return model.eval()


def _rate(step: int, steps: int) -> float:
    """Share of the learning rate: a linear warm-up, then half a cosine down to a tenth."""
    if step < _WARM_UP:
        return (step + 1) / _WARM_UP
    return 0.55 + 0.45 * math.cos(math.pi * (step - _WARM_UP) / max(1, steps - _WARM_UP))
