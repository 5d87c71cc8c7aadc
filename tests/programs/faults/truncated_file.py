"""A file that is cut between two forwards; ends with the error."""

import os

import torch

from tests.programs.faults.tools import FILE, expected, load, logits, streamer_of

model = load()
assert torch.equal(logits(model), expected)
streamer_of(model)._buffers_of(0).ticket_of(0).wait()
os.truncate(FILE, 4096)
logits(model)
