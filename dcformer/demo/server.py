"""Serving the page on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from .page import build_page, import_gradio


_CSS = """
.gradio-container {max-width: 1180px !important; margin: 0 auto !important}
.attention {display: flex; flex-wrap: wrap; gap: 1rem}
.attention figure {flex: 1 1 340px; min-width: 0; margin: 0; color: var(--body-text-color)}
.attention svg {width: 100%; height: auto}
"""


@dataclass
class Server:
    """A page that is being served from a thread: the address for a browser, and the `gradio.Blocks`."""

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
    """Arguments for `gradio.Blocks.launch`: fonts of the reader's own, and no public link."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    theme = import_gradio().themes.Soft(primary_hue="blue", neutral_hue="slate", **fonts)
    return {"theme": theme, "css": _CSS, "footer_links": [], "ssr_mode": False, "quiet": True, "share": False}


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
        model (defaults to `"dcformer-tiny"`), options: Arguments of [`dcformer.demo.build_page`].
        host (defaults to `"127.0.0.1"`): Address to listen on; `"0.0.0.0"` lets other machines open the page.
        port (*optional*): By default the first free one from 7860 on.
        opens_browser (defaults to `False`): Open the page in a browser on this machine.

    Raises:
        OSError: from gradio, if the port is taken.
    """
    page = build_page(model, **options)
    where = {"server_name": host, "server_port": port, "inbrowser": opens_browser, "prevent_thread_lock": True}
    _, address, _ = page.launch(**where, **launch_options())
    return Server(address, page)
