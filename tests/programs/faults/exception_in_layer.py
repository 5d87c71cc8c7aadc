"""An exception of the given class in a decoder layer, then an interrupt, then right results."""

import os
import time

import torch

from tests.programs.faults.tools import ARGUMENTS, expected, is_offloaded, load, logits

ERROR = {"KeyboardInterrupt": KeyboardInterrupt, "ValueError": ValueError}[ARGUMENTS[0]]
model = load()
for layer in (0, 3):

    def fail(*_):
        raise ERROR("in a block")

    handle = model.model.layers[layer].mlp.register_forward_pre_hook(fail)
    for _ in range(2):
        try:
            logits(model)
            raise SystemExit("no error")
        except ERROR:
            assert is_offloaded(model)
    handle.remove()
    assert torch.equal(logits(model), expected)


def interrupted(*_):
    os.kill(os.getpid(), 2)
    time.sleep(0.01)


handle = model.model.layers[1].register_forward_pre_hook(interrupted)
try:
    logits(model)
    raise SystemExit("no error")
except KeyboardInterrupt:
    pass
handle.remove()
assert torch.equal(logits(model), expected)
