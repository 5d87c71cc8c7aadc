"""Which kernel a preference chooses."""

import pytest

from hfq.errors import SetupError
from hfq.kernels import reference
from hfq.kernels.table import KERNELS, choose_kernel


def test_the_reference_kernel_is_chosen_by_its_name():
    kernel = choose_kernel("reference")
    assert (kernel.name, kernel.linear, kernel.linear_grad) == ("reference", reference.linear, reference.linear_grad)


def test_every_kernel_is_found_by_its_own_name():
    assert {name: choose_kernel(name) for name in KERNELS} == KERNELS
    assert all(name == kernel.name for name, kernel in KERNELS.items())


def test_auto_chooses_one_of_the_table():
    assert choose_kernel("auto") in KERNELS.values()


@pytest.mark.parametrize(("preference", "hint"), [("referense", "did you mean 'reference'?"), ("aut", "did you mean 'auto'?")])
def test_a_mistyped_kernel_is_refused_with_a_hint(preference, hint):
    with pytest.raises(SetupError) as caught:
        choose_kernel(preference)
    assert hint in caught.value.what
    assert caught.value.expected.startswith("'auto' or 'reference'")


@pytest.mark.parametrize("preference", ["", "AUTO!", "cuda graphs", None, 3, ["reference"]])
def test_an_unknown_kernel_is_refused_by_name(preference):
    with pytest.raises(SetupError) as caught:
        choose_kernel(preference)
    assert caught.value.found == repr(preference)
