"""The optimizers of a recipe: AdamW, with a separate learning rate for composition, and Muon for matrices."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .recipe import TrainingRecipe


def build_optimizer(model: nn.Module, training: TrainingRecipe) -> Optimizer:
    """
    Build AdamW, or Muon for the matrices of layers and AdamW for embeddings, the output layer, compose weights, norms
    and biases. Dynamic composition has a separate learning rate if the recipe gives one.

    Norms and biases, which are vectors, do not decay; in the authors' JAX code (`adam_pax` in
    jax/MaxText/optimizers.py) they do.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; not used in the paper.
    """
    matrices: list[nn.Parameter] = []
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}  # by learning rate, and whether they decay
    output = getattr(model, "get_output_embeddings", lambda: None)()  # has a row per token, as embeddings
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding) or each is output}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if training.optimizer == "muon" and parameter.dim() == 2 and id(parameter) not in tables:
            matrices.append(parameter)
        else:
            is_dynamic = ".compose." in f".{name}" and not name.endswith(".static_weight")
            rate = training.compose_learning_rate if is_dynamic else None
            groups.setdefault((rate or training.learning_rate, parameter.dim() > 1), []).append(parameter)
    settings = [
        {"params": parameters, "lr": rate, "weight_decay": training.weight_decay if decays else 0.0}
        for (rate, decays), parameters in groups.items()
    ]
    betas = (training.adam_beta1, training.adam_beta2)
    adamw = torch.optim.AdamW(settings, lr=training.learning_rate, betas=betas, eps=training.adam_epsilon, fused=True)
    if training.muon_learning_rate is None:
        return adamw
    muon = torch.optim.Muon(matrices, lr=training.muon_learning_rate, weight_decay=training.weight_decay)
    return JoinedOptimizer([muon, adamw])


class JoinedOptimizer(Optimizer):
    """Optimizers of different parameters, which schedules, checkpoints and Trainer see as one."""

    def __init__(self, parts: list[Optimizer]):
        self.parts = parts
        super().__init__(self._groups(), {})

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step of every part."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of the parts, in their order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict` of the same parts."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = self._groups()  # loading makes new ones
