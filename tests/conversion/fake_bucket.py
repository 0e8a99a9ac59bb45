"""A server that speaks as much of S3 and Google Cloud Storage as reading needs; it fails on request."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse
from xml.sax.saxutils import escape


class FakeBucket:
    """
    A bucket named `runs` with the files of a dictionary, from path to bytes.

    Attributes:
        files: What it holds.
        status: Code of every answer where it is not 200.
        is_silent: Requests are accepted and never answered.
    """

    def __init__(self, files):
        self.files, self.status, self.is_silent = files, 200, False
        self._let_go = threading.Event()
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                bucket._answer(self)

            do_HEAD = do_GET

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def stop(self):
        self._let_go.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler):
        url = urlparse(handler.path)
        path, query = unquote(url.path), parse_qs(url.query)
        if self.is_silent:
            self._let_go.wait()
            return
        status, body = self.status, b""
        if status == 200:
            google = "/storage/v1/b/runs/o"
            key = path.removeprefix(google).removeprefix("/runs").removeprefix("/")
            is_list = not key if path.startswith(google) else "list-type" in query
            if is_list:
                body = self._list(query, path.startswith(google))
            elif key in self.files:
                body = self.files[key]
                if path.startswith(google) and query.get("alt") != ["media"]:
                    body = json.dumps({"name": key, "size": str(len(body)), "generation": "1"}).encode()
            else:
                status, body = 404, b"<Error><Code>NoSuchKey</Code></Error>"
        handler.send_response(status)
        for name, value in {"Content-Length": len(body), "ETag": '"1"', "x-goog-generation": 1}.items():
            handler.send_header(name, str(value))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)

    def _list(self, query, is_google):
        prefix, start, end = (query.get(key, [""])[0] for key in ("prefix", "startOffset", "endOffset"))
        names = [name for name in sorted(self.files) if name.startswith(prefix) and start <= name < (end or "~")]
        sizes = {name: len(self.files[name]) for name in names}
        if is_google:
            items = [{"name": name, "size": str(size), "generation": "1"} for name, size in sizes.items()]
            return json.dumps({"items": items}).encode()
        entries = (f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size></Contents>" for name, size in sizes.items())
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>"
        return f'<?xml version="1.0"?>{text}'.encode()
