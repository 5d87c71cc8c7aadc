"""Tests of HQQ against loops over its slabs, for all bits, and of its metadata."""

import numpy as np
import pytest
import torch

from hfq import FormatError
from hfq.formats.hqq import Hqq
from tests.support.tiny_models import described

PACKINGS = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
SLABS = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
SIZES = [((12, 96), 64), ((6, 48), 16), ((15, 64), 32), ((64, 40), 8), ((9, 24), 72)]


def packed_rows(rows: int, num_bits: int) -> int:
    return -(-rows // SLABS[num_bits])


def random_layer(num_bits: int, size: tuple[int, int], group_size: int, axis: int = 1):
    """Returns a layer of random bytes; every bit pattern is a weight."""
    generator = torch.Generator().manual_seed(num_bits)
    groups = size[0] * size[1] // group_size
    rows, columns = (groups, group_size) if axis == 1 else (group_size, groups)
    shape = packed_rows(rows, num_bits), columns
    words = torch.randint(0, 1 << 30, shape, generator=generator)
    codes = words.to(torch.int32) if num_bits == 3 else (words & 255).to(torch.uint8)
    scale = (groups, 1) if axis == 1 else (1, groups)
    scalars = {"nbits": num_bits, "group_size": group_size, "axis": axis}
    return {
        "W_q": codes,
        "scale": torch.randn(scale, generator=generator).bfloat16(),
        "zero": torch.randn(scale, generator=generator).bfloat16() * 4,
        **{name: torch.tensor(value, dtype=torch.int32) for name, value in scalars.items()},
        "shape": torch.tensor(size),
        "packing": torch.tensor(list(PACKINGS[num_bits].encode()), dtype=torch.uint8),
    }


def by_hand(tensors, num_bits: int, size: tuple[int, int], group_size: int, axis: int = 1) -> torch.Tensor:
    """Computes W.flat = ((M - zero) * scale).flat.

    Row r of M is in slab r // height, with the first slab in the highest bits.
    """
    packed = tensors["W_q"].tolist()
    groups, height = size[0] * size[1] // group_size, len(packed)
    rows, columns = (groups, group_size) if axis == 1 else (group_size, groups)
    scale, zero = tensors["scale"].float().numpy(), tensors["zero"].float().numpy()
    flat = []
    for row in range(rows):
        shift = (SLABS[num_bits] - 1 - row // height) * num_bits
        for column in range(columns):
            code = packed[row % height][column] >> shift & ((1 << num_bits) - 1)
            place = (row, 0) if axis == 1 else (0, column)
            flat.append((np.float32(code) - zero[place]) * scale[place])
    return torch.from_numpy(np.array(flat, dtype=np.float32).reshape(size))


def detected(tensors, size):
    found = Hqq.detect("m", described("m", tensors), {}).sized(size[1], size[0])
    specs = {spec.name: spec for spec in found.tensor_specs(size[1], size[0])}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: specs[name].shape for name in tensors
    }
    return found.resolve("m", tensors)


def check(tensors, size, expected) -> None:
    found = detected(tensors, size)
    assert torch.equal(found.dequantize(tensors), expected)
    for start in range(0, size[0], found.row_multiple):
        for rows in (1, 3, size[0] - start):
            panel = torch.full((min(rows, size[0] - start), size[1]), float("nan"))
            found.dequantize_into(panel, tensors, start)
            assert torch.equal(panel, expected[start : start + rows]), (start, rows)


def is_whole(num_bits: int, size: tuple[int, int], group_size: int, axis: int) -> bool:
    """Returns True if hqq packs this number of rows; it pads rows only for 3 bits."""
    rows = size[0] * size[1] // group_size if axis == 1 else group_size
    return num_bits == 3 or rows % SLABS[num_bits] == 0


LAYERS = [
    (bits, *size, axis)
    for bits in sorted(PACKINGS)
    for size in SIZES
    for axis in (0, 1)
    if is_whole(bits, *size, axis)
]


@pytest.mark.parametrize(("num_bits", "size", "group_size", "axis"), LAYERS, ids=str)
def test_the_weight_is_that_of_the_loops(num_bits, size, group_size, axis):
    tensors = random_layer(num_bits, size, group_size, axis)
    check(tensors, size, by_hand(tensors, num_bits, size, group_size, axis))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_bits", [8, 4, 2, 1, 3])
def test_codes_that_are_stored_as_floats_are_read_by_their_bytes(num_bits, dtype):
    size, group_size = (16, 64), 64
    tensors = random_layer(num_bits, size, group_size)
    expected = by_hand(tensors, num_bits, size, group_size)
    tensors["W_q"] = tensors["W_q"].view(dtype)
    tensors["view_as_float"] = torch.tensor(1, dtype=torch.uint8)
    check(tensors, size, expected)


def test_floats_that_are_not_said_to_be_codes_are_refused():
    tensors = random_layer(4, (16, 64), 64)
    tensors["W_q"] = tensors["W_q"].view(torch.bfloat16)
    with pytest.raises(FormatError, match=r"(?s)Nothing was loaded.*without view_as_float"):
        detected(tensors, (16, 64))


@pytest.mark.parametrize("nbits", [5, 6, 7, 8])
def test_five_to_seven_bits_lie_in_bytes(nbits):
    tensors = random_layer(8, (12, 96), 64) | {"nbits": torch.tensor(nbits, dtype=torch.int32)}
    check(tensors, (12, 96), by_hand(tensors, 8, (12, 96), 64))


LIES = {
    "nbits": torch.tensor(2),
    "group_size": torch.tensor(32),
    "axis": torch.tensor(0),
    "shape": torch.tensor([64, 16]),
    "packing": torch.tensor(list(b"2bit_u8"), dtype=torch.uint8),
    "quant_zero": torch.tensor(1, dtype=torch.uint8),
    "quant_scale": torch.tensor(1, dtype=torch.uint8),
    "view_as_float": torch.tensor(1, dtype=torch.uint8),
}


@pytest.mark.parametrize("name", LIES)
def test_what_a_layer_says_of_itself_must_be_true(name):
    tensors = random_layer(4, (16, 64), 64) | {name: LIES[name]}
    with pytest.raises(
        FormatError, match=rf"(?s)contradicts its tensors. Nothing was loaded.*{name}: expected"
    ):
        detected(tensors, (16, 64))


def test_what_a_layer_does_not_say_is_read_by_its_shapes():
    tensors = {
        name: tensor
        for name, tensor in random_layer(4, (16, 64), 64).items()
        if name in ("W_q", "scale", "zero")
    }
    check(tensors, (16, 64), by_hand(tensors, 4, (16, 64), 64))


@pytest.mark.parametrize("name", ["zero.scale", "scale.W_q", "zero_scale", "meta"])
def test_scales_that_are_quantized_themselves_are_refused(name):
    tensors = random_layer(4, (16, 64), 64) | {name: torch.ones(1)}
    with pytest.raises(
        FormatError, match=rf"(?s)HQQ options of a layer are not supported. Nothing was loaded.*{name}"
    ):
        Hqq.detect("m", described("m", tensors), {})


@pytest.mark.parametrize("size", [(16, 65), (17, 64), (48, 64)], ids=str)
def test_codes_of_another_size_are_refused(size):
    tensors = random_layer(4, (16, 64), 64)
    with pytest.raises(FormatError, match="do not fit its size"):
        Hqq.detect("m", described("m", tensors), {}).sized(size[1], size[0])


@pytest.mark.parametrize("name", ["scale", "zero"])
def test_a_scale_that_is_not_finite_is_refused_by_name(name):
    tensors = random_layer(4, (16, 64), 64)
    tensors[name][3] = float("nan")
    with pytest.raises(FormatError, match=rf"(?s)not finite. Nothing was loaded.*m.{name}"):
        detected(tensors, (16, 64))
