"""Tests of products of int8 activations and int8 weights.

Integer products must be exact, and results equal those of rounded activations.
"""

import ctypes
import dataclasses
import functools
import math
import mmap
import subprocess

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hfq.formats import ActivationScheme
from hfq.formats.bitsandbytes import BnbInt8
from hfq.formats.codecs.thread_buffers import release_buffers
from hfq.formats.compressed_tensors import IntQuantized
from hfq.formats.fp8 import Fp8
from hfq.kernels.activations import OutlierTally, outlier_channels, quantize_activations
from hfq.kernels.cpp import build as building
from hfq.kernels.cpp import int8_library as compiled_int8
from hfq.kernels.cpp.int8_library import Engine, RoundedWeight, best_engine, integer_product, rounded_linear
from hfq.kernels.cpu import int8, panels
from hfq.kernels.layer_tensors import LayerTensors
from hfq.kernels.registry import choose_kernel, explain_kernels
from tests.kernels.test_reference_memory import Allocations
from tests.support.kernel_layers import misplaced

TOKEN, TENSOR = ActivationScheme("token", dtype="int8"), ActivationScheme("tensor", dtype="int8")
LLM = ActivationScheme("token", dtype="int8", outlier_threshold=6.0)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Tolerances relative to the norm: scales and sums in float32, and rounding of the result."""


@pytest.fixture
def integers(compiled, monkeypatch):
    """Enables the C++ library for one test."""
    monkeypatch.setattr(int8, "is_built", lambda: True)
    if compiled_int8._library() is None:
        pytest.skip("int8.cpp is not built")


def skip_without(engine: Engine) -> None:
    if best_engine() < engine:
        pytest.skip(f"the best of this processor is {best_engine().name}")


def layer(out_features: int, in_features: int, weight_format=None):
    weight_format = weight_format or IntQuantized(scale_shape=(out_features, 1))
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(1)) * 0.1 + 0.02
    return weight_format, weight_format.quantize(weight)


def random_rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def exact(activations, tensors, weight_format, scheme):
    """Computes the product in double, with activations rounded in float32."""
    rounded = quantize_activations(activations.float(), scheme, tensors)
    return rounded.double() @ weight_format.dequantize(tensors, torch.float64).t()


def by_torchs_operations(activations, tensors, weight_format, scheme):
    """Rounds and scales by torch's operations; the integer product is unchanged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8, "_is_for_fused", lambda rows: False)
        return int8.linear(activations, tensors, weight_format, scheme)


@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 15, 16, 17, 33, 64, 70, 128])
def test_integers_are_summed_exactly_from_any_address(integers, rows, engine):
    skip_without(engine)
    generator = torch.Generator().manual_seed(rows)
    for out_features, in_features in ((1, 1), (5, 37), (8, 64), (33, 352), (16, 63), (47, 65), (65, 1100)):
        memory = torch.randint(
            0, 256, (out_features * in_features + 3,), dtype=torch.uint8, generator=generator
        )
        weight = memory[3:].view(torch.int8).view(out_features, in_features)
        codes = torch.randint(-128, 128, (rows, in_features), dtype=torch.int16, generator=generator)
        expected = codes.to(torch.int64) @ weight.to(torch.int64).t()
        assert torch.equal(integer_product(codes, weight, engine), expected)


@pytest.mark.parametrize("engine", Engine)
def test_extreme_codes_neither_saturate_nor_overflow_and_threads_change_nothing(
    integers, engine, monkeypatch
):
    skip_without(engine)
    in_features = (1 << 17) - 1
    weight = torch.full((18, in_features), -128, dtype=torch.int8)
    weight[1::2] = 127
    for code, rows in ((-128, 2), (127, 2), (-128, 33), (127, 33)):
        codes = torch.full((rows, in_features), code, dtype=torch.int16)
        expected = torch.tensor([[code * -128 * in_features, code * 127 * in_features] * 9] * rows)
        for threads in (1, 4):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            assert torch.equal(integer_product(codes, weight, engine), expected)


