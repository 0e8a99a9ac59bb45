"""A web demo: text from a model, and its attention before and after composition."""

from .page import build_page, launch_options, serve_page


__all__ = ["build_page", "launch_options", "serve_page"]
