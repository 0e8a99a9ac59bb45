"""Buckets: where their credentials come from, and servers that refuse, deny, fail, fall silent or go away."""

import os
import time

import pytest
from fake_bucket import FakeBucket, files_of
from orbax_writer import maxtext_leaves, write_checkpoint

from dcformer.conversion import aws_credentials, buckets, compare, convert_maxtext, inspect_checkpoint
from dcformer.conversion.aws_credentials import choose_credentials
from dcformer.conversion.shard_writer import ShardWriter
from dcformer.conversion.stores import Store


# Generous on a busy machine; without bounds these take from minutes to forever.
LONGEST_SECONDS = 20
DENIED = b"<Error><Code>AccessDenied</Code><Message>No.</Message></Error>"


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No credentials anywhere, and metadata services that refuse at once."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "CLOUDSDK_", "TENSORSTORE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("GCE_METADATA_ROOT", "127.0.0.1:9")
    aws_credentials._has_role.cache_clear()
    return monkeypatch


@pytest.fixture
def bucket(bare):
    server = FakeBucket()
    bare.setenv("AWS_ENDPOINT_URL", server.endpoint)
    bare.setenv("AWS_REGION", "us-east-1")
    bare.setenv("TENSORSTORE_GCS_HTTP_URL", server.endpoint)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    leaves = maxtext_leaves(0, layers=8, embed=32, heads=4, channels=8, mlp=64, vocab=64)
    write_checkpoint(folder / "5" / "state", leaves)
    return folder


def refused(call, *arguments):
    """The error of a call that is over soon, one line that is not about the data."""
    started = time.monotonic()
    with pytest.raises(OSError) as caught:
        call(*arguments)
    assert time.monotonic() - started < LONGEST_SECONDS
    assert "\n" not in str(caught.value)
    assert "damaged" not in str(caught.value)
    return caught.value


COMMANDS = {
    "inspect": lambda place, folder: inspect_checkpoint(place),
    "convert": lambda place, folder: convert_maxtext(place, folder / "model"),
    "verify": lambda place, folder: compare(place, place),
}