@pytest.mark.parametrize("engine", [Engine.DOTS, Engine.TILES])
@pytest.mark.parametrize("in_features", [1, 63, 64, 65, 4099, 12345])
def test_every_number_of_rows_has_the_plain_sums(integers, in_features, engine):
    skip_without(engine)
    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randint(-128, 128, (131, in_features), dtype=torch.int8, generator=generator)
    codes = torch.randint(-128, 128, (200, in_features), dtype=torch.int16, generator=generator)
    expected = integer_product(codes, weight, Engine.PLAIN)
    for rows in (*range(1, 41), 127, 200):
        for out_features in (1, 3, 18, 131):
            found = integer_product(codes[:rows], weight[:out_features], engine)
            assert torch.equal(found, expected[:rows, :out_features])


@pytest.mark.parametrize("engine", Engine)
def test_nothing_is_read_beyond_the_weight_or_written_beyond_the_result(integers, engine):
    """The weight ends at the end of readable memory."""
    skip_without(engine)
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, 9 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(start + 8 * page, page, 0) == 0
    readable = torch.frombuffer(memory, dtype=torch.int8, count=8 * page)
    try:
        for rows, out_features, in_features in (
            (1, 5, 37),
            (3, 1, 1),
            (7, 18, 129),
            (17, 33, 700),
            (40, 3, 6001),
        ):
            weight = readable[8 * page - out_features * in_features :].view(out_features, in_features)
            weight.random_(-128, 128)
            codes = torch.randint(-128, 128, (rows, in_features), dtype=torch.int16)
            assert torch.equal(
                integer_product(codes, weight, engine), codes.to(torch.int32) @ weight.to(torch.int32).t()
            )
            size, activations = rows * out_features, random_rows(rows, in_features)
            guarded = torch.full((size + 64,), 7.0)
            rounded = RoundedWeight(weight, torch.ones(1), 1.0, 127.5, math.inf)
            rounded_linear(activations, rounded, guarded[:size].view(rows, out_features), engine)
            expected = torch.empty(rows, out_features)
            rounded_linear(activations, rounded, expected, Engine.PLAIN)
            assert torch.equal(guarded, torch.cat([expected.flatten(), torch.full((64,), 7.0)]))
    finally:
        libc.mprotect(start + 8 * page, page, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize("scheme", [TOKEN, TENSOR, LLM], ids=["token", "tensor", "llm.int8"])
@pytest.mark.parametrize(
    "weight_format",
    [
        IntQuantized(scale_shape=(37, 1)),
        IntQuantized(scale_shape=(1,)),
        IntQuantized(scale_shape=(37, 1), zero_dtype="I8"),
        BnbInt8(scale_shape=(37,)),
    ],
    ids=["channel", "tensor", "zero points", "bitsandbytes"],
)
def test_results_are_those_of_rounded_activations(integers, weight_format, scheme):
    weight_format, tensors = layer(37, 99, weight_format)
    biased = tensors | {"bias": torch.linspace(-1, 1, 37).half()}
    for dtype, bound in ROUNDING.items():
        for shape in ((1,), (2,), (3,), (8,), (17,), (128,), (2, 5), ()):
            activations = random_rows(*shape, 99, dtype=dtype)
            activations[..., 7] *= 20  # an LLM.int8() outlier
            expected = exact(activations, tensors, weight_format, scheme)
            found = int8.linear(activations, tensors, weight_format, scheme)
            assert found.dtype == dtype
            assert found.shape == expected.shape
            assert found._base is None
            assert (found.double() - expected).norm() <= bound * expected.norm()
            with_bias = int8.linear(activations, biased, weight_format, scheme)
            assert torch.equal(with_bias, found + biased["bias"].to(dtype))
    assert int8.linear(random_rows(0, 99), tensors, weight_format, scheme).shape == (0, 37)


def test_strided_rows_are_read_as_they_are(integers):
    weight_format, tensors = layer(37, 96)
    for activations in (random_rows(96, 5).t(), random_rows(5, 192)[:, :96], random_rows(5, 192)[:, ::2]):
        found = int8.linear(activations, tensors, weight_format, TOKEN)
        assert torch.equal(found, int8.linear(activations.contiguous(), tensors, weight_format, TOKEN))


@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize("scale_shape", [(37, 1), (1,)])
@pytest.mark.parametrize("bound", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_gives_the_bits_of_torchs_operations(
    integers, dtype, bound, scale_shape, engine, monkeypatch
):
    skip_without(engine)
    monkeypatch.setattr(int8, "rounded_linear", functools.partial(rounded_linear, most=engine))
    scheme = dataclasses.replace(TOKEN, upper_bound=bound)
    for in_features, count in ((1, 1), (7, 2), (99, 5), (63, 15), (65, 17), (1100, 33), (352, 64)):
        weight_format, tensors = layer(37, in_features, IntQuantized(scale_shape=scale_shape))
        activations = random_rows(count, in_features, dtype=dtype)
        activations[0] = 0
        activations[-1, 0] = 3e38
        expected = by_torchs_operations(activations, tensors, weight_format, scheme)
        with Allocations() as allocations:
            found = int8.linear(activations, tensors, weight_format, scheme)
        assert torch.equal(found, expected)
        assert allocations.total <= 4 * count * (in_features + 2 * 37 + 2) + 4 * in_features + 4 * 37


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power", [-132, -126, -106, -20, 0, 20, 100, 120])
def test_codes_beside_a_half_are_those_of_a_division(integers, power, dtype):
    """An amplitude of 127.5 has a scale of 1; the other scales have more digits."""
    halves = torch.arange(-127.5, 128, 1.0)
    beside = torch.cat(
        [halves, halves.nextafter(torch.tensor(torch.inf)), halves.nextafter(torch.tensor(-torch.inf))]
    )
    scales = torch.tensor([1.0, 1.1, 1.3, 1.7, 1.9999]).reshape(-1, 1) * 2.0**power
    activations = (beside.clamp(-127.5, 127.5) * scales).to(dtype)
    tensors = {
        "weight": torch.eye(beside.numel()).to(torch.int8),
        "weight_scale": torch.ones(beside.numel(), 1),
    }
    for bound in (None, float(scales[2]) * 50):
        scheme = dataclasses.replace(TOKEN, upper_bound=bound)
        weight_format = IntQuantized(scale_shape=(beside.numel(), 1))
        expected = by_torchs_operations(activations, tensors, weight_format, scheme)
        assert torch.equal(int8.linear(activations, tensors, weight_format, scheme), expected)


@pytest.mark.parametrize("engine", Engine)
def test_the_smallest_floats_count_whichever_thread_multiplies(integers, engine, monkeypatch):
    """torch.set_flush_denormal treats subnormal floats as zeros, on the calling thread only."""
    skip_without(engine)
    monkeypatch.setattr(int8, "rounded_linear", functools.partial(rounded_linear, most=engine))
    weight_format, tensors = layer(2048, 1024)
    rows = random_rows(3, 1024) * torch.tensor([[2.0**-128], [2.0**-126], [2.0**-120]])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    expected = int8.linear(rows, tensors, weight_format, TOKEN)
    torch.set_flush_denormal(True)
    try:
        found = int8.linear(rows, tensors, weight_format, TOKEN)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, expected)


def test_sums_of_few_rows_are_no_larger_than_a_batch(integers):
    weight_format, tensors = layer(32768, 8)
    activations = random_rows(64, 8, dtype=torch.bfloat16)
    with Allocations() as allocations:
        found = int8.linear(activations, tensors, weight_format, TOKEN)
    assert allocations.largest <= int8.BATCH_NBYTES + 1024
    for part in (0, 30, 63):
        assert torch.equal(found[part], int8.linear(activations[part], tensors, weight_format, TOKEN))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"), [(128, 33, 352), (600, 65, 1100), (100, 129, 9000)]
)
def test_many_rows_have_the_bits_of_torchs_operations(
    integers, rows, out_features, in_features, dtype, monkeypatch
):
    weight_format, tensors = layer(out_features, in_features)
    activations = random_rows(rows, in_features, dtype=dtype)
    expected = by_torchs_operations(activations, tensors, weight_format, TOKEN)
    elsewhere = torch.empty(out_features * in_features + 3, dtype=torch.int8)[3:].view(
        out_features, in_features
    )
    tensors["weight"] = elsewhere.copy_(tensors["weight"])
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(int8.linear(activations, tensors, weight_format, TOKEN), expected)


