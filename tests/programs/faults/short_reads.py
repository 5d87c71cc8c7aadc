"""Reads that return less than was asked for, or are interrupted: right results."""

import errno
import fcntl
import os
import signal

import torch

from tests.programs.faults.tools import expected, load, logits

model, really, calls = load(), os.preadv, []


def short(descriptor, targets, offset):
    calls.append(offset)
    if (
        len(calls) % 7 == 1 and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
    ):  # Python itself tries the others again
        raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
    return really(descriptor, [targets[0][:8192]], offset)


os.preadv = short
assert torch.equal(logits(model), expected)
assert torch.equal(logits(model), expected)
assert len(calls) > 100
os.preadv = really
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
for _ in range(5):
    assert torch.equal(logits(model), expected)
signal.setitimer(signal.ITIMER_REAL, 0)
