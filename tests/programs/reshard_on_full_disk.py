"""Reshards a checkpoint where files may not exceed 100 kB; prints the error."""

import resource
import sys

import hfq
from hfq.checkpoint import Checkpoint
from hfq.checkpoint.reshard import reshard_checkpoint

source = Checkpoint.open(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    reshard_checkpoint(source, sys.argv[2])
except hfq.CheckpointError as error:
    print(error)
