"""Tests of the C++ kernel against exact products, for every layout and level."""

import dataclasses
import gc
import itertools
import os
import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hfq.errors import CheckpointError
from hfq.formats.fp8 import Fp8
from hfq.kernels import reference
from hfq.kernels.cpp import kernel as cpu
from hfq.kernels.cpp import layers, library
from hfq.kernels.cpp.layers import DTYPES, describe_layer
from hfq.kernels.cpp.openmp_team import team
from hfq.kernels.cpu import panels
from tests.support.kernel_layers import CASES, at_the_end_of_a_page, fp8, gptq, misplaced, multiply_together

# float32 sums in another order, or integers exactly; then one rounding of the result
RELATIVE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(scope="module", params=CASES)
def layer(request):
    weight_format, tensors = CASES[request.param].make()
    return weight_format, tensors, weight_format.dequantize(tensors)


def random(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: torch.Tensor, activations: torch.Tensor, weight: torch.Tensor) -> float:
    exact = activations.double() @ weight.double().t()
    assert found.shape == exact.shape
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("level", [0, 9])
def test_products_are_exact_up_to_rounding(native, layer, level):
    weight_format, tensors, weight = layer
    native.hfq_use(level)
    for rows in (1, 2, 3, 8, 17, 128):
        for dtype in DTYPES:
            activations = random(rows, weight.shape[1], dtype=dtype, seed=rows)
            found = cpu.linear(activations, tensors, weight_format)
            assert found.dtype == dtype
            assert error(found, activations, weight) <= RELATIVE[dtype], (rows, dtype)


@pytest.mark.parametrize("panel_nbytes", [1 << 20, 4 * 352 * 5])
def test_products_by_panels_that_are_dequantized_here_are_close_to_those_of_torch(
    native, layer, panel_nbytes
):
    weight_format, tensors, weight = layer
    biased = tensors | {"bias": random(weight.shape[0])}
    for rows in (1, 17):
        for dtype in DTYPES:
            activations = random(rows, weight.shape[1], dtype=dtype, seed=rows)
            found = cpu.panel_linear(activations, biased, weight_format, panel_nbytes)
            expected = panels.linear(activations, biased, weight_format, panel_nbytes)
            assert found.dtype == dtype
            assert (
                float((found.double() - expected.double()).norm() / expected.double().norm())
                <= 2 * RELATIVE[dtype]
            )


@pytest.mark.parametrize("subnormals", [0, 1])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("fp8")])
def test_e4m3_codes_are_exact_both_ways_that_they_are_read(native, name, subnormals):
    weight_format, tensors = CASES[name].make()
    weight = weight_format.dequantize(tensors)
    native.hfq_use_subnormals(subnormals)
    for rows in (1, 2, 3, 4, 7, 8, 9):
        activations = random(rows, weight.shape[1], seed=rows)
        assert (
            error(cpu.linear(activations, tensors, weight_format), activations, weight)
            <= RELATIVE[torch.float32]
        ), rows


@pytest.mark.parametrize("strategy", ["channel", "block"])
@pytest.mark.parametrize(("in_features", "out_features"), [(320, 1100), (6404, 35), (90112, 18)])
def test_e4m3_codes_of_many_or_long_rows_are_exact(native, strategy, in_features, out_features):
    """Many rows share scaled activations, and long rows are read two at a time.

    NaN affects its own row only.
    """
    block = (128, 128) if strategy == "block" else None
    weight_format, tensors = fp8(in_features, out_features, strategy=strategy, block_structure=block).make()
    weight = weight_format.dequantize(tensors)
    native.hfq_use_subnormals(1)
    for rows in (1, 2, 8):
        activations = random(rows, in_features, seed=rows)
        expected = cpu.linear(activations, tensors, weight_format)
        assert error(expected, activations, weight) <= RELATIVE[torch.float32], rows
        faulty = {**tensors, "weight": tensors["weight"].clone()}
        faulty["weight"].view(torch.uint8)[out_features - 1, in_features - 1] = 0xFF
        found = cpu.linear(activations, faulty, weight_format)
        assert torch.equal(found[:, :-1], expected[:, :-1])
        assert found[:, -1].isnan().all()


