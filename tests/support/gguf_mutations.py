"""Small GGUF files and mutations of them, drawn from any `random.Random`."""

import struct

from tests.support.gguf_files import ARRAY, IDS, STRING, U32, entry, key, nbytes_of, pack

__all__ = ["MUTATIONS", "mutated"]

_NUMBERS = [0, 1, 2, 3, 4, 7, 9, 31, 32, 33, 48, 64, 255, 256, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
_NAMES = ["a", "b", "blk.0.attn_q.weight", "n" * 63, "n" * 64, "é", "", "a/b", "a\0"]
_VALUES = [(U32, 7), (STRING, "text"), (ARRAY, (5, [1, 2])), (ARRAY, (STRING, ["a", "b"])), (7, 1), (12, 0.5)]
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


def _random_parts(random):
    """Returns entries of metadata, entries of tensors, and data of a valid file."""
    keys = [key("general.architecture", STRING, "llama")]
    keys += [key(f"k{i}", *random.choice(_VALUES)) for i in range(random.randint(0, 3))]
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


def mutated(random, kinds):
    """Returns the bytes of a file with these mutations."""
    keys, tensors, nbytes, alignment = _random_parts(random)
    raw_kinds = [kind for kind in kinds if kind in ("byte", "cut", "append", "number")]
    for kind in kinds:
        if kind == "key":
            keys.append(key(random.choice(_NAMES), *random.choice(_VALUES)))
        elif kind == "alignment":
            keys.append(key("general.alignment", *random.choice([(U32, 16), (U32, 48), (10, 32), (U32, 0)])))
        elif kind in ("name", "type", "shape", "offset") and tensors:
            tensor = random.choice(tensors)
            place = ("name", "type", "shape", "offset").index(kind)
            tensor[place] = {
                "name": random.choice(_NAMES),
                "type": random.choice([*range(45), 2**32 - 1]),
                "shape": tuple(random.choice([*_NUMBERS[:14], 2**62]) for _ in range(random.randint(0, 5))),
                "offset": random.choice(_NUMBERS),
            }[kind]
        elif kind == "duplicate" and tensors:
            tensors.append([*random.choice(tensors)])
    raw = bytearray(pack(keys, [entry(*tensor) for tensor in tensors], bytes(nbytes), alignment=alignment))
    for kind in raw_kinds:
        at = random.randrange(len(raw))
        if kind == "byte":
            raw[at] = random.randrange(256)
        elif kind == "number":
            raw[at : at + 8] = struct.pack("<Q", random.choice(_NUMBERS))
        elif kind == "cut":
            del raw[random.randrange(len(raw) + 1) :]
            raw += b"\0" * (not raw)
        else:
            raw += bytes(random.randint(1, 40))
    return bytes(raw)
