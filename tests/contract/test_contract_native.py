"""Contract tests of the compiled kernel, for the formats that it supports.

It has one result in every placement, equal to the reference up to rounding.
"""

import pytest

from hfq.kernels.cpp.layers import reason_against
from hfq.modules.linear import QuantizedLinear
from tests.contract.test_contract_model import PLACEMENTS, TOKENS
from tests.support.models import logits


def test_the_compiled_kernel_gives_the_same_logits_in_every_placement(
    native, case, detected, load, checkpoint
):
    formats = [weight_format for weight_format, _ in detected.values()]
    if any(reason_against(weight_format, 128, 128) for weight_format in formats):
        pytest.skip("the compiled kernel does not read this dialect")
    model = load(checkpoint, kernel="cpp")
    assert {module.kernel.name for module in model.modules() if isinstance(module, QuantizedLinear)} == {
        "cpp"
    }
    found, reference = logits(model, TOKENS), logits(load(checkpoint, kernel="reference"), TOKENS)
    assert (found - reference).norm() <= 1e-5 * reference.norm()  # the kernel sums products in another order
    assert logits(load(checkpoint, PLACEMENTS["half"], cpu_memory="private"), TOKENS).equal(found)
