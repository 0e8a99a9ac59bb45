"""The `dcformer` command: one file for each group of subcommands; the work itself is done in the rooms they call."""

from .main import app, main


__all__ = ["app", "main"]
