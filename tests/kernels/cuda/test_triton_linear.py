"""Tests of the Triton kernels in Triton's interpreter on a CPU, against exact products."""

import pytest
import torch

from tests.support.gguf_files import exact_blocks, random_blocks
from tests.support.kernel_layers import CASES, misplaced
from tests.support.triton_device import DEVICE, made, random_rows, skip_without_codec

pytest.importorskip("triton")

from hfq.checkpoint.gguf.block_types import block_type
from hfq.formats import ActivationScheme
from hfq.formats.gguf.block_rows import Gguf, positions
from hfq.formats.gguf.gptqmodel_rows import GptqmodelGguf
from hfq.kernels.activations import quantize_activations
from hfq.kernels.cuda import launch, triton_linear
from hfq.kernels.cuda.layers import describe, reason_against
from hfq.kernels.layer_tensors import LayerTensors
from hfq.tensor_spec import Blocks, StoredOrder

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative tolerances: float32 sums of some hundred terms, and rounding of the weight and of the result."""


BLOCKS = ("Q4_0", "Q4_1", "Q8_0", "IQ4_NL", "MXFP4", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
LAYOUTS = [
    pytest.param(name, marks=pytest.mark.every_dialect) if name.startswith("ggml") else name for name in CASES
]
"""All layers; the fast tests of blocks are below."""


def check(found: torch.Tensor, activations: torch.Tensor, tensors, weight_format) -> None:
    """Compares with the double product of the weight."""
    dtype = activations.dtype
    expected = activations.double() @ weight_format.dequantize(tensors).double().t()
    if "bias" in tensors:
        expected = expected.to(dtype).double() + tensors["bias"].double()
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() <= ROUNDING[dtype] * (1 + ("bias" in tensors)) * expected.norm()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_multiplied(name):
    weight_format, tensors = made(name)
    skip_without_codec(weight_format)
    in_features = weight_format.shape(tensors)[1]
    for dtype, count in ((torch.float32, 3), (torch.bfloat16, 1), (torch.float16, 17)):
        activations = random_rows(count, in_features, dtype)
        check(triton_linear.linear(activations, tensors, weight_format), activations, tensors, weight_format)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_decoded_bit_for_bit(name):
    """Panels equal the CPU's decoder; products of blocks of integers are exact."""
    kind = block_type(name)
    weight_format, rows = Gguf(Blocks(name, is_layer=True)), 5
    count = rows * 512 // kind.size
    weight = torch.from_numpy(random_blocks(name, count)).view(rows, -1).to(DEVICE)
    panel = torch.empty(rows, 512, device=DEVICE)
    launch.expand(panel, describe(weight_format, {"weight": weight}), 0)
    assert torch.equal(panel, weight_format.dequantize({"weight": weight}))
    tensors = {"weight": torch.from_numpy(exact_blocks(name, count)).view(rows, -1).to(DEVICE)}
    whole = weight_format.dequantize(tensors).double().t()
    for size in (1, 5):  # one of each kernel
        activations = torch.randint(-2, 3, (size, 512), generator=torch.Generator().manual_seed(size))
        found = triton_linear.linear(activations.float().to(DEVICE), tensors, weight_format)
        assert torch.equal(found.double(), activations.double().to(DEVICE) @ whole)


def test_blocks_at_odd_addresses_and_in_another_order_give_the_same_bits():
    order = StoredOrder(4, 2, 2, 2, 1)
    weight_format = Gguf(Blocks("Q4_K", is_layer=True, rows=order))
    weight = torch.from_numpy(random_blocks("Q4_K", order.size, scale=0.01)).to(DEVICE)
    panel = torch.empty(order.size, 256, device=DEVICE)
    launch.expand(panel, describe(weight_format, {"weight": weight}), 0)
    assert torch.equal(panel, weight_format.dequantize({"weight": weight}))
    ordered = {"weight": weight[positions(order, DEVICE)]}
    for count, shift in ((2, 1), (5, 2)):  # one of each kernel
        rows = random_rows(count, 256, torch.float32)
        expected = triton_linear.linear(rows, ordered, Gguf(Blocks("Q4_K", is_layer=True)))
        moved = misplaced({"weight": weight}, shift) if DEVICE.type == "cpu" else {"weight": weight}
        for tensors in ({"weight": weight}, moved):
            assert torch.equal(triton_linear.linear(rows, tensors, weight_format), expected)


def test_blocks_that_the_kernels_do_not_read_are_named():
    blocks = Blocks("Q4_K", is_layer=True, columns=StoredOrder(0, 1, 2, 128, 1))
    assert reason_against(Gguf(blocks)) == "the file has the columns in another order"
    scaled = Gguf(Blocks("Q4_K", is_layer=True), scale_shape=(1,))
    assert reason_against(scaled) == "it does not read a scale of all blocks"
    assert reason_against(Gguf(Blocks("IQ3_S", is_layer=True))) == "it does not read blocks of IQ3_S"
    assert reason_against(GptqmodelGguf("Q2_0")) == "it does not read blocks of Q2_0"


