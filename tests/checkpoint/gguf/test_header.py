"""`read_gguf_header`: what is valid is read as written, and each of its seven checks names what it refuses."""

import struct
import tracemalloc

import pytest

from hfq import FormatError
from hfq.checkpoint import HeaderLimits
from hfq.checkpoint.gguf.block_types import BLOCK_TYPES, block_type
from hfq.checkpoint.gguf.header import GgufArray, read_gguf_header
from hfq.tensor_spec import Blocks
from tests.support.checkpoint_files import refused, stored_bytes
from tests.support.gguf_files import ARRAY, STRING, U32, entry, key, nbytes_of, pack, write_gguf

ARCHITECTURE = key("general.architecture", STRING, "llama")
F32 = entry("a", "F32", (2, 4), 0)


def write(tmp_path, *arguments, **options):
    path = tmp_path / "x.gguf"
    path.write_bytes(pack(*arguments, **options))
    return path


@pytest.mark.parametrize("found", BLOCK_TYPES.values(), ids=lambda found: found.name)
def test_every_type_is_read_as_written(tmp_path, found):
    shape = (3, 2 * found.size)
    nbytes = nbytes_of(found.name, shape)
    raw = bytes(range(256)) * (nbytes // 256 + 1)
    path = write_gguf(
        tmp_path / "x.gguf", {}, {"first": ("I8", (5,), raw[:5]), "a": (found.name, shape, raw[:nbytes])}
    )
    info = read_gguf_header(path).tensors["a"]
    assert (info.dtype, info.blocks) == (found.dtype, Blocks(found.name, is_layer=found.dtype == "U8"))
    assert info.shape == (shape if found.dtype != "U8" else (3, 2 * found.nbytes))
    assert stored_bytes(info) == raw[:nbytes]
    assert info.range.offset % 32 == 0
    assert block_type(found.name) is found
    assert found.bits == 8 * nbytes / (6 * found.size)


def test_every_type_of_a_value_is_read_as_written(tmp_path):
    values = {
        0: 255, 1: -128, 2: 65535, 3: -32768, 4: 2**32 - 1, 5: -(2**31), 6: 0.5, 7: 1,
        8: "é", 10: 2**64 - 1, 11: -(2**63), 12: -1e300,
    }  # fmt: skip
    keys = [key(f"k.{kind}", kind, value) for kind, value in values.items()]
    keys += [key(f"a.{kind}", ARRAY, (kind, [value] * 3)) for kind, value in values.items()]
    found = read_gguf_header(write(tmp_path, keys, [])).keys
    assert {int(name[2:]): value for name, value in found.items() if name[0] == "k"} == values
    assert found["k.7"] is True
    for kind, value in values.items():
        assert found[f"a.{kind}"] == GgufArray(3, None if kind == STRING else (value,) * 3)


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_may_hold_no_tensor(tmp_path, version):
    header = read_gguf_header(write(tmp_path, [ARCHITECTURE], [], version=version))
    assert (header.tensors, header.metadata, header.keys) == ({}, {}, {"general.architecture": "llama"})


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_tensors_are_where_the_alignment_puts_them(tmp_path, alignment):
    tensors = {name: ("F32", (3,), name.encode() * 12) for name in "abc"}
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, tensors, alignment)
    header = read_gguf_header(path)
    assert {name: stored_bytes(info) for name, info in header.tensors.items()} == {
        name: raw for name, (_, _, raw) in tensors.items()
    }
    assert header.data_start % alignment == 0
    assert header.nbytes == path.stat().st_size


def test_the_padding_after_the_last_tensor_may_be_missing(tmp_path):
    path = write(tmp_path, [], [entry("a", "I8", (5,), 0)], b"12345")
    assert stored_bytes(read_gguf_header(path).tensors["a"]) == b"12345"


