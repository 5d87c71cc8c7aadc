"""Tests of slices for tensor parallelism: together they equal the layer bit for bit.

Other cuts raise an error.
"""

import pytest
import torch

from hfq.errors import FormatError
from hfq.formats.base import Format
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.placement.tensor_parallel import rank_slice
from tests.contract.cases import CASES
from tests.support.tiny_models import described, settled

SIZE = OUT, IN = 192, 384
CUT = [case for case in CASES if type(case.format).shard is not Format.shard and "gemv" not in case.id]
UNALIGNED = {
    2: {
        ("pack-quantized-w3-words", "in"),  # words of 10 codes in 192 channels
        ("blockwise-int8", "out"),
        ("blockwise-int8", "in"),  # blocks of 128 in 96 rows and in 192 channels
        ("blockwise-int8-ragged", "in"),
    },
    3: {
        (id, "in")
        for id in (
            "int-quantized-group-asym",
            "pack-quantized-w4",
            "pack-quantized-w4-asym",
            "pack-quantized-w8-asym",
            "pack-quantized-w3-words",
            "torchao-intx-asym",
            "blockwise-int8-ragged",
        )
    }  # groups of 96 or 192, or blocks of 80, in 128 channels
    | {("blockwise-int8", "out"), ("blockwise-int8-ragged", "out")},
    4: {
        ("gptq-v1-w3-sym", "out"),
        ("gptq-planar-w3", "out"),
        ("gptq-planar-w5", "out"),
        ("awq-gemm-w3", "out"),  # 32 of 48 rows
        ("fp8-group", "in"),
        ("awq-gemm", "in"),
        ("awq-gemm-w3", "in"),  # groups of 64 in 96 channels
        ("int-quantized-group-asym", "in"),
        ("pack-quantized-w4", "in"),
        ("pack-quantized-w3-words", "in"),
        ("blockwise-int8", "out"),
        ("blockwise-int8", "in"),
        ("blockwise-int8-ragged", "in"),
    },
}
"""Cuts that the layouts do not allow: {ranks: {(case, axis)}}."""


@pytest.fixture(scope="module")
def weight():
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(3)) * 0.1


def dequantized(found, tensors, axis: str, world: int) -> list[torch.Tensor]:
    """Returns the weight of each rank's slice, from its own tensors alone."""
    index, slices = {name: tensor for name, tensor in tensors.items() if name.endswith("g_idx")}, []
    for rank in range(world):
        part = rank_slice(axis, OUT if axis == "out" else IN, rank, world)
        local, cuts = found.shard(part, described("m", tensors), index)
        held = {
            name: tensors[name]
            if cut is None
            else tensors[name].narrow(cut.dim, cut.start, cut.stop - cut.start).contiguous()
            for name, cut in cuts.items()
        }
        slices.append(local.resolve("m", held).dequantize(held))
    return slices


def check(found, tensors, axis: str, world: int) -> None:
    whole = found.resolve("m", tensors).dequantize(tensors)
    assert torch.equal(torch.cat(dequantized(found, tensors, axis, world), 0 if axis == "out" else 1), whole)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("axis", ["out", "in"])
@pytest.mark.parametrize("case", CUT, ids=lambda case: case.id)
def test_the_slices_of_all_ranks_are_the_layer(case, axis, world, weight):
    tensors = case.format.quantize(weight)
    found = settled(case.format, tensors, case.config, SIZE, case.schema)
    if (case.id, axis) in UNALIGNED[world]:
        with pytest.raises(
            FormatError,
            match=r"(?s)Tensor parallelism cannot cut a .* at this position.*Fix: Use fewer ranks",
        ):
            dequantized(found, tensors, axis, world)
    else:
        check(found, tensors, axis, world)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("axis", ["out", "in"])
def test_groups_that_act_order_scatters_are_read_through_the_index(axis, world, weight):
    tensors = Gptq(group_size=64, g_idx_length=IN).quantize(weight)
    tensors["g_idx"] = tensors["g_idx"][torch.randperm(IN, generator=torch.Generator().manual_seed(5))]
    check(Gptq(group_size=64, g_idx_length=IN, needs_g_idx=True), tensors, axis, world)


@pytest.mark.parametrize("world", [2, 4])
def test_a_slice_within_a_group_is_described_as_it_is_held(world, weight):
    tensors = Gptq(group_size=128, g_idx_length=IN).quantize(weight)
    part, infos = rank_slice("in", IN, 1, world), described("m", tensors)
    found, _ = Gptq(group_size=128, g_idx_length=IN).shard(part, infos, {"g_idx": tensors["g_idx"]})
    specs = {spec.name: spec.shape for spec in found.tensor_specs(IN // world, OUT)}
    assert specs["scales"] == tensors["scales"].shape
    assert specs["qzeros"] == tensors["qzeros"].shape
    assert specs["g_idx"] == (IN // world,)


def test_a_slice_of_whole_groups_holds_its_own_scales_and_no_index(weight):
    tensors = Gptq(group_size=64, g_idx_length=IN).quantize(weight)
    part = rank_slice("in", IN, 1, 2)
    found, cuts = Gptq(group_size=64).shard(part, described("m", tensors), {"g_idx": tensors["g_idx"]})
    assert "g_idx" not in cuts
    assert not found.act_order
    assert {name: (cut.dim, cut.start, cut.stop) for name, cut in cuts.items()} == {
        "qweight": (0, 24, 48),
        "scales": (0, 3, 6),
        "qzeros": (0, 3, 6),
    }


def test_without_an_index_groups_cannot_be_cut(weight):
    tensors = Gptq(group_size=128, g_idx_length=None).quantize(weight)
    with pytest.raises(
        FormatError,
        match=r"(?s)expected: a cut between groups of 128 channels.*found: input channels 0 to 192",
    ):
        dequantized(Gptq(group_size=128), tensors, "in", 2)


def test_a_damaged_index_is_refused_before_a_slice_is_read(weight):
    tensors = Gptq(group_size=64, g_idx_length=IN).quantize(weight)
    tensors["g_idx"][7] = 99
    with pytest.raises(FormatError, match=r"(?s)m\.g_idx.*expected: 0 to 5"):
        dequantized(Gptq(group_size=64), tensors, "in", 2)


@pytest.mark.parametrize("scale_shape", [(4, 1, 8, 1), None])
@pytest.mark.parametrize("axis", ["out", "in"])
def test_a_slice_within_a_block_keeps_its_scale(axis, scale_shape, weight):
    found = Fp8(strategy="block", block_structure=(50, 50), scale_shape=scale_shape)
    check(found, found.quantize(weight), axis, 5)


def test_one_rank_alone_adds_the_bias_of_a_sum(weight):
    tensors = {**Fp8().quantize(weight), "bias": torch.ones(OUT)}
    held = {
        axis: [
            Fp8().shard(rank_slice(axis, size, rank, 2), described("m", tensors), {})[1].get("bias", "none")
            for rank in (0, 1)
        ]
        for axis, size in (("out", OUT), ("in", IN))
    }
    assert [(cut.start, cut.stop) for cut in held["out"]] == [(0, 96), (96, 192)]
    assert held["in"] == [None, "none"]


@pytest.mark.parametrize("case", [case for case in CASES if case not in CUT], ids=lambda case: case.id)
def test_a_dialect_that_is_not_cut_says_so(case):
    with pytest.raises(
        FormatError, match=r"(?s)hfq does not support tensor parallelism for .* layers. Nothing was loaded"
    ):
        case.format.shard(rank_slice("out", OUT, 0, 2), {}, {})
