"""Model cards beyond what saving a model writes: measured scores, and the cards of the published shapes."""
