"""Promises 10 and 11 for GGUF: only errors of hfq escape, and ggml and gguf read the same files."""

import importlib.util
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfq import HfqError
from hfq.checkpoint.gguf.header import read_gguf_header
from tests.support import ggml_library
from tests.support.gguf_files import ARRAY, IDS, STRING, U32, entry, key, nbytes_of, pack

EXAMPLES = 600
NUMBERS = [0, 1, 2, 3, 4, 7, 9, 31, 32, 33, 48, 64, 255, 256, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
NAMES = ["a", "b", "blk.0.attn_q.weight", "n" * 63, "n" * 64, "é", "", "a/b", "a\0"]
READERS = [
    "none",
    pytest.param(
        "gguf",
        marks=pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed"),
    ),
    pytest.param(
        "ggml",
        marks=[
            pytest.mark.peers,
            pytest.mark.skipif(not ggml_library.is_installed(), reason="no ggml is installed"),
        ],
    ),
]


def random_parts(random):
    """Returns entries of metadata, entries of tensors, and data of a valid file."""
    keys = [key("general.architecture", STRING, "llama")]
    keys += [key(f"k{i}", *random.choice(VALUES)) for i in range(random.randint(0, 3))]
    alignment = random.choice([32, 32, 8, 64])
    if alignment != 32:
        keys.append(key("general.alignment", U32, alignment))
    tensors, offset = [], 0
    for index in range(random.randint(0, 3)):
        kind = random.choice([*IDS])
        shape = (*[random.randint(1, 3)] * random.randint(0, 2), 256)
        tensors.append([f"t{index}", kind, shape, offset])
        offset += -(-nbytes_of(kind, shape) // alignment) * alignment
    return keys, tensors, offset, alignment


VALUES = [(U32, 7), (STRING, "text"), (ARRAY, (5, [1, 2])), (ARRAY, (STRING, ["a", "b"])), (7, 1), (12, 0.5)]


def mutated(random, kinds):
    """Returns the bytes of a file with these mutations."""
    keys, tensors, nbytes, alignment = random_parts(random)
    raw_kinds = [kind for kind in kinds if kind in ("byte", "cut", "append", "number")]
    for kind in kinds:
        if kind == "key":
            keys.append(key(random.choice(NAMES), *random.choice(VALUES)))
        elif kind == "alignment":
            keys.append(key("general.alignment", *random.choice([(U32, 16), (U32, 48), (10, 32), (U32, 0)])))
        elif kind in ("name", "type", "shape", "offset") and tensors:
            tensor = random.choice(tensors)
            place = ("name", "type", "shape", "offset").index(kind)
            tensor[place] = {
                "name": random.choice(NAMES),
                "type": random.choice([*range(45), 2**32 - 1]),
                "shape": tuple(random.choice([*NUMBERS[:14], 2**62]) for _ in range(random.randint(0, 5))),
                "offset": random.choice(NUMBERS),
            }[kind]
        elif kind == "duplicate" and tensors:
            tensors.append([*random.choice(tensors)])
    raw = bytearray(pack(keys, [entry(*tensor) for tensor in tensors], bytes(nbytes), alignment=alignment))
    for kind in raw_kinds:
        at = random.randrange(len(raw))
        if kind == "byte":
            raw[at] = random.randrange(256)
        elif kind == "number":
            raw[at : at + 8] = struct.pack("<Q", random.choice(NUMBERS))
        elif kind == "cut":
            del raw[random.randrange(len(raw) + 1) :]
            raw += b"\0" * (not raw)
        else:
            raw += bytes(random.randint(1, 40))
    return bytes(raw)


MUTATIONS = [
    "none",
    "byte",
    "number",
    "cut",
    "append",
    "key",
    "alignment",
    "name",
    "type",
    "shape",
    "offset",
    "duplicate",
]


def read_by(reader, path):
    """Returns {name: (number of the type, offset in the data, bytes)} as another reader finds it."""
    if reader == "ggml":
        return ggml_library.read_tensors(path)
    from gguf import GGUFReader

    found = GGUFReader(path)
    start = found.data_offset
    return {
        tensor.name: (int(tensor.tensor_type), int(tensor.data_offset) - start, int(tensor.n_bytes))
        for tensor in found.tensors
    }


@pytest.mark.parametrize("reader", READERS)
def test_only_hfq_errors_escape_and_what_hfq_accepts_others_read_alike(reader, tmp_path):
    refused, accepted = [], []

    @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None)
    @given(st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=2), st.randoms(use_true_random=False))
    def check(kinds, random):
        path = tmp_path / "x.gguf"
        path.write_bytes(mutated(random, kinds))
        try:
            header = read_gguf_header(path)
        except HfqError as error:
            refused.append(str(error))
            return
        found = {
            name: (IDS[info.blocks.type], info.range.offset - header.data_start, info.nbytes)
            for name, info in header.tensors.items()
        }
        known = reader == "gguf" and any(kind >= 42 for kind, _, _ in found.values())  # newer than gguf 0.19
        if reader != "none" and not known:
            assert read_by(reader, path) == found
        accepted.append(kinds)

    check()
    assert [text for text in refused if "\nFix: " not in text or str(tmp_path) not in text] == []
    assert min(len(refused), len(accepted)) >= EXAMPLES // 5
