"""A model that is dropped during a read: no thread and no file descriptor is left."""

import gc
import threading

import torch

from tests.programs.faults.tools import descriptors, expected, in_flight, load, logits, readers

gc.collect()
assert not readers()
before = descriptors()
for _ in range(3):
    model = load()
    assert torch.equal(logits(model), expected)
    hold = in_flight(model)
    assert readers() and descriptors() > before
    leave = hold.leave
    del hold, model
    threading.Timer(0.05, leave.set).start()
    gc.collect()
    assert not readers(), readers()
    gc.collect()
    assert descriptors() == before, (descriptors(), before)
