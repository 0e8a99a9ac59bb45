"""Serving the page on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from .optional import import_gradio
from .page import CSS, build_page


@dataclass
class Server:
    """
    A page that is being served.

    Attributes:
        address: Where a browser finds it.
        page: The `gradio.Blocks`.
    """

    address: str
    page: Any

    def wait(self) -> None:
        """Serve until Ctrl-C or another signal, which is raised again after the server has been closed."""
        try:
            while True:
                time.sleep(3600)
        finally:
            self.close()

    def close(self) -> None:
        self.page.close(verbose=False)


def launch_options() -> dict[str, Any]:
    """What `gradio.Blocks.launch` is to be given: looks with fonts of the reader's own, and no public link."""
    gr = import_gradio()
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    theme = gr.themes.Soft(primary_hue="blue", neutral_hue="slate", **fonts)
    return {"theme": theme, "css": CSS, "footer_links": [], "ssr_mode": False, "quiet": True}


def serve_page(
    model: Any = "dcformer-tiny",
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    opens_browser: bool = False,
    **options: Any,
) -> Server:
    """
    Serve the page from a thread.

    Args:
        model (defaults to `"dcformer-tiny"`), options: As [`dcformer.demo.build_page`] takes them.
        host (defaults to `"127.0.0.1"`): The address to listen on; `"0.0.0.0"` lets other machines open the page.
        port (*optional*): `None`: the first free one from 7860 on.
        opens_browser (defaults to `False`): Open the page in a browser on this machine.

    Raises:
        OSError: if the address cannot be listened on.
        ImportError, FileNotFoundError, ValueError: as `build_page`.
    """
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"port must be from 1 to 65535, got {port}.")
    page = build_page(model, **options)
    try:
        _, address, _ = page.launch(
            server_name=host,
            server_port=port,
            inbrowser=opens_browser,
            share=False,
            prevent_thread_lock=True,
            **launch_options(),
        )
    except OSError as error:
        where = host if port is None else f"{host}:{port}"
        raise OSError(f"The page cannot be served at {where}: it is in use or no address of this machine.") from error
    return Server(address, page)
