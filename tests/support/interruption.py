"""A keyboard interrupt at one line of the offloader."""

import linecache
import sys
from pathlib import Path

from hfq import offload

__all__ = ["Interruption"]

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