@pytest.mark.parametrize("subnormals", [0, 1])
@pytest.mark.parametrize("flushed", [False, True])
def test_fp8_products_keep_the_smallest_codes_and_activations_of_any_size(native, subnormals, flushed):
    """Also if the caller treats subnormal floats as zeros; that setting is unchanged."""
    codes = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 < 9].repeat(16)[
        :256
    ]  # nearly all subnormal
    tensors = {"weight": codes.view(1, 256).view(torch.float8_e4m3fn), "weight_scale": torch.tensor(1.0)}
    weight_format = Fp8(strategy="tensor", scale_shape=())
    weight = weight_format.dequantize(tensors)
    given = [
        random(3, 256) * 2.0**power for power in (-110, -60, 0, 60, 120)
    ]  # the products are normal floats
    native.hfq_use_subnormals(subnormals)
    torch.set_flush_denormal(flushed)
    try:
        found = [cpu.linear(activations, tensors, weight_format) for activations in given]
        zeros = cpu.linear(torch.zeros(2, 256), tensors, weight_format)
        is_flushed = float(torch.tensor([2.0**-126]).mul(0.5)) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert is_flushed == flushed
    for activations, result in zip(given, found, strict=True):
        assert error(result, activations, weight) <= RELATIVE[torch.float32]
    assert torch.equal(zeros, torch.zeros(2, 1))


CANCELLING = [
    "w8 channel",
    "w4 channel, 40 outputs, bf16 scales",
    "awq channel, 40 outputs",
    "pack-quantized channel asym, 301 inputs",
]


@pytest.mark.parametrize("level", [0, 9])
@pytest.mark.parametrize("name", CANCELLING)
def test_zero_points_that_cancel_cost_no_limbs(native, name, level):
    """Activations have one sign, and weights are far smaller than the largest of their group.

    Sums of codes are then far larger than the results.
    """
    case = CASES.get(name) or gptq(8, -1)
    weight = (
        torch.randn(case.out_features, case.in_features, generator=torch.Generator().manual_seed(3)) * 0.01
    )
    weight[:, ::32], weight[:, 1::32] = 1.28, -1.28
    tensors = case.format.quantize(weight)
    weight_format = case.format.resolve("m", tensors)
    dequantized = weight_format.dequantize(tensors).double()
    native.hfq_use(level)
    for rows in (1, 3, 17):
        activations = random(rows, case.in_features, seed=rows) * 0.1 + 1
        activations[:, ::32], activations[:, 1::32] = 0, 0
        exact, terms = (
            activations.double() @ dequantized.t(),
            activations.double().abs() @ dequantized.abs().t(),
        )
        # half a unit of 2**-22 of the largest of 128 activations, which is less than twice the others; float32
        # sums alone may lose n * 2**-24
        assert (
            (cpu.linear(activations, tensors, weight_format).double() - exact).abs() <= 5e-7 * terms
        ).all(), rows


@pytest.mark.parametrize("level", [0, 9])
@pytest.mark.parametrize(
    "name", ["w2 g32", "w3 g32", "w4 g32", "w8 g32", "awq g32", "pack-quantized g32 asym"]
)
@pytest.mark.parametrize(
    "places", [range(0), range(1, 16), range(16, 32), range(9, 32, 13), range(5, 32, 9), range(1, 32)]
)
def test_the_lowest_limbs_of_activations_count_wherever_they_are(native, name, level, places):
    """The largest activations are multiplied by zeros.

    The others are so small that they only have lowest limbs.
    """
    case = CASES[name]
    weight = random(case.out_features, case.in_features)
    weight[:, ::32] = 0
    tensors = case.format.quantize(weight)
    weight_format = case.format.resolve("m", tensors)
    dequantized = weight_format.dequantize(tensors)
    assert not dequantized[:, ::32].any()
    native.hfq_use(level)
    for rows in (1, 3, 8):
        activations = torch.zeros(rows, case.in_features)
        activations[:, ::32] = 1
        for place in places:
            activations[:, place::32] = 2.0**-16  # 64 units
        activations[1:, 32:64] = 0  # rows differ in the chunks with such activations
        found = cpu.linear(activations, tensors, weight_format)
        exact = activations.double() @ dequantized.double().t()
        assert (exact != 0).any() == (len(places) > 0)
        assert (
            (found.double() - exact).abs() <= 1e-6 * (activations.double() @ dequantized.double().abs().t())
        ).all()  # tolerance of a few float32 sums


