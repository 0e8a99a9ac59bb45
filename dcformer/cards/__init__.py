"""Model cards with measured scores, and the cards of the published checkpoints and shapes."""

from .catalogue import published_cards
from .scores import update_card


__all__ = ["published_cards", "update_card"]
