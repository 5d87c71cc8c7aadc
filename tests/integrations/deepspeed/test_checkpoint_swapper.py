"""Tests of the checkpoint swapper: its reads, its cache, and its limits."""

from types import SimpleNamespace

import pytest
import torch

from hfq import CheckpointError, PlacementError
from hfq.checkpoint import Checkpoint, Reader, write_safetensors
from hfq.placement.zero.shards import FlatParameter

pytest.importorskip("deepspeed")
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

from hfq.integrations.deepspeed.checkpoint_swapper import CheckpointSwapper, ShardSource

VALUES = torch.arange(5000, dtype=torch.int16)


@pytest.fixture
def file(tmp_path):
    raw = VALUES.numpy().tobytes()
    write_safetensors(
        tmp_path / "model.safetensors", {"odd": ("U8", (3,), b"abc"), "values": ("I16", (5000,), raw)}
    )
    return tmp_path


def parameter(numel: int, dtype: torch.dtype, ds_id: int = 0):
    """Returns the attributes of a partitioned parameter that a swapper reads."""
    shard = torch.empty(0, dtype=dtype)
    shard.ds_numel, shard.status = numel, PartitionedParamStatus.AVAILABLE
    return SimpleNamespace(ds_id=ds_id, ds_tensor=shard, dtype=dtype, ds_shape=(2 * numel,))


def swapper_of(file, dtype=torch.bfloat16, stored=torch.bfloat16, rank=1, is_direct=False):
    """Returns (a swapper with one of three shards, the parameter, the reader)."""
    checkpoint = Checkpoint.open(file)
    reader = Reader(checkpoint)
    flat = FlatParameter("values", 10_000, 2, ((0, checkpoint.tensors["values"].range),))
    swapper, placed = CheckpointSwapper(reader, is_direct), parameter(flat.shard_numel(3), dtype)
    swapper.place(placed, ShardSource(flat.reads(rank, 3), flat.shard_nbytes(3), stored))
    return swapper, placed, reader


def bits(shard: torch.Tensor) -> list[int]:
    return shard.view(torch.int16).tolist()


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_shard_is_read_from_the_file_and_its_padding_is_zero(file, is_direct):
    for rank, expected in ((0, range(1667)), (2, [*range(3334, 5000), 0])):
        swapper, placed, _ = swapper_of(file, rank=rank, is_direct=is_direct)
        assert placed.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE
        swapper.swap_in([placed], async_op=True)
        assert placed.ds_tensor.status == PartitionedParamStatus.INFLIGHT
        swapper.synchronize_reads()
        assert placed.ds_tensor.status == PartitionedParamStatus.AVAILABLE
        assert bits(placed.ds_tensor) == list(expected)


def test_memory_is_given_back_and_used_again(file):
    swapper, placed, _ = swapper_of(file)
    ahead = swapper.available_swap_in_buffers()
    addresses = set()
    for _ in range(3):
        swapper.swap_in([placed], async_op=False)
        assert swapper.available_swap_in_buffers() == ahead - 1
        addresses.add(placed.ds_tensor.data_ptr())
        swapper.remove_partition_and_release_buffers([placed])
        assert placed.ds_tensor.numel() == 0
    assert len(addresses) == 1
    assert (swapper.nbytes_read, swapper.nbytes_written) == (3 * 3334, 0)
    assert swapper.available_swap_in_buffers() == ahead


def test_a_dense_shard_is_cast_to_the_dtype_of_the_model(file):
    swapper, placed, _ = swapper_of(file, dtype=torch.float32, stored=torch.int16)
    swapper.swap_in([placed], async_op=False)
    assert torch.equal(placed.ds_tensor, VALUES[1667:3334].float())


def test_a_shard_that_was_not_changed_stays_in_the_file_and_one_that_was_is_kept(file):
    swapper, placed, reader = swapper_of(file)
    swapper.swap_in([placed], async_op=False)
    swapper.swap_out_and_release([placed])
    before = reader.counters.bytes_read
    swapper.swap_in([placed], async_op=False)
    assert reader.counters.bytes_read > before
    placed.ds_tensor[5] = 1.5
    swapper.swap_out_and_release([placed])
    before = reader.counters.bytes_read
    swapper.swap_in([placed], async_op=False)
    assert reader.counters.bytes_read == before
    assert placed.ds_tensor[5] == 1.5
    assert bits(placed.ds_tensor[6:8]) == [1673, 1674]


def test_what_an_optimizer_makes_of_a_shard_is_kept(file):
    swapper, placed, _ = swapper_of(file)
    into = torch.empty(1667, dtype=torch.bfloat16)
    swapper.swap_into_buffer(placed, into)
    assert bits(into) == list(range(1667, 3334))
    swapper.swap_out_partitioned_params([placed], [torch.full((1667,), 2.5)])
    swapper.swap_in([placed], async_op=False)
    assert placed.ds_tensor.unique().tolist() == [2.5]


def test_a_file_that_was_cut_off_is_an_error_and_not_a_shard_of_something_else(file):
    swapper, placed, _ = swapper_of(file, rank=2)
    with open(file / "model.safetensors", "rb+") as stream:
        stream.truncate(9000)
    with pytest.raises(CheckpointError, match=r"(?s)changed.*Fix:"):
        swapper.swap_in([placed], async_op=False)


def test_nothing_else_is_ever_swapped_out(file):
    swapper, placed, _ = swapper_of(file)
    assert not swapper.swappable_tensor(numel=1 << 30)
    with pytest.raises(PlacementError, match='nvme_source="swap_files"'):
        swapper.get_path(placed, True)
