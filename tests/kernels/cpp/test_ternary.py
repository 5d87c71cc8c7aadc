"""Tests of QMoE's rows in the C++ library: bits, threads, and codes that must not be followed."""

import pytest
import torch

from hfq.errors import FormatError
from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.formats.qmoe import Qmoe
from hfq.kernels import reference
from hfq.kernels.cpp import library, ternary
from hfq.kernels.cpu import panels
from tests.support.kernel_layers import at_the_end_of_a_page
from tests.support.tiny_models import settled

SIZES = [(1, 1), (9, 2), (3, 31), (8, 32), (17, 33), (64, 75), (5, 768)]


def made(size: tuple[int, int], zeros: float = 0.885):
    """Returns (format, tensors) of a layer."""
    generator = torch.Generator().manual_seed(size[1])
    kept = torch.rand(size, generator=generator) >= zeros
    tensors = Qmoe().quantize(torch.randn(size, generator=generator) * kept)
    return settled(Qmoe(), tensors, {"quant_method": "qmoe"}, size), tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("level", [0, 1, 2])
def test_rows_are_those_of_the_reference_and_nothing_else_is_written(native, level, size, dtype):
    native.hfq_use(level)
    found, tensors = made(size)
    whole = found.dequantize(tensors, dtype)
    for start in range(0, size[0], 3):
        rows = min(5, size[0] - start)
        memory = thread_buffer("panel", torch.float32, torch.device("cpu"), rows * size[1] + 64)
        memory.fill_(7)
        panel = ternary.fill_rows(tensors, found, dtype, start, rows)
        assert torch.equal(panel, whole[start : start + rows])
        assert bool((memory[rows * size[1] :] == 7).all())


@pytest.mark.parametrize("level", [0, 1, 2])
def test_nothing_outside_of_the_tensors_is_read(native, level):
    native.hfq_use(level)
    for zeros in (0.0, 0.885, 1.0):
        found, tensors = made((6, 75), zeros)
        ends = {name: at_the_end_of_a_page(tensor) for name, tensor in tensors.items()}
        assert torch.equal(ternary.fill_rows(ends, found, torch.float32, 0, 6), found.dequantize(tensors))


def test_bits_do_not_depend_on_threads_or_alignment(native):
    found, tensors = made((700, 768))
    expected = found.dequantize(tensors)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(ternary.fill_rows(tensors, found, torch.float32, 0, 700), expected)
    finally:
        torch.set_num_threads(before)
    moved = dict(tensors)
    for name, tensor in tensors.items():
        memory = bytearray(tensor.nbytes + 1)
        memory[1:] = tensor.view(torch.uint8).numpy().tobytes()
        moved[name] = torch.frombuffer(memory, dtype=tensor.dtype, offset=1)
    assert torch.equal(ternary.fill_rows(moved, found, torch.float32, 0, 700), expected)


@pytest.mark.parametrize("place", [0, 7, -1])
@pytest.mark.parametrize("code", [0, -1], ids=["too few columns", "too many columns"])
def test_codes_of_another_width_are_refused(native, code, place):
    found, tensors = made((6, 75), 0.5)
    codes = tensors["w_comp"].clone()
    codes[place] = code
    damaged = {**tensors, "w_comp": at_the_end_of_a_page(codes)}
    before = thread_buffer("panel", torch.float32, torch.device("cpu"), 6 * 75 + 64)
    before.fill_(7)
    with pytest.raises(FormatError, match=r"(?s)not those of the row's width.*rows 0 to 5"):
        ternary.fill_rows(damaged, found, torch.float32, 0, 6)
    assert bool((before[6 * 75 :] == 7).all())


@pytest.mark.parametrize("offset", [-1, 2**31 - 1, -(2**31), 1_000], ids=str)
@pytest.mark.parametrize("place", [0, 3, -1])
def test_offsets_outside_of_the_codes_are_not_followed(native, offset, place):
    found, tensors = made((6, 75))
    offsets = tensors["row_off"].clone()
    offsets[place] = offset
    ends = {"w_comp": at_the_end_of_a_page(tensors["w_comp"]), "row_off": offsets}
    with pytest.raises(FormatError, match="not those of the row's width"):
        ternary.fill_rows({**tensors, **ends}, found, torch.float32, 0, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_are_those_without_the_library(compiled, dtype):
    found, tensors = made((300, 768))
    rows = torch.randn(3, 768, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for engine in (compiled, "torch"):
        with library.use(engine):
            results.append(
                (panels.linear(rows, tensors, found), panels.linear_grad(rows[:, :300], tensors, found))
            )
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    expected = reference.linear(rows, tensors, found)
    # float16 is multiplied in float32, and products of panels are summed in another order
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert (results[0][0] - expected).float().norm() <= tolerance * expected.float().norm()
