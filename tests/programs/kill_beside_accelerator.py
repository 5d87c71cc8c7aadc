"""Loads and runs a model with shared memory beside an accelerator, in forks that kill themselves.

The input is a line for each fork: the moment of its death. The answer is its exit code. Every fork starts the
simulated accelerator itself, since its threads do not survive a fork.
"""

import os
import signal
import sys
import threading

import torch
from transformers.models.llama import modeling_llama  # noqa: F401

from hfq.checkpoint.shared_memory import SharedMemory
from hfq.kernels.cuda import host_memory
from tests.support import simulated_accelerator
from tests.support.leaving import leave
from tests.support.models import load

path, folder = sys.argv[1:]
DEVICE_MAP = {"": "sim:0", "model.layers.1": "cpu", "model.layers.2": "cpu"}


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(moment: str) -> None:
    """Loads the model and computes; is killed at a moment."""
    original = SharedMemory.open

    def open_shared(key, nbytes, fill, is_private):
        def fill_half(memory):
            fill(memory)
            memory[nbytes // 2 :] = bytes(nbytes - nbytes // 2)
            kill()

        shared = original(
            key, nbytes, fill_half if moment == "while it is filled" else fill, folder, is_private
        )
        return kill() if moment == "after it is filled" else shared

    SharedMemory.open = open_shared
    if moment == "while it is pinned":  # in the background; the buffers of the copies are pinned before
        pin = host_memory.pin
        is_weights = lambda: threading.current_thread().name == "hfq-pin"  # noqa: E731
        host_memory.pin = lambda *given: kill() if is_weights() else pin(*given)
    sim = simulated_accelerator.start(count=1)
    with sim.streams(default=300, others=3000), torch.no_grad():
        model = load(path, DEVICE_MAP, cpu_memory="shared")
        if moment == "in a forward pass":
            model.model.layers[2].mlp.register_forward_hook(kill)
        model(torch.arange(8)[None].to("sim:0"))


for line in sys.stdin:
    child = os.fork()
    if not child:
        run(line.strip())
        leave()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
