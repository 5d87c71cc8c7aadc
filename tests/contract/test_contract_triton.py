"""Products of every format by the Triton kernels, in Triton's interpreter, or on a GPU if there is one."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from hfq.formats import Format
from hfq.formats.gguf.gptqmodel_rows import GptqmodelGguf
from hfq.formats.mlx.float_modes import MlxFp8
from hfq.kernels.cuda import triton_linear
from hfq.tensor_spec import TensorSpec
from tests.contract.test_contract_format import IN, MODULE, OUT
from tests.support.gguf_files import exact_blocks
from tests.support.triton_device import DEVICE, skip_without_codec

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
COUNTS = (1, 3, 4, 16, 17, 64, 65)


@pytest.fixture(scope="module")
def exact(case, detected):
    """The layer with random codes, and scales and zero points whose products have exact sums."""
    weight_format, tensors = detected[MODULE]
    skip_without_codec(weight_format)
    if getattr(weight_format, "nested_offset", 0.0):
        weight_format = dataclasses.replace(weight_format, nested_offset=0.0)
    generator = torch.Generator().manual_seed(7)
    made = dict(tensors)
    for spec in weight_format.tensor_specs(IN, OUT):
        if spec.name in tensors and spec.role not in ("meta", "index", "bias"):
            made[spec.name] = exact_values(spec, tensors[spec.name], generator)
    if getattr(weight_format, "multiplier", 1.0) != 1.0:
        made[weight_format.scale] = torch.full_like(tensors[weight_format.scale], 127.0)
    if isinstance(weight_format, GptqmodelGguf):
        count = made["qweight"].numel() // weight_format.type.nbytes
        blocks = torch.from_numpy(exact_blocks(weight_format.type_name, count))
        made["qweight"] = blocks.view(made["qweight"].shape)
    return weight_format, on_device(without_nan(weight_format, made))


def on_device(tensors: dict) -> dict:
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def exact_values(spec: TensorSpec, stored: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns random codes, powers of two as scales, or small integers as zero points."""
    if spec.role == "scale":
        exponents = torch.randint(-1, 2, stored.shape, generator=generator)
        if stored.dtype == torch.uint8:  # E8M0, or E4M3 and E5M3, of which this is a power of two, too
            return torch.where(exponents > 0, 0x40, 0x38).to(torch.uint8)
        return torch.exp2(exponents.float()).to(stored.dtype)
    if spec.role == "zero_point" and stored.is_floating_point():
        return torch.randint(-3, 4, stored.shape, generator=generator).to(stored.dtype)
    nbytes = stored.numel() * stored.element_size()
    codes = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    return codes.view(stored.dtype).view(stored.shape)


def without_nan(weight_format: Format, tensors: dict) -> dict:
    """Returns the tensors with codes of FP8 whose values are finite and of similar size."""
    name = weight_format.codes_name
    is_e5m2 = tensors[name].dtype == torch.float8_e5m2
    is_e4m3 = tensors[name].dtype == torch.float8_e4m3fn or isinstance(weight_format, MlxFp8)
    codes = tensors[name].reshape(-1).view(torch.uint8)
    if is_e4m3:
        codes = codes & 0x9F | 0x20
    if is_e5m2:
        codes = codes & 0x93 | 0x30
    return {**tensors, name: codes.view(tensors[name].dtype).view(tensors[name].shape)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_products_of_integers_are_exact(exact, dtype):
    weight_format, tensors = exact
    for count in COUNTS if dtype == torch.float32 else (1, 16, 65):  # one of each kernel
        few = count <= triton_linear.FEW_ROWS
        weight = weight_format.dequantize(tensors, torch.float32 if few else dtype).double()
        rows = torch.randint(-2, 3, (count, IN), generator=torch.Generator().manual_seed(count)).to(
            DEVICE, dtype
        )
        found = triton_linear.linear(rows, tensors, weight_format)
        assert torch.equal(found, (rows.double() @ weight.t()).float().to(dtype)), f"{count} rows"


def test_random_products_are_within_rounding_of_the_exact_ones(detected):
    """1e-6 of the norm: sums of 256 terms in float32."""
    skip_without_codec(detected[MODULE][0])
    weight_format, tensors = detected[MODULE][0], on_device(detected[MODULE][1])
    weight = weight_format.dequantize(tensors).double()
    for count in (3, 17, 65):  # one of each kernel
        rows = torch.randn(count, IN, generator=torch.Generator().manual_seed(count)).to(DEVICE)
        expected = rows.double() @ weight.t()
        found = triton_linear.linear(rows, tensors, weight_format).double()
        assert (found - expected).norm() <= 1e-6 * expected.norm(), f"{count} rows"
