"""An interrupt while a read is waited for, then right results."""

import os
import threading
import time

import torch

from tests.programs.faults.tools import Hold, expected, load, logits

model = load()
hold = Hold(model)


def interrupt():
    hold.began.wait(20)
    os.kill(os.getpid(), 2)
    time.sleep(0.05)
    hold.leave.set()


threading.Thread(target=interrupt).start()
try:
    logits(model)
    raise SystemExit("no error")
except KeyboardInterrupt:
    pass
hold.leave.set()
for _ in range(3):
    assert torch.equal(logits(model), expected)
