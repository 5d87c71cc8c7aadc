"""Tests of products in bfloat16: by Intel's tiles, by vectors, and by their emulation."""

import ctypes
import itertools
import mmap
import threading

import pytest
import torch

from hfq.formats.awq import Awq
from hfq.formats.compressed_tensors import IntQuantized
from hfq.formats.fp8 import Fp8
from hfq.formats.gguf.block_rows import Gguf
from hfq.formats.gptq import Gptq
from hfq.kernels.cpp import kernel, library
from hfq.kernels.cpp.layers import DTYPES, describe_layer
from tests.kernels.cpp.test_kernel import misplaced, random
from tests.support.kernel_layers import CASES, GPTQ_IN, Case, fp8, gptq, multiply_together, packed
from tests.support.kernel_layers import blocks as ggml_blocks

SHORT = torch.bfloat16


def int8(in_features: int, out_features: int, groups: int) -> Case:
    return Case(IntQuantized(codes_dtype="I8", scale_shape=(out_features, groups)), in_features, out_features)


def words(bits: int, group_size: int, in_features: int, out_features: int) -> Case:
    return Case(Gptq(bits, group_size, False, g_idx_length=in_features), in_features, out_features)


def blocks(in_features: int, out_features: int, *block: int, **options) -> Case:
    return fp8(in_features, out_features, strategy="block", block_structure=block, **options)


TILED = {
    **{
        f"fp8 channel {size}": fp8(*size, strategy="channel")
        for size in ((31, 1), (33, 15), (64, 31), (65, 33), (129, 257))
    },
    "fp8 of 600 outputs": fp8(200, 600, strategy="channel"),
    "fp8 channel of 2500 inputs": fp8(2500, 33, strategy="channel"),
    "fp8 e5m2 blocks of 64x128": blocks(300, 257, 64, 128, codes_dtype="F8_E5M2"),
    "fp8 blocks of 48x192": blocks(500, 101, 48, 192),
    "fp8 blocks of 7x64, reciprocal": blocks(200, 33, 7, 64, reciprocal=True, scale_name="weight_scale_inv"),
    "fp8 blocks of 32x384": blocks(900, 70, 32, 384),
    "fp8 groups of 64": fp8(320, 31, strategy="group", group_size=64),
    "fp8 groups of 192": fp8(576, 33, strategy="group", group_size=192),
    "int8 g64": int8(320, 33, 5),
    "int8 channel, 15 outputs": int8(63, 15, 1),
    "pack-quantized g64": packed(320, 37, 5),
    "pack-quantized g128": packed(384, 257, 3),
    "pack-quantized channel, 33 inputs": packed(33, 31, 1),
    "pack-quantized g128 asym": packed(384, 257, 3, is_symmetric=False),
    "pack-quantized channel asym, 66 inputs": packed(66, 31, 1, is_symmetric=False),
    "pack-quantized w8 g64": packed(320, 37, 5, bits=8),
    "pack-quantized w8 channel, 65 inputs": packed(65, 31, 1, bits=8),
    "awq gemv g192": Case(Awq(version="gemv", group_size=192), 384, 40),
    **{f"w{bits} channel, 160 inputs": words(bits, -1, 160, 32) for bits in (2, 3, 4, 8)},
    "w4 g128, 264 outputs": words(4, 128, 384, 264),
    "w3 g96": words(3, 96, 288, 64),
    "w8 g160, 36 outputs": words(8, 160, 480, 36),
    "w2 g64, 16 outputs": words(2, 64, 192, 16),
    "awq g128, 8 outputs": Case(Awq(group_size=128), 384, 8),
    "awq g64, 1096 outputs": Case(Awq(group_size=64), 192, 1096),
    "awq channel, 33 inputs": Case(Awq(group_size=-1), 33, 264),
    **{f"ggml {name}, 1030 outputs": ggml_blocks(name, 1030) for name in ("Q4_K", "Q6_K", "Q8_0")},
}
# parts of 128 outputs, with a remainder of fewer outputs than are read together; and inputs that need several
# passes
FEW = {
    "fp8 blocks of 128x128, 1030 outputs": blocks(300, 1030, 128, 128),
    "fp8 channel, 33000 inputs": fp8(33000, 40, strategy="channel"),
    "fp8 blocks of 128x128, 33000 inputs": blocks(33000, 520, 128, 128),
}
ROWS = (1, 2, 3, 8, 15, 16, 17, 32, 33, 64, 129, 520)


