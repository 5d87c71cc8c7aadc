"""Valid and damaged safetensors files, and the form that every error must have."""

import contextlib
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hfq import CheckpointError, HfqError


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    """Returns the header entry of one tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write_raw(path, header, data=b"", length=None):
    """Writes a file of this header (a dict, or its bytes) and this data.

    `length` replaces the true length of the header.
    """
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def write_shards(folder, shards, weight_map=None):
    """Writes a folder of shards ({file: {tensor: value}}) with their index, or with `weight_map`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, values in shards.items():
        save_file({name: torch.tensor(value) for name, value in values.items()}, folder / file)
    true_map = {name: file for file, values in shards.items() for name in values}
    index = {"weight_map": true_map if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def stored_bytes(info):
    """Returns the bytes of a stored tensor, read without hfq."""
    return Path(info.range.file).read_bytes()[info.range.offset : info.range.offset + info.range.nbytes]


@contextlib.contextmanager
def refused(*words, kind=CheckpointError, file=None, tensor=None):
    """Requires one error of exactly this class, in hfq's form, with these words, file, and tensor."""
    with pytest.raises(HfqError) as caught:
        yield caught
    text = str(caught.value)
    assert isinstance(caught.value, kind), text
    assert text.count("\nFix: ") == 1, text
    assert [word for word in words if str(word) not in text] == [], text
    assert file is None or f"\n  file: {file}\n" in text, text
    assert tensor is None or caught.value.tensor == tensor, text
