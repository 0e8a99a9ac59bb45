"""Buckets (`gs://`, `s3://`): whose credentials are used, how long an answer may take, and what went wrong, in words.

tensorstore tries a request 33 times with pauses of up to 32 seconds and waits without end for a server that accepts a
connection and says nothing. Here a bucket is first asked for something small; where a result then takes long, it is
asked again, so that a slow download goes on and a dead server is an error within seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..common.optional import import_optional
from .aws_credentials import choose_credentials


# How long a server may take for its first answer, and for a sign of life when a result is late.
_ANSWER_SECONDS = 8.0
# How long a result may take before the server is asked whether it is still there.
_PATIENCE_SECONDS = 10.0
_QUICK_RETRIES = {"max_retries": 2, "initial_delay": "500ms", "max_delay": "1s"}
_RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}
# A file that no checkpoint has: any answer to a request for it shows that the server is there.
_ABSENT_FILE = ".dcformer-is-anybody-there"
_LOCATION = re.compile(r"(gs|s3)://([^/]+)/*(.*?)/*", re.IGNORECASE | re.DOTALL)
# What tensorstore's messages hold where the server, the way to it or the credentials are at fault, not the data.
_TRANSPORT = re.compile(r"CURL error|http_response_code=|retry attempts failed|Failed to (get|create) credentials")
_STATUS_CODES = {"PERMISSION_DENIED": 403, "UNAUTHENTICATED": 401, "NOT_FOUND": 404}
# The start of a line as Abseil's logging writes it, and its warning about that.
_LOG_LINE = re.compile(rb"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\] |WARNING: All log messages before absl")
_LOG_LOCK = threading.Lock()


def import_tensorstore():
    return import_optional("tensorstore", "Reading JAX checkpoints needs tensorstore: pip install 'dcformer[convert]'.")


class BucketAccessError(PermissionError):
    """A bucket that may not be read, or no longer: credentials expire in the middle of long conversions."""


class CredentialsError(BucketAccessError):
    """Credentials that were found and cannot be used."""


class Bucket:
    """
    One place in a bucket and the way to it.

    Args:
        location (`str`): `gs://bucket/path` or `s3://bucket/path`; the path may be empty.

    Attributes:
        location (`str`), name (`str`), path (`str`): The location without a slash at its end, and its two parts.
        spec: The tensorstore key-value store of the files there.

    Raises:
        ValueError: if the location names no bucket.
    """

    def __init__(self, location: str):
        match = _LOCATION.fullmatch(location)
        if match is None:
            raise ValueError(f"{location!r} names no bucket; give s3://bucket/path or gs://bucket/path.")
        scheme, self.name, self.path = match.groups()
        self._is_s3 = scheme.lower() == "s3"
        self.location = f"{scheme.lower()}://{self.name}/{self.path}".rstrip("/")
        place = {"bucket": self.name, "path": f"{self.path}/" if self.path else ""}
        if self._is_s3:
            credentials, self._credentials = choose_credentials()
            self._is_quiet = credentials["type"] in ("environment", "profile", "anonymous")
            place = {"driver": "s3", **place, "aws_credentials": credentials}
            if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
                place["endpoint"] = endpoint
            if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
                place["aws_region"] = region
        else:
            place, self._credentials = {"driver": "gcs", **place}, _google_credentials()
            self._is_quiet = False
        self._places = (
            "the environment, ~/.aws or a role of the machine"
            if self._is_s3
            else ("GOOGLE_APPLICATION_CREDENTIALS or gcloud's folder")
        )
        kind = "s3" if self._is_s3 else "gcs"
        self.spec = {**place, f"{kind}_request_retries": _RETRIES}
        # With a queue of its own, so that the question does not wait behind downloads.
        self._question = {
            **place,
            f"{kind}_request_retries": _QUICK_RETRIES,
            f"{kind}_request_concurrency": {"limit": 1},
        }

    def ask(self) -> None:
        """
        Make sure that the server answers, whatever it answers.

        Raises:
            ConnectionError: if it does not within seconds, or only with a failure of its own.
            CredentialsError: if it cannot be asked.
        """
        refusal = self._refusal()
        if isinstance(refusal, ConnectionError | CredentialsError):
            raise refusal

    def _refusal(self) -> Exception | None:
        """What a request for a small file comes to: None if the server answers it."""
        tensorstore = import_tensorstore()
        with contextlib.nullcontext() if self._is_quiet else _log_lines_held_back():
            try:
                reading = tensorstore.KvStore.open(self._question).result(timeout=_ANSWER_SECONDS).read(_ABSENT_FILE)
                reading.result(timeout=_ANSWER_SECONDS)
            except TimeoutError:
                return self._unreachable(f"it has not answered within {_ANSWER_SECONDS:g} seconds")
            except ValueError as error:
                return self.explain(error)
        return None

    def result(self, future: Any) -> Any:
        """
        The result of a request, however long it takes as long as the server is there.

        Raises:
            ConnectionError, PermissionError, FileNotFoundError: if the server does not give it; the message says why.
            ValueError: as tensorstore, for what was read.
        """
        while True:
            try:
                return future.result(timeout=_PATIENCE_SECONDS)
            except TimeoutError:
                try:
                    self.ask()
                except OSError:
                    future.cancel()
                    raise
            except ValueError as error:
                if _TRANSPORT.search(str(error)):
                    raise self.explain(error) from error
                raise

    def names(self) -> list[str]:
        """
        Every file there, with its path relative to the place, sorted.

        Raises:
            ConnectionError, PermissionError, FileNotFoundError: if it cannot be listed, or is empty.
        """
        self.ask()
        tensorstore = import_tensorstore()
        try:
            keys = self.result(tensorstore.KvStore.open(self.spec).result().list())
        except ValueError as error:
            # The listing of a Google bucket fails without its reason, which a file of it gives.
            raise self._refusal() or self.explain(error) from error
        # Consoles of buckets make empty files for folders.
        names = sorted(name for key in keys if (name := key.decode()) and not name.endswith("/"))
        if not names:
            nothing = FileNotFoundError(f"There is nothing at {self.location!r}; check the bucket and the path.")
            raise self._refusal() or nothing
        return names

    def explain(self, error: Exception) -> Exception:
        """The error to raise for one of tensorstore's: what is wrong and what to do."""
        text = str(error)
        detail = re.sub(r"^.*?retry attempts failed: ", "", first_sentence(error))
        if "credentials provider" in text or "credentials from provider" in text:
            reason = text.split(" [")[0].rsplit(", ", 1)[-1]
            return CredentialsError(
                f"{self.location!r} cannot be read: {self._credentials or 'no credentials'} cannot be used ({reason}); "
                "correct them."
            )
        if match := re.search(r"resolve host: ([^ \[]+)", text):
            return self._unreachable(f"the host name {match[1]!r} cannot be resolved")
        if match := re.search(r"Failed to connect to (\S+) port (\d+)", text):
            return self._unreachable(f"the connection to {match[1]} port {match[2]} was refused or timed out")
        if "CURL error" in text:
            return self._unreachable(detail.replace("CURL error ", ""))
        code = re.search(r"http_response_code='(\d+)'", text)
        number = int(code[1]) if code else _STATUS_CODES.get(text.split(":")[0], 0)
        if not number:
            return ValueError(f"{self.location!r} cannot be read: {detail.rstrip(' .:')}.")
        answer = f"the server answers {number}" + (f" ({detail})" if detail not in ("", "Unknown") else "")
        if number in (401, 403):
            advice = f"check {self._credentials} and the bucket"
            if self._credentials is None:
                advice = f"no credentials were found in {self._places}: give some, or check the bucket"
            return BucketAccessError(f"{self.location!r} cannot be read: access is denied, {answer}; {advice}.")
        if number == 404:
            return FileNotFoundError(
                f"There is no bucket {self.name!r} for {self.location!r}: {answer}; check the name."
            )
        advice = "try again later" if number >= 500 or number in (408, 429) else "check the bucket and its region"
        return ConnectionError(f"{self.location!r} cannot be read: {answer}; {advice}.")

    def _unreachable(self, reason: str) -> ConnectionError:
        setting = "AWS_ENDPOINT_URL" if self._is_s3 else "TENSORSTORE_GCS_HTTP_URL"
        through = f" and {setting}, {os.environ[setting]!r}" if os.environ.get(setting) else ""
        return ConnectionError(f"{self.location!r} cannot be reached: {reason}; check the network{through}.")


def first_sentence(error: Exception) -> str:
    """The telling part of a tensorstore message: without status code, nested context and source positions."""
    text = str(error).split(" [")[0].split("\n")[0]
    return re.sub(r"^[A-Z_]+: ", "", text)[:300]


def _google_credentials() -> str | None:
    """Which credentials tensorstore's Google client takes, in words; it has no setting for them."""
    given = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    folder = os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud"
    files = (given, Path(folder, "application_default_credentials.json"))
    return next((f"the credentials in {str(file)!r}" for file in files if file and Path(file).is_file()), None)


@contextlib.contextmanager
def _log_lines_held_back() -> Iterator[None]:
    """
    Keep log lines off the standard error stream: tensorstore writes there how its search for Google's credentials went,
    or for others over a network, and has no switch for it. Whatever else is written meanwhile comes afterwards.
    """
    with _LOG_LOCK, tempfile.TemporaryFile() as held:
        stream = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stream, 2)
            os.close(stream)
            held.seek(0)
            for line in held:
                if not _LOG_LINE.match(line):
                    os.write(2, line)