VECTORS, TILES = 1, 2
"""Arguments of `hfq_use_short`."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("compiled", TILES), id="tiles"),
        pytest.param(("compiled", VECTORS), id="vectors"),
        pytest.param(("emulated", TILES), id="emulated tiles", marks=pytest.mark.exhaustive),
        pytest.param(("emulated", VECTORS), id="emulated vectors", marks=pytest.mark.exhaustive),
    ],
)
def form(request):
    """Returns the C++ library in use, and its form of products in bfloat16."""
    name, wanted = request.param
    loaded = request.getfixturevalue(name)
    with library.use(loaded):
        if loaded.hfq_use_short(wanted) != wanted:
            pytest.skip(f"the processor has no {'tiles' if wanted == TILES else 'products of bfloat16'}")
        yield loaded, wanted


@pytest.fixture(scope="module")
def tiles(form):
    return form[0]


def is_tiled(native, weight_format, tensors) -> bool:
    described = describe_layer(weight_format, tensors)
    return described is not None and bool(native.hfq_is_tiled(described.here, 64, DTYPES[SHORT]))


@pytest.fixture(scope="module", params=[*CASES, *TILED])
def layer(tiles, request):
    weight_format, tensors = (CASES | TILED)[request.param].make()
    if not is_tiled(tiles, weight_format, tensors):
        assert request.param in CASES
        pytest.skip("not by tiles")
    return weight_format, tensors, weight_format.dequantize(tensors)


def rows_of(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return random(count, width, dtype=SHORT, seed=seed)


def is_rounded(found: torch.Tensor, activations: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns True if a result is the exact product, up to float32 sums, rounded.

    Rounding preserves the order of numbers, so rounded bounds contain the result.
    """
    given, weight, dtype = activations.double(), weight.double(), activations.dtype
    assert (found.dtype, found.shape) == (dtype, (activations.shape[0], weight.shape[0]))
    exact, margin = given @ weight.t(), 1e-5 * (given.abs() @ weight.abs().t())
    return bool(((found >= (exact - margin).to(dtype)) & (found <= (exact + margin).to(dtype))).all())


def has_minima(weight_format) -> bool:
    return isinstance(weight_format, Gguf) and weight_format.blocks.type in ("Q4_K", "Q5_K")


def test_products_are_the_exact_ones_rounded(layer):
    weight_format, tensors, weight = layer
    for rows in ROWS:
        activations = rows_of(rows, weight.shape[1], rows)
        assert is_rounded(kernel.linear(activations, tensors, weight_format), activations, weight), rows


def test_float16_of_more_than_8_rows_is_multiplied_as_two_bfloat16(layer):
    weight_format, tensors, weight = layer
    given = random(529, weight.shape[1], dtype=torch.float16)
    given[3] *= 2.0**-14  # subnormal numbers
    given[4] *= 2.0**12
    if weight.abs().max() > 100:
        given *= 2.0**-9  # keeps results finite
    few = kernel.linear(given[:9], tensors, weight_format)
    for rows in (9, 15, 16, 64, 65, 129, 257, 529):
        found = kernel.linear(given[:rows], tensors, weight_format)
        assert is_rounded(found, given[:rows], weight), rows
        assert torch.equal(found[:9], few), rows  # independent of the other rows
    assert torch.equal(kernel.linear(given[::2][:40], tensors, weight_format), found[::2][:40])


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -65504.0])
def test_float16_that_is_not_finite_reaches_its_own_row_alone(tiles, value):
    weight_format, tensors = TILED["w4 g128, 264 outputs"].make()
    weight = weight_format.dequantize(tensors)
    given = random(20, 384, dtype=torch.float16)
    expected = kernel.linear(given, tensors, weight_format)
    given[7, 5] = value
    found = kernel.linear(given, tensors, weight_format)
    assert torch.equal(found[[*range(7), *range(8, 20)]], expected[[*range(7), *range(8, 20)]])
    alone = (given[7].double() @ weight.double().t()).to(torch.float16)
    if abs(value) == 65504:
        assert torch.allclose(found[7], alone, rtol=2e-3, atol=1)  # one rounding of sums of large numbers
    else:
        assert torch.equal(found[7].isnan(), alone.isnan())
        assert torch.equal(found[7][~alone.isnan()], alone[~alone.isnan()])


