"""Checkpoints in buckets, which a local server imitates."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse
from xml.sax.saxutils import escape

import pytest
from damage import contents
from orbax_writer import maxtext_leaves, write_checkpoint

from dcformer.conversion import convert_maxtext, stores, writer


class FakeBucket(ThreadingHTTPServer):
    """A bucket named `runs` of files by their paths; it answers with `status`, or never if `is_silent`."""

    daemon_threads = True
    request_queue_size = 128  # tensorstore asks for all arrays at once; a connection that finds no place waits a second

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), AnsweringReaders)
        self.files, self.status, self.is_silent = files, 200, False
        self.is_stopped, self.endpoint = threading.Event(), f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        self.is_stopped.set()
        self.shutdown()
        self.server_close()

    def listing(self, query, is_google):
        prefix, start, end = (query.get(key, [""])[0] for key in ("prefix", "startOffset", "endOffset"))
        names = [name for name in sorted(self.files) if name.startswith(prefix) and start <= name < (end or "~")]
        sizes = {name: len(self.files[name]) for name in names}
        if is_google:
            items = [{"name": name, "size": str(size), "generation": "1"} for name, size in sizes.items()]
            return json.dumps({"items": items}).encode()
        entries = (f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size></Contents>" for name, size in sizes.items())
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>"
        return f'<?xml version="1.0"?>{text}'.encode()


class AnsweringReaders(BaseHTTPRequestHandler):
    """As much of S3 and Google Cloud Storage as reading needs."""

    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def do_GET(self):
        bucket, url = self.server, urlparse(self.path)
        path, query, google = unquote(url.path), parse_qs(url.query), "/storage/v1/b/runs/o"
        if bucket.is_silent:
            bucket.is_stopped.wait()
            return
        status, body, is_google = bucket.status, b"", path.startswith(google)
        key = path.removeprefix(google).removeprefix("/runs").removeprefix("/")
        if status == 200 and (not key if is_google else "list-type" in query):
            body = bucket.listing(query, is_google)
        elif status == 200 and key in bucket.files:
            body = bucket.files[key]
            if is_google and query.get("alt") != ["media"]:
                body = json.dumps({"name": key, "size": str(len(body)), "generation": "1"}).encode()
        elif status == 200:
            status, body = 404, b"<Error><Code>NoSuchKey</Code></Error>"
        self.send_response(status)
        for name, value in {"Content-Length": len(body), "ETag": '"1"', "x-goog-generation": 1}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_checkpoint(folder / "5" / "state", maxtext_leaves(0, embed=32, channels=8, mlp=64))
    (folder / "train_config.yml").write_text("window_size: [5, null]")
    return folder


@pytest.fixture
def bucket(run, monkeypatch):
    server = FakeBucket({"mine/": b""} | {f"mine/{name}": content for name, content in contents(run).items()})
    settings = dict.fromkeys(("AWS_ENDPOINT_URL", "TENSORSTORE_GCS_HTTP_URL"), server.endpoint)
    settings |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
    settings |= {"AWS_REGION": "us-east-1", "GCE_METADATA_ROOT": "127.0.0.1:9"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


@pytest.mark.parametrize("scheme, below", [("s3", ""), ("gs", "5")])
def test_a_run_is_read_from_a_bucket(bucket, run, tmp_path, scheme, below):
    remote = convert_maxtext(f"{scheme}://runs/mine/{below}", tmp_path / "remote", verify=False)
    here = convert_maxtext(run, tmp_path / "here", verify=False)
    assert remote.source["step"] == 5
    assert remote.source["location"] == f"{scheme}://runs/mine/5/state"
    assert remote.origins == here.origins and not any(o.is_default for o in here.origins if "window" in o.field)
    assert [record["sha256"] for record in remote.tensors] == [record["sha256"] for record in here.tensors]
    assert remote.source["sha256"] == here.source["sha256"]


def test_a_conversion_goes_on_after_the_server_failed_in_its_middle(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})
    save, saved = writer.save_file, []

    def save_then_fail(tensors, path, **options):
        save(tensors, path, **options)
        saved.append(path)
        bucket.status = 500 if len(saved) == 2 else 200

    monkeypatch.setattr(writer, "save_file", save_then_fail)
    with pytest.raises(ValueError, match="500"):
        convert_maxtext("s3://runs/mine", tmp_path / "model", max_shard_size="20KB", verify=False)
    assert not (tmp_path / "model").exists()
    bucket.status = 200
    report = convert_maxtext("s3://runs/mine", tmp_path / "model", max_shard_size="20KB", verify=False)
    assert report.resumed_shards == 2


def test_an_empty_folder_and_a_server_that_never_answers_are_named(bucket, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="s3://runs/nothing"):
        convert_maxtext("s3://runs/nothing", tmp_path / "model")
    monkeypatch.setattr(stores, "_LIST_SECONDS", 0.1)
    bucket.is_silent = True
    with pytest.raises(TimeoutError, match="s3://runs/mine"):
        convert_maxtext("s3://runs/mine", tmp_path / "model")
