"""Reshards a checkpoint and kills itself at the first progress."""

import os
import sys

from hfq.checkpoint import Checkpoint
from hfq.checkpoint.reshard import reshard_checkpoint

reshard_checkpoint(Checkpoint.open(sys.argv[1]), sys.argv[2], lambda nbytes: os.kill(os.getpid(), 9))
