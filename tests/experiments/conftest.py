"""Fixtures that all tests of experiments share."""

from tiny_recipes import without_curves  # noqa: F401  a fixture of every module here
