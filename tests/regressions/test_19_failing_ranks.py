"""Tests that failing ranks end by their exception, and that an empty folder is taken for an absent one."""

import os
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from hfq.integrations.deepspeed import scatter
from hfq.loading import ranks
from tests.support import programs
from tests.support.models import GPTQ


def test_a_collective_ends_after_other_threads_have_released_its_tensors(monkeypatch):
    sent = []

    def hold(tensors):
        sent.append(weakref.ref(tensors[0]))
        time.sleep(0.2)
        tensors.clear()

    def all_gather_object(found, value):
        found[0] = value
        threading.Thread(target=hold, args=([torch.ones(4)],)).start()

    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    assert ranks.exchange("x") == ["x"]
    assert [tensor() for tensor in sent] == [None]


@pytest.mark.slow
def test_ranks_that_fail_together_end_by_their_exceptions(tmp_path):
    """torch's gloo threads abort one of some processes that end while a thread holds a tensor."""
    codes = []
    for pair in range(4):
        ranks = [programs.start("fail_as_rank", rank, tmp_path / str(pair)) for rank in range(2)]
        codes += [rank.wait(120) for rank in ranks]
    assert codes == [1] * 8


@pytest.mark.parametrize("exists", [False, True], ids=["absent", "empty"])
def test_a_rank_whose_folder_holds_nothing_gets_the_headers_of_rank_0(exists, monkeypatch, tmp_path):
    folder = tmp_path / "model"
    if exists:
        folder.mkdir()
    monkeypatch.setattr(scatter, "start_distributed", lambda: (1, 2))
    monkeypatch.setattr(scatter, "exchange", lambda is_here: [True, is_here])
    monkeypatch.setattr(scatter, "raise_together", lambda error: None)
    monkeypatch.setattr(
        scatter.dist,
        "broadcast_object_list",
        lambda box, src: box.__setitem__(0, scatter._describe(GPTQ, None, None)),
    )
    with scatter.described_folder(folder) as described:
        assert described != folder
        assert {"config.json", "model.safetensors"} <= set(os.listdir(described))
