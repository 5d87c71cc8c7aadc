"""Tests of the choice of a kernel for a layer, and of the reasons against the others."""

import pytest

from hfq.errors import SetupError
from hfq.formats.awq import Awq
from hfq.formats.base import FORMATS
from hfq.formats.bitsandbytes import Bnb4Bit
from hfq.formats.compressed_tensors import IntQuantized, PackQuantized
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.formats.hqq import Hqq
from hfq.formats.mlx.affine import Mlx
from hfq.kernels import reference
from hfq.kernels.cpu import panels
from hfq.kernels.registry import KERNELS, check_kernel, choose_kernel, explain_kernels


def test_the_reference_kernel_is_chosen_by_its_name():
    kernel = choose_kernel("reference")
    assert (kernel.name, kernel.linear, kernel.linear_grad) == (
        "reference",
        reference.linear,
        reference.linear_grad,
    )
    assert choose_kernel("reference", Fp8(), 64, 64) is kernel


def test_every_kernel_is_found_by_its_own_name(native):
    here = {name: kernel for name, kernel in KERNELS.items() if kernel.lacks() is None}
    assert {name: choose_kernel(name) for name in here} == here
    assert {"reference", "torch", "cpp", "int8"} <= here.keys()
    assert all(name == kernel.name for name, kernel in KERNELS.items())


def test_auto_takes_the_compiled_kernel_where_it_reads_the_format(native):
    assert choose_kernel("auto").name == "cpp"
    for weight_format, name in (
        (Fp8(), "cpp"),
        (Gptq(), "cpp"),
        (Awq(), "cpp"),
        (Gptq(5, is_planar=True), "torch"),
        (Awq("gemv"), "cpp"),
        (Hqq(), "torch"),
    ):
        assert choose_kernel("auto", weight_format, 256, 256).name == name
        assert choose_kernel("cpp", weight_format, 256, 256).name == name


def test_auto_takes_panels_without_a_compiled_kernel():
    assert choose_kernel("auto", Fp8(), 256, 256).linear is panels.linear


def test_a_compiled_kernel_asked_for_by_name_is_missed():
    with pytest.raises(SetupError) as caught:
        choose_kernel("cpp")
    assert caught.value.found == "HFQ_DISABLE_CPP=1"


def test_every_kernel_that_does_not_run_has_a_reason(native):
    assert explain_kernels("auto", Gptq(5, is_planar=True), 256, 256) == {
        "cpp": "it does not read gptq's bit planes",
        "torch": None,
        "reference": "not used: torch is preferred",
    }
    assert explain_kernels("reference", Fp8(), 256, 256) == {
        "reference": None,
        "cpp": "not used: reference is preferred",
        "torch": "not used: reference is preferred",
    }
    assert "groups are more than" in explain_kernels("auto", Gptq(group_size=8), 1 << 14, 64)["cpp"]


@pytest.mark.parametrize(
    "weight_format",
    [
        PackQuantized(3, scale_shape=(8, 1), width=4),
        Mlx(6, 32),
        PackQuantized(4, scale_shape=(8, 4)),
        Awq(num_bits=3),
        Awq("gemv_fast", group_size=12),
        Bnb4Bit(blocksize=64),
        IntQuantized(has_columns=True),
    ],
    ids=[
        "3 bits",
        "mlx of 6 bits",
        "groups of odd size",
        "awq of 3 bits",
        "gemv_fast of odd groups",
        "nf4 across rows",
        "scales of columns",
    ],
)
def test_what_the_compiled_kernel_cannot_read_is_not_given_to_it(native, weight_format):
    assert choose_kernel("auto", weight_format, 36, 8).name == "torch"


def test_a_format_of_others_that_builds_on_ours_is_not_taken_for_it(native):
    class Other(Fp8):
        name = "fp8 of another package"

    try:
        assert choose_kernel("auto", Other(), 64, 64).name == "torch"
    finally:
        del FORMATS[Other.name]


def test_a_switched_off_kernel_says_so():
    assert explain_kernels("auto", Fp8(), 64, 64)["cpp"] == "HFQ_DISABLE_CPP=1"


@pytest.mark.parametrize(
    ("preference", "hint"), [("referense", "Did you mean 'reference'?"), ("aut", "Did you mean 'auto'?")]
)
def test_a_mistyped_kernel_is_refused_with_a_hint(preference, hint):
    with pytest.raises(SetupError) as caught:
        check_kernel(preference)
    assert hint in caught.value.message
    assert caught.value.expected.startswith("'auto' or 'reference'")


@pytest.mark.parametrize("preference", ["", "AUTO!", "cuda graphs", None, 3, ["reference"]])
def test_an_unknown_kernel_is_refused_by_name(preference):
    with pytest.raises(SetupError) as caught:
        choose_kernel(preference)
    assert caught.value.found == repr(preference)
