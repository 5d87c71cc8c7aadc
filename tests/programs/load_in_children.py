"""Children of a fork that load a model each; prints their exit codes."""

import os
import sys

import torch

from tests.support.models import load

torch.set_num_threads(2)  # in the children, each new thread then looks for the pool
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        load(dtype=torch.bfloat16)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
