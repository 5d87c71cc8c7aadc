"""Tests of the choice of kernels on CUDA devices with mocked capabilities.

torch's FP8 product is tested with its CPU implementation.
"""

import pytest
import torch

from hfq.errors import SetupError
from hfq.formats import ActivationScheme
from hfq.formats.compressed_tensors import IntQuantized
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.formats.mxfp4 import Mxfp4
from hfq.formats.unquantized import Unquantized
from hfq.kernels import reference, registry
from hfq.kernels.activations import quantize_activations
from hfq.kernels.cuda import libraries, scaled_mm, triton_linear
from hfq.kernels.registry import choose_kernel, explain_kernels

TOKEN, TENSOR = ActivationScheme("token"), ActivationScheme("tensor")
GROUP = ActivationScheme("group", group_size=128)
BLOCKS = Fp8(strategy="block", block_structure=(128, 128))


@pytest.fixture
def device(monkeypatch):
    """device(capability, cuda, packages): mocks a machine with such a device."""

    def make(capability=(9, 0), cuda="13.0", packages=("triton",)):
        libraries.probe.cache_clear()
        monkeypatch.setattr(libraries, "capability", lambda: capability)
        monkeypatch.setattr(registry, "capability", lambda: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(triton_linear, "_reason_not_launched", lambda: None)
        monkeypatch.setattr(scaled_mm, "_reason_against_blocks", lambda: None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in packages else None)

    yield make
    libraries.probe.cache_clear()


@pytest.mark.parametrize(
    ("weight_format", "scheme", "name"),
    [
        (Gptq(), None, "triton"),
        (Gptq(3), None, "triton"),
        (BLOCKS, None, "triton"),
        (Mxfp4(), None, "triton"),
        (Gptq(5, is_planar=True), None, "triton"),
        (Unquantized(), None, "reference"),
        (BLOCKS, GROUP, "scaled_mm"),
        (Fp8(strategy="block", block_structure=(128, 64)), GROUP, "triton_fp8"),
        (Fp8(), TOKEN, "scaled_mm"),
        (Fp8(strategy="tensor"), TENSOR, "scaled_mm"),
        (Fp8(codes_dtype="F8_E5M2"), TOKEN, "triton_fp8"),
        (IntQuantized(scale_shape=(64, 1)), ActivationScheme("token", dtype="int8"), "triton"),
    ],
)
def test_what_a_hopper_multiplies_with(device, weight_format, scheme, name):
    device((9, 0))
    assert choose_kernel("auto", weight_format, 256, 256, "cuda", scheme).name == name
    assert choose_kernel("reference", weight_format, 256, 256, "cuda", scheme).name == "reference"


@pytest.mark.parametrize(
    ("capability", "weight_format", "scheme", "name", "refused", "reason"),
    [
        (
            (8, 0),
            Fp8(),
            TOKEN,
            "triton_fp8",
            "scaled_mm",
            "it needs compute capability 8.9, the device has 8.0",
        ),
        (
            (8, 9),
            Fp8(),
            TOKEN,
            "triton_fp8",
            "scaled_mm",
            "it needs compute capability 9.0 or later, the device has 8.9",
        ),
        ((8, 9), Fp8(strategy="tensor"), TENSOR, "scaled_mm", "triton", "not used: scaled_mm is preferred"),
        (
            (10, 0),
            BLOCKS,
            GROUP,
            "triton_fp8",
            "scaled_mm",
            "it needs compute capability 9.0, the device has 10.0",
        ),
        ((7, 0), Gptq(), None, "reference", "triton", "it needs compute capability 8.0, the device has 7.0"),
    ],
)
def test_an_older_device_has_the_next_best(device, capability, weight_format, scheme, name, refused, reason):
    device(capability)
    reasons = explain_kernels("auto", weight_format, 256, 256, "cuda", scheme)
    assert choose_kernel("auto", weight_format, 256, 256, "cuda", scheme).name == name
    assert reasons[refused] == reason


def test_sizes_that_the_library_does_not_take_are_left_to_triton(device):
    device()
    reasons = explain_kernels("auto", Fp8(), 256, 250, "cuda", TOKEN)
    assert reasons["scaled_mm"] == "250 x 256 is no multiple of 16"
    assert reasons["triton_fp8"] is None
    reasons = explain_kernels("auto", BLOCKS, 256, 192, "cuda", GROUP)
    assert reasons["scaled_mm"] == "192 x 256 is no multiple of 128"


def test_without_triton_the_reference_multiplies(device):
    device(packages=())
    reasons = explain_kernels("auto", Gptq(), 256, 256, "cuda")
    assert reasons == {"triton": "triton is not installed", "reference": None}
    with pytest.raises(SetupError) as caught:
        choose_kernel("triton", Gptq(), 256, 256, "cuda")
    assert caught.value.found == "triton is not installed"


def test_a_kernel_of_one_device_is_not_chosen_for_another(device):
    device()
    assert choose_kernel("auto", Gptq(), 256, 256).name == "torch"
    assert choose_kernel("triton", Gptq(), 256, 256).name == "torch"
    assert explain_kernels("triton", Gptq(), 256, 256)["triton"] == "it computes on cuda"
    assert choose_kernel("torch", Gptq(), 256, 256, "cuda").name == "triton"


def test_other_schemes_are_left_to_other_kernels():
    assert triton_linear.reason_against_scheme(Gptq(), TOKEN, 64, 64) == "it does not read gptq"
    assert (
        triton_linear.reason_against_scheme(Fp8(), ActivationScheme("token", dtype="int8"), 64, 64)
        == "it does not round to int8"
    )


def test_a_machine_that_cannot_compile_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def fail(*_):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(triton_linear, "quantize_rows", fail)
    monkeypatch.setattr(torch, "ones", lambda *_, device: None)
    triton_linear._reason_not_launched.cache_clear()
    try:
        reason = triton_linear.reason_missing()
    finally:
        triton_linear._reason_not_launched.cache_clear()
    assert reason == "Triton cannot compile: RuntimeError: Please specify via CC environment variable."


def test_products_of_fp8_are_not_those_of_rocm(device, monkeypatch):
    device()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    reasons = explain_kernels("auto", Fp8(), 256, 256, "cuda", TOKEN)
    assert reasons["scaled_mm"].startswith("ROCm's devices have other codes of FP8")
    assert reasons["triton_fp8"] is None


PROBES = [
    ("scaled_mm tensorwise", (8, 9), "12.4", (), True, "compute capability 8.9"),
    (
        "scaled_mm tensorwise",
        (8, 6),
        "12.4",
        (),
        False,
        "it needs compute capability 8.9 or later, the device has 8.6",
    ),
    ("scaled_mm rowwise", (9, 0), "12.4", (), True, "compute capability 9.0"),
    (
        "scaled_mm blockwise",
        (9, 0),
        "12.8",
        (),
        False,
        "it needs CUDA 12.9 or later, torch is built with 12.8",
    ),
    (
        "scaled_mm blockwise",
        (10, 0),
        "13.0",
        (),
        False,
        "it needs compute capability 9.0, the device has 10.0",
    ),
    ("scaled_mm blockwise", (9, 0), "13.0", (), True, "compute capability 9.0"),
    ("marlin", (8, 0), "13.0", (), False, "gptqmodel is not installed"),
    ("marlin", (8, 0), "13.0", ("gptqmodel",), False, libraries._GPTQMODEL),
    (
        "marlin",
        (7, 0),
        "13.0",
        ("gptqmodel",),
        False,
        "it needs compute capability 7.5 or later, the device has 7.0",
    ),
    ("machete", (8, 0), "13.0", ("gptqmodel",), False, "it needs compute capability 9.0, the device has 8.0"),
    (
        "kernels hub",
        (9, 0),
        "13.0",
        ("kernels",),
        False,
        "hfq does not call it: it runs code from the network",
    ),
]


@pytest.mark.parametrize(("name", "capability", "cuda", "packages", "is_available", "reason"), PROBES)
def test_libraries_are_probed(device, name, capability, cuda, packages, is_available, reason):
    device(capability, cuda, packages)
    assert libraries.probe(name) == (is_available, reason)


def test_without_a_device_nothing_is_available(device):
    device(None, None)
    assert {libraries.probe(name) for name in libraries.LIBRARIES} == {
        (False, "this machine has no CUDA device")
    }


def test_a_library_is_asked_once(device):
    device()
    first = libraries.probe("scaled_mm rowwise")
    torch.version.cuda = "1.0"
    assert libraries.probe("scaled_mm rowwise") is first


@pytest.mark.parametrize(
    ("weight_format", "scheme", "dtype"),
    [
        (Fp8(), TOKEN, torch.bfloat16),
        (Fp8(), TENSOR, torch.bfloat16),
        (Fp8(strategy="tensor"), TOKEN, torch.bfloat16),
        (Fp8(strategy="tensor"), TENSOR, torch.bfloat16),
        (Fp8(strategy="tensor"), TENSOR, torch.float32),
        (Fp8(reciprocal=True), TOKEN, torch.bfloat16),
        (Fp8(), ActivationScheme("token", upper_bound=1.0), torch.bfloat16),
        (Fp8(), ActivationScheme("tensor", scale_name="input_scale"), torch.bfloat16),
    ],
)
def test_torchs_product_is_that_of_rounded_activations(weight_format, scheme, dtype):
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    tensors = weight_format.quantize(weight) | {
        "input_scale": torch.tensor(0.01),
        "bias": torch.linspace(-1, 1, 48).half(),
    }
    for shape in ((1,), (3,), (2, 5)):
        activations = torch.randn(*shape, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
        found = scaled_mm.linear(activations, tensors, weight_format, scheme)
        rounded = quantize_activations(activations.float(), scheme, tensors).double()
        expected = rounded @ weight_format.dequantize(tensors, torch.float64).t() + tensors["bias"].double()
        assert found.dtype == dtype
        assert found._base is None
        bound = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[
            dtype
        ]  # bfloat16: the product and the sum with the bias
        assert (found.double() - expected).norm() <= bound * expected.norm()


def test_panels_of_an_accelerator_are_larger(monkeypatch):
    weight_format = Fp8()
    tensors = {
        name: tensor.to("meta") for name, tensor in weight_format.quantize(torch.ones(512, 4096)).items()
    }
    monkeypatch.setattr(Fp8, "dequantize_into", lambda *_: None)
    sizes = [panel.shape[0] for _, panel in reference._panels(tensors, weight_format, torch.float32)]
    assert sizes == [512] == [min(512, reference.ACCELERATOR_PANEL_NBYTES // (4 * 4096))]


def test_the_capability_of_a_device_is_told_for_cuda_alone(monkeypatch):
    found = {torch.device("cuda:1"): (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", found.__getitem__)
    assert libraries.capability_of("cuda:1") == "compute capability 9.0"
    assert libraries.capability_of("xpu:0") == ""
