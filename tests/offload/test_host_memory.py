"""Large host buffers, where the system gives huge pages and where it does not."""

import mmap

import pytest
import torch

from hfq.offload.host_memory import HUGE_PAGE, huge_buffer


@pytest.mark.parametrize("nbytes", [0, 1, HUGE_PAGE, HUGE_PAGE + 1])
@pytest.mark.parametrize("is_touched", [True, False])
def test_a_buffer_is_zeroed_aligned_and_of_its_size(nbytes, is_touched):
    buffer = huge_buffer(nbytes, is_touched)
    assert (buffer.shape, buffer.dtype) == ((nbytes,), torch.uint8)
    assert buffer.data_ptr() % HUGE_PAGE == 0
    assert not buffer.any()


def test_a_system_without_huge_pages_gives_small_ones(monkeypatch):
    asked = []

    class Small(mmap.mmap):
        def madvise(self, *advice):
            asked.append(advice)
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Small)
    assert huge_buffer(5).tolist() == [0] * 5
    assert asked
