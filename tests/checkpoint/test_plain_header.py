"""`read_plain`: equal to the examination of each tensor, or undecided."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from hfq import HfqError
from hfq.checkpoint import HeaderLimits, header
from hfq.checkpoint.header import parse_header, read_header
from hfq.checkpoint.plain_header import read_plain
from tests.support.header_mutations import MUTATIONS, mutate, mutate_text, random_header, serialised

CHECKPOINTS = sorted(Path(__file__).parents[1].glob("data/tiny-*/*.safetensors"))


def examined(raw):
    try:
        return header._examine(raw, "x", 8 + len(raw), HeaderLimits())
    except HfqError as error:
        return error


def mutated(random):
    pairs, nbytes = random_header(random)
    for _ in range(random.randint(0, 2)):
        mutate(random, random.choice(MUTATIONS), pairs, {"length": 0, "data": nbytes})
        if not pairs:
            return b"{}"
    raw = serialised(pairs).encode()
    return mutate_text(random, raw) if random.random() < 0.5 else raw


def test_a_decided_header_is_read_as_if_each_tensor_was_examined():
    random, outcomes = Random(0), Counter()
    for _ in range(5_000):
        raw = mutated(random)
        if raw[:1] != b"{":
            continue  # `read_raw` refuses it
        found, expected = read_plain(raw, "x", 8 + len(raw), 8, 512), examined(raw)
        is_fault = isinstance(expected, HfqError)
        outcomes[found is not None, is_fault] += 1
        assert found is None or found == expected
    assert min(outcomes[True, False], outcomes[False, True]) > 500


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[-0,4]}}',
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],'
        b'"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"k":"v","k":"v"},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b'{"\\u0061":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b'{"__metadata__":null,"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","shape":[0,9223372036854775807,2],"data_offsets":[0,0]}}',
        b"[]",
        b'{"a":[]}',
    ],
)
def test_a_doubtful_header_is_left_undecided(raw):
    assert read_plain(raw, "x", 8 + len(raw), 8, 512) is None


def test_headers_of_checkpoints_are_plain(monkeypatch):
    asked = []
    monkeypatch.setattr(header, "_examine", lambda *arguments: asked.append(arguments))
    assert CHECKPOINTS
    for file in CHECKPOINTS:
        read_header(file)
    assert asked == []


def test_tensors_of_one_shape_share_it():
    entries = {
        f"t{i}": {"dtype": "U8", "shape": [300, 2], "data_offsets": [i * 600, i * 600 + 600]}
        for i in range(3)
    }
    raw = str(entries).replace("'", '"').encode()
    tensors = parse_header(raw, "x", (0, 8 + len(raw) + 1800, 0)).tensors
    assert len({id(info.shape) for info in tensors.values()}) == 1
