"""Checkpoints in buckets, which a local server imitates."""

import pytest
from damage import contents
from fake_bucket import FakeBucket
from orbax_writer import maxtext_leaves, write_checkpoint

from dcformer.conversion import convert_maxtext, stores, writer


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
    monkeypatch.setattr(stores, "_LIST_SECONDS", 0.5)
    bucket.is_silent = True
    with pytest.raises(TimeoutError, match="s3://runs/mine"):
        convert_maxtext("s3://runs/mine", tmp_path / "model")