def test_dot_products_and_tiles_round_any_number_of_rows(integers, monkeypatch):
    skip_without(Engine.DOTS)
    monkeypatch.setattr(int8, "activation_codes", None)
    weight_format, tensors = layer(37, 99)
    assert int8.linear(random_rows(200, 99), tensors, weight_format, TOKEN).shape == (200, 37)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """The kernels, with plain arrays instead of AVX-512 and AMX."""
    made = tmp_path_factory.mktemp("emulated") / "emulated.so"
    flags = [flag for flag in building.FLAGS if flag != "-O2"]
    source = str(compiled_int8.SOURCE)
    subprocess.run(
        [*building.find_compiler(), "-DHFQ_EMULATE", "-O1", *flags, source, "-o", str(made)], check=True
    )
    return compiled_int8._declared(ctypes.CDLL(str(made)))


@pytest.mark.slow
@pytest.mark.parametrize("engine", [Engine.DOTS, Engine.TILES])
def test_dot_products_and_tiles_on_processors_without_them_compute_the_same(
    integers, emulated, engine, monkeypatch
):
    """Expected results are computed without them."""
    monkeypatch.setattr(compiled_int8, "_library", lambda: emulated)
    monkeypatch.setattr(int8, "takes_any_rows", lambda: True)
    monkeypatch.setattr(int8, "rounded_linear", functools.partial(rounded_linear, most=engine))
    assert emulated.hfq_int8_engine() == Engine.TILES
    for rows in (1, 2, 15, 16, 17, 33, 64, 128, 600):
        for out_features, in_features in (
            (37, 1),
            (5, 63),
            (16, 64),
            (33, 65),
            (65, 352),
            (32, 1100),
            (19, 6200),
        ):
            weight_format, tensors = layer(out_features, in_features)
            elsewhere = torch.empty(out_features * in_features + 3, dtype=torch.int8)[3:].view(
                out_features, in_features
            )
            tensors["weight"] = elsewhere.copy_(tensors["weight"])
            codes = torch.randint(-128, 128, (rows, in_features), dtype=torch.int16)
            expected = integer_product(codes, elsewhere, Engine.PLAIN)
            for threads in (1, 3):
                monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
                assert torch.equal(integer_product(codes, elsewhere, engine), expected)
            for dtype in (torch.float32, torch.bfloat16):
                activations = random_rows(rows, in_features, dtype=dtype)
                expected = by_torchs_operations(activations, tensors, weight_format, TOKEN)
                assert torch.equal(int8.linear(activations, tensors, weight_format, TOKEN), expected)


