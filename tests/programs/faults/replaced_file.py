"""A checkpoint file that is replaced, then unlinked: the old bytes are read."""

import os

import torch

from tests.programs.faults.tools import FILE, FOLDER, expected, load, logits

model, late = load(), load()
assert torch.equal(logits(model), expected)
with open(FOLDER + "/other", "wb") as stream:
    stream.write(bytes(os.path.getsize(FILE)))
os.replace(FOLDER + "/other", FILE)
for _ in range(2):
    assert torch.equal(logits(model), expected)
os.unlink(FILE)
os.chmod(FOLDER, 0)
for one in (model, late):
    assert torch.equal(logits(one), expected)
os.chmod(FOLDER, 0o755)
