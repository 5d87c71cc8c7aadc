"""A fork, during a read if the argument says so: right results on both sides."""

import os
import traceback

import torch

from tests.programs.faults.tools import ARGUMENTS, expected, in_flight, load, logits, readers

IS_IN_FLIGHT = ARGUMENTS == ["True"]
model = load()
assert torch.equal(logits(model), expected)
if IS_IN_FLIGHT:
    hold = in_flight(model)
child = os.fork()
if IS_IN_FLIGHT:
    hold.source.read = hold.read
if child == 0:
    try:
        right = all(torch.equal(logits(model), expected) for _ in range(3))
        os._exit(0 if right and readers() else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(2)
if IS_IN_FLIGHT:
    hold.leave.set()
assert all(torch.equal(logits(model), expected) for _ in range(3))
status = os.waitpid(child, 0)[1]
assert os.waitstatus_to_exitcode(status) == 0, status
