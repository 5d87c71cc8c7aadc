"""Made-up safetensors headers and mutations of them, drawn from any `random.Random`."""

import json
import struct
from random import Random

from hfq.tensor_spec import DTYPE_BITS

__all__ = ["MUTATIONS", "as_file", "make_header", "mutate", "mutate_text", "random_header", "serialised"]

SIZES = [0, 1, 2, 3, 5, 8, 64, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, -1, -8]
WRONG = [None, True, False, "", "4", 4.0, -0.0, 1e300, [], [[]], [4], {}, {"dtype": "U8"}]
NAMES = ["", "__metadata__", "a", "t0", "t1", "a/b", "..", "a\\b", "\0", "\ud800", "n" * 512, "n" * 513]
DTYPES = [*DTYPE_BITS, "F6_E2M3", "F6_E3M2", "u8", "F33", ""]
WHOLE_BYTES = [dtype for dtype in DTYPE_BITS if dtype != "F4"]
METADATA = [*WRONG, [("k", "v")], [("k", 1)]]
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
_TOKENS = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b" ", b"\n", b"\t", b"\0", b"\xff", b"\xed\xa0\x80"),
    *(b"-", b"+", b".", b"e0", b"E1", b"0", b"1", b"01", b"-0", b"1.0", b"18446744073709551615"),
    *(b"null", b"true", b"NaN", b"Infinity", b"{}", b"[]", b'"a":', b'"a":1,', b"/**/", b"\xef\xbb\xbf"),
    *(b"\\u0061", b"\\ud800", b"\\udc00", b"\\ud83d\\ude00", b"\\/", b"\\x41", b"\xc3\xa9", b"\xe2\x80\xae"),
]


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


def random_header(random: Random):
    """Returns a valid header of one to four small tensors; as `make_header`."""
    return make_header(
        [
            (random.choice(WHOLE_BYTES), [random.randint(0, 5) for _ in range(random.randint(0, 2))])
            for _ in range(random.randint(1, 4))
        ]
    )


def serialised(pairs):
    """Returns JSON of nested lists of pairs; all other values become plain JSON."""
    if isinstance(pairs, list) and pairs and all(isinstance(pair, tuple) for pair in pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{serialised(value)}" for key, value in pairs) + "}"
    return json.dumps(pairs)


def mutate(random: Random, kind: str, pairs: list, sizes: dict) -> None:
    """Damages `pairs` (the header) or `sizes` (the claimed length, the bytes of data)."""
    at = random.randint(1, len(pairs) - 1) if len(pairs) > 1 else 0
    name, fields = pairs[at]
    if kind == "length":
        sizes["length"] = random.choice([*range(-9, 10), -(2**62), 2**62])
    elif kind == "data":
        sizes["data"] += random.randint(-9, 9)
    elif kind == "drop":
        del pairs[at]
    elif kind == "duplicate":
        pairs.append((name, fields))
    elif kind == "rename":
        pairs[at] = (random.choice([*NAMES, chr(random.randrange(0x3000)) * random.randint(1, 3)]), fields)
    elif kind == "metadata":
        pairs[0] = (pairs[0][0], random.choice(METADATA))
    elif not isinstance(fields, list) or len(fields) != 3:
        return
    elif kind == "wrong type":
        field, wrong = random.randint(0, 3), random.choice(WRONG)
        pairs[at] = (
            name,
            wrong if field == 3 else [*fields[:field], (fields[field][0], wrong), *fields[field + 1 :]],
        )
    else:
        (_, dtype), (_, shape), (_, offsets) = fields
        if kind == "shape" and isinstance(shape, list) and shape:
            shape = [random.choice(SIZES), *shape[1:]]
        elif kind == "rank" and isinstance(shape, list):
            shape = shape + [1] * random.randint(0, 9)
        elif kind == "offset" and isinstance(offsets, list) and len(offsets) == 2:
            shift = random.randint(-3, 3)
            offsets = [offsets[0] + shift * random.randint(0, 1), offsets[1] + shift]
        elif kind == "dtype":
            dtype = random.choice(DTYPES)
        pairs[at] = (name, [("dtype", dtype), ("shape", shape), ("data_offsets", offsets)])


def mutate_text(random: Random, raw: bytes) -> bytes:
    """Returns the JSON with some bytes changed, removed, repeated, or followed by a token."""
    begin = random.randint(0, len(raw))
    end = min(len(raw), begin + random.choice([0, 0, 1, 1, 2, 8]))
    between = random.choice([random.choice(_TOKENS), random.choice(_TOKENS), bytes([random.randrange(256)])])
    return raw[:begin] + random.choice([between, between, raw[begin:end] * 2, b""]) + raw[end:]


def as_file(raw: bytes, nbytes: int, lie: int = 0) -> bytes:
    """Returns a file with this JSON, whose claimed length may differ, and bytes of data."""
    return struct.pack("<Q", max(len(raw) + lie, 0)) + raw + bytes(max(nbytes, 0))
