"""Several packed layers in the place of one: the outputs of each, put together."""

import torch

from hfq.formats.base import Format
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.kernels.registry import choose_kernel
from hfq.modules.concat_linear import ConcatLinear
from hfq.modules.linear import QuantizedLinear
from tests.support.tiny_models import described


def layer(weight_format: Format, out_features: int) -> QuantizedLinear:
    tensors = weight_format.quantize(
        torch.randn(out_features, 64, generator=torch.Generator().manual_seed(out_features))
    )
    module = QuantizedLinear(
        "m", 64, out_features, weight_format, described("m", tensors), choose_kernel("reference")
    )
    module.hold(tensors)
    return module


def test_parts_of_different_dialects_are_computed_one_after_another():
    parts = [
        layer(Gptq(group_size=32), 32),
        layer(Fp8(strategy="channel"), 48),
        layer(Fp8(strategy="tensor"), 16),
    ]
    fused, inputs = (
        ConcatLinear({str(index): part for index, part in enumerate(parts)}),
        torch.randn(2, 3, 64),
    )
    assert (fused.in_features, fused.out_features) == (64, 96)
    found = fused(inputs)
    assert torch.equal(found, torch.cat([part(inputs) for part in parts], -1))
    assert not torch.equal(found[..., :32], found[..., 32:64])
    assert {name.rpartition(".")[0] for name in fused.state_dict()} == {"0", "1", "2"}