def test_a_file_that_is_not_there_is_named(tmp_path):
    with refused("cannot be read", "No such file", file=tmp_path / "x.gguf"):
        read_gguf_header(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "too short"),
        (b"GGUF" + bytes(19), "too short"),
        (b"GGML" + bytes(60), "does not start as a GGUF file"),
        (b"\x08\0\0\0\0\0\0\0{}" + bytes(60), "does not start as a GGUF file"),
        (pack([], [], counts=(1, 0), alignment=8), "ends inside its header"),
    ],
)
def test_check_1_the_file_is_a_gguf_file(tmp_path, raw, words):
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    with refused(words, file=path):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("version", "words", "found"),
    [
        (1, "This version of GGUF", "version 1"),
        (4, "This version of GGUF", "version 4"),
        (0, "This version of GGUF", "version 0"),
        (3 << 24, "A big-endian GGUF file", "version 3, big-endian"),
        (2 << 24, "A big-endian GGUF file", "version 2, big-endian"),
    ],
)
def test_check_1_other_versions_and_byte_orders_are_named(tmp_path, version, words, found):
    path = write(tmp_path, [], [], version=version)
    with refused(words, f"found: {found}\n", kind=FormatError, file=path):
        read_gguf_header(path)


def test_check_2_a_file_that_is_cut_anywhere_is_refused(tmp_path):
    raw = pack(
        [ARCHITECTURE, key("a", ARRAY, (8, ["one", "two"]))],
        [F32, entry("b", "Q4_0", (1, 32), 32)],
        bytes(64),
    )
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    assert len(read_gguf_header(path).tensors) == 2
    for size in range(len(raw) - 14):  # the last block has 18 bytes of 32
        path.write_bytes(raw[:size])
        with refused(file=path):
            read_gguf_header(path)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((500_001, 0), "too many tensors"),
        ((2**64 - 1, 0), "too many tensors"),
        ((0, 65_537), "too many keys"),
        ((0, 2**64 - 1), "too many keys"),
        ((1, 0), "ends inside its header"),
        ((0, 1), "ends inside its header"),
    ],
)
def test_check_2_counts_are_limited(tmp_path, counts, words):
    path = write(tmp_path, [], [], counts=counts, alignment=8)
    with refused(words, file=path):
        read_gguf_header(path)


def test_check_2_a_header_is_read_up_to_its_limit_alone(tmp_path):
    path = write(tmp_path, [key("a", ARRAY, (8, ["x" * 100] * 50_000))], [])
    limits = HeaderLimits(header_nbytes=1 << 20)
    tracemalloc.start()
    with refused("its header is too large", "at most 1048576 bytes", file=path):
        read_gguf_header(path, limits)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert read_gguf_header(path).keys["a"].count == 50_000


def huge(kind, count):
    """Returns an array that claims `count` elements and has none."""
    return key("a", U32, 0)[:9] + struct.pack("<IIQ", ARRAY, kind, count)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([key("", U32, 1)], "a key is not printable ASCII"),
        ([key("é", U32, 1)], "a key is not printable ASCII"),
        ([key("a\0", U32, 1)], "a key is not printable ASCII"),
        ([key("a" * 65_536, U32, 1)], "a key is too long"),
        ([key("a", U32, 1), key("a", U32, 2)], "a key stands twice"),
        ([key("a", STRING, b"\xff")], "the value of a is not UTF-8"),
        ([key("a", 7, 2)], "a truth value is neither 0 nor 1"),
        ([key("a", ARRAY, (7, [0, 1, 2]))], "a truth value is neither 0 nor 1"),
        ([key("a", U32, 1)[:9] + struct.pack("<IQ", 13, 0)], "a value has an unknown type"),
        ([key("a", ARRAY, (13, []))], "a value has an unknown type"),
        ([key("a", ARRAY, (9, []))], "an array holds arrays"),
        ([huge(4, 2**62)], "an array is larger than the file"),
        ([huge(0, 2**64 - 1)], "an array is larger than the file"),
        ([huge(8, 2**64 - 1)], "ends inside its header"),
        ([key("a", STRING, "")[:-8] + struct.pack("<Q", 2**63)], "the value of a is too long"),
    ],
)
def test_check_3_keys_and_values(tmp_path, entries, words):
    path = write(tmp_path, entries, [])
    with refused(words, file=path):
        read_gguf_header(path)


