"""Tests of the bytes of a stored tensor that a rank reads for its slice."""

import itertools
import math

import pytest
import torch

from hfq.placement.tensor_parallel import TensorPart, rank_slice
from hfq.tensor_spec import ByteRange, ByteRuns, Cut, TensorInfo

OFFSET = 40


def stored(shape: tuple[int, ...], dtype: str = "I32") -> tuple[TensorInfo, torch.Tensor, bytes]:
    tensor = torch.arange(math.prod(shape), dtype=torch.int32 if dtype == "I32" else torch.uint8).reshape(
        shape
    )
    content = bytes(OFFSET) + tensor.numpy().tobytes() + bytes(9)
    return TensorInfo("t", dtype, shape, ByteRange("f", OFFSET, tensor.nbytes)), tensor, content


@pytest.mark.parametrize("shape", [(6,), (6, 4), (4, 6), (2, 6, 3), (6, 1, 4, 1)])
@pytest.mark.parametrize("dtype", ["I32", "U8"])
def test_the_runs_of_a_part_are_the_bytes_of_the_sliced_tensor(shape, dtype):
    info, tensor, content = stored(shape, dtype)
    for dim, size in enumerate(shape):
        for start, stop in itertools.combinations(range(size + 1), 2):
            part, sliced = TensorPart(info, Cut(dim, start, stop)), tensor.narrow(dim, start, stop - start)
            runs = part.runs()
            starts = [runs.offset + run * runs.stride for run in range(runs.count)]
            read = b"".join(content[at : at + runs.nbytes] for at in starts)
            assert (read, part.shape, part.nbytes) == (
                sliced.numpy().tobytes(),
                tuple(sliced.shape),
                sliced.nbytes,
            )


def test_rows_are_one_run_and_columns_one_for_each_row():
    info, _, _ = stored((6, 4))
    assert TensorPart(info, Cut(0, 2, 4)).runs() == ByteRuns("f", OFFSET + 32, 32, 96, 1)
    assert TensorPart(info, Cut(1, 1, 3)).runs() == ByteRuns("f", OFFSET + 4, 8, 16, 6)
    assert (
        TensorPart(info, Cut(1, 0, 4)).runs() == TensorPart(info).runs() == ByteRuns("f", OFFSET, 96, 96, 1)
    )


@pytest.mark.parametrize(("size", "world"), [(8, 2), (7, 2), (10, 4), (5, 4), (3, 4)])
def test_slices_are_those_of_torch_chunk(size, world):
    chunks = [(int(chunk[0]), int(chunk[-1]) + 1) for chunk in torch.arange(size).chunk(world)]
    slices = [rank_slice("in", size, rank, world) for rank in range(world)]
    assert [(part.start, part.stop) for part in slices if part] == chunks
    assert [part is None for part in slices] == [rank >= len(chunks) for rank in range(world)]