@pytest.mark.parametrize("lowest", [0, 1, 2, 120, 240])
def test_powers_of_two_as_scales_are_kept_however_small(tiles, lowest):
    weight_format, tensors = CASES["mxfp4"].make()
    scale = tensors["weight_scale"].view(torch.uint8)
    scale.copy_(scale % 8 + lowest)
    weight = weight_format.dequantize(tensors)
    activations = (rows_of(20, weight.shape[1]).float() * 2.0 ** (120 - lowest)).to(SHORT)
    assert is_tiled(tiles, weight_format, tensors)
    for rows in (1, 8, 20):
        assert is_rounded(
            kernel.linear(activations[:rows], tensors, weight_format), activations[:rows], weight
        ), rows


def test_a_row_is_multiplied_alike_among_any_others(form, layer):
    """Exceptions: one row alone, and, without tiles, few rows.

    These are up to eight rows (3 bits: three, AWQ: five), of ggml's blocks also with tiles. Sums cancel, so that another order of summation would change results.
    """
    weight_format, tensors, weight = layer
    is_awq = isinstance(weight_format, Awq) and weight_format.version == "gemm"
    least, has_least = (
        (5 if is_awq else 3),
        is_awq or (isinstance(weight_format, Gptq) and weight_format.num_bits == 3),
    )
    activations = rows_of(720, weight.shape[1])
    activations -= (activations.float() @ weight.pinverse() @ weight).to(SHORT)
    many = kernel.linear(activations, tensors, weight_format)
    few, fewer = (
        torch.cat([kernel.linear(part, tensors, weight_format) for part in activations.split(count)])
        for count in (8, least)
    )
    by_tiles = form[1] == TILES and not isinstance(weight_format, Gguf)
    if by_tiles or has_least:
        assert torch.equal(few, many)
    if by_tiles or not has_least:
        assert torch.equal(fewer, few)
    for rows in (2, 3, 5, 8, 9, 12, 13, 16, 17, 31, 33, 65, 512, 513, 514, 529):
        expected = fewer if rows <= least else few if rows <= 8 else many
        assert torch.equal(kernel.linear(activations[:rows], tensors, weight_format), expected[:rows]), rows
        assert torch.equal(kernel.linear(activations[-rows:], tensors, weight_format), expected[-rows:]), rows


def test_neither_threads_nor_places_nor_strides_matter(layer, monkeypatch):
    weight_format, tensors, weight = layer
    size = weight.shape[1]
    wide = rows_of(40, 2 * size)
    activations = wide[:, 1 : 1 + size]
    expected = kernel.linear(activations.contiguous(), tensors, weight_format)
    assert torch.equal(kernel.linear(activations, tensors, weight_format), expected)
    turned = kernel.linear(activations.view(4, 10, size).transpose(0, 1), tensors, weight_format)
    assert torch.equal(turned.transpose(0, 1).flatten(0, 1), expected)
    one = activations[:1].expand(20, size)
    assert torch.equal(kernel.linear(one, tensors, weight_format), expected[:1].expand(20, -1))
    moved = misplaced({"x": activations.contiguous()}, 1)["x"]
    for shift in (1, 2, 3, 31, 36):
        assert torch.equal(kernel.linear(moved, misplaced(tensors, shift), weight_format), expected), shift
    rows_expected = {
        rows: kernel.linear(activations[:rows], tensors, weight_format) for rows in (1, 2, 7, 12, 40)
    }
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for rows, expected in rows_expected.items():
            assert torch.equal(kernel.linear(activations[:rows], tensors, weight_format), expected), (
                threads,
                rows,
            )


