"""Model cards with measured scores."""

from .scores import PAPER_SHOTS, paper_scores, update_card


__all__ = ["PAPER_SHOTS", "paper_scores", "update_card"]
