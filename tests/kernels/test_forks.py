"""A child of a fork has none of the threads that its parent's OpenMP runtime would wait for in it."""

import os
import subprocess
import sys

CHILDREN = """
import os, signal, sys
import torch

torch.set_num_threads(2)
given, weight = torch.ones(1, 1024), torch.ones(1024, 1024, dtype=torch.int8)
tensors = {"weight": weight, "weight_scale": torch.ones(1024, 1)}
given.expand(1024, 1024).contiguous().mul_(2)  # by torch's threads: from here on they are waited for


def multiply(kernel):
    from hfq.formats import ActivationScheme
    from hfq.formats.compressed_tensors import IntQuantized
    from hfq.kernels import cpu, int8

    weight_format = IntQuantized(scale_shape=(1024, 1))
    if kernel == "cpu":
        return cpu.linear(given, tensors, weight_format)
    return int8.linear(given, tensors, weight_format, ActivationScheme("token", dtype="int8"))


def settle():
    from hfq.kernels.native.library import library

    return library()


def child(kernel):
    process = os.fork()
    if process == 0:
        signal.alarm(60)  # what waits for such a thread waits for ever
        expected = 1024.0 if kernel == "cpu" else 127 * 1024 * (torch.ones(()) / 127.5)
        os._exit(0 if (multiply(kernel) == expected).all() else 1)
    return os.waitpid(process, 0)[1]


print([child("cpu"), child("int8"), settle() is not None, child("cpu"), child("int8")])
"""


def test_products_in_children_wait_for_none_of_the_parents_threads(compiled):
    """hfq is first imported in the child; or its parent has loaded the compiled part, and multiplied nothing."""
    run = subprocess.run(
        [sys.executable, "-c", CHILDREN], capture_output=True, text=True, env=os.environ | {"HFQ_NATIVE": "1"}, timeout=400
    )
    assert run.stdout == "[0, 0, True, 0, 0]\n", run.stderr
