"""Tests that products in the child of a fork do not wait for the parent's OpenMP threads."""

import ctypes
import os
import resource
import threading

import pytest
import torch

from hfq.kernels.cpp.layer_struct import PRODUCT
from hfq.kernels.cpp.layers import describe_layer
from tests.support import programs
from tests.support.kernel_layers import CASES


def test_products_in_children_wait_for_none_of_the_parents_threads(compiled):
    """The child imports hfq first, or its parent has loaded the C++ library without using it."""
    run = programs.run("multiply_in_children", timeout=400, HFQ_DISABLE_CPP="0")
    assert run.stdout == "[0, 0, True, 0, 0]\n", run.stderr


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_no_memory_is_an_error_and_not_the_end_of_the_process(native):
    weight_format, tensors = CASES["w4 g32"].make()
    layer = describe_layer(weight_format, tensors)
    given, result = torch.ones(1, layer.in_features), torch.empty(layer.in_features, layer.out_features)

    def starve():  # a new thread has no scratch from earlier calls
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
