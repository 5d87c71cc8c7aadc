"""Prints what the refusal of a checkpoint costs: bytes of memory, seconds of CPU, and its first line."""

import sys
import time

from hfq import CheckpointError
from hfq.checkpoint import Checkpoint
from hfq.machine_profile.worker_process import memory

before, started = memory().get("peak_rss", 0), time.process_time()
try:
    Checkpoint.open(sys.argv[1])
except CheckpointError as error:
    seconds, peak = time.process_time() - started, memory().get("peak_rss", 0)
    print(peak - before, seconds, str(error).splitlines()[0], sep="|")
