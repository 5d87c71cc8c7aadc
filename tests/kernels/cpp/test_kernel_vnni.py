"""Tests that products of integer activations are bit-identical with and without VNNI."""

import pytest
import torch

from hfq.formats.awq import Awq
from hfq.formats.gptq import Gptq
from hfq.formats.mxfp4 import Mxfp4
from hfq.formats.nvfp4 import Nvfp4
from hfq.kernels.cpp import kernel, library
from hfq.kernels.cpp.layers import DTYPES
from tests.support.kernel_layers import CASES, Case, packed

ROWS = (1, 2, 3, 8, 17)
# groups of several spans, parts of several strips, and incomplete last vectors of columns and rows
LARGER = {
    **{
        f"w{bits} g{size}, {out_features} outputs": Case(
            Gptq(bits, size, False, "stored", g_idx_length=704), 704, out_features
        )
        for bits, size, out_features in (
            (2, 64, 304),
            (3, 352, 288),
            (4, 176, 2600),
            (4, -1, 328),
            (8, 352, 300),
            (8, 176, 36),
        )
    },
    **{  # more columns than a part has for one row
        f"w{bits}, 16480 outputs, zeros {reading}": Case(
            Gptq(bits, 64, False, reading, g_idx_length=128), 128, 16480
        )
        for bits, reading in (
            (2, "word_plus_one"),
            (4, "masked_plus_one"),
            (4, "word_plus_one"),
            (8, "word_plus_one"),
        )
    },
    "awq, 16424 outputs": Case(Awq(group_size=64), 128, 16424),
    "awq g176, 2600 outputs": Case(Awq(group_size=176), 704, 2600),
    "awq channel, 392 outputs": Case(Awq(group_size=-1), 1003, 392),
    "mxfp4 of 1440 inputs": Case(Mxfp4(), 1440, 35),
    "nvfp4 of 1296 inputs": Case(Nvfp4(), 1296, 35),
    "pack-quantized g128 asym": packed(1408, 35, 11, is_symmetric=False),
    "pack-quantized g384": packed(1152, 35, 3),
    "pack-quantized channel, 1157 inputs": packed(1157, 35, 1),
}


def random(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows)).to(dtype)


def compare(loaded, case: Case) -> None:
    weight_format, tensors = case.make()
    for rows in ROWS:
        for dtype in DTYPES:
            activations = random(rows, case.in_features, dtype)
            activations[:, 64:128] = activations[:, :1]  # equal magnitudes have no lowest limbs
            loaded.hfq_use_vnni(0)
            expected = kernel.linear(activations, tensors, weight_format)
            loaded.hfq_use_vnni(-1)
            assert torch.equal(kernel.linear(activations, tensors, weight_format), expected), (rows, dtype)


@pytest.mark.parametrize("name", [*CASES, *LARGER])
def test_no_bit_depends_on_how_bytes_are_multiplied(native, name):
    if not native.hfq_use_vnni(-1):
        pytest.skip("this processor has no dot products of bytes")
    native.hfq_use_short(0)  # multiplies bfloat16 as integers, too
    compare(native, CASES.get(name) or LARGER[name])


def test_it_is_used_where_the_processor_has_it(native):
    assert native.hfq_use_vnni(0) == 0
    found = native.hfq_use_vnni(-1)
    native.hfq_use(1)
    assert native.hfq_use_vnni(-1) == 0
    native.hfq_use(-1)
    assert native.hfq_use_vnni(-1) == found


@pytest.mark.slow
def test_the_form_for_other_processors_computes_the_same(emulated):
    with library.use(emulated):
        emulated.hfq_use_short(0)
        assert emulated.hfq_use_vnni(-1) == 1
        for case in [*CASES.values(), *LARGER.values()]:
            compare(emulated, case)
