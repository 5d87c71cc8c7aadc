"""A child of a fork has none of the threads that its parent's OpenMP runtime would wait for in it."""

import ctypes
import os
import resource
import subprocess
import sys
import threading

import pytest
import torch

from hfq.kernels.cpp.layer_struct import PRODUCT
from hfq.kernels.cpp.layers import describe_layer
from tests.support.kernel_layers import CASES

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
"""


def test_products_in_children_wait_for_none_of_the_parents_threads(compiled):
    """hfq is first imported in the child; or its parent has loaded the compiled part, and multiplied
    nothing.
    """
    run = subprocess.run(
        [sys.executable, "-c", CHILDREN],
        capture_output=True,
        text=True,
        env=os.environ | {"HFQ_DISABLE_CPP": "0"},
        timeout=400,
    )
    assert run.stdout == "[0, 0, True, 0, 0]\n", run.stderr


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_no_memory_is_an_error_and_not_the_end_of_the_process(native):
    weight_format, tensors = CASES["w4 g32"].make()
    layer = describe_layer(weight_format, tensors)
    given, result = torch.ones(1, layer.in_features), torch.empty(layer.in_features, layer.out_features)

    def starve():  # a thread has nothing from earlier calls
        resource.setrlimit(resource.RLIMIT_AS, (0, 0))
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        while libc.malloc(1 << 16):
            pass
        product = native.hfq_linear(
            PRODUCT.pack(layer.here, given.data_ptr(), 0, 1, layer.in_features, result.data_ptr(), 1)
        )
        panel = native.hfq_dequantize(layer.here, 0, layer.out_features, result.data_ptr(), 0, 1)
        os._exit(0 if (product, panel) == (-3, -3) else 1)

    process = os.fork()
    if process == 0:
        thread = threading.Thread(target=starve)
        thread.start()
        thread.join()
        os._exit(2)
    assert os.waitpid(process, 0)[1] == 0
