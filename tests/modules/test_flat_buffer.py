"""A packed row in the mapped file and in an arena: the same bytes, at 16-byte boundaries, without a copy."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfq.formats.codecs.dtypes import torch_dtype
from hfq.modules.flat_buffer import (
    FlatBuffer,
    flat_layout,
    is_mappable,
    map_tensor,
    map_tensors,
    read_tensor,
    stack_tensors,
)
from hfq.tensor_spec import DTYPE_BITS, ByteRange, TensorInfo

TENSORS = {
    "weight": torch.arange(0, 35, dtype=torch.float32).reshape(5, 7).to(torch.float8_e4m3fn),
    "weight_scale": torch.rand(5, 1, generator=torch.Generator().manual_seed(0)),
    "scalar": torch.tensor(0.25, dtype=torch.bfloat16),
    "g_idx": torch.empty(0, dtype=torch.int32),
    "codes": torch.arange(-3, 9, dtype=torch.int32).reshape(3, 4),
    "exponents": torch.tensor([[0, 127, 254]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
}


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes."""
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(*raw)


def test_both_backings_hold_the_bytes_of_the_file(store):
    infos, reader = store(TENSORS)
    arena, mapped = FlatBuffer.read(reader, infos).tensors(), map_tensors(reader, infos)
    assert list(arena) == list(mapped) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert same(arena[name], tensor)
        assert same(mapped[name], tensor)
        assert same(read_tensor(reader, infos[name]), tensor)


def test_an_arena_reads_each_byte_once_and_a_map_reads_none(store):
    infos, reader = store(TENSORS)
    map_tensors(reader, infos)
    assert (reader.counters.bytes_read, reader.counters.maps) == (0, 1)
    FlatBuffer.read(reader, infos)
    assert reader.counters.bytes_read == sum(tensor.nbytes for tensor in TENSORS.values())


def test_every_tensor_of_an_arena_starts_on_a_16_byte_boundary(store):
    infos, reader = store(TENSORS)
    row = FlatBuffer.read(reader, infos)
    assert row.buffer.dtype == torch.uint8
    assert row.buffer.numel() % 16 == 0
    for name, tensor in row.tensors().items():
        assert row.segments[name].offset % 16 == 0
        if tensor.numel():
            assert tensor.data_ptr() == row.buffer.data_ptr() + row.segments[name].offset


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(set(DTYPE_BITS) - {"F4"})), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    )
)
def test_segments_follow_each_other_without_overlap(tensors):
    infos = {
        str(i): TensorInfo(
            str(i), dtype, tuple(shape), ByteRange("f", 0, math.prod(shape) * DTYPE_BITS[dtype] // 8)
        )
        for i, (dtype, shape) in enumerate(tensors)
    }
    segments, nbytes = flat_layout(infos)
    end = 0
    for name, info in infos.items():
        segment = segments[name]
        assert (segment.nbytes, segment.dtype, segment.shape) == (info.nbytes, info.dtype, info.shape)
        assert segment.offset % 16 == 0
        assert end <= segment.offset < end + 16
        end = segment.offset + segment.nbytes
    assert end <= nbytes < end + 16
    assert nbytes % 16 == 0


def test_an_arena_can_be_read_into_the_front_of_a_given_buffer(store):
    infos, reader = store(TENSORS)
    _, nbytes = flat_layout(infos)
    buffer = torch.full((nbytes + 100,), 0xAA, dtype=torch.uint8)
    row = FlatBuffer.read(reader, infos, buffer)
    assert row.buffer.data_ptr() == buffer.data_ptr()
    assert row.buffer.numel() == nbytes
    assert (buffer[nbytes:] == 0xAA).all()
    assert all(same(tensor, TENSORS[name]) for name, tensor in row.tensors().items())


def test_a_map_is_a_view_that_every_call_shares(store):
    infos, reader = store(TENSORS)
    first, second = map_tensors(reader, infos), map_tensors(reader, infos)
    assert all(first[name].data_ptr() == second[name].data_ptr() for name in TENSORS if TENSORS[name].numel())
    distance = first["codes"].data_ptr() - first["weight"].data_ptr()
    assert distance == infos["codes"].range.offset - infos["weight"].range.offset


def test_what_is_written_to_a_map_stays_in_the_process(store, tmp_path):
    infos, reader = store(TENSORS)
    before = (tmp_path / "model.safetensors").read_bytes()
    mapped = map_tensor(reader, infos["codes"]).fill_(7)
    assert (mapped == 7).all()
    assert (map_tensor(reader, infos["codes"]) == 7).all()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert same(read_tensor(reader, infos["codes"]), TENSORS["codes"])


@pytest.mark.parametrize(
    ("shift", "mappable"), [(0, True), (4, True), (8, True), (1, False), (2, False), (3, False), (6, False)]
)
def test_a_tensor_off_its_own_alignment_cannot_be_used_where_it_lies(store, shift, mappable):
    tensors = {"codes": TENSORS["codes"], "weight": TENSORS["weight"]}
    infos, reader = store(tensors, shift)
    assert is_mappable(infos) is mappable
    assert is_mappable({"weight": infos["weight"]})
    assert all(
        same(tensor, tensors[name]) for name, tensor in FlatBuffer.read(reader, infos).tensors().items()
    )
    if mappable:
        assert all(same(tensor, tensors[name]) for name, tensor in map_tensors(reader, infos).items())


def test_one_misaligned_tensor_is_enough(store):
    infos, _ = store({"scale": torch.ones(1, dtype=torch.float16), "codes": torch.ones(3, dtype=torch.int32)})
    assert is_mappable({"scale": infos["scale"]})
    assert not is_mappable(infos)


def test_every_stored_dtype_that_hfq_can_hold_has_a_torch_dtype_of_its_size():
    sizes = {name: torch_dtype(name).itemsize * 8 for name in DTYPE_BITS if name != "F4"}
    assert sizes == {name: bits for name, bits in DTYPE_BITS.items() if name != "F4"}


@pytest.mark.parametrize(
    ("offsets", "is_view"), [((0, 256, 512), True), ((256, 768), True), ((0, 256, 1024), False)]
)
def test_tensors_of_flat_buffers_are_stacked(store, offsets, is_view):
    infos, reader = store(TENSORS)
    held = FlatBuffer.read(reader, infos)
    memory = bytearray(2048)
    for offset in offsets:
        memory[offset : offset + held.buffer.numel()] = held.buffer.numpy().tobytes()
    stacked = stack_tensors(memoryview(memory), offsets, held.segments)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for name, tensor in TENSORS.items():
        for layer in stacked[name]:
            assert same(layer, tensor)
        if tensor.numel():
            assert (stacked[name].data_ptr() == start + offsets[0] + held.segments[name].offset) is is_view
