"""A rank ends well while one of gloo's threads still lets go of what it has sent."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.zero_launch import free_port

RANK = """
import atexit, os, threading, time
import torch, torch.distributed as dist
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
"""


def test_it_ends_well_and_does_what_is_to_be_done_at_exit():  # without `leave`: aborted
    variables = {
        "PYTHONPATH": str(Path(__file__).parent),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    done = subprocess.run(
        [sys.executable, "-c", RANK],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["lets go", "at exit"]