@pytest.mark.parametrize("name", ["w4 g32", "awq g32", "w8 g32", "mxfp4", "nvfp4", "pack-quantized g32 asym"])
def test_activations_of_all_sizes_keep_a_share_of_the_largest_beside_them(native, name):
    """Activations as integers: outliers, tiny values, the largest finite ones, and zeros only."""
    weight_format, tensors = CASES[name].make()
    weight = weight_format.dequantize(tensors).double()
    outliers = random(4, weight.shape[1])
    outliers[0, ::50] *= 1e5
    outliers[1] *= 1e-38
    outliers[2] *= 1e30
    outliers[3, 7:] = 0
    found, exact = cpu.linear(outliers, tensors, weight_format).double(), outliers.double() @ weight.t()
    largest = outliers.double().abs().amax(1, keepdim=True)
    # half a unit per activation, the smallest possible unit, and float32's rounding of a few sums
    unit = largest * 2.0**-21 + 2.0**-126
    bound = unit * (1 + weight.abs().sum(1)) + outliers.double().abs() @ weight.abs().t() * 2.0**-21
    assert ((found - exact).abs() <= bound).all()
    assert torch.equal(
        cpu.linear(torch.zeros(1, weight.shape[1]), tensors, weight_format), torch.zeros(1, weight.shape[0])
    )


