"""`read_header`: what is valid is read as it is written, and each of its seven checks refuses by name."""

import json
import os
import struct

import pytest
import safetensors.torch
import torch

from hfq.checkpoint import HeaderLimits, read_header
from tests.support.checkpoint_files import entry, refused, stored_bytes, write_raw

DATA = b"\x01\x02\x03\x04"
DTYPES = list(safetensors.torch._SIZE)
ONE = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'


def written_header(path):
    """(tensors, metadata, start of the data) as the file's own JSON says, read without hfq."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    tensors = json.loads(raw[8 : 8 + length])
    return tensors, tensors.pop("__metadata__", {}), 8 + length


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_that_safetensors_writes_is_read_as_written(tmp_path, dtype):
    path = tmp_path / "model.safetensors"
    value = (
        torch.arange(32, dtype=torch.uint8).view(dtype)
        if dtype != torch.bool
        else torch.tensor([True, False])
    )
    safetensors.torch.save_file({"a": value}, path)
    info = read_header(path).tensors["a"]
    tensors, _, data_start = written_header(path)
    begin, end = tensors["a"]["data_offsets"]
    assert (info.dtype, list(info.shape)) == (tensors["a"]["dtype"], tensors["a"]["shape"])
    assert (info.range.file, info.range.offset, info.nbytes) == (str(path), data_start + begin, end - begin)
    assert stored_bytes(info) == value.view(torch.uint8).numpy().tobytes()


def test_a_file_of_many_tensors_is_read_as_written(tmp_path):
    path = tmp_path / "model.safetensors"
    values = {f"model.{i}.weight": torch.full((i, 3), i, dtype=dtype) for i, dtype in enumerate(DTYPES[:8])}
    safetensors.torch.save_file({**values, "scalar": torch.tensor(1.0)}, path, {"format": "pt", "é": "ü"})
    header = read_header(path)
    tensors, metadata, data_start = written_header(path)
    assert header.file == str(path)
    assert (header.metadata, header.data_start, header.nbytes) == (metadata, data_start, path.stat().st_size)
    assert header.tensors.keys() == tensors.keys()
    for name, info in header.tensors.items():
        offset = data_start + tensors[name]["data_offsets"][0]
        assert (info.name, info.dtype, list(info.shape)) == (
            name,
            tensors[name]["dtype"],
            tensors[name]["shape"],
        )
        assert info.range.offset == offset


def test_a_tensor_may_be_empty(tmp_path):
    header = {"a": entry(), "none": entry(shape=(0, 7), offsets=(4, 4)), "b": entry(offsets=(4, 8))}
    tensors = read_header(write_raw(tmp_path / "x", header, DATA * 2)).tensors
    assert (tensors["none"].nbytes, tensors["none"].numel, tensors["none"].shape) == (0, 0, (0, 7))


def test_a_file_may_hold_no_tensor_and_no_metadata(tmp_path):
    header = read_header(write_raw(tmp_path / "x", {}))
    assert (header.tensors, header.metadata) == ({}, {})


def test_the_identity_is_that_of_the_file(tmp_path):
    path = write_raw(tmp_path / "x", ONE, DATA)
    status = os.stat(path)
    assert read_header(path).identity == (status.st_ino, status.st_size, status.st_mtime_ns)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with refused("cannot be read", "No such file", file=tmp_path / "x"):
        read_header(tmp_path / "x")


def test_a_path_that_no_file_can_have_is_refused(tmp_path):
    with refused("cannot be read"):
        read_header(f"{tmp_path}/a\0b")


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    with refused("cannot be read", file=tmp_path):
        read_header(tmp_path)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "too short"),
        (b"\x08\0\0\0\0\0\0", "too short"),
        (struct.pack("<Q", 1) + b"{", "header length is out of bounds"),
        (struct.pack("<Q", (32 << 20) + 1) + b"{}", "header length is out of bounds"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "header length is out of bounds"),
        (struct.pack("<Q", 3) + b"{}", "ends inside its header"),
        (b"PK\x03\x04" + bytes(60), "looks like a pickle or a zip archive"),
        (b"\x80\x04\x95\x10" + bytes(60), "looks like a pickle or a zip archive"),
    ],
)
def test_check_1_the_file_holds_the_header_it_promises(tmp_path, raw, words):
    path = tmp_path / "x"
    path.write_bytes(raw)
    with refused(words, file=path):
        read_header(path)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b" " + ONE, "not a JSON object"),
        (b"[" + ONE + b"]", "not a JSON object"),
        (b"\xef\xbb\xbf" + ONE, "not a JSON object"),
        (ONE + b"\0", "not valid JSON"),
        (ONE + ONE, "not valid JSON"),
        (ONE[:-1], "not valid JSON"),
        (ONE.replace(b"a", b"\xff", 1), "not valid JSON"),
        (ONE.replace(b"[4]", b"[04]"), "not valid JSON"),
        (ONE.replace(b"[4]", b"[" + b"1" * 5000 + b"]"), "not valid JSON"),
        *(
            (ONE.replace(b"[4]", constant), "is not JSON")
            for constant in (b"[NaN]", b"[Infinity]", b"[-Infinity]")
        ),
        (ONE[:-1] + b"," + ONE[1:], "stands twice in its header"),
        (ONE.replace(b"{", b'{"__metadata__":{"k":"1","k":"2"},', 1), "stands twice in its header"),
        (ONE.replace(b'"dtype"', b'"shape":[4],"dtype"'), "stands twice in its header"),
        (ONE[:-1] + b"," + ONE[1:].replace(b'"a"', b'"\\u0061"'), "stands twice in its header"),
    ],
)
def test_check_2_the_header_is_one_json_object(tmp_path, raw, words):
    path = write_raw(tmp_path / "x", raw, DATA)
    with refused(words, file=path):
        read_header(path)


@pytest.mark.parametrize("metadata", [None, [], "text", 1, {"k": 1}, {"k": None}, {"k": {"l": "m"}}])
def test_check_3_metadata_maps_strings_to_strings(tmp_path, metadata):
    path = write_raw(tmp_path / "x", {"__metadata__": metadata, "a": entry()}, DATA)
    with refused("__metadata__ must map strings to strings", file=path):
        read_header(path)


WITHOUT_DTYPE = {"shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "entry is malformed"),
        ([], "entry is malformed"),
        (WITHOUT_DTYPE, "entry is malformed"),
        ({**entry(), "extra": 1}, "entry is malformed"),
        *(({**entry(), "dtype": dtype}, "unknown dtype") for dtype in ("u8", "F3", "", 8, None, ["U8"])),
        *(
            ({**entry(), "shape": shape}, "unacceptable shape")
            for shape in (4, "4", None, {}, [4.0], ["4"], [None], [[4]])
        ),
        *(
            ({**entry(), "shape": shape}, "unacceptable shape")
            for shape in ([-4], [-2, -2], [2**63], [4] + [1] * 8)
        ),
        ({**entry(), "shape": [True, 4]}, "unacceptable shape"),
        *(
            ({**entry(), "data_offsets": value}, "unacceptable data_offsets")
            for value in (4, [4], [0, 4, 4], [4, 0], [-4, 0])
        ),
        *(
            ({**entry(), "data_offsets": value}, "unacceptable data_offsets")
            for value in ([False, 4], [0, 4.0], ["0", "4"])
        ),
    ],
)
def test_check_4_a_tensor_is_a_dtype_a_shape_and_offsets(tmp_path, value, words):
    path = write_raw(tmp_path / "x", {"a": value}, DATA)
    with refused(words, file=path, tensor="a"):
        read_header(path)


UNACCEPTABLE = ["", "a" * 513, "a/b", "..\\b", "/etc/passwd", "a\nb", "a\0b", "\x1b[2Jb", "\u202eb", "\ud800"]


@pytest.mark.parametrize("name", UNACCEPTABLE)
def test_check_5_a_name_is_printable_and_no_path(tmp_path, name):
    path = write_raw(tmp_path / "x", {name: entry()}, DATA)
    with refused("unacceptable name", repr(name[:80]), file=path) as caught:
        read_header(path)
    assert str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (entry(shape=(3,)), "4 bytes"),
        (entry(shape=(5,)), "4 bytes"),
        (entry(shape=()), "4 bytes"),
        (entry("F32", (4,)), "4 bytes"),
        (entry("F4", (10,)), "4 bytes"),
        (entry("F16", (2,), (1, 4)), "3 bytes"),
        (entry(shape=(0,)), "4 bytes"),
        (entry(shape=(2**62, 2**62)), "4 bytes"),
        (entry(shape=[2**63 - 1] * 8), "4 bytes"),
    ],
)
def test_check_6_the_bytes_equal_dtype_times_shape(tmp_path, value, found):
    path = write_raw(tmp_path / "x", {"a": value}, DATA)
    with refused("bytes do not match its dtype and shape", f"found: {found}", file=path, tensor="a"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "tensor", "words"),
    [
        ({"a": entry(), "b": entry(offsets=(3, 7))}, "b", "tensors overlap"),
        ({"a": entry(), "b": entry()}, "b", "tensors overlap"),
        (
            {"a": entry(shape=(8,), offsets=(0, 8)), "b": entry(shape=(0,), offsets=(4, 4))},
            "b",
            "tensors overlap",
        ),
        ({"a": entry(offsets=(1, 5))}, "a", "tensors leave a hole"),
        (
            {"a": entry(shape=(2,), offsets=(0, 2)), "b": entry(shape=(2,), offsets=(5, 7))},
            "b",
            "tensors leave a hole",
        ),
        ({"a": entry(shape=(9,), offsets=(0, 9))}, None, "truncated by 1 bytes"),
        ({"a": entry()}, None, "4 bytes follow its last tensor"),
        ({}, None, "8 bytes follow its last tensor"),
    ],
)
def test_check_7_the_tensors_cover_the_file(tmp_path, header, tensor, words):
    path = write_raw(tmp_path / "x", header, DATA * 2)
    with refused(words, file=path, tensor=tensor):
        read_header(path)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (HeaderLimits(header_nbytes=len(ONE) - 1), "header length is out of bounds"),
        (HeaderLimits(tensors=0), "too many tensors"),
        (HeaderLimits(rank=0), "unacceptable shape"),
        (HeaderLimits(name_length=0), "unacceptable name"),
    ],
)
def test_each_limit_can_be_lowered(tmp_path, limits, words):
    path = write_raw(tmp_path / "x", ONE, DATA)
    assert list(read_header(path).tensors) == ["a"]
    with refused(words, file=path):
        read_header(path, limits)


def test_each_limit_can_be_raised(tmp_path):
    path = write_raw(tmp_path / "x", {"a" * 600: entry(shape=[4] + [1] * 8)}, DATA)
    assert read_header(path, HeaderLimits(rank=9, name_length=600)).tensors["a" * 600].shape == (4, *[1] * 8)


def test_a_raised_rank_still_refuses_an_impossible_shape(tmp_path):
    path = write_raw(tmp_path / "x", {"a": entry(shape=[2**62] * 40)}, DATA)
    with refused("bytes do not match", tensor="a"):
        read_header(path, HeaderLimits(rank=64))
