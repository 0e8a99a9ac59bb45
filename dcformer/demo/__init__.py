"""A web demo: text from a model, and its attention before and after composition."""

from .page import Server, build_page, launch_options, serve_page


__all__ = ["Server", "build_page", "launch_options", "serve_page"]
