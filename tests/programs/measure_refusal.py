"""Prints what the refusal of a checkpoint costs: KiB of memory, seconds of CPU, and its first line."""

import resource
import sys

from hfq import CheckpointError
from hfq.checkpoint import Checkpoint

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    Checkpoint.open(sys.argv[1])
except CheckpointError as error:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_maxrss - before, used.ru_utime + used.ru_stime, str(error).splitlines()[0], sep="|")
