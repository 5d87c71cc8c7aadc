"""A file that is cut during a read, then restored."""

import os
import threading
from pathlib import Path

import torch

from hfq import CheckpointError
from tests.programs.faults.tools import FILE, expected, is_offloaded, load, logits

content, times = Path(FILE).read_bytes(), os.stat(FILE)
model, really, cuts = load(), os.preadv, []


def cut(descriptor, targets, offset):
    if threading.current_thread().name == "hfq-reader" and not cuts:
        cuts.append(offset)
        count = really(descriptor, [targets[0][:4096]], offset)
        os.truncate(FILE, offset + 4096)
        return count
    return really(descriptor, targets, offset)


os.preadv = cut
try:
    logits(model)
    raise SystemExit("no error")
except CheckpointError as error:
    assert "model.layers." in str(error) or "lm_head" in str(error), error
    assert "changed while the model was using it" in str(error), error
assert cuts and is_offloaded(model)
with open(FILE, "r+b") as stream:
    stream.write(content)
os.utime(FILE, ns=(times.st_atime_ns, times.st_mtime_ns))  # another time is another file
assert torch.equal(logits(model), expected)
