"""Muon for matrices beside AdamW for all else, as one optimizer with one schedule and one state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .recipe import TrainingRecipe


def muon_with_adamw(model: nn.Module, training: TrainingRecipe, decaying: Iterable[str]) -> JoinedOptimizer:
    """
    Muon for the matrices of layers, AdamW for embeddings, the output layer, compose weights, norms and biases.

    The two have learning rates of their own, which rise and fall together.

    Args:
        model (`nn.Module`): Model to train.
        training (`TrainingRecipe`): Learning rates, decay, and the constants of AdamW.
        decaying (`Iterable[str]`): Names of the parameters that decay.

    Raises:
        ValueError: if this torch has no Muon.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Not used in the paper.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"training.optimizer 'muon' needs torch 2.9 or newer, found {torch.__version__}; update torch, or use "
            "'adamw'."
        )
    decaying = set(decaying)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if output is not None:
        tables.add(id(output.weight))
    matrices, decayed, kept = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.dim() == 2 and id(parameter) not in tables
            (matrices if is_matrix else decayed if name in decaying else kept).append(parameter)
    if not matrices:
        raise ValueError("training.optimizer 'muon' found no matrix in the model's layers; use 'adamw'.")
    muon = torch.optim.Muon(matrices, lr=training.muon_learning_rate, weight_decay=training.weight_decay)
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": training.weight_decay}, {"params": kept, "weight_decay": 0.0}],
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        fused=True,
    )
    return JoinedOptimizer([muon, adamw])


class JoinedOptimizer(Optimizer):
    """
    Several optimizers, each with parameters of its own, that schedules, checkpoints and Trainer see as one.

    Args:
        parts (`list[Optimizer]`): The optimizers. Their parameter groups are shared with this one.
    """

    def __init__(self, parts: list[Optimizer]):
        self.parts = parts
        super().__init__(self._groups(), {})

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """A step of every part."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of the parts, in their order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` returned for the same parts."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = self._groups()  # loading makes new ones
