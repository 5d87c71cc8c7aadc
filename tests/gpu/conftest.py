"""The device of the tests marked `gpu`: the first GPU.

With HFQ_GPU_TESTS=simulated it is a simulated accelerator, on which the tests of CUDA's own functions are
skipped. So a machine without a GPU can show that the tests themselves are right.
"""

import os

import pytest
import torch

from tests.support import simulated_accelerator


@pytest.fixture(scope="session")
def device():
    """The device that computes."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if os.environ.get("HFQ_GPU_TESTS") != "simulated":
        pytest.skip("no GPU")
    reason = simulated_accelerator.missing()
    if reason:
        pytest.skip(reason)
    simulated_accelerator.start(count=1)
    return torch.device("sim", 0)


@pytest.fixture
def cuda(device):
    """The device, for tests of what only CUDA does."""
    if device.type != "cuda":
        pytest.skip("needs CUDA")
    return device