@pytest.mark.parametrize(
    "value", [(U32, 0), (U32, 48), (10, 32), (5, 32), (STRING, "32"), (ARRAY, (4, [32]))]
)
def test_check_4_the_alignment_is_a_power_of_two(tmp_path, value):
    path = write(tmp_path, [key("general.alignment", *value)], [])
    with refused("general.alignment is not valid", file=path):
        read_gguf_header(path)


@pytest.mark.parametrize("name", ["", "a/b", "a\\b", "a\nb", "\x1b[2J"])
def test_check_5_names_are_printable_and_no_paths(tmp_path, name):
    path = write(tmp_path, [], [entry(name, "F32", (2, 4), 0)], bytes(32))
    with refused("a tensor has an unacceptable name", file=path):
        read_gguf_header(path)


def test_check_5_names_are_limited_and_unique(tmp_path):
    path = write(tmp_path, [], [entry("n" * 64, "F32", (2, 4), 0)], bytes(32))
    with refused("the name of a tensor is too long", "at most 63 bytes", file=path):
        read_gguf_header(path)
    path = write(tmp_path, [], [F32, entry("a", "F32", (2, 4), 32)], bytes(64))
    with refused("a tensor stands twice", file=path, tensor="a"):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("tensor", "words", "kind"),
    [
        (entry("a", "F32", (), 0), "an unacceptable shape", None),
        (entry("a", "F32", (1,) * 5, 0), "an unacceptable shape", None),
        (entry("a", "F32", (2, 4), 0, rank=2**32 - 1), "an unacceptable shape", None),
        (entry("a", "F32", (0, 4), 0), "an unacceptable shape", None),
        (entry("a", "F32", (2**62, 4), 0), "an unacceptable shape", None),
        (entry("a", "F32", (2**63, 2**63, 2**63), 0), "an unacceptable shape", None),
        (entry("a", "Q4_K", (2, 100), 0), "do not consist of whole blocks", None),
        (entry("a", "Q4_0", (32, 16), 0), "do not consist of whole blocks", None),
        (entry("a", 43, (2, 4), 0), "type 43: unknown, newer", FormatError),
        (entry("a", 2**32 - 1, (2, 4), 0), "unknown, newer", FormatError),
        (entry("a", 9, (2, 32), 0), "type 9: Q8_1", FormatError),
        (entry("a", 15, (2, 256), 0), "type 15: Q8_K", FormatError),
        (entry("a", 4, (2, 32), 0), "type 4: Q4_2, which ggml has removed", FormatError),
    ],
)
def test_check_6_types_and_shapes(tmp_path, tensor, words, kind):
    path = write(tmp_path, [], [tensor], bytes(64))
    with refused(words, file=path, tensor="a", **({"kind": kind} if kind else {})):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ((32, 64), "leave a hole"),
        ((0, 0), "overlap"),
        ((0, 31), "overlap"),
        ((0, 33), "leave a hole"),
        ((0, 64), "leave a hole"),
        ((0, 2**64 - 32), "leave a hole"),
        ((2**63, 0), "leave a hole"),
    ],
)
def test_check_7_tensors_neither_overlap_nor_leave_holes(tmp_path, offsets, words):
    tensors = [entry(name, "F32", (2, 4), offset) for name, offset in zip("ab", offsets, strict=True)]
    path = write(tmp_path, [], tensors, bytes(128))
    with refused(words, file=path):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(31, "it is truncated by 1 bytes"), (0, "by 32 bytes"), (33, "1 bytes follow its last tensor")],
)
def test_check_7_the_file_ends_with_its_last_tensor(tmp_path, nbytes, words):
    path = write(tmp_path, [ARCHITECTURE], [F32], bytes(nbytes))
    with refused(words, file=path):
        read_gguf_header(path)
