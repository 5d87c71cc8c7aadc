"""Opens a checkpoint in at most 256 MiB and three seconds; prints "opened" or "refused"."""

import resource
import signal
import sys

import hfq
from hfq.checkpoint import Checkpoint

resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))
signal.alarm(3)
try:
    print("opened", Checkpoint.open(sys.argv[1]))
except hfq.CheckpointError as error:
    print("refused", error)
