"""Tests of AWQ's three layouts against loops over their words, and of unsupported files."""

import numpy as np
import pytest
import torch

from hfq import FormatError
from hfq.formats.awq import Awq
from hfq.formats.gptq import Gptq
from tests.support.tiny_models import described

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIG = {"quant_method": "awq", "bits": 4, "zero_point": True}


def any_words(generator, *shape: int, bits: int = 32) -> torch.Tensor:
    half = 1 << (bits - 1)
    return torch.randint(-half, half, shape, dtype=torch.int64, generator=generator).to(
        torch.int32 if bits == 32 else torch.int16
    )


def nibble(word: int, place: int) -> int:
    return (word & 0xFFFFFFFF) >> (4 * place) & 15


def stream(words: list[int], num_bits: int, count: int) -> list[int]:
    bits = sum((word & 0xFFFFFFFF) << (32 * place) for place, word in enumerate(words))
    return [bits >> (i * num_bits) & ((1 << num_bits) - 1) for i in range(count)]


def multiply(codes: list, zeros: list, scales: np.ndarray, group_size: int) -> torch.Tensor:
    """Computes W[n, k] = (q - z) * s in float32, with `zeros` and `scales` as [n][group]."""
    weight = [
        [
            np.float32(code - zeros[n][k // group_size]) * scales[n, k // group_size]
            for k, code in enumerate(row)
        ]
        for n, row in enumerate(codes)
    ]
    return torch.from_numpy(np.array(weight, dtype=np.float32))


def random_gemm(out_features: int, in_features: int, group_size: int, num_bits: int = 4, dtype=torch.float16):
    generator = torch.Generator().manual_seed(num_bits)
    words, groups = out_features * num_bits // 32, in_features // group_size
    return {
        "qweight": any_words(generator, in_features, words),
        "qzeros": any_words(generator, groups, words),
        "scales": torch.randn(groups, out_features, generator=generator).to(dtype),
    }


def gemm_row(words: list[int], num_bits: int) -> list[int]:
    """Returns the columns of a row of words: AWQ's order for 4 bits, else a plain stream."""
    count = len(words) * 32 // num_bits
    if num_bits != 4:
        return stream(words, num_bits, count)
    columns = [0] * count
    for place, word in enumerate(words):
        for i in range(8):
            columns[8 * place + ORDER[i]] = nibble(word, i)
    return columns


def gemm_by_hand(tensors, group_size: int, num_bits: int = 4) -> torch.Tensor:
    codes = np.array([gemm_row(row, num_bits) for row in tensors["qweight"].tolist()]).T
    zeros = np.array([gemm_row(row, num_bits) for row in tensors["qzeros"].tolist()]).T
    return multiply(codes.tolist(), zeros.tolist(), tensors["scales"].float().numpy().T, group_size)


def random_gemv(out_features: int, in_features: int, group_size: int):
    generator = torch.Generator().manual_seed(1)
    multiple = {64: 2, 32: 4}.get(group_size, 1)
    words = -(-(in_features // group_size) // 8)
    width = -(-words // multiple) * multiple
    return {
        "qweight": any_words(generator, out_features, in_features // 8),
        "qzeros": any_words(generator, out_features, width),
        "scales": torch.randn(out_features, 8 * width, generator=generator).half(),
    }


def gemv_by_hand(tensors, group_size: int) -> torch.Tensor:
    codes = [stream(row, 4, 8 * len(row)) for row in tensors["qweight"].tolist()]
    zeros = [stream(row, 4, 8 * len(row)) for row in tensors["qzeros"].tolist()]
    return multiply(codes, zeros, tensors["scales"].float().numpy(), group_size)


def random_fast(out_features: int, in_features: int, group_size: int, zeros_name: str = "qzeros"):
    generator = torch.Generator().manual_seed(2)
    rows = random_gemv(out_features, in_features, group_size)["scales"].shape[1]
    return {
        "qweight": any_words(generator, out_features // 4, in_features, bits=16),
        zeros_name: torch.randn(rows, out_features, generator=generator).half(),
        "scales": torch.randn(rows, out_features, generator=generator).half(),
    }


def fast_by_hand(tensors, group_size: int, zeros_name: str = "qzeros") -> torch.Tensor:
    """Inverts AutoAWQ's `pack_intweight`.

    Four rows share a word, and channels are permuted twice within 32.
    """
    words = tensors["qweight"].tolist()
    in_features, out_features = len(words[0]), 4 * len(words)
    first = [
        4 * 2 * a + 2 * b + c for b in range(4) for a in range(4) for c in range(2)
    ]  # arange(32) as [4, 4, 2], its first two swapped
    source = [first[8 * (q // 8) + ORDER[q % 8]] for q in range(32)]
    codes = [[0] * in_features for _ in range(out_features)]
    for quad, row in enumerate(words):
        for place, word in enumerate(row):
            stride, within = divmod(place, 64)
            for i in range(4):
                line, column = divmod(4 * within + i, 64)
                column += 64 * stride
                codes[4 * quad + line][column // 32 * 32 + source[column % 32]] = nibble(word, i)
    scales, zeros = tensors["scales"].float().numpy(), tensors[zeros_name].float().numpy()
    weight = [
        [
            np.float32(code) * scales[k // group_size, n] + zeros[k // group_size, n]
            for k, code in enumerate(line)
        ]
        for n, line in enumerate(codes)
    ]
    return torch.from_numpy(np.array(weight, dtype=np.float32))


def detected(tensors, size: tuple[int, int], **config):
    found = Awq.detect("m", described("m", tensors), CONFIG | config)
    specs = {spec.name: spec for spec in found.tensor_specs(size[1], size[0])}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: specs[name].shape for name in tensors
    }
    return found.resolve("m", tensors)


def check_panels(weight_format, tensors, whole) -> None:
    step = weight_format.row_multiple
    for start in range(0, whole.shape[0], step):
        for rows in {1, step, step + 3, whole.shape[0] - start}:
            panel = torch.full((min(rows, whole.shape[0] - start), whole.shape[1]), float("nan"))
            weight_format.dequantize_into(panel, tensors, start)
            assert torch.equal(panel, whole[start : start + rows]), (start, rows)


@pytest.mark.parametrize("group_size", [32, 64, 96, 192])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gemm_is_that_of_the_loops(group_size, dtype):
    tensors = random_gemm(40, 192, group_size, dtype=dtype)
    found = detected(tensors, (40, 192), version="gemm", group_size=group_size)
    expected = gemm_by_hand(tensors, group_size)
    assert torch.equal(found.dequantize(tensors), expected)
    check_panels(found, tensors, expected)


@pytest.mark.parametrize("num_bits", [2, 3, 5, 6, 7, 8])
def test_gemm_of_other_bits_is_a_plain_stream_along_the_output(num_bits):
    tensors = random_gemm(64, 96, 32, num_bits)
    found = detected(tensors, (64, 96), version="gemm", group_size=32, bits=num_bits)
    expected = gemm_by_hand(tensors, 32, num_bits)
    assert torch.equal(found.dequantize(tensors), expected)
    check_panels(found, tensors, expected)


@pytest.mark.parametrize(
    ("in_features", "group_size"), [(256, 128), (256, 64), (256, 32), (1152, 128), (192, 96), (320, 32)]
)
def test_gemv_is_that_of_the_loops(in_features, group_size):
    tensors = random_gemv(20, in_features, group_size)
    found = detected(tensors, (20, in_features), version="gemv", group_size=group_size)
    assert found.version == "gemv"
    expected = gemv_by_hand(tensors, group_size)
    assert torch.equal(found.dequantize(tensors), expected)
    check_panels(found, tensors, expected)


@pytest.mark.parametrize("zeros_name", ["qzeros", "scaled_zeros"])
@pytest.mark.parametrize(("in_features", "group_size"), [(256, 128), (256, 64), (192, 32)])
def test_gemv_fast_is_that_of_the_loops(in_features, group_size, zeros_name):
    tensors = random_fast(12, in_features, group_size, zeros_name)
    found = detected(tensors, (12, in_features), version="gemv_fast", group_size=group_size)
    assert found.version == "gemv_fast"
    expected = fast_by_hand(tensors, group_size, zeros_name)
    assert torch.equal(found.dequantize(tensors), expected)
    check_panels(found, tensors, expected)


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast"])
def test_a_group_over_all_channels_is_read(version):
    tensors = Awq(version=version, group_size=-1).quantize(torch.randn(8, 128))
    by_hand = {"gemm": gemm_by_hand, "gemv": gemv_by_hand, "gemv_fast": fast_by_hand}[version]
    found = detected(tensors, (8, 128), version=version, group_size=-1)
    assert torch.equal(found.dequantize(tensors), by_hand(tensors, 128))


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_a_config_without_its_group_size_is_read_by_the_shapes(version, group_size):
    tensors = Awq(version=version, group_size=group_size).quantize(torch.randn(16, 2048))
    found = Awq.detect("m", described("m", tensors), {"quant_method": "awq"})
    assert (found.version, found.group_size) == (version, group_size)


def test_awq_and_gptq_of_one_word_shape_are_told_apart_by_what_stands_beside():
    gptq = Gptq(4, 32, True, "stored", g_idx_length=64).quantize(torch.randn(64, 64))
    awq = Awq(group_size=32).quantize(torch.randn(64, 64))
    for config in ({}, {"quant_method": "gptq", "bits": 4}, CONFIG):
        assert Awq.detect("m", described("m", gptq), config) is None
        assert Awq.detect("m", described("m", awq), config).version == "gemm"
        assert Gptq.detect("m", described("m", awq), config) is None


@pytest.mark.parametrize("version", ["marlin", "exllama", "gemm2", 4])
def test_a_layout_that_is_none_of_awqs_is_refused(version):
    tensors = random_gemm(16, 64, 32)
    with pytest.raises(FormatError, match=r"(?s)does not support. Nothing was loaded.*gemv_fast"):
        Awq.detect("m", described("m", tensors), CONFIG | {"version": version})


@pytest.mark.parametrize("bits", [3, 8])
def test_gemv_knows_four_bits_alone(bits):
    for tensors in (random_gemv(16, 256, 64), random_fast(16, 256, 64)):
        version = "gemv_fast" if tensors["qweight"].dtype == torch.int16 else "gemv"
        with pytest.raises(FormatError, match="Nothing was loaded"):
            Awq.detect("m", described("m", tensors), CONFIG | {"bits": bits, "version": version})


@pytest.mark.parametrize("size", [(12, 64), (8, 100), (8, 48)], ids=str)
def test_a_size_that_gemm_cannot_hold_is_refused(size):
    with pytest.raises(FormatError, match="cannot hold a layer of this"):
        Awq(group_size=32).tensor_specs(size[1], size[0])


@pytest.mark.parametrize(
    ("version", "name"),
    [("gemm", "scales"), ("gemv", "scales"), ("gemv_fast", "scales"), ("gemv_fast", "qzeros")],
)
def test_a_scale_that_is_not_finite_is_refused_by_name(version, name):
    weight_format = Awq(version=version, group_size=64)
    tensors = weight_format.quantize(torch.randn(8, 64))
    tensors[name][0, 0] = float("nan")
    with pytest.raises(FormatError, match=rf"(?s)not finite.*m.{name}"):
        weight_format.resolve("m", tensors)


@pytest.mark.parametrize("dtype", ["I16", "I32"])
def test_a_scalar_of_codes_is_left_to_the_error_about_shapes(dtype, describe):
    found = Awq.detect("m", describe("m", qweight=(dtype, ())), CONFIG)
    assert found is None or found.tensor_specs(64, 64)[0].shape != ()