def test_what_is_not_finite_stays_in_its_own_row(layer):
    weight_format, tensors, weight = layer
    activations = rows_of(35, weight.shape[1])
    expected = kernel.linear(activations, tensors, weight_format)
    for value in (float("nan"), float("inf"), -float("inf")):
        faulty = activations.clone()
        faulty[17, weight.shape[1] - 1] = value
        found = kernel.linear(faulty, tensors, weight_format)
        exact = faulty[17].float() * weight  # zero codes turn infinities into NaN
        assert not found[17].isfinite().any()
        if not has_minima(weight_format):  # an infinite product minus an infinite minimum is NaN
            assert torch.equal(found[17].isnan(), exact.isnan().any(1))
        assert torch.equal(found[:17], expected[:17])
        assert torch.equal(found[18:], expected[18:])


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("rows", [1, 2, 17, 70])
def test_a_nan_code_reaches_its_own_output_alone(tiles, dtype, rows):
    weight_format, tensors = fp8(300, 37, strategy="channel", codes_dtype=dtype).make()
    activations = rows_of(rows, 300)
    expected = kernel.linear(activations, tensors, weight_format)
    for output, channel, code in ((0, 0, 0x7F), (31, 150, 0xFF), (36, 299, 0xFF)):
        tensors["weight"].view(torch.uint8)[output, channel] = code
    found = kernel.linear(activations, tensors, weight_format)
    faulty = torch.tensor([0, 31, 36])
    assert found[:, faulty].isnan().all()
    found[:, faulty] = expected[:, faulty]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("flushed", [False, True])
