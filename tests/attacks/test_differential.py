"""Promises 10 and 11: only errors of hfq escape, and safetensors accepts the same headers.

safetensors reads every header that hfq accepts, with the same result.
"""

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from hfq import HfqError
from hfq.checkpoint import read_header
from hfq.tensor_spec import DTYPE_BITS

EXAMPLES = 300
SIZES = st.sampled_from([0, 1, 2, 3, 5, 8, 64, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, -1, -8])
WRONG = st.sampled_from([None, True, False, "", "4", 4.0, -0.0, 1e300, [], [[]], [4], {}, {"dtype": "U8"}])
NAMES = st.one_of(
    st.sampled_from(
        ["", "__metadata__", "a", "t0", "t1", "a/b", "..", "a\\b", "\0", "\ud800", "n" * 512, "n" * 513]
    ),
    st.text(max_size=5),
)
DTYPES = st.sampled_from([*DTYPE_BITS, "F6_E2M3", "F6_E3M2", "u8", "F33", ""])
MUTATIONS = (
    "shape",
    "rank",
    "offset",
    "dtype",
    "rename",
    "length",
    "data",
    "wrong type",
    "drop",
    "duplicate",
    "metadata",
)


def make_header(dtypes_and_shapes):
    """Returns a valid header as pairs, and the bytes of its data.

    Pairs allow duplicate keys.
    """
    pairs, end = [("__metadata__", [("format", "pt")])], 0
    for i, (dtype, shape) in enumerate(dtypes_and_shapes):
        begin = end
        end += (shape[0] * shape[1] if len(shape) == 2 else (shape or [1])[0]) * DTYPE_BITS[dtype] // 8
        pairs.append((f"t{i}", [("dtype", dtype), ("shape", list(shape)), ("data_offsets", [begin, end])]))
    return pairs, end


VALID = st.lists(
    st.tuples(
        st.sampled_from([dtype for dtype in DTYPE_BITS if dtype != "F4"]),
        st.lists(st.integers(0, 5), max_size=2),
    ),
    min_size=1,
    max_size=4,
).map(make_header)


def serialised(pairs):
    """Returns JSON of nested lists of pairs; all other values become plain JSON."""
    if isinstance(pairs, list) and pairs and all(isinstance(pair, tuple) for pair in pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{serialised(value)}" for key, value in pairs) + "}"
    return json.dumps(pairs)


def mutate(data, kind, pairs, sizes):
    """Damages `pairs` (the header) or `sizes` (the claimed length, the bytes of data)."""
    at = data.draw(st.integers(1, len(pairs) - 1)) if len(pairs) > 1 else 0
    name, fields = pairs[at]
    if kind == "length":
        sizes["length"] = data.draw(st.one_of(st.integers(-9, 9), st.sampled_from([-(2**62), 2**62])))
    elif kind == "data":
        sizes["data"] += data.draw(st.integers(-9, 9))
    elif kind == "drop":
        del pairs[at]
    elif kind == "duplicate":
        pairs.append((name, fields))
    elif kind == "rename":
        pairs[at] = (data.draw(NAMES), fields)
    elif kind == "metadata":
        pairs[0] = (pairs[0][0], data.draw(st.one_of(WRONG, st.just([("k", "v")]), st.just([("k", 1)]))))
    elif not isinstance(fields, list) or len(fields) != 3:
        return
    elif kind == "wrong type":
        field = data.draw(st.integers(0, 3))
        wrong = data.draw(WRONG)
        pairs[at] = (
            name,
            wrong if field == 3 else [*fields[:field], (fields[field][0], wrong), *fields[field + 1 :]],
        )
    else:
        (_, dtype), (_, shape), (_, offsets) = fields
        if kind == "shape" and isinstance(shape, list) and shape:
            shape = [data.draw(SIZES), *shape[1:]]
        elif kind == "rank" and isinstance(shape, list):
            shape = shape + [1] * data.draw(st.integers(0, 9))
        elif kind == "offset" and isinstance(offsets, list) and len(offsets) == 2:
            shift = data.draw(st.integers(-3, 3))
            offsets = data.draw(
                st.sampled_from([[offsets[0], offsets[1] + shift], [offsets[0] + shift, offsets[1] + shift]])
            )
        elif kind == "dtype":
            dtype = data.draw(DTYPES)
        pairs[at] = (name, [("dtype", dtype), ("shape", shape), ("data_offsets", offsets)])


def write(path, pairs, nbytes, lie=0):
    raw = serialised(pairs).encode("utf-8") if pairs else b"{}"
    path.write_bytes(struct.pack("<Q", max(len(raw) + lie, 0)) + raw + bytes(max(nbytes, 0)))
    return path


def assert_read_alike(path, header):
    """Checks that hfq and safetensors read the same values."""
    with safe_open(path, "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()} == {
            name: (info.dtype, list(info.shape)) for name, info in header.tensors.items()
        }
        assert (file.metadata() or {}) == header.metadata


# 10. Only errors of hfq escape. 11. hfq accepts only headers that safetensors reads.


def test_only_hfq_errors_escape_and_what_hfq_accepts_safetensors_reads_alike(tmp_path):
    refused, accepted = [], []

    @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None)
    @given(VALID, st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=2), st.data())
    def check(valid, kinds, data):
        pairs, nbytes = valid
        sizes = {"length": 0, "data": nbytes}
        for kind in kinds:
            mutate(data, kind, pairs, sizes)
        path = write(tmp_path / "x.safetensors", pairs, sizes["data"], sizes["length"])
        try:
            header = read_header(path)
        except HfqError as error:
            refused.append(str(error))
        else:
            assert_read_alike(path, header)
            accepted.append(kinds)

    check()
    assert [text for text in refused if "\nFix: " not in text or str(tmp_path) not in text] == []
    assert min(len(refused), len(accepted)) >= EXAMPLES // 10


def is_accepted_by_safetensors(path):
    try:
        with safe_open(path, "np"):
            return True
    except SafetensorError:
        return False


def one(shape="[1]", offsets="[0,4]", metadata='{"k":"v"}'):
    return f'{{"__metadata__":{metadata},"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}'


@pytest.mark.parametrize(
    ("raw", "nbytes"),
    [
        (one(shape="[1.0]"), 4),
        (one(shape="[01]"), 4),
        (one(shape="[true]"), 4),
        (one(shape="[-1]"), 4),
        (one(shape="[2]"), 4),
        (one(offsets="[0,5]"), 5),
        (one(offsets="[4,8]"), 8),
        (one(metadata='{"k":1}'), 4),
        (one(metadata='"k"'), 4),
        (one() + "x", 4),
        (one() + one(), 4),
        (one(metadata='{"k":"\x01"}'), 4),
        (one(metadata="NaN"), 4),
        (one(shape="[-0]", offsets="[0,0]"), 0),
        (one(offsets="[-0,4]"), 4),
        (one(shape=f"[{2**62},4,0]", offsets="[0,0]"), 0),
        (one(metadata='{"k":"\\ud800"}'), 4),
        (one(metadata='{"\\udc00":"v"}'), 4),
    ],
)
def test_what_safetensors_refuses_hfq_refuses(tmp_path, raw, nbytes):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw.encode() + bytes(nbytes))
    assert not is_accepted_by_safetensors(path)
    with pytest.raises(HfqError):
        read_header(path)
