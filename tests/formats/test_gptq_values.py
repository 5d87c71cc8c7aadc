"""Tests of GPTQ layers that depend on values: wrong version labels, and damage."""

import logging

import pytest
import torch

from hfq.errors import FormatError
from hfq.formats.codecs.bit_packing import pack_stream
from hfq.formats.gptq import Gptq

LOGGER = "hfq.formats.gptq"
MODULE = "model.layers.3.mlp.down_proj"
GPTQMODEL = {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}


def values(stored: int, num_bits: int = 4):
    return {
        "qweight": torch.zeros(256 * num_bits // 32, 64, dtype=torch.int32),
        "qzeros": pack_stream(torch.full((64, 4), stored), num_bits).t().contiguous(),
        "scales": torch.ones(4, 64, dtype=torch.float16),
    }


@pytest.mark.parametrize("num_bits", [2, 3, 4, 8])
@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stored_as", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("writer", [{}, GPTQMODEL])
def test_a_symmetric_layer_is_read_by_its_zero_points_whatever_its_label(
    describe_tensors, caplog, num_bits, label, stored_as, writer
):
    middle = 1 << (num_bits - 1)
    tensors = values(middle - (stored_as == "gptq"), num_bits)
    detected = Gptq.detect(
        MODULE,
        describe_tensors(MODULE, tensors),
        {"bits": num_bits, "sym": True, "checkpoint_format": label} | writer,
    )
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        resolved = detected.resolve(MODULE, tensors)
    assert resolved.dequantize(tensors).unique().tolist() == [-middle]
    assert [MODULE in record.getMessage() for record in caplog.records] == (
        [] if label == stored_as else [True]
    )
    assert ("v2" in resolved.describe()) is (stored_as == "gptq_v2")


def test_a_mislabelled_layer_is_recognised_though_its_zero_points_end_inside_a_word():
    tensors = {"qweight": torch.zeros(4, 36, dtype=torch.int32), "scales": torch.ones(1, 36)}
    tensors["qzeros"] = pack_stream(torch.full((36, 1), 8), 4).t().contiguous()
    assert Gptq(4, -1, True, "field_plus_one").resolve(MODULE, tensors).dequantize(
        tensors
    ).unique().tolist() == [-8]


@pytest.mark.parametrize(("label", "stored"), [("gptq", 8), ("gptq_v2", 7)])
def test_an_asymmetric_layer_is_read_by_its_label(describe_tensors, caplog, label, stored):
    detected = Gptq.detect(
        MODULE, describe_tensors(MODULE, values(stored)), {"sym": False, "checkpoint_format": label}
    )
    resolved = detected.resolve(MODULE, values(stored))
    assert not caplog.records
    assert resolved.dequantize(values(stored)).unique().tolist() == [-stored - (label == "gptq")]


@pytest.mark.parametrize("worst", [-1, 4, 2**31 - 1])
def test_a_g_idx_beyond_the_groups_is_refused(worst):
    g_idx = torch.arange(256, dtype=torch.int32) // 64
    g_idx[17] = worst
    with pytest.raises(FormatError, match="index is out of range") as caught:
        Gptq(4, 64, g_idx_length=256).resolve(MODULE, values(7) | {"g_idx": g_idx})
    assert caught.value.tensor == f"{MODULE}.g_idx"
    assert caught.value.expected == "0 to 3"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_scale_that_is_not_finite_is_refused(bad):
    tensors = values(7)
    tensors["scales"][2, 5] = bad
    with pytest.raises(FormatError, match="not finite") as caught:
        Gptq(4, 64).resolve(MODULE, tensors)
    assert caught.value.tensor == f"{MODULE}.scales"
    assert "[2, 5]" in caught.value.found


def test_a_g_idx_that_leaves_a_group_without_channels_is_refused():
    g_idx = torch.arange(256, dtype=torch.int32) // 64
    with pytest.raises(FormatError, match="leaves groups without channels") as caught:
        Gptq(4, 64, g_idx_length=256).resolve(MODULE, values(7) | {"g_idx": g_idx.clamp(max=2)})
    assert caught.value.tensor == f"{MODULE}.g_idx"
    assert caught.value.found == "3 of them"
