"""Model cards with measured scores, and the cards of the published checkpoints and shapes."""

from .catalogue import published_cards
from .update import UpdatedCard, update_card


__all__ = ["UpdatedCard", "published_cards", "update_card"]
