"""Generated checkpoints to reshard, and checks of every copy."""

import hashlib
import os

import torch

from hfq.checkpoint import Checkpoint, write_safetensors
from hfq.tensor_spec import DTYPE_BITS
from tests.support import tiny_models

ODD = [
    ("model.layers.10.mlp.a", "U8", (3,)),
    ("model.layers.10.mlp.b", "F32", (5,)),
    ("model.layers.2.mlp.empty", "F32", (0, 7)),
    ("model.layers.2.mlp.flag", "BOOL", ()),
    ("model.layers.2.mlp.b", "I64", (3,)),
    ("model.layers.2.mlp.four", "F4", (6,)),
    ("model.layers.2.norm.weight", "BF16", (5,)),
    ("model.layers.10.norm.odd", "U8", (7,)),
    ("model.layers.10.last", "C64", (1,)),
    ("lone", "U8", (9,)),
    ("weights.0", "F32", (2,)),
    ("encoder.h.0.x", "U8", (1,)),
    ("lm_head.weight", "U8", (1 << 20,)),
    ("lm_head.bias", "F32", (1,)),
]


def made_up(folder, tensors, metadata=None):
    """Returns a checkpoint of (name, dtype, shape) in this order, with different bytes for each tensor."""
    folder.mkdir(exist_ok=True)
    stored = {}
    for name, dtype, shape in tensors:
        nbytes = torch.Size(shape).numel() * DTYPE_BITS[dtype] // 8
        seed = hashlib.sha256(name.encode()).digest()
        stored[name] = (dtype, shape, (seed * (nbytes // 32 + 1))[:nbytes])
    write_safetensors(folder / "model.safetensors", stored, metadata)
    return Checkpoint.open(folder)


def assert_packed(source, target):
    """Checks that tensors are unchanged, data starts on a page, and tensors are aligned."""
    assert tiny_models.digests(target) == tiny_models.digests(source)
    packed = Checkpoint.open(target)
    assert all(header.data_start % 4096 == 0 for header in packed.headers.values())
    assert all(
        info.range.offset % max(DTYPE_BITS[info.dtype] // 8, 1) == 0 for info in packed.tensors.values()
    )


def assert_nothing_left(tmp_path, *others):
    assert sorted(os.listdir(tmp_path)) == sorted(["source", *others])
