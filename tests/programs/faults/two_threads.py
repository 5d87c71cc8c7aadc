"""Two threads that use one model at once: right results for both."""

import threading

import torch

from tests.programs.faults.tools import load, logits

model, plain = load(), load(None)
batches = [torch.arange(3, 6 + number)[None] for number in range(2)]
rights = [logits(plain, batch) for batch in batches]
barrier, found = threading.Barrier(2), {0: [], 1: []}


def work(number):
    barrier.wait()
    for _ in range(8):
        found[number].append(torch.equal(logits(model, batches[number]), rights[number]))


threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
[thread.start() for thread in threads]
[thread.join(60) for thread in threads]
assert found == {0: [True] * 8, 1: [True] * 8}, found
