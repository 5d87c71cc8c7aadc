"""Tests of a keyboard interrupt at any line of the offloader.

Afterwards nothing is onloaded, the lock is free, and the next forward pass is right.
"""

import contextlib
import linecache
import sys
from pathlib import Path

import torch

from hfq import offload
from hfq.offload.offloader import OffloadOptions

SIZE = 64
NO_STEPS = ("with ", "try:")
"""What Python never interrupts: between the end of a lock's body and its release, and where a try begins."""
FOLDER = str(Path(offload.__file__).parent)


class Interruption:
    """Counts the lines of the streaming code that `work` runs in this thread, and raises KeyboardInterrupt at
    one of them.
    """

    def __init__(self, at: int = -1) -> None:
        self.at, self.lines = at, []

    def run(self, work):
        sys.settrace(self._enter)
        try:
            return work()
        finally:
            sys.settrace(None)

    def _enter(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(FOLDER) else None

    def _line(self, frame, event, argument):
        file, line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and not linecache.getline(file, line).strip().startswith(NO_STEPS):
            self.lines.append((file, line))
            if len(self.lines) - 1 == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


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
