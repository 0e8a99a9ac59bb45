"""A checkpoint in a bucket, served by a local S3 server."""

import boto3
import pytest
from moto.server import ThreadedMotoServer
from orbax_writer import maxtext_leaves, write_checkpoint

from dcformer.conversion import convert_maxtext


@pytest.fixture
def bucket(monkeypatch):
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="runs")
    yield client
    server.stop()


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_converts_from_s3(bucket, tmp_path, layout):
    local = tmp_path / "run"
    write_checkpoint(local / "checkpoints" / "5" / "state", maxtext_leaves(0), layout=layout)
    for path in local.rglob("*"):
        if path.is_file():
            bucket.upload_file(str(path), "runs", f"mine/{path.relative_to(local).as_posix()}")
    remote = convert_maxtext("s3://runs/mine", tmp_path / "remote")
    here = convert_maxtext(local, tmp_path / "here")
    assert remote.source["step"] == 5
    assert [r["sha256"] for r in remote.tensors] == [r["sha256"] for r in here.tensors]


def test_an_empty_place_in_a_bucket_is_named(bucket, tmp_path):
    with pytest.raises(FileNotFoundError, match="s3://runs/nothing"):
        convert_maxtext("s3://runs/nothing", tmp_path / "model")


def test_a_remote_destination_is_refused(tmp_path):
    with pytest.raises(ValueError, match="local folder"):
        convert_maxtext(tmp_path, "s3://runs/model")