@pytest.mark.parametrize("name", ["w4 act-order", "fp8 blocks of 48x80"])
def test_many_rows_strides_dimensions_and_a_bias(name, monkeypatch):
    weight_format, tensors = made(name)
    out_features, in_features = weight_format.shape(tensors)
    biased = tensors | {"bias": torch.linspace(-1, 1, out_features).half().to(DEVICE)}
    strided = random_rows(in_features, 8, torch.float32).t()
    rows_apart = random_rows(4, 2 * in_features, torch.bfloat16)[:, :in_features]
    for activations in (strided, rows_apart, random_rows(6, in_features, torch.float32).view(2, 3, -1)):
        found = triton_linear.linear(activations, biased, weight_format)
        check(found, activations, biased, weight_format)
        assert found._base is None
    monkeypatch.setattr(launch, "_MOST_SPLITS", 1)
    check(triton_linear.linear(strided, tensors, weight_format), strided, tensors, weight_format)
    many = random_rows(launch.SOME_ROWS + 1, in_features, torch.float32)
    monkeypatch.setattr(triton_linear, "EXPANDED_NBYTES", 32 * 4 * in_features)
    check(triton_linear.linear(many, biased, weight_format), many, biased, weight_format)
    assert triton_linear.linear(many[:0], tensors, weight_format).shape == (0, out_features)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy warns about NaN
def test_every_code_of_fp8_is_decoded_with_its_nan():
    for dtype, name in ((torch.float8_e4m3fn, "fp8 channel"), (torch.float8_e5m2, "fp8 e5m2")):
        weight_format = CASES[name].format
        codes = torch.arange(256, dtype=torch.uint8).view(256, 1).view(dtype)
        tensors = {"weight": codes.to(DEVICE), "weight_scale": torch.ones(256, 1, device=DEVICE)}
        found = triton_linear.linear(torch.ones(1, 1, device=DEVICE), tensors, weight_format)[0].cpu()
        expected = codes[:, 0].float()
        assert torch.equal(found.isnan() | found.isinf(), expected.isnan() | expected.isinf())
        finite = expected.isfinite()
        assert torch.equal(found[finite], expected[finite])


def test_activations_are_encoded_as_torch_casts_them():
    every = (
        torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float()
    )  # every sign, exponent and upper mantissa
    fine = torch.cat(
        [every[every.abs() < 448], torch.linspace(-448, 448, 4001), torch.linspace(-0.02, 0.02, 4001)]
    )
    rows = torch.cat([fine, torch.full((-fine.numel() % 2048,), 448.0)]).view(-1, 2048).clone()
    rows = rows.to(DEVICE)
    rows[:, 0] = 448.0  # so that every scale is 1
    codes, scales = triton_linear.quantize_rows(rows, ActivationScheme("token"))
    assert scales.eq(1).all()
    assert torch.equal(codes.view(torch.uint8), rows.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(
    "scheme",
    [
        ActivationScheme("token"),
        ActivationScheme("group", group_size=128),
        ActivationScheme("token", upper_bound=1.5),
    ],
    ids=["token", "group", "bound"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_as_in_plain_torch(scheme, dtype):
    rows = random_rows(5, 300, torch.float32).mul(torch.logspace(-3, 2, 300, device=DEVICE)).to(dtype)
    rows[2] = 0
    codes, scales = triton_linear.quantize_rows(rows, scheme)
    spread = scales.repeat_interleave(scheme.group_size or 300, 1)[:, :300]
    assert torch.equal((codes.float() * spread).to(dtype), quantize_activations(rows, scheme, {}))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("fp8 blocks", ActivationScheme("group", group_size=128)),
        ("fp8 channel", ActivationScheme("token")),
        ("fp8 channel", ActivationScheme("tensor")),
        ("fp8 e5m2 blocks", ActivationScheme("group", group_size=50)),
    ],
)
def test_rounded_activations_are_multiplied(name, scheme):
    weight_format, tensors = made(name)
    in_features = weight_format.shape(tensors)[1]
    for dtype in (torch.float32, torch.bfloat16):
        activations = random_rows(3, in_features, dtype)
        found = triton_linear.quantized_linear(activations, tensors, weight_format, scheme)
        check(found, quantize_activations(activations, scheme, tensors), tensors, weight_format)


def test_equal_calls_give_equal_bits():
    weight_format, tensors = made("w4 g32")
    activations = random_rows(2, 352, torch.float32)
    first = triton_linear.linear(activations, tensors, weight_format)
    assert torch.equal(first, triton_linear.linear(activations, tensors, weight_format))


COUNTS = (1, 2, 3, 4, 5, 16, 17, 33, 64)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("w4 g32", COUNTS),
        ("awq g32", (1, 3, 33)),
        ("nf4 double-quantized", (4, 17)),
        ("fp8 blocks", (2, 5)),
        *(
            pytest.param(name, COUNTS, marks=pytest.mark.exhaustive, id=f"{name}, all counts")
            for name in ("awq g32", "nf4 double-quantized", "fp8 blocks")
        ),
    ],
)
def test_products_are_the_same_however_a_held_layer_is_launched(name, counts):
    weight_format, tensors = made(name)
    held = LayerTensors(tensors)
    in_features = weight_format.shape(tensors)[1]
    for count in counts:
        rows = random_rows(count, in_features, torch.bfloat16)
        expected = triton_linear.linear(rows, tensors, weight_format)
        assert torch.equal(triton_linear.linear(rows, held, weight_format), expected)
        assert torch.equal(triton_linear.linear(rows, held, weight_format), expected)


def test_a_row_has_the_same_bits_in_every_batch_of_its_kernel():
    weight_format, tensors = made("w4 g32")
    rows = random_rows(64, 352, torch.bfloat16)
    few = triton_linear.linear(rows[:4], tensors, weight_format)
    some = triton_linear.linear(rows, tensors, weight_format)
    for count in (1, 2, 3):
        assert torch.equal(triton_linear.linear(rows[:count], tensors, weight_format), few[:count])
    for count in (5, 17, 33):
        assert torch.equal(triton_linear.linear(rows[:count], tensors, weight_format), some[:count])