@pytest.mark.parametrize("rows", [1, 3, 64, 200])
def test_torchs_threads_and_its_own_give_the_same_bits(integers, rows, monkeypatch):
    weight_format, tensors = layer(2048, 1024)
    activations = random_rows(rows, 1024)
    expected = int8.linear(activations, tensors, weight_format, TOKEN)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(int8.linear(activations, tensors, weight_format, TOKEN), expected)
    monkeypatch.setattr(compiled_int8, "team", lambda: None)
    assert torch.equal(int8.linear(activations, tensors, weight_format, TOKEN), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so_in_one_call(integers, value, engine, dtype, monkeypatch):
    skip_without(engine)
    monkeypatch.setattr(int8, "rounded_linear", functools.partial(rounded_linear, most=engine))
    weight_format, tensors = layer(37, 99)
    for place in (0, 40, 98):
        activations = random_rows(3, 99, dtype=dtype)
        activations[1, place] = value
        found = int8.linear(activations, tensors, weight_format, TOKEN)
        assert not found[1].isfinite().any()
        assert torch.equal(found[::2], int8.linear(activations[::2], tensors, weight_format, TOKEN))


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
def test_without_a_compiler_torch_multiplies_codes_in_bfloat16(rows, monkeypatch):
    monkeypatch.setattr(panels, "linear", None)
    weight_format, tensors = layer(37, 96)
    activations = random_rows(rows, 96, dtype=torch.bfloat16)
    found = int8.linear(activations, tensors, weight_format, TOKEN)
    expected = exact(activations, tensors, weight_format, TOKEN)
    assert (
        found.double() - expected
    ).norm() <= 2**-7 * expected.norm()  # two roundings: the sum and the result


def test_without_a_compiler_everything_else_goes_through_panels(monkeypatch):
    monkeypatch.setattr(
        int8, "_has_exact_dots", lambda: False
    )  # otherwise, torch's `_int_mm` multiplies many rows
    weight_format, tensors = layer(37, 99)
    for activations in (random_rows(3, 99), random_rows(3, 99, dtype=torch.bfloat16), random_rows(40, 99)):
        rounded = quantize_activations(activations, TOKEN, tensors)
        expected = panels.linear(rounded, tensors, weight_format)
        assert torch.equal(int8.linear(activations, tensors, weight_format, TOKEN), expected)


def test_without_a_compiler_torch_sums_many_rows_by_dot_products(integers, monkeypatch):
    weight_format, tensors = layer(37, 96)
    activations = random_rows(40, 96)
    expected = int8.linear(activations, tensors, weight_format, TOKEN)
    calls = []
    multiply = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda *arguments: calls.append(1) or multiply(*arguments))
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    int8._has_exact_dots.cache_clear()
    int8.linear(activations, tensors, weight_format, TOKEN)
    assert len(calls) == 0
    monkeypatch.setattr(int8, "is_built", lambda: False)
    assert torch.equal(int8.linear(activations, tensors, weight_format, TOKEN), expected)
    assert len(calls) == 2  # one call of the probe, one of the layer
    int8.linear(activations[:31], tensors, weight_format, TOKEN)
    assert len(calls) == 2
    int8._has_exact_dots.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", lambda one, other: multiply(one, other) + 1)
    found = int8.linear(activations, tensors, weight_format, TOKEN)  # wrong sums are not used
    assert torch.equal(
        found, panels.linear(quantize_activations(activations, TOKEN, tensors), tensors, weight_format)
    )
    int8._has_exact_dots.cache_clear()


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_lie_anywhere_in_a_file(compiled, is_compiled, dtype, monkeypatch):
    """torch's `_weight_int8pack_mm` ends the process if a weight is not aligned to 16 bytes."""
    monkeypatch.setattr(int8, "is_built", lambda: is_compiled)
    monkeypatch.setattr(int8, "_PACK_PART", 64 * 96)
    weight_format, tensors = layer(300, 96)
    for rows in (1, 4, 7, 16, 40):
        activations = random_rows(rows, 96, dtype=dtype)
        expected = int8.linear(activations, misplaced(tensors, 0), weight_format, TOKEN)
        for shift in (8, 16, 36):
            assert torch.equal(
                int8.linear(activations, misplaced(tensors, shift), weight_format, TOKEN), expected
            )


