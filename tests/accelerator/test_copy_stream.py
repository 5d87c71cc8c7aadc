"""Tests of the copy stream that threads share."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hfq.offload.copy_stream import copy_stream_to

pytestmark = pytest.mark.accelerator


def test_copies_leave_every_thread_in_its_own_stream(sim):
    device = torch.device("sim:0")
    copy_stream = copy_stream_to(device)

    def bring(stream):
        with stream:
            for _ in range(100):
                copy_stream.bring(64, [(0, copy_stream.host_buffer(64))])
                yield torch.accelerator.current_stream(device) == stream

    with ThreadPoolExecutor(4) as pool:
        streams = [torch.Stream(device) for _ in range(4)]
        assert all(all(found) for found in pool.map(lambda stream: list(bring(stream)), streams))
