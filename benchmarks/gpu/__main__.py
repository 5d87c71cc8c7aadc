"""`python -m benchmarks.gpu`."""

import signal
import sys

from benchmarks.gpu.command import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the part's process, too
    main()
