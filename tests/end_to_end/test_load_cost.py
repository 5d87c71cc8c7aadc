"""Python calls and memory that a load takes for each further stored tensor, without times."""

import functools
import gc
import sys
import tracemalloc

import pytest

from benchmarks.load.large_models import LARGE_MODELS, make_large
from tests.support.large_models import narrow
from tests.support.models import load

COUNTS = (8, 40)
"""Experts of the smaller and of the larger model."""

BOUNDS = {
    # calls and bytes for each further tensor
    "qwen3-30b-gptq4": ({"": "cpu"}, 70, 1100),
    "deepseek-v3-fp8": ({"": "disk"}, 160, 3000),
}


@pytest.fixture(scope="module", params=BOUNDS)
def models(request, tmp_path_factory):
    """Returns functions that load the smaller and the larger model, and the bounds."""
    device_map, *bounds = BOUNDS[request.param]
    loads = []
    for experts in COUNTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(LARGE_MODELS, request.param, narrow(request.param, experts))
            folder = make_large(tmp_path_factory.mktemp("models"), request.param, 4)
        loads.append(functools.partial(load, folder, device_map))
        loads[-1]()  # makes the tables that are kept between loads
    return loads, *bounds


def tensors_of(model):
    return len(model.hf_quantizer.loading.checkpoint.tensors)


def calls(work):
    """Returns the number of Python functions that are called, and the result."""
    found = 0

    def count(frame, event, argument):
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return found, result


def test_each_further_tensor_takes_few_calls(models):
    loads, most, _ = models
    (few, small), (many, large) = map(calls, loads)
    assert many - few <= most * (tensors_of(large) - tensors_of(small))


def test_each_further_tensor_takes_little_memory(models):
    loads, _, most = models
    found = []
    for work in loads:
        gc.collect()
        tracemalloc.start()
        model = work()
        gc.collect()
        found.append((tracemalloc.get_traced_memory()[0], tensors_of(model)))
        tracemalloc.stop()
    nbytes, tensors = (large - small for small, large in zip(*found, strict=True))
    assert nbytes <= most * tensors
