"""Takes the lock of a build and forks; the parent ends, and the child prints its number and stays."""

import os
import sys
import time
from pathlib import Path

from hfq.kernels.cpp.build import _locked

with _locked(Path(sys.argv[1])):
    if os.fork():
        os._exit(1)
    print(os.getpid(), flush=True)
    time.sleep(60)
