"""Ends a rank's process without taking Python apart.

torch's gloo threads let go of a collective's tensors some time after it is done. Where Python is being taken
apart meanwhile, torch 2.13 ends the process: "terminate called without an active exception", since a
destructor waits for Python's lock, which is no longer given. DeepSpeed keeps its process groups, and so their
threads, whatever a script destroys.
"""

import atexit
import os
import sys
from typing import NoReturn


def leave() -> NoReturn:
    """Does what is to be done at exit, and ends the process with code 0."""
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)