@pytest.mark.parametrize("name", ["w4 g32", "awq g32", "mxfp4", "fp8 blocks"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_activations_that_are_not_finite_stay_so(native, name, value):
    weight_format, tensors = CASES[name].make()
    activations = random(3, weight_format.shape(tensors)[1])
    activations[1, 5] = value
    found, expected = (
        cpu.linear(activations, tensors, weight_format),
        panels.linear(activations, tensors, weight_format),
    )
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.equal(found[1].isnan(), expected[1].isnan())


@pytest.mark.parametrize("name", ["w4 g32", "w3 g32", "awq g32", "mxfp4", "nvfp4", "pack-quantized g64 asym"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_beside_one_that_is_not_finite_keep_their_bits(native, name, dtype):
    weight_format, tensors = CASES[name].make()
    for rows in (2, 5, 8):
        activations = random(rows, weight_format.shape(tensors)[1], dtype=dtype)
        faulty = activations.clone()
        faulty[1, 5] = float("inf")
        expected = cpu.linear(activations, tensors, weight_format)
        found = [cpu.linear(faulty, tensors, weight_format)]
        together = multiply_together(
            torch.cat([activations, faulty]), [rows, rows], [(tensors, weight_format)] * 2
        )
        if together is not None:
            assert torch.equal(together[:rows], expected)
            found.append(together[rows:])
        for one in found:
            assert not one[1].isfinite().any()
            one[1] = expected[1]
            assert torch.equal(one, expected), rows


@pytest.mark.parametrize("level", [0, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dequantized_panels_are_the_references(native, layer, level, dtype):
    weight_format, tensors, weight = layer
    native.hfq_use(level)
    fill = cpu._filler(native, describe_layer(weight_format, tensors), tensors, weight_format)
    multiple = weight_format.row_multiple
    for start in (0, weight.shape[0] // 2 // multiple * multiple):
        assert torch.equal(fill(start, weight.shape[0] - start, dtype), weight[start:].to(dtype))


def test_gradients_are_those_of_the_dense_weight(native, layer):
    weight_format, tensors, weight = layer
    for dtype in DTYPES:
        grad = random(3, 2, weight.shape[0], dtype=dtype)
        assert error(cpu.linear_grad(grad, tensors, weight_format), grad, weight.t()) <= RELATIVE[dtype]


def test_strided_and_3d_activations_are_multiplied_like_their_copies(native, layer):
    weight_format, tensors, weight = layer
    size = weight.shape[1]
    wide = random(3, 4, 2 * size)
    for strided in (
        wide[:, :, ::2],
        wide[:, :, 1 : 1 + size].transpose(0, 1),
        wide[0, 0, size:],
        wide[:1, 0, :size].expand(3, size),
    ):
        expected = cpu.linear(strided.contiguous(), tensors, weight_format)
        assert torch.equal(cpu.linear(strided, tensors, weight_format), expected)
        assert expected.shape == (*strided.shape[:-1], weight.shape[0])
    assert cpu.linear(wide[:0, 0, :size], tensors, weight_format).shape == (0, weight.shape[0])


def test_results_do_not_depend_on_where_the_bytes_lie_or_on_threads(native, layer):
    weight_format, tensors, weight = layer
    threads = torch.get_num_threads()
    for rows, dtype in itertools.product((1, 5, 17, 64), (torch.float32, torch.bfloat16)):
        activations = random(rows, weight.shape[1], dtype=dtype)
        expected = cpu.linear(activations, tensors, weight_format)
        for shift in (1, 2, 36):
            assert torch.equal(cpu.linear(activations, misplaced(tensors, shift), weight_format), expected)
        try:
            for count in (2, 5):
                torch.set_num_threads(count)
                assert torch.equal(cpu.linear(activations, tensors, weight_format), expected)
        finally:
            torch.set_num_threads(threads)


def test_read_only_pages_that_end_where_the_bytes_end_are_read(native, layer):
    weight_format, tensors, weight = layer
    mapped = {name: at_the_end_of_a_page(tensor) for name, tensor in tensors.items()}
    for rows in (1, 8, 65):
        activations = random(rows, weight.shape[1])
        assert torch.equal(
            cpu.linear(activations, mapped, weight_format), cpu.linear(activations, tensors, weight_format)
        )
    cpu.linear_grad(random(1, weight.shape[0]), mapped, weight_format)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_an_index_that_left_its_range_after_it_was_checked_is_never_followed(native, dtype):
    """A file may be overwritten while a model reads it from disk."""
    weight_format, tensors = CASES["w4 act-order"].make()
    for group in (-1, 11):
        tensors["g_idx"] = tensors["g_idx"].to(dtype)
        tensors["g_idx"][17] = group
        for rows in (1, 3, 70):
            with pytest.raises(CheckpointError, match="changed while the model was using it"):
                cpu.linear(random(rows, 352), tensors, weight_format)
        with pytest.raises(CheckpointError, match=f"(?s)0 to 10.*{group}"):
            cpu.linear_grad(random(1, 40), tensors, weight_format)


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_nan_code_reaches_its_own_output_alone(native, rows):
    weight_format, tensors = fp8(300, 37, strategy="channel").make()
    for place, code in ((0, 0x7F), (299, 0xFF)):
        tensors["weight"].view(torch.uint8)[place % 37, place] = code
    nan = cpu.linear(random(rows, 300), tensors, weight_format).isnan()
    assert nan[:, [0, 299 % 37]].all()
    assert int(nan.sum()) == 2 * rows
    assert torch.equal(nan, reference.linear(random(rows, 300), tensors, weight_format).isnan())


def test_every_code_has_its_value(native):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    for name, dtype in (("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)):
        weight_format = Fp8(codes_dtype=name, strategy="tensor", scale_shape=())
        tensors = {"weight": codes.view(dtype), "weight_scale": torch.tensor(1.0)}
        fill = cpu._filler(native, describe_layer(weight_format, tensors), tensors, weight_format)
        for level in (0, 9):
            native.hfq_use(level)
            values, expected = fill(0, 1, torch.float32), codes.view(dtype).float()
            assert torch.equal(values.isnan(), expected.isnan())
            assert torch.equal(values[~expected.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_16_bit_activation_and_result_has_its_value(native, dtype):
    """The weight is the identity, so results equal the activations."""
    weight_format = Fp8(strategy="tensor", scale_shape=())
    tensors = {"weight": torch.eye(64).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(1.0)}
    bits = (
        torch.arange(1 << 16, dtype=torch.int32)
        .to(torch.int16)
        .view(dtype if dtype != torch.float32 else torch.float16)
    )
    activations = bits[torch.isfinite(bits)].to(dtype)
    activations = activations[: activations.numel() // 64 * 64].view(-1, 64)
    for level in (0, 9):
        native.hfq_use(level)
        for part in activations.split(
            cpu.FUSED_ROWS[torch.bfloat16]
        ):  # torch multiplies more rows on processors with bfloat16
            assert torch.equal(cpu.linear(part, tensors, weight_format), part)


class Allocations(TorchDispatchMode):
    """Sum of the bytes of all storages that operators allocate."""

    total = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((arguments, options))
            if torch.is_tensor(leaf)
        }
        result = operator(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in given:
                self.total += leaf.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize(
    ("kernel", "name"), [(cpu, "w4 g32"), (cpu, "w4 act-order"), (cpu, "fp8 blocks"), (panels, "fp8 blocks")]
)
def test_a_second_call_makes_its_result_and_copies_of_its_activations_alone(native, kernel, name):
    weight_format, tensors = CASES[name].make()
    out_features, in_features = weight_format.shape(tensors)
    for rows in (1, 8, 70):
        activations = random(rows, in_features, dtype=torch.bfloat16)
        kernel.linear(activations, tensors, weight_format)
        with Allocations() as allocations:
            kernel.linear(activations, tensors, weight_format)
        assert allocations.total <= rows * (out_features * 2 + in_features * 4) + 4096  # and some scales


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_what_is_kept_between_calls_is_of_the_activations_size(native, layer, rows):
    weight_format, tensors, weight = layer
    described = describe_layer(weight_format, tensors)
    if described is not None:
        assert 4 * native.hfq_scratch(described.here, rows) <= 16 * rows * (weight.shape[1] + 256)


def test_a_layer_is_described_once_as_long_as_it_lies_where_it_lay(native):
    weight_format, tensors = CASES["fp8 channel"].make()
    described = describe_layer(weight_format, tensors)
    assert describe_layer(weight_format, dict(tensors)) is described
    elsewhere = tensors | {"weight": tensors["weight"].clone()}
    assert describe_layer(weight_format, elsewhere).codes == elsewhere["weight"].data_ptr() != described.codes
    first = tensors | {"weight": tensors["weight"][:1], "weight_scale": tensors["weight_scale"][:1]}
    assert describe_layer(weight_format, first).out_features == 1 < described.out_features
    other = dataclasses.replace(weight_format, reciprocal=True)
    assert describe_layer(other, tensors).divides == 1 != described.divides


@pytest.mark.parametrize("name", ["nvfp4", "w4 g32"])
def test_numbers_of_a_layer_are_read_anew(native, name):
    weight_format, tensors = CASES[name].make()
    activations = random(2, weight_format.shape(tensors)[1])
    before = cpu.linear(activations, tensors, weight_format)
    next(part for part in tensors.values() if part.dtype in DTYPES).mul_(2)
    after = cpu.linear(activations, tensors, weight_format)
    assert not torch.equal(after, before)
    assert error(after, activations, weight_format.dequantize(tensors)) <= RELATIVE[torch.float32]


@pytest.mark.parametrize("name", ["nvfp4", "pack-quantized g32 asym", "w4 g32"])
def test_nothing_stays_of_a_description_that_is_not_kept(native, name, monkeypatch):
    """Some formats are described in each call; leaks would fill the memory token by token."""
    weight_format, tensors = CASES[name].make()
    made, describe = [], cpu.describe_layer
    monkeypatch.setattr(cpu, "describe_layer", lambda *given: made.append(describe(*given)) or made[-1])
    monkeypatch.setattr(layers, "_kept", {})
    for rows in (1, 128):
        cpu.linear(random(rows, weight_format.shape(tensors)[1]), tensors, weight_format)
    left = [weakref.ref(made.pop()) for _ in range(2)]
    layers._kept.clear()
    gc.collect()
    assert [reference() for reference in left] == [None, None]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_torchs_threads_and_its_own_give_the_same_bits(native, threads, layer, monkeypatch):
    weight_format, tensors, weight = layer
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for rows in (1, 8, 40):
        activations = random(rows, weight.shape[1])
        native.hfq_use_team(None)
        expected = cpu.linear(activations, tensors, weight_format)
        native.hfq_use_team(team())
        assert torch.equal(cpu.linear(activations, tensors, weight_format), expected)


def test_torchs_threads_are_known_where_it_has_openmp():
    assert (team() is not None) == ("ATen parallel backend: OpenMP" in torch.__config__.parallel_info())
    child = os.fork()
    if child == 0:
        os._exit(0 if team() is None else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_that_multiply_at_once_do_not_disturb_each_other(native):
    weight_format, tensors = gptq(4, 32).make()
    activations = [random(rows, 352, seed=rows) for rows in (20, 33, 64)]
    expected = [cpu.linear(part, tensors, weight_format) for part in activations]
    wrong = []

    def work(index: int) -> None:
        for _ in range(50):
            if not torch.equal(cpu.linear(activations[index], tensors, weight_format), expected[index]):
                wrong.append(index)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = [threading.Thread(target=work, args=(index % 3,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        torch.set_num_threads(before)
    assert not wrong


def test_what_is_not_contiguous_is_left_to_torch(native):
    weight_format, tensors = CASES["fp8 channel"].make()
    strided = tensors | {
        "weight": tensors["weight"].view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn)
    }
    assert describe_layer(weight_format, strided) is None
    activations = random(3, 257)
    expected = panels.linear(activations, tensors, weight_format)
    assert torch.equal(cpu.linear(activations, strided, weight_format), expected)
    assert torch.equal(cpu.panel_linear(activations, strided, weight_format, 1 << 20), expected)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_stand_ins_for_tensors_are_left_to_torch(native):
    weight_format, tensors = CASES["fp8 channel"].make()
    with FakeTensorMode() as mode:
        given = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
        assert describe_layer(weight_format, given) is None
        assert cpu._layer(torch.ones(1, 257), tensors, weight_format) is None


@pytest.mark.slow
def test_the_forms_for_other_processors_compute_the_same(emulated):
    """AVX-512 is emulated in plain C++, with sixteen lanes."""
    with library.use(emulated):
        assert emulated.hfq_use(2) == 2
        for name, case in CASES.items():
            weight_format, tensors = case.make()
            weight = weight_format.dequantize(tensors)
            fill = cpu._filler(emulated, describe_layer(weight_format, tensors), tensors, weight_format)
            assert torch.equal(fill(0, weight.shape[0], torch.float32), weight), name
            for rows in (1, 3, 8, 17):
                for dtype in DTYPES:
                    activations = random(rows, weight.shape[1], dtype=dtype)
                    found = cpu.linear(activations, tensors, weight_format)
                    assert error(found, activations, weight) <= RELATIVE[dtype], name


def test_many_experts_with_many_rows_are_taken_in_groups_that_change_nothing(native):
    """Memory for activations must not grow with the number of experts."""
    weight_format, tensors = fp8(2048, 32, strategy="channel").make()
    layers = [
        ({**tensors, "weight_scale": tensors["weight_scale"] * (1 + number)}, weight_format)
        for number in range(20)
    ]
    activations = random(20 * 64, 2048)
    found = multiply_together(activations, [64] * 20, layers)
    for part, one, (own, _) in zip(found.split(64), activations.split(64), layers, strict=True):
        assert torch.equal(part, cpu.linear(one, own, weight_format))
    described = [describe_layer(weight_format, own) for own, _ in layers]
    assert sum(native.hfq_scratch(each.here, 64) for each in described) > 2 << 20
