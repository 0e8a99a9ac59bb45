"""A server that speaks as much of S3 and Google Cloud Storage as reading needs; it fails on request."""

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse
from xml.sax.saxutils import escape


class FakeBucket:
    """
    A bucket named `runs` with the files of a dictionary, from path to bytes.

    Attributes:
        files: What it holds.
        status: Code of every answer where it is not 200, with `reply` as body.
        is_silent: Requests are accepted and never answered.
        requests: Paths that were asked for.
    """

    def __init__(self, files=None):
        self.files, self.status, self.reply, self.is_silent = dict(files or {}), 200, b"", False
        self.requests, self._let_go, self._open = [], threading.Event(), set()
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                bucket._answer(self)

            do_HEAD = do_PUT = do_GET

            def log_message(self, *arguments):
                pass

            def setup(self):
                super().setup()
                bucket._open.add(self.connection)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def stop(self):
        """Go away as a machine does that is switched off: connections end, new ones are refused."""
        self._let_go.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, handler):
        url = urlparse(handler.path)
        path, query = unquote(url.path), parse_qs(url.query)
        self.requests.append(path)
        if self.is_silent:
            self._let_go.wait()
            return
        status, body = self.status, self.reply
        if status == 200 and path.startswith("/storage/v1/b/runs/o"):
            status, body = self._google(path.removeprefix("/storage/v1/b/runs/o"), query)
        elif status == 200:
            status, body = self._s3(path.removeprefix("/runs").removeprefix("/"), query)
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("ETag", '"1"')
        handler.send_header("x-goog-generation", "1")
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)

    def _s3(self, key, query):
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            entries = "".join(
                f"<Contents><Key>{escape(name)}</Key><Size>{len(body)}</Size></Contents>"
                for name, body in sorted(self.files.items())
                if name.startswith(prefix)
            )
            text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
            return 200, f'<?xml version="1.0"?>{text}'.encode()
        return self._file(key, b"<Error><Code>NoSuchKey</Code></Error>")

    def _google(self, key, query):
        if not key:
            prefix = query.get("prefix", [""])[0]
            items = [
                {"name": name, "size": str(len(body)), "generation": "1"}
                for name, body in sorted(self.files.items())
                if name.startswith(prefix)
            ]
            return 200, json.dumps({"items": items}).encode()
        return self._file(key.removeprefix("/"), b"{}")

    def _file(self, key, missing):
        return (200, self.files[key]) if key in self.files else (404, missing)


def files_of(folder, below=""):
    """The files of a folder, by path, below another one in the bucket."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {below + path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
