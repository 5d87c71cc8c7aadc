"""Promises 5 to 9: hfq rejects damaged and hostile files.

Reading such a file costs no more than its size and runs no code.
"""

import os
import pickle
import runpy
import struct

import pytest
import torch

from hfq.checkpoint import Checkpoint, read_header
from tests.support import programs
from tests.support.checkpoint_files import entry, refused, write_raw, write_shards
from tests.support.model_copies import copy_model, edit_config, load, opened_files

SIZES = {"a": 24, "b": 1, "c": 40}
BIG = 4 << 20


@pytest.fixture
def path(tmp_path):
    """Returns a valid file of three tensors."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, nbytes in SIZES.items():
        header[name] = entry(shape=(nbytes,), offsets=(end, end + nbytes))
        end += nbytes
    return write_raw(tmp_path / "model.safetensors", header, bytes(range(end)))


# 5. A file that was truncated or extended at any position raises an error.


def test_a_file_cut_at_any_byte_is_refused(path):
    whole, ranges = path.read_bytes(), [info.range for info in read_header(path).tensors.values()]
    boundaries = {
        0,
        7,
        8,
        9,
        ranges[0].offset - 1,
        ranges[0].offset,
        ranges[1].offset,
        ranges[2].offset,
        len(whole) - 1,
    }
    assert boundaries < set(range(len(whole)))
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with refused("The safetensors file is damaged", f"{length} bytes", file=path):
            read_header(path)
    path.write_bytes(whole)
    assert read_header(path).nbytes == len(whole)


@pytest.mark.parametrize("extra", [b"\0", b" ", bytes(8), bytes(4096)], ids=len)
def test_bytes_after_the_last_tensor_are_refused(path, extra):
    path.write_bytes(path.read_bytes() + extra)
    with refused(f"{len(extra)} bytes follow its last tensor", file=path):
        read_header(path)


def test_two_files_in_one_are_refused(path):
    path.write_bytes(path.read_bytes() * 2)
    with refused("bytes follow its last tensor", file=path):
        read_header(path)


# 6. A header with wrong lengths, overlapping tensors, or unused bytes raises an error.


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_lie_about_the_length_of_the_header_is_refused(path, length):
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with refused("header length is out of bounds", f"found: {length}", file=path):
        read_header(path)


def test_a_header_that_ends_early_or_late_is_refused(path):
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    for lie in [*range(2, length), *range(length + 1, length + sum(SIZES.values()) + 9)]:
        path.write_bytes(struct.pack("<Q", lie) + path.read_bytes()[8:])
        with refused("The safetensors file is damaged", file=path):
            read_header(path)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([(0, 8), (4, 12), (12, 16)], "overlap"),
        ([(0, 8), (0, 8), (8, 16)], "overlap"),
        ([(0, 16), (4, 8), (8, 12)], "overlap"),
        ([(0, 4), (8, 12), (12, 16)], "leave a hole"),
        ([(4, 8), (8, 12), (12, 16)], "leave a hole"),
        ([(0, 4), (4, 8), (8, 12)], "4 bytes follow"),
        ([(0, 4), (4, 8), (8, 20)], "truncated by 4 bytes"),
        ([(0, 4), (4, 8), (8, 2**62)], "truncated by"),
        ([(2**62, 2**62 + 4), (0, 4), (4, 16)], "leave a hole"),
    ],
)
def test_tensors_that_share_bytes_or_leave_some_are_refused(tmp_path, offsets, words):
    header = {
        name: entry(shape=(end - begin,), offsets=(begin, end))
        for name, (begin, end) in zip("abc", offsets, strict=True)
    }
    path = write_raw(tmp_path / "x", header, bytes(16))
    with refused(words, file=path):
        read_header(path)


# 7. Reading a header costs no more than its limit allows, and never ends the process.


def refusal(folder):
    """Returns (bytes of memory, seconds of CPU, first line) of the error for a checkpoint.

    A separate process reads the checkpoint.
    """
    result = programs.run("measure_refusal", folder)
    assert result.returncode == 0, result.stderr
    memory, seconds, text = result.stdout.strip().split("|")
    return int(memory), float(seconds), text


def many(count, value):
    return b"{" + b",".join(b'"%x":%s' % (i, value) for i in range(count)) + b"}"


@pytest.mark.parametrize(
    ("length", "nbytes"),
    [(2**63, 100), (33 << 20, 33 << 20), (2**40, 33 << 20)],
    ids=["2**63", "33 MB", "2**40"],
)
def test_a_header_over_the_limit_is_refused_unread(tmp_path, length, nbytes):
    write_raw(tmp_path / "model.safetensors", many(700_000, b"[" + b" " * 36 + b"]")[:nbytes], length=length)
    memory, seconds, text = refusal(tmp_path)
    assert "header length is out of bounds" in text
    assert memory < 8 << 20
    assert seconds < 1


@pytest.mark.parametrize(
    "raw",
    [
        many(BIG // 62, b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'),
        many(BIG // 12, b"{}"),
        b'{"a":[' + b"[]," * (BIG // 3) + b"[]]}",
        b'{"a":{"b":[' + b"9," * (BIG // 2) + b"9]}}",
        b'{"a":"' + b"x" * BIG + b'"}',
    ],
    ids=["tensors", "entries", "lists", "numbers", "text"],
)
def test_a_header_within_the_limit_costs_a_bounded_multiple_of_its_size(tmp_path, raw):
    write_raw(tmp_path / "model.safetensors", raw)
    memory, _, text = refusal(tmp_path)
    assert "The safetensors file is damaged" in text
    assert memory < 48 * len(raw)


NESTED = [b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000]


@pytest.mark.parametrize("nested", NESTED, ids=["open", "lists", "objects"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_deeply_nested_json_is_refused_and_ends_no_process(path, name, nested):
    if name == "model.safetensors":
        write_raw(path, b'{"a":' + nested + b"}")
    else:
        path.rename(path.with_name("model.safetensors" if name == "config.json" else "x.safetensors"))
        path.with_name(name).write_bytes(b'{"a":' + nested + b"}")
    words = (
        "The safetensors file is damaged"
        if name == "model.safetensors"
        else "A JSON file of the checkpoint cannot be read"
    )
    assert refusal(path.parent)[2].startswith(words)


# 8. Code in a checkpoint never runs.


class _Trap:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_pickle_by_another_name_is_refused_and_never_run(tmp_path):
    trap = pickle.dumps(_Trap(tmp_path / "sprung"))
    (tmp_path / "model.safetensors").write_bytes(trap)
    with refused("looks like a pickle", file=tmp_path / "model.safetensors"):
        Checkpoint.open(tmp_path)
    assert not (tmp_path / "sprung").exists()
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists()


def test_a_zip_archive_by_another_name_is_refused(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with refused("looks like a pickle or a zip archive", file=tmp_path / "model.safetensors"):
        Checkpoint.open(tmp_path)


def test_a_pickle_beside_the_shards_is_never_opened(path):
    path.with_name("pytorch_model.bin").write_bytes(pickle.dumps(_Trap(path.with_name("sprung"))))
    with opened_files() as opened:
        Checkpoint.open(path.parent)
    assert opened == [str(path)]


def test_code_that_a_config_names_is_never_imported(tmp_path):
    folder = edit_config(
        copy_model("gptq", tmp_path),
        auto_map={name: f"trap.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")},
    )
    (folder / "trap.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'sprung')!r})")
    with opened_files() as opened:
        load(folder)
    assert str(folder / "config.json") in opened
    assert str(folder / "trap.py") not in opened
    assert not (tmp_path / "sprung").exists()
    runpy.run_path(str(folder / "trap.py"))
    assert (tmp_path / "sprung").exists()


# 9. Control characters of a checkpoint never reach the terminal.


ESCAPES = "\x1b]0;owned\x07"


def index_with_escapes(folder):
    write_shards(folder, {"x.safetensors": {"a": [1.0]}}, {ESCAPES: "x.safetensors"})


def folder_with_escapes(folder):
    (folder / ESCAPES).touch()


@pytest.mark.parametrize("spoil", [index_with_escapes, folder_with_escapes])
def test_control_characters_of_a_checkpoint_never_reach_the_terminal(tmp_path, spoil):
    spoil(tmp_path)
    with refused("owned") as caught:
        Checkpoint.open(tmp_path)
    assert str(caught.value).replace("\n", "").isprintable()
