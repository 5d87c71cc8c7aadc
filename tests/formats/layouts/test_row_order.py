"""Tests of reordered output rows: weights stay bit-identical, or the format is unsupported."""

import pytest
import torch

from hfq.errors import FormatError
from hfq.formats.base import Format
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from tests.contract.cases import CASES
from tests.support.tiny_models import settled

SIZE = OUT, IN = 192, 384
REFUSED = ("awq-gemv-fast", "blockwise-int8", "blockwise-int8-ragged")
REORDERED = [
    case for case in CASES if type(case.format).reorder is not Format.reorder and case.id not in REFUSED
]
OTHERS = [case for case in CASES if case not in REORDERED]
GENERATOR = torch.Generator().manual_seed(11)
ORDERS = {
    "any": torch.randperm(OUT, generator=GENERATOR),
    "RoPE by pairs, heads of 32": torch.arange(OUT).view(-1, 2, 16).transpose(1, 2).reshape(-1),
}


@pytest.fixture(scope="module")
def weight():
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(3)) * 0.1


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("case", REORDERED, ids=lambda case: case.id)
def test_row_i_is_row_order_i_of_the_stored_layer(case, order, weight):
    tensors = case.format.quantize(weight) | {"bias": torch.arange(float(OUT)).half()}
    found = settled(case.format, tensors, case.config, SIZE, case.schema)
    format_, reordered = found.reorder(tensors, order)
    assert torch.equal(format_.dequantize(reordered), found.dequantize(tensors)[order])
    assert torch.equal(reordered["bias"], tensors["bias"][order])
    resolved = format_.resolve("m", reordered)
    specs = {spec.name: spec for spec in resolved.tensor_specs(IN, OUT)}
    assert all(tuple(tensor.shape) == specs[name].shape for name, tensor in reordered.items())
    assert all(tensor.dtype == tensors[name].dtype for name, tensor in reordered.items())


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.id)
def test_a_dialect_that_cannot_be_reordered_says_so(case, weight):
    with pytest.raises(FormatError, match="does not support reordering the rows"):
        case.format.reorder({}, ORDERS["any"])


def test_zero_points_whose_words_carry_keep_their_values(weight):
    found = Gptq(zero_reading="word_plus_one", group_size=64, symmetric=False)
    tensors = found.quantize(weight)
    tensors["qzeros"] = torch.randint(-(1 << 31), 1 << 31, tensors["qzeros"].shape, generator=GENERATOR).to(
        torch.int32
    )
    tensors["qzeros"][:, ::3] = -1  # a word of fields that all carry
    _, reordered = found.reorder(tensors, ORDERS["any"])
    assert torch.equal(
        found.zero_points(reordered["qzeros"], 0, OUT),
        found.zero_points(tensors["qzeros"], 0, OUT)[:, ORDERS["any"]],
    )


def test_what_the_order_does_not_concern_is_not_copied(weight):
    found = Fp8(strategy="block", block_structure=(32, 128), scale_name="weight_scale_inv")
    tensors = found.quantize(weight)
    format_, reordered = found.reorder(tensors, ORDERS["RoPE by pairs, heads of 32"])
    assert format_ is found  # no row leaves its block
    assert reordered["weight_scale_inv"] is tensors["weight_scale_inv"]


@pytest.mark.parametrize("block", [(128, 128), (48, 80)])
def test_rows_that_leave_their_blocks_take_the_scales_of_these_with_them(block, weight):
    found = Fp8(strategy="block", block_structure=block, scale_name="weight_scale_inv")
    tensors = found.quantize(weight)
    format_, reordered = found.reorder(tensors, ORDERS["any"])
    assert reordered["weight_scale_inv"].shape == (OUT, -(-IN // block[1]))
    assert torch.equal(format_.dequantize(reordered), found.dequantize(tensors)[ORDERS["any"]])
