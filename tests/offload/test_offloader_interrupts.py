"""Tests of a keyboard interrupt at any line of the offloader.

Afterwards nothing is onloaded, the lock is free, and the next forward pass is right.
"""

import contextlib

import torch

from hfq.offload.offloader import OffloadOptions
from tests.support.interruption import Interruption

SIZE = 64


def test_after_an_interrupt_at_any_line_the_next_forward_is_right(build):
    stack = build(layers=3, options=OffloadOptions("buffered", threads=2, read_ahead_nbytes=0))
    activations = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, whole = stack.model(activations), Interruption()
        whole.run(lambda: stack.model(activations))
        places = {line: index for index, line in enumerate(whole.lines)}
        assert len(places) > 100
        for line, index in places.items():
            with contextlib.suppress(KeyboardInterrupt):
                Interruption(index).run(lambda: stack.model(activations))
            assert not stack.offloader.lock._is_owned(), line
            assert torch.equal(stack.model(activations), expected), line
            assert stack.is_offloaded(), line
            assert stack.offloader._in_use == (), line