@pytest.mark.parametrize("place", ["s3://runs/mine", "s3://runs", "gs://runs/mine"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_refused_connection_is_named(bare, tmp_path, capfd, command, place):
    bare.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    bare.setenv("TENSORSTORE_GCS_HTTP_URL", "http://127.0.0.1:9")
    error = refused(COMMANDS[command], place, tmp_path)
    assert isinstance(error, ConnectionError)
    assert repr(place) in str(error)
    assert "127.0.0.1 port 9" in str(error)
    assert "check the network" in str(error)
    # Nor does tensorstore write log lines.
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_server_that_never_answers_is_given_up(bucket, monkeypatch, scheme):
    monkeypatch.setattr(buckets, "_ANSWER_SECONDS", 1.0)
    bucket.is_silent = True
    error = refused(inspect_checkpoint, f"{scheme}://runs/mine")
    assert isinstance(error, ConnectionError)
    assert "not answered within 1 seconds" in str(error)
    assert bucket.endpoint in str(error)


ANSWERS = {
    "denied_without_credentials": (403, DENIED, {}, PermissionError, ["403", "AccessDenied", "no credentials"]),
    "denied_with_credentials": (
        403,
        DENIED,
        {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"},
        PermissionError,
        ["403", "check the credentials in the environment"],
    ),
    "no_bucket": (
        404,
        b"<Error><Code>NoSuchBucket</Code></Error>",
        {},
        FileNotFoundError,
        ["no bucket", "NoSuchBucket"],
    ),
    "internal_error": (500, b"<Error><Code>InternalError</Code></Error>", {}, ConnectionError, ["500", "later"]),
    "wrong_region": (400, b"<Error><Code>AuthorizationHeaderMalformed</Code></Error>", {}, ConnectionError, ["region"]),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_that_is_an_error_is_named(bucket, bare, case):
    bucket.status, bucket.reply, environment, kind, words = ANSWERS[case]
    for name, value in environment.items():
        bare.setenv(name, value)
    error = refused(inspect_checkpoint, "s3://runs/mine")
    assert isinstance(error, kind)
    for word in ["s3://runs/mine", *words]:
        assert word in str(error)


GOOGLE_ANSWERS = {
    "denied": (403, PermissionError, ["403", "no credentials", "GOOGLE_APPLICATION_CREDENTIALS"]),
    "no_bucket": (404, FileNotFoundError, ["nothing at 'gs://runs/mine'"]),
    "unavailable": (503, ConnectionError, ["503", "later"]),
}


@pytest.mark.parametrize("case", GOOGLE_ANSWERS)
def test_an_answer_of_google_that_is_an_error_is_named(bucket, case):
    bucket.status, kind, words = GOOGLE_ANSWERS[case]
    bucket.reply = b'{"error": {"message": "No."}}'
    error = refused(inspect_checkpoint, "gs://runs/mine")
    assert isinstance(error, kind)
    for word in words:
        assert word in str(error)


def test_a_host_that_cannot_be_resolved_is_named(bare):
    # As libcurl words it; looking a name up needs a network.
    message = "ABORTED: All 2 retry attempts failed: CURL error Could not resolve hostname: Could not resolve host: "
    error = buckets.Bucket("s3://runs/a").explain(ValueError(message + "runs.s3.amazonaws.com [curl_code='6']"))
    assert isinstance(error, ConnectionError)
    assert "host name 'runs.s3.amazonaws.com' cannot be resolved" in str(error)


@pytest.mark.parametrize("place", ["s3://", "gs:///a", "s3:runs"])
def test_a_location_without_a_bucket_is_refused(bare, place):
    with pytest.raises(ValueError, match="names no bucket"):
        Store(place)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("below", ["", "mine/"], ids=["root", "folder"])
def test_a_run_is_read_from_a_bucket(bucket, run, tmp_path, scheme, below):
    bucket.files = files_of(run, below) | ({"mine/": b""} if below else {})
    remote = convert_maxtext(f"{scheme}://runs/{below}", tmp_path / "remote", verify=False)
    here = convert_maxtext(run, tmp_path / "here", verify=False)
    assert remote.source["step"] == 5
    assert remote.source["location"] == f"{scheme}://runs/{below}5/state"
    assert [record["sha256"] for record in remote.tensors] == [record["sha256"] for record in here.tensors]


def fall_silent(bucket):
    bucket.is_silent = True


def start_failing(bucket):
    bucket.status = 500


def deny(bucket):
    bucket.status, bucket.reply = 403, DENIED


@pytest.mark.parametrize("fail", [FakeBucket.stop, fall_silent, start_failing, deny])
def test_a_conversion_goes_on_after_the_server_failed_in_its_middle(bucket, run, tmp_path, monkeypatch, fail):
    bucket.files = files_of(run)
    monkeypatch.setattr(buckets, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(buckets, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(buckets, "_RETRIES", {"max_retries": 2, "initial_delay": "10ms", "max_delay": "20ms"})
    complete = ShardWriter._complete

    def failing(self, shard, name):
        complete(self, shard, name)
        if sum(map(self._is_done, self.shards)) == 2:
            fail(bucket)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "_complete", failing)
        error = refused(
            lambda: convert_maxtext("s3://runs", tmp_path / "model", max_shard_size="100KB", workers=1, verify=False)
        )
    assert "s3://runs" in str(error)
    assert not (tmp_path / "model").exists()
    again = FakeBucket(files_of(run))
    monkeypatch.setenv("AWS_ENDPOINT_URL", again.endpoint)
    report = convert_maxtext("s3://runs", tmp_path / "model", max_shard_size="100KB", verify=False)
    again.stop()
    assert report.resumed_shards >= 2


def test_a_slow_result_is_waited_for_while_the_server_answers(bucket, bare):
    class Slow:
        """A result that takes three waits."""

        waits = 0

        def result(self, timeout):
            self.waits += 1
            if self.waits < 4:
                raise TimeoutError
            return "done"

    assert buckets.Bucket("s3://runs/mine").result(Slow()) == "done"
    assert len([path for path in bucket.requests if path.endswith("anybody-there")]) == 3


# --- Credentials ------------------------------------------------------------------------------------------------------


def aws_file(home, name, text):
    (home / ".aws").mkdir(parents=True, exist_ok=True)
    (home / ".aws" / name).write_text(text)


KEYS = "aws_access_key_id = a\naws_secret_access_key = b\n"
PROFILES = {
    "keys_in_credentials": ("credentials", f"[default]\n{KEYS}", None, "profile"),
    "keys_in_config": ("config", f"[default]\nregion = x\n{KEYS}", None, "profile"),
    "role_in_config": ("config", "[profile work]\nrole_arn = r\ncredential_source = Environment\n", "work", "profile"),
    "named_in_credentials": ("credentials", f"[other]\nregion = x\n[work]\n{KEYS}", "work", "profile"),
    "only_a_region": ("config", "[default]\nregion = x\n", None, "anonymous"),
    "another_profile": ("credentials", f"[other]\n{KEYS}", None, "anonymous"),
    "no_profiles_at_all": ("credentials", "garbage", None, "anonymous"),
}


@pytest.mark.parametrize("case", PROFILES)
def test_a_profile_is_used_if_it_holds_credentials(bare, tmp_path, case):
    file, text, profile, kind = PROFILES[case]
    aws_file(tmp_path / "home", file, text)
    if profile is not None:
        bare.setenv("AWS_PROFILE", profile)
    credentials, words = choose_credentials()
    assert credentials["type"] == kind
    assert (words is None) == (kind == "anonymous")


@pytest.mark.parametrize("file", ["credentials", "config"])
def test_a_profile_reaches_the_server_without_log_lines(bucket, bare, tmp_path, run, capfd, file):
    bucket.files = files_of(run)
    aws_file(tmp_path / "home", file, f"[default]\n{KEYS}")
    assert Store("s3://runs").has("5/state/_METADATA")
    assert capfd.readouterr().err == ""


OTHERS = {
    "environment": ({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_PROFILE": "x"}, "environment"),
    "half_of_it": ({"AWS_ACCESS_KEY_ID": "a"}, "anonymous"),
    "container": ({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2"}, "ecs"),
    "web_identity": ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/token", "AWS_ROLE_ARN": "arn"}, "default"),
    "none": ({}, "anonymous"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_places_of_credentials(bare, case):
    environment, kind = OTHERS[case]
    for name, value in environment.items():
        bare.setenv(name, value)
    assert choose_credentials()[0]["type"] == kind


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("role,kind", [(b"my-role", "imds"), (b"", "anonymous")], ids=["role", "no_role"])
def test_the_role_of_a_machine_is_used_if_it_has_one(bare, role, kind, has_tokens):
    server = FakeBucket({"latest/meta-data/iam/security-credentials/": role})
    if has_tokens:
        server.files["latest/api/token"] = b"a-token"
    bare.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.endpoint)
    assert choose_credentials()[0]["type"] == kind
    server.stop()


def test_a_metadata_service_that_never_answers_costs_seconds(bare):
    server = FakeBucket()
    server.is_silent = True
    bare.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.endpoint)
    started = time.monotonic()
    assert choose_credentials()[0]["type"] == "anonymous"
    assert time.monotonic() - started < LONGEST_SECONDS
    server.stop()


def test_credentials_that_cannot_be_had_are_named_without_log_lines(bucket, bare, capfd):
    bare.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:9/credentials")
    error = refused(inspect_checkpoint, "s3://runs/mine")
    assert isinstance(error, PermissionError)
    assert "the credentials of the container cannot be used" in str(error)
    assert capfd.readouterr().err == ""


def test_other_writing_to_stderr_is_not_lost(capfd):
    with buckets._log_lines_held_back():
        os.write(2, b"E1122 04:01:35.927114    5804 google_auth_provider.cc:188] Could not find the credentials file\n")
        os.write(2, b"something else\n")
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "something else\nlater\n"
