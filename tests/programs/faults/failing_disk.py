"""Reads that fail for a while: errors that name the layer, then right results."""

import contextlib
import errno
import os
import threading

import torch

from hfq import CheckpointError
from tests.programs.faults.tools import FILE, expected, load, logits

model, really = load(), os.preadv


def fail(descriptor, targets, offset):
    if threading.current_thread().name == "hfq-reader" and fail.is_on:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return really(descriptor, targets, offset)


os.preadv, fail.is_on = fail, True
for _ in range(2):
    try:
        logits(model)
        raise SystemExit("no error")
    except CheckpointError as error:
        assert (
            "model.layers.0" in str(error) and "cannot be read any more" in str(error) and FILE in str(error)
        ), error
fail.is_on = False
assert torch.equal(logits(model), expected)
fail.is_on = True  # now while the next pass is read ahead, too
for _ in range(3):
    with contextlib.suppress(CheckpointError):
        logits(model)
fail.is_on = False
assert torch.equal(logits(model), expected)