def test_activations_of_every_size_come_back_from_an_identity(tiles, flushed, monkeypatch):
    """Includes subnormal numbers, with any denormal setting of the caller and any threads.

    Numbers of one row have similar magnitudes.
    """
    tensors = {"weight": torch.eye(64).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(1.0)}
    weight_format = Fp8(strategy="tensor", scale_shape=())
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(SHORT)
    activations = bits[torch.isfinite(bits)].view(-1, 64)
    try:
        for threads in (1, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            for rows in (1, 2, 17, 510):
                torch.set_flush_denormal(flushed)
                found = [kernel.linear(part, tensors, weight_format) for part in activations.split(rows)]
                torch.set_flush_denormal(False)
                assert torch.equal(torch.cat(found), activations), rows
    finally:
        torch.set_flush_denormal(False)


def test_forms_are_chosen_and_chosen_back(form):
    tiles, wanted = form
    weight_format, tensors = CASES["fp8 channel"].make()
    described, activations = describe_layer(weight_format, tensors), rows_of(40, 257)
    expected = kernel.linear(activations, tensors, weight_format)
    try:
        for chosen in (0, VECTORS, wanted):
            assert tiles.hfq_use_short(chosen) == chosen
            assert tiles.hfq_is_tiled(described.here, 40, DTYPES[SHORT]) == (chosen > 0)
            assert is_rounded(
                kernel.linear(activations[:8], tensors, weight_format),
                activations[:8],
                weight_format.dequantize(tensors),
            )
        assert torch.equal(kernel.linear(activations, tensors, weight_format), expected)
        tiles.hfq_use(1)
        assert not tiles.hfq_is_tiled(described.here, 40, DTYPES[SHORT])
    finally:
        tiles.hfq_use_short(wanted), tiles.hfq_use(-1)
    assert tiles.hfq_is_tiled(described.here, 40, DTYPES[torch.float16])
    assert not tiles.hfq_is_tiled(described.here, 8, DTYPES[torch.float16])
    assert not tiles.hfq_is_tiled(described.here, 40, DTYPES[torch.float32])


def test_layers_that_are_multiplied_together_are_so_bit_for_bit(tiles):
    """The layers include some that are not tiled."""
    cases = [
        gptq(4, 32),
        gptq(4, 32, scatter=True),
        gptq(8, 32),
        gptq(3, 32, scatter=True),
        gptq(4, 176),
        gptq(2, 16),
    ]
    cases += [
        fp8(GPTQ_IN, 96, strategy="channel"),
        blocks(GPTQ_IN, 96, 7, 9),
        packed(GPTQ_IN, 96, 11),
        packed(GPTQ_IN, 96, 1),
    ]
    made = [case.make() for case in cases]
    assert {is_tiled(tiles, *one) for one in made} == {False, True}
    layers = [(tensors, weight_format) for weight_format, tensors in made]
    for counts, dtype in itertools.product(
        ([1] * 10, [8, 1, 2, 3, 4, 5, 6, 7, 8, 1], [2] * 10, [9, 20, 3] * 3 + [64]), DTYPES
    ):
        activations = random(sum(counts), GPTQ_IN, dtype=dtype)
        found = multiply_together(activations, counts, layers)
        if max(counts) > 8 and dtype == SHORT:
            assert found is None
            continue
        for result, part, one in zip(found.split(counts), activations.split(counts), layers, strict=True):
            assert torch.equal(result, kernel.linear(part, *one))


class Mallinfo(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]

    def in_use(self) -> int:
        return self.field7 + self.field4  # uordblks and hblkhd: bytes from the heap and from mmap


def kept_by_a_thread(activations, tensors, weight_format, monkeypatch) -> int:
    """Returns the bytes that a new thread keeps after a product, without the result."""
    mallinfo, grown = getattr(ctypes.CDLL(None), "mallinfo2", None), []
    if mallinfo is None:
        pytest.skip("another C library")
    mallinfo.restype = Mallinfo

    def work() -> None:
        before = mallinfo().in_use()
        result = kernel.linear(activations, tensors, weight_format)
        grown.append(mallinfo().in_use() - before - result.nbytes)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    one = threading.Thread(target=work)
    one.start(), one.join()
    return grown[0]


LARGE = {
    "fp8": fp8(2048, 4096, strategy="channel"),
    "gptq": words(4, 32, 512, 1 << 14),
    "awq": Case(Awq(group_size=64), 512, 1 << 14),
    "int8": int8(2048, 4096, 1),
    "pack-quantized": packed(2048, 4096, 32),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_a_thread_keeps_does_not_grow_with_the_weight(tiles, name, monkeypatch):
    case = LARGE[name]
    weight_format, tensors = case.make()
    activations = rows_of(64, case.in_features)
    kernel.linear(activations[:2], tensors, weight_format)
    assert kept_by_a_thread(activations, tensors, weight_format, monkeypatch) <= (1 << 20) + 16 * 64 * (
        case.in_features + 256
    )


class Guarded:
    """Bytes between two pages that can be neither read nor written."""

    def __init__(self, tensor: torch.Tensor, at_end: bool) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        inside = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, inside + 2 * mmap.PAGESIZE)
        start, libc = (
            ctypes.addressof(ctypes.c_char.from_buffer(self.memory)),
            ctypes.CDLL(None, use_errno=True),
        )
        offset = mmap.PAGESIZE + (inside - nbytes if at_end else 0)
        ctypes.memmove(start + offset, tensor.contiguous().data_ptr(), nbytes)
        for page in (start, start + mmap.PAGESIZE + inside):
            assert (
                libc.mprotect(
                    ctypes.c_void_p(page),
                    ctypes.c_size_t(mmap.PAGESIZE),
                    mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0,
                )
                == 0
            )
        self.tensor = torch.frombuffer(
            self.memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset
        ).view(tensor.shape)


@pytest.mark.parametrize("at_end", [False, True])
def test_nothing_is_read_beyond_either_end(layer, at_end):
    weight_format, tensors, weight = layer
    guarded = {name: Guarded(tensor, at_end).tensor for name, tensor in tensors.items()}
    for rows in (1, 3, 17, 65):
        activations = rows_of(rows, weight.shape[1])
        found = kernel.linear(Guarded(activations, at_end).tensor, guarded, weight_format)
        assert torch.equal(found, kernel.linear(activations, tensors, weight_format)), rows


@pytest.mark.parametrize("name", [name for name in CASES | TILED | FEW if name.startswith("fp8")])
def test_few_rows_are_multiplied_by_dot_products_where_there_are_no_tiles(native, name):
    weight_format, tensors = (CASES | TILED | FEW)[name].make()
    if native.hfq_use_short(1) != 1:
        pytest.skip("the processor has no dot products of bfloat16")
    weight, guarded = (
        weight_format.dequantize(tensors),
        {name: Guarded(tensor, True).tensor for name, tensor in tensors.items()},
    )
    activations = rows_of(8, weight.shape[1])
    expected = kernel.linear(activations, tensors, weight_format)
    assert is_rounded(expected, activations, weight)
    for rows in range(1, 8):
        assert torch.equal(
            kernel.linear(Guarded(activations[:rows], True).tensor, guarded, weight_format), expected[:rows]
        ), rows
