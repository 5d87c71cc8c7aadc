"""Tests of the copies from pinned weights to a unit's buffer."""

import random

import pytest
import torch

from hfq.offload import pinned_weights
from hfq.offload.pinned_weights import PinnedWeights
from hfq.offload.unit_layout import lay_out_on_device
from hfq.tensor_spec import ByteRange, TensorInfo


def tensor(name: str, offset: int, nbytes: int) -> TensorInfo:
    return TensorInfo(name, "U8", (nbytes,), ByteRange("file", offset, nbytes))


@pytest.mark.parametrize("seed", range(20))
def test_copies_bring_every_byte_and_cross_no_piece(monkeypatch, seed):
    monkeypatch.setattr(pinned_weights, "PIECE_NBYTES", 1024)
    dice = random.Random(seed)
    memory = torch.randint(256, (20_000,), dtype=torch.uint8)
    pinned, infos, end = PinnedWeights(memory), [], 0
    for number in range(8):
        nbytes = dice.choice([0, 1, 255, 256, 700, 3000])
        infos.append(tensor(str(number), 7 * end, nbytes))
        pinned.add(infos[-1], end)
        end += -(-nbytes // 256) * 256 + dice.choice([0, 0, 256])
    layout = lay_out_on_device(infos, pinned.in_order(infos))
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    copies = pinned.copies(layout)
    for place, part in copies:
        first = part.data_ptr() - memory.data_ptr()
        assert first // 1024 == (first + part.numel() - 1) // 1024
        buffer[place : place + part.numel()] = part
    for info in infos:
        place = layout.places[info]
        assert place % 256 == 0
        assert torch.equal(buffer[place : place + info.nbytes], pinned[info])


def test_neighbors_are_copied_together():
    infos = [tensor("a", 0, 300), tensor("b", 300, 512), tensor("c", 812, 10)]
    pinned = PinnedWeights(torch.zeros(2000, dtype=torch.uint8))
    for info, offset in zip(infos, (0, 512, 1024), strict=True):
        pinned.add(info, offset)
    assert [place for place, _ in pinned.copies(lay_out_on_device(infos, pinned.in_order(infos)))] == [0]
    assert pinned.in_order(reversed(infos)) == infos
    assert tensor("d", 0, 300) not in pinned
