"""Shards cover every byte of every row once, reads give each rank its own, and ranks that differ are told
so.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfq import PlacementError
from hfq.placement.zero.shards import FlatParameter, ZeroPlan, check_same_plan, flat_parameter
from hfq.tensor_spec import ByteRange, TensorInfo, segment_layout

SHAPES = st.lists(
    st.tuples(st.sampled_from(["U8", "I32", "F16", "F8_E4M3"]), st.integers(0, 70)), min_size=1, max_size=5
)


def stored(shapes) -> tuple[dict[str, TensorInfo], bytes]:
    """(tensors one behind the other in a file, the bytes of that file)."""
    infos, file = {}, bytearray(b"header..")
    for index, (dtype, numel) in enumerate(shapes):
        nbytes = numel * {"U8": 1, "F8_E4M3": 1, "F16": 2, "I32": 4}[dtype]
        infos[str(index)] = TensorInfo(
            f"m.{index}", dtype, (numel,), ByteRange("a.safetensors", len(file), nbytes)
        )
        file += bytes((7 * len(file) + i) % 251 for i in range(nbytes))
    return infos, bytes(file)


def shard(row: FlatParameter, rank: int, world: int, file: bytes) -> bytes:
    """What a rank holds when it has carried out its reads."""
    memory = bytearray(row.shard_nbytes(world))
    for read in row.reads(rank, world):
        memory[read.offset : read.offset + read.source.nbytes] = file[read.source.offset :][
            : read.source.nbytes
        ]
    return bytes(memory)


@given(SHAPES, st.integers(1, 5), st.sampled_from([2, 4]))
def test_the_shards_of_all_ranks_are_the_row_and_no_byte_is_read_twice(shapes, world, itemsize):
    infos, file = stored(shapes)
    layout = segment_layout((name, info.dtype, info.shape) for name, info in infos.items())
    row = flat_parameter("m.flat_buffer", infos, layout, itemsize)
    whole = bytearray(row.shard_nbytes(world) * world)
    for name, segment in layout[0].items():
        source = infos[name].range
        whole[segment.offset : segment.offset + segment.nbytes] = file[
            source.offset : source.offset + source.nbytes
        ]
    assert b"".join(shard(row, rank, world, file) for rank in range(world)) == bytes(whole)
    read = sum(read.source.nbytes for rank in range(world) for read in row.reads(rank, world))
    assert read == sum(info.nbytes for info in infos.values())
    assert row.shard_nbytes(world) == -(-row.nbytes // itemsize // world) * itemsize


def test_a_plan_counts_packed_and_dense_bytes_apart():
    quantized = FlatParameter("a.flat_buffer", 48, 2, ((0, ByteRange("f", 8, 40)),), is_quantized=True)
    unquantized = FlatParameter("norm.weight", 14, 2, ((0, ByteRange("f", 48, 14)),))
    plans = [ZeroPlan((quantized, unquantized), rank, 3, "cpu") for rank in range(3)]
    assert [(plan.quantized_nbytes, plan.quantized_shard_nbytes) for plan in plans] == [(48, 16)] * 3
    assert [plan.read_nbytes(is_quantized=True) for plan in plans] == [16, 16, 8]
    assert [plan.read_nbytes(is_quantized=False) for plan in plans] == [6, 6, 2]


def plan(**changes) -> ZeroPlan:
    row = FlatParameter(
        "a.flat_buffer", 48, 2, ((0, ByteRange("/here/f.safetensors", 8, 40)),), is_quantized=True
    )
    return ZeroPlan(
        **{"parameters": (row,), "rank": 0, "world": 2, "shard_device": "cpu", "settings": {"dtype": "bf16"}}
        | changes
    )


def test_ranks_agree_wherever_the_files_lie_on_their_node():
    row = FlatParameter(
        "a.flat_buffer", 48, 2, ((0, ByteRange("/there/f.safetensors", 8, 40)),), is_quantized=True
    )
    check_same_plan([plan().digests(), plan(rank=1, parameters=(row,)).digests()])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"settings": {"dtype": "fp16"}}, "dtype"),
        ({"settings": {"dtype": "bf16", "hfq version": "2"}}, "hfq version"),
        ({"shard_device": "nvme"}, "device of the shards"),
        ({"world": 3}, "number of ranks"),
        ({"parameters": ()}, "names of the parameters"),
        ({"parameters": (FlatParameter("a.flat_buffer", 64, 2, (), True),)}, "sizes of the parameters"),
        (
            {
                "parameters": (
                    FlatParameter("a.flat_buffer", 48, 2, ((0, ByteRange("f.safetensors", 9, 40)),), True),
                )
            },
            "places of the tensors",
        ),
    ],
)
def test_the_rank_that_differs_is_named_and_in_what(changes, named):
    with pytest.raises(PlacementError, match=named) as caught:
        check_same_plan([plan().digests(), plan(rank=1).digests(), plan(rank=2, **changes).digests()])
    assert caught.value.rank == 2
