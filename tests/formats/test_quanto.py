"""Tests of optimum-quanto against loops over slabs and bytes, and of its side file."""

import numpy as np
import pytest
import torch

from hfq import FormatError
from hfq.formats.quanto import QuantoBits, QuantoBytes
from tests.support.tiny_models import described

SIZES = [((12, 96), 32), ((8, 128), 128), ((5, 64), 16), ((64, 24), 24), ((16, 20), 40)]


def random_bits(num_bits: int, size: tuple[int, int], group_size: int):
    generator = torch.Generator().manual_seed(num_bits)
    rows = size[0] * size[1] // group_size
    return {
        "weight._data._data": torch.randint(
            0, 256, (-(-rows * num_bits // 8), group_size), dtype=torch.uint8, generator=generator
        ),
        "weight._scale": torch.randn(rows, 1, generator=generator).bfloat16(),
        "weight._shift": torch.randn(rows, 1, generator=generator).bfloat16(),
        "input_scale": torch.ones((), dtype=torch.bfloat16),
        "output_scale": torch.ones((), dtype=torch.bfloat16),
    }


def bits_by_hand(tensors, num_bits: int, size: tuple[int, int], group_size: int) -> torch.Tensor:
    """Computes W.flat = scale * q - shift.

    Group r is in slab r // height, with the first slab in the low bits.
    """
    packed = tensors["weight._data._data"].tolist()
    scale, shift = tensors["weight._scale"].float().numpy(), tensors["weight._shift"].float().numpy()
    flat = []
    for row in range(size[0] * size[1] // group_size):
        slab, line = divmod(row, len(packed))
        codes = [byte >> (slab * num_bits) & ((1 << num_bits) - 1) for byte in packed[line]]
        flat += [np.float32(code) * scale[row, 0] - shift[row, 0] for code in codes]
    return torch.from_numpy(np.array(flat, dtype=np.float32).reshape(size))


def detected(cls, tensors, size, config=None):
    found = cls.detect("m", described("m", tensors), config or {}).sized(size[1], size[0])
    specs = {spec.name: spec for spec in found.tensor_specs(size[1], size[0])}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: specs[name].shape for name in tensors
    }
    return found.resolve("m", tensors)


def check_panels(weight_format, tensors, whole) -> None:
    for start in range(0, whole.shape[0], weight_format.row_multiple):
        for rows in (1, 3, whole.shape[0] - start):
            panel = torch.full((min(rows, whole.shape[0] - start), whole.shape[1]), float("nan"))
            weight_format.dequantize_into(panel, tensors, start)
            assert torch.equal(panel, whole[start : start + rows]), (start, rows)


@pytest.mark.parametrize(("size", "group_size"), SIZES, ids=str)
@pytest.mark.parametrize("num_bits", [2, 4])
def test_the_weight_is_that_of_the_loops(num_bits, size, group_size):
    tensors = random_bits(num_bits, size, group_size)
    found = detected(QuantoBits, tensors, size)
    assert (found.num_bits, found.group_size) == (num_bits, group_size)
    expected = bits_by_hand(tensors, num_bits, size, group_size)
    assert torch.equal(found.dequantize(tensors), expected)
    check_panels(found, tensors, expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_bytes_are_scaled_by_their_row(dtype):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 120, (7, 33), dtype=torch.uint8, generator=generator).view(dtype)
    tensors = {"weight._data": codes, "weight._scale": torch.randn(7, 1, generator=generator).bfloat16()}
    found = detected(QuantoBytes, tensors, (7, 33))
    expected = torch.stack([codes[n].float() * tensors["weight._scale"][n].float() for n in range(7)])
    assert torch.equal(found.dequantize(tensors), expected)
    check_panels(found, tensors, expected)


@pytest.mark.parametrize(("num_bits", "named"), [(4, "qint8"), (4, "qfloat8"), (2, "qint8")])
def test_a_side_file_that_contradicts_the_codes_is_refused(num_bits, named):
    tensors = random_bits(num_bits, (8, 128), 128)
    with pytest.raises(
        FormatError, match=r"(?s)quanto_qmap.json contradicts the tensors of m. Nothing was loaded"
    ):
        QuantoBits.detect("m", described("m", tensors), {"quanto_qmap": {"m": {"weights": named}}})


@pytest.mark.parametrize(("num_bits", "named"), [(4, "qint2"), (2, "qint4")])
def test_a_side_file_that_names_the_other_bits_is_refused(num_bits, named):
    tensors = random_bits(num_bits, (8, 128), 128)
    with pytest.raises(FormatError):
        detected(QuantoBits, tensors, (8, 128), {"quanto_qmap": {"m": {"weights": named}}})


@pytest.mark.parametrize(
    "qmap", [5, [], {"m": 5}, {"m": {}}, {"other": {"weights": "qint8"}}, {"m": {"weights": None}}], ids=str
)
def test_a_side_file_that_says_nothing_of_a_module_decides_nothing(qmap):
    tensors = random_bits(4, (8, 128), 128)
    found = detected(QuantoBits, tensors, (8, 128), {"quanto_qmap": qmap})
    assert torch.equal(found.dequantize(tensors), bits_by_hand(tensors, 4, (8, 128), 128))


def test_quantized_activations_are_not_passed_over_in_silence():
    tensors = random_bits(4, (8, 128), 128)
    found = detected(
        QuantoBits, tensors, (8, 128), {"quanto_qmap": {"m": {"weights": "qint4", "activations": "qint8"}}}
    )
    assert found.activation_scheme is not None
    assert detected(QuantoBits, tensors, (8, 128)).activation_scheme is None


@pytest.mark.parametrize("size", [(8, 127), (9, 128), (128, 128)], ids=str)
def test_codes_of_another_size_are_refused(size):
    tensors = random_bits(4, (8, 128), 128)
    with pytest.raises(FormatError, match=r"optimum-quanto cannot hold|do not fit its size"):
        QuantoBits.detect("m", described("m", tensors), {}).sized(size[1], size[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32])
def test_bytes_of_another_kind_are_refused_by_name(dtype):
    tensors = {"weight._data": torch.zeros(4, 8, dtype=dtype), "weight._scale": torch.ones(4, 1)}
    with pytest.raises(FormatError, match=r"(?s)unsupported dtype. Nothing was loaded.*m.weight._data"):
        QuantoBytes.detect("m", described("m", tensors), {})


@pytest.mark.parametrize("name", ["weight._scale", "weight._shift"])
def test_a_scale_that_is_not_finite_is_refused_by_name(name):
    tensors = random_bits(4, (8, 128), 128)
    tensors[name][7] = float("-inf")
    with pytest.raises(FormatError, match=rf"(?s)not finite. Nothing was loaded.*m.{name}"):
        detected(QuantoBits, tensors, (8, 128))


def test_a_scalar_of_codes_is_left_to_the_error_about_shapes():
    found = QuantoBytes.detect("m", described("m", {"weight._data": torch.tensor(3, dtype=torch.int8)}), {})
    assert found is None or found.tensor_specs(8, 8)[0].shape == (8, 8)
