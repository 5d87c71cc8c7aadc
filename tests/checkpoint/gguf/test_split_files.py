"""The files of one model: a single file, or all parts of a split and no other file."""

from pathlib import Path

import pytest

from hfq.checkpoint.gguf.header import read_gguf_header
from hfq.checkpoint.gguf.split_files import check_parts, find_gguf, parts_of
from tests.support.checkpoint_files import refused
from tests.support.gguf_files import write_gguf


def write(tmp_path, number, count=2, tensors=2, name="a"):
    metadata = {"split.no": number, "split.count": count, "split.tensors.count": tensors}
    tensor = {f"{name}.{number}": ("F32", (8,), bytes(32))}
    return write_gguf(tmp_path / f"m-{number + 1:05d}-of-{count:05d}.gguf", metadata, tensor)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ((), None),
        (("model.safetensors",), None),
        (("x.gguf",), "x.gguf"),
        (("x.gguf", "mmproj-x.gguf", "mtp-x.gguf"), "x.gguf"),
        (("x-00002-of-00002.gguf", "x-00001-of-00002.gguf"), "x-00001-of-00002.gguf"),
    ],
)
def test_a_folder_is_one_model_if_its_files_are(tmp_path, names, found):
    for name in names:
        (tmp_path / name).touch()
    assert find_gguf(tmp_path) == (tmp_path / found if found else None)


def test_a_folder_of_several_models_is_refused(tmp_path):
    for name in ("x-Q4_0.gguf", "x-Q8_0-00001-of-00002.gguf", "x-Q8_0-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    with refused(
        "There are several GGUF models", "x-Q4_0.gguf, x-Q8_0-00001-of-00002.gguf", "gguf_file='x-Q4_0.gguf'"
    ):
        find_gguf(tmp_path)


def test_any_part_names_all_parts():
    names = ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]
    for name in names:
        assert [path.name for path in parts_of(Path("folder", name))] == names
    assert parts_of(Path("folder/m.gguf")) == [Path("folder/m.gguf")]
    for name in ("m-00000-of-00003.gguf", "m-00004-of-00003.gguf"):
        with refused("is not valid", file=f"folder/{name}"):
            parts_of(Path("folder", name))


def test_parts_belong_together(tmp_path):
    headers = [read_gguf_header(write(tmp_path, number)) for number in range(2)]
    check_parts(headers)
    with refused("do not belong together", "expected: split.no=0", "found: split.no=1"):
        check_parts(headers[::-1])
    with refused("do not belong together", "expected: split.count=1", "found: split.count=2"):
        check_parts(headers[:1])
    other = read_gguf_header(write(tmp_path, 1, tensors=3))
    with refused("expected: split.tensors.count=2", "found: split.tensors.count=3", file=other.file):
        check_parts([headers[0], other])


def test_a_file_that_is_no_part_needs_no_keys(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, {})
    check_parts([read_gguf_header(path)])
    check_parts([read_gguf_header(write_gguf(path, {"split.no": 0, "split.count": 1}, {}))])
