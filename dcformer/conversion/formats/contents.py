"""What a checkpoint stores, before anything is known of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..leaves import Leaf


@dataclass
class Contents:
    """
    Attributes:
        format (`str`): The format in words, such as `"orbax (OCDBT, zarr 2)"`.
        location (`str`): Where the checkpoint was found.
        leaves: The arrays by name, without those of the training state.
        step (`int`, *optional*): The step of the training run.
        optimizer: Names of the optimizer's arrays.
        state: Names of step counters and random states.
        skipped_steps: Later steps of the run that are not whole, with the reason.
    """

    format: str
    location: str
    leaves: dict[str, Leaf]
    step: int | None = None
    optimizer: list[str] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    skipped_steps: dict[str, str] = field(default_factory=dict)

    def source(self) -> dict[str, Any]:
        """What a report says of where the arrays come from."""
        source = {"format": self.format, "location": self.location, "step": self.step}
        return source | ({"skipped_steps": self.skipped_steps} if self.skipped_steps else {})
