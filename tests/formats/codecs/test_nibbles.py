"""Tests of the lookup of 4-bit codes in every byte, with either order and many shapes."""

import pytest
import torch

from hfq.formats.codecs.nibbles import look_up_nibbles

VALUES = torch.randn(16, generator=torch.Generator().manual_seed(5))
BYTES = torch.arange(256, dtype=torch.uint8)


def one_by_one(packed: torch.Tensor, high_first: bool) -> torch.Tensor:
    halves = [packed & 15, packed >> 4]
    return VALUES[torch.stack(halves[::-1] if high_first else halves, -1).flatten(-2).long()]


@pytest.mark.parametrize("high_first", [False, True])
@pytest.mark.parametrize("columns", [32, 31, 25, 1])
@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_every_byte_in_rows_that_end_anywhere(high_first, columns, skipped):
    """Also tests panels that start between two 64-bit elements."""
    packed = BYTES[torch.randperm(256, generator=torch.Generator().manual_seed(6))].view(16, 16)
    panel = torch.empty(skipped + 16 * columns)[skipped:].view(16, columns)
    look_up_nibbles(panel, packed, VALUES, high_first=high_first)
    assert torch.equal(panel, one_by_one(packed, high_first)[:, :columns])


@pytest.mark.parametrize("count", [512, 511])
def test_without_rows(count):
    panel = torch.empty(count)
    look_up_nibbles(panel, BYTES, VALUES, high_first=True)
    assert torch.equal(panel, one_by_one(BYTES, True)[:count])


@pytest.mark.parametrize(
    "words",
    [
        BYTES.view(torch.int32).view(8, 8),
        BYTES.view(torch.int32).view(8, 8).t(),
        BYTES.view(torch.int32)[::64, None],
    ],
)
def test_words_are_little_endian_and_lie_anyhow(words):
    panel = torch.empty(len(words), 8 * words.shape[1])
    look_up_nibbles(panel, words, VALUES)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    assert torch.equal(panel, VALUES[((words[:, :, None] >> shifts) & 15).flatten(1).long()])
