"""A stand-in for the Hub on loopback: repositories of models in memory, as far as saving and loading speak to it."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
from huggingface_hub.utils import close_session


class FakeHub:
    """
    `with FakeHub(folder) as hub`, then `hub.use(monkeypatch, cache)` turns this process to it.

    Weights are uploaded by the LFS protocol, everything else inside a commit, as the Hub asks for.
    """

    def __init__(self, folder: Path):
        self._repositories: dict[str, dict[str, bytes]] = {}
        self._objects: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self._server.shutdown()
        self._server.server_close()
        close_session()

    def use(self, monkeypatch, cache: Path) -> None:
        constants = huggingface_hub.constants
        close_session()
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr("transformers.utils.hub._hf_api", huggingface_hub.HfApi(endpoint=self.endpoint))

    def files(self, repository: str) -> dict[str, bytes]:
        return self._repositories[repository]

    def commit(self, repository: str, files: dict[str, bytes]) -> None:
        self._repositories[repository].update(files)

    def sha(self, repository: str) -> str:
        """Of the commit: another one whenever a file has changed."""
        content = [(name, hashlib.sha1(data).hexdigest()) for name, data in sorted(self.files(repository).items())]
        return hashlib.sha1(repr(content).encode()).hexdigest()

    def create(self, body: bytes) -> dict:
        wanted = json.loads(body)
        name = "/".join(part for part in (wanted.get("organization"), wanted["name"]) if part)
        self._repositories.setdefault(name, {})
        return {"url": f"{self.endpoint}/{name}", "id": name, "name": name}

    def modes(self, body: bytes) -> dict:
        files = [file["path"] for file in json.loads(body)["files"]]
        modes = {True: "lfs", False: "regular"}
        return {
            "files": [
                {"path": name, "uploadMode": modes[name.endswith(".safetensors")], "shouldIgnore": False}
                for name in files
            ]
        }

    def batch(self, body: bytes) -> dict:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.endpoint}/objects/{each['oid']}"}}}
            for each in json.loads(body)["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def store(self, oid: str, body: bytes) -> dict:
        assert hashlib.sha256(body).hexdigest() == oid
        self._objects[oid] = body
        return {}

    def commit_lines(self, repository: str, body: bytes) -> dict:
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                self.commit(repository, {item["value"]["path"]: base64.b64decode(item["value"]["content"])})
            elif item["key"] == "lfsFile":
                self.commit(repository, {item["value"]["path"]: self._objects[item["value"]["oid"]]})
        oid = self.sha(repository)
        return {"commitUrl": f"{self.endpoint}/{repository}/commit/{oid}", "commitOid": oid}


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_HEAD(self) -> None:
        self._resolve()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path)
        if match is None:
            self._resolve()
        elif match[1] not in self.hub._repositories:
            self._refuse("RepoNotFound")
        elif (match[2] or "").startswith("/tree/"):
            self._refuse("EntryNotFound")  # the folder of further chat templates
        else:
            name = match[1]
            siblings = [{"rfilename": file} for file in self.hub.files(name)]
            self._answer({"id": name, "sha": self.hub.sha(name), "siblings": siblings, "private": False, "tags": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.split("?")[0]
        if path == "/api/repos/create":
            self._answer(self.hub.create(body))
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            self._answer(self.hub.modes(body))
        elif path.endswith("/info/lfs/objects/batch"):
            self._answer(self.hub.batch(body))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self._answer(self.hub.commit_lines(match[1], body))
        else:
            self._refuse("EntryNotFound")

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(self.hub.store(self.path.rsplit("/", 1)[-1], body))

    def _resolve(self) -> None:
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path.split("?")[0])
        if match is None or match[1] not in self.hub._repositories:
            self._refuse("RepoNotFound")
        elif match[2] not in self.hub.files(match[1]):
            self._refuse("EntryNotFound", match[1])
        else:
            content = self.hub.files(match[1])[match[2]]
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": self.hub.sha(match[1])}
            self._send(200, content, headers)

    def _refuse(self, code: str, repository: str | None = None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code}
        self._send(404, b"{}", headers | ({"X-Repo-Commit": self.hub.sha(repository)} if repository else {}))

    def _answer(self, value: dict) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
