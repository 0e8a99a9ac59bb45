"""Fixtures that all tests of training share."""

from tiny_recipes import without_curves  # noqa: F401  a fixture of every module here
