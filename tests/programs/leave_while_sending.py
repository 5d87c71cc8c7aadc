"""Two ranks, the first of which ends while gloo holds a tensor whose destructor takes seconds."""

import atexit
import os
import threading
import time

import torch
import torch.distributed as dist

from tests.support.leaving import leave

begun = threading.Event()


class Slow:
    def __del__(self):
        print("lets go", flush=True)
        begun.set()
        time.sleep(3)


is_first = os.fork() != 0
atexit.register(lambda: print("at exit", flush=True) if is_first else None)
dist.init_process_group("gloo", rank=0 if is_first else 1, world_size=2)
if not is_first:
    time.sleep(0.5)  # until the first holds nothing of its tensor but what gloo holds
values = torch.ones(4)
if is_first:
    values.slow = Slow()
work = dist.all_reduce(values, async_op=True)
if is_first:
    del values, work
    begun.wait(60)
else:
    work.wait()
    os._exit(0)
leave()
