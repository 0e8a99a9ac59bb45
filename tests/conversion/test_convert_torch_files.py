"""Torch and safetensors files: checksums, compressed archives, tensors that are no weights, links, no warnings."""

import itertools
import json
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model

from dcformer.conversion import convert_torch, inspect_checkpoint
from dcformer.conversion.formats.transformers_folder import open_weights


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    tiny_model(num_hidden_layers=1).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    """A model whose weights are in a torch file."""
    folder = tmp_path / "hub"
    folder.mkdir()
    shutil.copy(original / "config.json", folder)
    torch.save(load_file(original / "model.safetensors"), folder / "pytorch_model.bin")
    return folder


def data_members(path):
    with zipfile.ZipFile(path) as archive:
        return [member for member in archive.infolist() if "/data/" in member.filename and member.file_size]


def flip(path, position):
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def assert_same(folder, original):
    written, expected = (load_file(path / "model.safetensors") for path in (folder, original))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def refused(folder, *words):
    with pytest.raises(ValueError) as caught:
        convert_torch(folder, folder.parent / "out", verify=False)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert not (folder.parent / "out").exists()
    assert not list(folder.parent.glob(".*.partial"))


@pytest.mark.parametrize("which", [0, 3, -1])
def test_a_flipped_bit_in_the_data_of_a_torch_file_is_refused(folder, which):
    path = folder / "pytorch_model.bin"
    member = data_members(path)[which]
    flip(path, member.header_offset + len(member.FileHeader()) + 64 + member.file_size // 2)
    refused(folder, str(path), member.filename)


def test_a_flipped_bit_in_the_description_of_a_torch_file_is_refused(folder):
    path = folder / "pytorch_model.bin"
    content = path.read_bytes()
    # The shape of a parameter is a flipped bit away from another one.
    flip(path, content.index(b"model.norm.weight") + 3)
    refused(folder, str(path), "data.pkl")


def test_listing_a_torch_file_does_not_read_its_data(folder):
    path = folder / "pytorch_model.bin"
    member = data_members(path)[0]
    flip(path, member.header_offset + len(member.FileHeader()) + 64 + member.file_size // 2)
    assert inspect_checkpoint(folder).architecture


def test_a_torch_file_without_checksums_is_read(folder, original):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(load_file(original / "model.safetensors"), folder / "pytorch_model.bin")
    finally:
        torch.serialization.set_crc32_options(True)
    convert_torch(folder, folder.parent / "out", verify=False)
    assert_same(folder.parent / "out", original)


def test_a_compressed_torch_file_is_refused(folder):
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    refused(folder, str(path), "compressed", "torch.save")


def test_a_torch_file_with_a_member_twice_is_refused(folder):
    path = folder / "pytorch_model.bin"
    member = data_members(path)[0].filename
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(member, b"other")
    refused(folder, str(path), member, "twice")


UNUSUAL = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "compressed_rows": (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", UNUSUAL)
def test_tensors_without_plain_data_are_refused_by_name(folder, case):
    make, kind = UNUSUAL[case]
    torch.save({"model.norm.weight": make()}, folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin", "model.norm.weight", kind)


def test_no_warning_stands_before_the_refusal_of_another_pickle_protocol(folder, recwarn):
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin", pickle_protocol=4)
    refused(folder, "pytorch_model.bin")
    assert not [warning for warning in recwarn if "pickle" in str(warning.message)]


@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_files_that_are_links_are_read(folder, original, tmp_path, form):
    """As in the cache of the Hub, where a snapshot links to blobs without names."""
    name = "pytorch_model.bin" if form == "bin" else "model.safetensors"
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    for number, source in enumerate([folder / "config.json", (folder if form == "bin" else original) / name]):
        shutil.copy(source, blobs / str(number))
        (snapshot / source.name).symlink_to(f"../blobs/{number}")
    convert_torch(snapshot, tmp_path / "out", verify=False)
    assert_same(tmp_path / "out", original)


def set_header(path, change):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + length].decode().rstrip()).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def shift_first_tensor(text):
    header = json.loads(text)
    name = next(name for name in header if name != "__metadata__" and header[name]["data_offsets"][0] == 0)
    header[name]["data_offsets"] = [4, header[name]["data_offsets"][1] + 4]
    return json.dumps(header)


def repeat_first_tensor(text):
    header = json.loads(text)
    name = next(itertools.islice(iter(header), 1, None))
    return text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"


HEADERS = {
    "offsets_that_overlap": shift_first_tensor,
    "a_tensor_twice": repeat_first_tensor,
    "nested": lambda text: text[:-1] + ', "__metadata__": ' + "[" * 10**5 + "}",
    "fewer_bytes": lambda text: text.replace('"F32"', '"F16"', 1),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_headers_of_safetensors_are_refused(original, tmp_path, case):
    shutil.copytree(original, tmp_path / "hub")
    set_header(tmp_path / "hub" / "model.safetensors", HEADERS[case])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated, damaged"):
        open_weights(tmp_path / "hub")
