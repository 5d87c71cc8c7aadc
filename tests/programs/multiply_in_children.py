"""Multiplies in forks of a process whose OpenMP threads have run; prints how each fork ended."""

import os
import signal

import torch

torch.set_num_threads(2)
given, weight = torch.ones(1, 1024), torch.ones(1024, 1024, dtype=torch.int8)
tensors = {"weight": weight, "weight_scale": torch.ones(1024, 1)}
given.expand(1024, 1024).contiguous().mul_(2)  # by torch's threads: from here on they are waited for


def multiply(kernel):
    from hfq.formats import ActivationScheme
    from hfq.formats.compressed_tensors import IntQuantized
    from hfq.kernels.cpp import kernel as cpp_kernel
    from hfq.kernels.cpu import int8

    weight_format = IntQuantized(scale_shape=(1024, 1))
    if kernel == "cpu":
        return cpp_kernel.linear(given, tensors, weight_format)
    return int8.linear(given, tensors, weight_format, ActivationScheme("token", dtype="int8"))


def settle():
    from hfq.kernels.cpp.library import library

    return library()


def child(kernel):
    process = os.fork()
    if process == 0:
        signal.alarm(60)  # what waits for such a thread waits for ever
        expected = 1024.0 if kernel == "cpu" else 127 * 1024 * (torch.ones(()) / 127.5)
        os._exit(0 if (multiply(kernel) == expected).all() else 1)
    return os.waitpid(process, 0)[1]


print([child("cpu"), child("int8"), settle() is not None, child("cpu"), child("int8")])