@pytest.mark.parametrize("scheme", [TOKEN, TENSOR, LLM], ids=["token", "tensor", "llm.int8"])
def test_many_rows_are_multiplied_in_batches_that_change_nothing(integers, scheme, monkeypatch):
    weight_format, tensors = layer(37, 96)
    activations = random_rows(50, 96)
    activations[49, 5] = 9.0
    expected = int8.linear(activations, tensors, weight_format, scheme)
    monkeypatch.setattr(int8, "BATCH_NBYTES", 4 * 96 * 7)
    assert torch.equal(int8.linear(activations, tensors, weight_format, scheme), expected)


def test_what_is_made_on_the_way_does_not_grow_with_the_rows(integers):
    weight_format, tensors = layer(64, 2048)
    activations = random_rows(4096, 2048, dtype=torch.bfloat16)
    with Allocations() as allocations:
        int8.linear(activations, tensors, weight_format, TOKEN)
    assert allocations.largest <= int8.BATCH_NBYTES < activations.numel() * 2


def llm_int8(
    activations: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Computes LLM.int8() step by step (Dettmers et al. 2022, section 3).

    Equation 8 with vector-wise quantization of the channels without outliers.
    """
    channels = range(activations.shape[1])
    outliers = [channel for channel in channels if float(activations[:, channel].abs().max()) >= threshold]
    others = [channel for channel in channels if channel not in outliers]
    amax = activations[:, others].abs().amax(1, keepdim=True)
    codes = (activations[:, others] * (127 / amax)).round()
    products = codes.double() @ weight[:, others].double().t()
    floats = activations[:, outliers].double() @ (weight[:, outliers].double() * scale[:, None] / 127).t()
    return products * amax * scale / (127 * 127) + floats


@pytest.mark.parametrize("threshold", [6.0, 3.0, 2.0])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_outliers_are_treated_as_published(compiled, is_compiled, threshold, monkeypatch):
    monkeypatch.setattr(int8, "is_built", lambda: is_compiled)
    weight_format, tensors = layer(24, 128, BnbInt8(scale_shape=(24,)))
    activations = random_rows(5, 128)
    activations[1, 3], activations[4, 10], activations[:, 20] = 30.0, -6.0, 8.0
    scheme = dataclasses.replace(LLM, outlier_threshold=threshold)
    expected = llm_int8(activations, tensors["weight"], tensors["SCB"].double(), threshold)
    plain = panels.linear(quantize_activations(activations, scheme, tensors), tensors, weight_format)
    if is_compiled and threshold == 6:  # few outliers are multiplied apart from the integers, many use panels
        monkeypatch.setattr(panels, "linear", None)
    found = int8.linear(activations, tensors, weight_format, scheme)
    assert (found.double() - expected).norm() <= 2e-6 * expected.norm()
    assert (plain.double() - expected).norm() <= 2e-6 * expected.norm()
    tally = OutlierTally()
    for _ in range(2):
        tally.count(activations, scheme)
    assert tally.channels == 256
    assert tally.outliers == 2 * int((activations.abs() >= threshold).any(0).sum())


def test_a_threshold_of_zero_rounds_every_channel_by_127():
    scheme = dataclasses.replace(LLM, outlier_threshold=0.0)
    values = random_rows(3, 16) * 50
    steps = values.abs().amax(1, keepdim=True) / 127
    assert outlier_channels(values, scheme) is None
    assert torch.equal(quantize_activations(values, scheme, {}), (values / steps).round() * steps)


def test_the_kernel_is_chosen_for_rounded_activations_alone(integers):
    weight_format = IntQuantized(scale_shape=(64, 1))
    assert choose_kernel("auto", weight_format, 64, 64, scheme=TOKEN).name == "int8"
    assert choose_kernel("auto", weight_format, 64, 64).name != "int8"
    assert choose_kernel("reference", weight_format, 64, 64, scheme=TOKEN).name == "reference"
    assert choose_kernel("int8", weight_format, 64, 64).name == "torch"
    assert explain_kernels("int8", weight_format, 64, 64)["int8"] == "it multiplies rounded activations only"


@pytest.mark.parametrize(
    ("weight_format", "scheme", "in_features", "part"),
    [
        (Fp8(), TOKEN, 64, "does not read fp8"),
        (IntQuantized(scale_shape=(64, 2)), TOKEN, 64, "one scale per row"),
        (IntQuantized(scale_shape=(64, 1)), ActivationScheme("token"), 64, "does not round to e4m3"),
        (IntQuantized(scale_shape=(64, 1)), TOKEN, 1 << 17, "too many"),
        (IntQuantized(scale_shape=(64, 1)), TOKEN, 99, "multiple"),
        (IntQuantized(scale_shape=(64, 1), zero_dtype="I8"), TOKEN, 64, "without the C++ library"),
    ],
)
def test_what_it_cannot_multiply_is_left_to_others_with_a_reason(weight_format, scheme, in_features, part):
    assert part in int8.reason_against(weight_format, scheme, in_features, 64)
    assert choose_kernel("auto", weight_format, in_features, 64, scheme=scheme).name == "torch"


@pytest.mark.parametrize("scale_shape", [(37, 1), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_of_any_dtype_are_read_as_they_lie(integers, dtype, scale_shape):
    weight_format, tensors = layer(37, 99, IntQuantized(scale_shape=scale_shape))
    tensors["weight_scale"] = (tensors["weight_scale"] * 2.0**-9).to(
        dtype
    )  # includes subnormal numbers of float16
    tensors["weight_scale"].view(-1)[0] = torch.finfo(dtype).smallest_normal / 4
    rows = random_rows(3, 99) * 2.0**20
    expected = by_torchs_operations(rows, tensors, weight_format, TOKEN)
    assert torch.equal(int8.linear(rows, tensors, weight_format, TOKEN), expected)
    assert expected[:, 0].abs().min() > 0


def test_every_half_is_widened_exactly(integers):
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    weight_format = IntQuantized(scale_shape=(1 << 16, 1))
    tensors = {"weight": torch.ones(1 << 16, 1, dtype=torch.int8), "weight_scale": codes.view(-1, 1)}
    found = int8.linear(torch.ones(1, 1), tensors, weight_format, TOKEN)[0]
    expected = by_torchs_operations(torch.ones(1, 1), tensors, weight_format, TOKEN)[0]
    assert torch.equal(found.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(found[kept], expected[kept])


def test_scales_that_are_written_in_place_are_the_next_products(integers):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        weight_format, tensors = layer(37, 99)
        held = LayerTensors(tensors | {"weight_scale": tensors["weight_scale"].to(dtype)})
        rows = random_rows(2, 99)
        first = int8.linear(rows, held, weight_format, TOKEN)
        assert ("int8" in held.answers) == (dtype != torch.float64)
        held["weight_scale"].mul_(2)
        assert torch.equal(int8.linear(rows, held, weight_format, TOKEN), 2 * first)


@pytest.mark.parametrize("rows", [1, 100])
def test_stand_ins_for_tensors_are_left_to_torch(integers, rows):
    """Their address is null, which the C++ library would read.

    Later products must not use their results.
    """
    weight_format, tensors = layer(64, 128)
    release_buffers()
    with FakeTensorMode() as mode:
        given = LayerTensors({name: mode.from_tensor(tensor) for name, tensor in tensors.items()})
        found = int8.linear(mode.from_tensor(random_rows(rows, 128)), given, weight_format, TOKEN)
    assert found.shape == (rows, 64)
    assert given.answers == {}
    activations = random_rows(rows, 128)
    expected = exact(activations, tensors, weight_format, TOKEN)
    for multiply in (
        int8.linear,
        lambda *given: panels.linear(quantize_activations(activations, TOKEN, tensors), *given[1:3]),
    ):
        result = multiply(activations, tensors, weight_format, TOKEN).double()
        assert (result - expected).norm() <= ROUNDING[torch.float32] * expected.norm()
