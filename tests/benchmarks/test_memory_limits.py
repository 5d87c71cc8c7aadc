"""Tests of touching pages, warming the page cache, and copy rates."""

import mmap
import os

import pytest
import torch

from benchmarks import memory_limits as limits
from hfq.machine_profile.machine_limits import cached_share


def test_a_warm_cache_contains_every_page(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(200_000))
    limits.warm_cache([file])
    if cached_share([file]) is None:
        pytest.skip("the system cannot tell what is cached")
    assert cached_share([file]) == 1


def test_touching_reads_a_byte_of_every_page_and_the_last_one():
    tensor = torch.zeros(3 * mmap.PAGESIZE + 10, dtype=torch.uint8)
    tensor[:: mmap.PAGESIZE] = 1
    tensor[-1] = 100
    assert limits.touch([tensor, tensor[:0], torch.empty(5, device="meta")]) == 104


def test_copies_in_memory_have_a_rate():
    assert limits.copy_rate(1 << 20, 1) > 0
