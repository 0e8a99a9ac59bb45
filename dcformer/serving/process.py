"""A server as a process of its own: started, waited for until it answers, and ended with all that it has started."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence


_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_FOR_AN_ANSWER = 2.0
# After these a server that was asked to end is killed. One that has not answered yet has nothing to finish, and vLLM's
# then waits for ever for engines that have gone.
_SECONDS_TO_FINISH = 10.0
_SECONDS_TO_GIVE_UP = 3.0
_SECONDS_FOR_CHILDREN = 2.0


def check_address(host: str, port: int) -> None:
    """
    Refuse an address that a server could not listen on.

    Raises:
        ValueError: if it is no port.
        OSError: if the port is in use, or `host` is no address of this machine.
    """
    if not 1 <= port <= 65535:
        raise ValueError(f"port must be from 1 to 65535, got {port}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            if os.name == "posix":  # on Windows it would take a port that is in use
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except PermissionError as error:
        raise OSError(f"Port {port} of {host} needs rights that this user lacks; give another by --port.") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"Port {port} of {host} is in use; give another by --port.") from error
        raise OSError(f"{host!r} is no address of this machine ({error.strerror}); give another by --host.") from error


def run_server(
    command: Sequence[str],
    url: str,
    *,
    title: str,
    environment: Mapping[str, str] | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """
    Run a server until it ends by itself, or until an exception such as that of Ctrl-C ends it.

    It runs in a session of its own, so that a terminal's Ctrl-C reaches this process alone; this one ends it, and kills
    what is left of it and its children after some seconds.

    Args:
        command: Of the server.
        url: Where it answers, with `/health` below.
        title: What messages call it.
        environment (*optional*): Variables beside those of this process.
        on_ready (*optional*): Called once it answers.

    Raises:
        ChildProcessError: if it ends with a status that is not 0.
    """
    process = subprocess.Popen(
        command, env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL, start_new_session=True
    )
    has_answered = False
    try:
        while process.poll() is None and not has_answered:
            has_answered = _answers(url)
            if not has_answered:
                _wait(process, _SECONDS_BETWEEN_LOOKS)
        if has_answered:
            on_ready()
        status = process.wait()
    finally:
        _end(process, _SECONDS_TO_FINISH if has_answered else _SECONDS_TO_GIVE_UP)
    if status != 0:
        how = f"with status {status}" if status > 0 else f"by signal {signal.Signals(-status).name}"
        when = "" if has_answered else " before it answered"
        raise ChildProcessError(f"{title} ended {how}{when}; what it printed above says why.")


def _answers(url: str) -> bool:
    # Asks this machine alone: no proxy knows its addresses, and its certificate names another.
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified)
    )
    try:
        with opener.open(f"{url}/health", timeout=_SECONDS_FOR_AN_ANSWER) as answer:
            return answer.status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False


def _wait(process: subprocess.Popen, seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _end(process: subprocess.Popen, seconds: float) -> None:
    """Ask a process to end, and kill what is left of it and its children then; at once if Ctrl-C is heard again."""
    try:
        if process.poll() is None:
            process.terminate()
            _wait(process, seconds)
        _wait_for_children(process)
    finally:
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()


def _wait_for_children(process: subprocess.Popen) -> None:
    """The server has gone; those that it started, which are of its group, are about to."""
    if process.poll() is None or not hasattr(os, "killpg"):
        return
    until = time.monotonic() + _SECONDS_FOR_CHILDREN
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < until:
            os.killpg(process.pid, 0)
            time.sleep(0.02)
