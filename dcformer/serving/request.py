"""Where a server answers, and a request to begin with."""

from __future__ import annotations

import ipaddress
import json
import shlex
from collections.abc import Sequence

from .models import ServedModel
from .options import has_option


# The bundled models know 509 words; this is a question from what they learnt.
_BUNDLED_PROMPT = "There are Paris, Paris, Mumbai. Which is different? The city in"
_PROMPT = "Attention heads"
_MESSAGE = "What is attention?"
_MAX_TOKENS = 16


def base_url(host: str, port: int, arguments: Sequence[str] = ()) -> str:
    """
    The address of a server as this machine reaches it, without a path.

    Args:
        host: That it listens on; for all addresses at once, the address is this machine's own.
        port: That it listens on.
        arguments (defaults to none): Of the engine; a certificate makes the scheme https.
    """
    scheme = "https" if has_option(arguments, "ssl-certfile") else "http"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return f"{scheme}://{host}:{port}"
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"{scheme}://[{address}]:{port}" if address.version == 6 else f"{scheme}://{address}:{port}"


def curl_line(model: ServedModel, name: str, url: str, arguments: Sequence[str] = (), *, has_key: bool = False) -> str:
    """
    One line for a shell that asks a server for text: an answer if there is a chat template, else a completion.

    Args:
        model: That is served.
        name: What requests call it by.
        url: Of the server, as [`base_url`] gives it.
        arguments (defaults to none): Of the engine, where a chat template or a key may be.
        has_key (defaults to `False`): Whether the variable VLLM_API_KEY holds the key that the server asks for.
    """
    if model.has_chat_template or has_option(arguments, "chat-template"):
        path, asked = "chat/completions", {"messages": [{"role": "user", "content": _MESSAGE}]}
    else:
        path, asked = "completions", {"prompt": _BUNDLED_PROMPT if model.is_bundled else _PROMPT}
    body = {"model": name, **asked, "max_tokens": _MAX_TOKENS, "temperature": 0}
    headers = "-H 'Content-Type: application/json'"
    if has_option(arguments, "api-key"):
        headers += " -H 'Authorization: Bearer API_KEY'"
    elif has_key:
        headers += ' -H "Authorization: Bearer $VLLM_API_KEY"'
    return f"curl {shlex.quote(f'{url}/v1/{path}')} {headers} -d {shlex.quote(json.dumps(body))}"
