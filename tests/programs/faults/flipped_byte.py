"""A flipped byte in a model that checks what it reads, as the argument says; ends with the error."""

import contextlib
import os

import torch

from hfq import CheckpointError
from tests.programs.faults.tools import ARGUMENTS, FILE, expected, load, logits, streamer_of

model = load(disk_checksum=ARGUMENTS[0])
if ARGUMENTS[0] == "always":
    assert torch.equal(logits(model), expected)
    (
        streamer_of(model)._buffers_of(0).ticket_of(0).wait(),
        streamer_of(model)._buffers_of(1).ticket_of(1).wait(),
    )
times = os.stat(FILE)
info = model.model.layers[2].mlp.up_proj.infos["qweight"].range
with open(FILE, "r+b") as stream:
    stream.seek(info.offset + 100)
    byte = stream.read(1)[0]
    stream.seek(info.offset + 100)
    stream.write(bytes([byte ^ 16]))
os.utime(
    FILE, ns=(times.st_atime_ns, times.st_mtime_ns)
)  # only the checksum sees a change that keeps the time
with contextlib.suppress(CheckpointError):
    logits(model)
logits(model)
