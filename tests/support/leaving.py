"""End of a rank's process without Python's shutdown.

torch's gloo threads release the tensors of a collective some time after it is done. During Python's shutdown,
torch 2.13 then ends the process with "terminate called without an active exception", since a destructor waits
for Python's lock. DeepSpeed keeps its process groups and their threads until the end.
"""

import atexit
import os
import sys
from typing import NoReturn


def leave() -> NoReturn:
    """Runs the exit handlers, and ends the process with code 0."""
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)
