"""Tests of ambiguous tensors without a hint in the config, which raise an error."""

import json

import pytest
import torch

from hfq import FormatError
from hfq.formats.awq import Awq
from hfq.formats.bitsandbytes import Bnb4Bit
from hfq.formats.compressed_tensors import IntQuantized, PackQuantized
from hfq.formats.gptq import Gptq
from hfq.formats.modelopt.linear import ModeloptInt4
from hfq.formats.mxfp4 import Mxfp4
from hfq.formats.quanto import QuantoBits
from tests.support import tiny_models
from tests.support.tiny_models import described

OUT, IN = 64, 256


@pytest.fixture
def weight():
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(3)) * 0.1


def settle(weight_format, tensors, config, size=(OUT, IN)):
    return tiny_models.settled(weight_format, tensors, config, size)


def test_mxfp4_and_mxint4_look_the_same(weight):
    tensors = Mxfp4().quantize(weight)
    for config in ({}, {"quant_method": "auto-round"}, {"data_type": "MX_INT"}, {"data_type": ["mx_int"]}):
        with pytest.raises(FormatError, match="MXFP4 and MXINT4 have the same tensors"):
            settle(Mxfp4(), tensors, config)
    extra = {
        "quant_method": "auto-round",
        "data_type": "mx_fp",
        "extra_config": {"m": {"data_type": "mx_int"}},
    }
    assert settle(Mxfp4(), tensors, extra).describe() == "mxint4"


def test_asymmetric_zero_points_without_any_config_are_refused(weight):
    tensors = Gptq(symmetric=False, zero_reading="stored", group_size=64).quantize(weight)
    with pytest.raises(FormatError, match="encoding of the zero points is unknown"):
        settle(Gptq(), tensors, {})
    named = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "sym": False}
    assert settle(Gptq(), tensors, named).zero_reading == "stored"


def test_a_zero_point_of_0_needs_the_name_of_its_writer(weight):
    written = Gptq(symmetric=False, zero_reading="word_plus_one", group_size=64)
    tensors = written.quantize(weight.abs())
    config = {"quant_method": "gptq", "bits": 4, "sym": False}
    with pytest.raises(FormatError, match="encoding of the zero points is unknown"):
        settle(Gptq(), tensors, config)
    named = settle(Gptq(), tensors, config | {"meta": {"quantizer": "GPTQModel:7.7.0"}})
    assert torch.equal(named.dequantize(tensors), written.dequantize(tensors))


def test_zero_points_that_differ_contradict_a_symmetric_config(weight):
    tensors = Gptq(symmetric=False, zero_reading="stored", group_size=64).quantize(weight)
    config = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "sym": True}
    with pytest.raises(FormatError, match="sym=true, but the zero points differ"):
        settle(Gptq(), tensors, config)


def test_two_labels_that_disagree_are_refused(weight):
    tensors = Gptq(group_size=64).quantize(weight)
    config = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq", "format": "gptq_v2"}
    with pytest.raises(FormatError, match="checkpoint_format"):
        settle(Gptq(), tensors, config)


@pytest.mark.parametrize("version", ["gemv", "gemv_fast"])
def test_a_padded_awq_layout_does_not_tell_its_group_size(weight, version):
    tensors = Awq(version=version, group_size=256).quantize(weight)
    config = {"quant_method": "awq", "bits": 4, "version": version}
    with pytest.raises(FormatError, match="group size of an AWQ"):
        settle(Awq(), tensors, config)
    assert settle(Awq(), tensors, config | {"group_size": 256}).group_size == 256


def test_a_square_gemv_may_be_gptq_or_gemm(weight):
    square = weight[:32, :256]
    tensors = Awq(version="gemv", group_size=32).quantize(square)
    with pytest.raises(FormatError, match="GPTQ or AWQ gemv"):
        settle(Awq(), tensors, {}, (32, 256))
    config = {"quant_method": "awq", "bits": 4, "version": "gemv", "group_size": 32}
    assert settle(Awq(), tensors, config, (32, 256)).version == "gemv"
    small = Awq(version="gemv", group_size=32).quantize(weight[:32, :32])
    with pytest.raises(FormatError, match="gemm or gemv"):
        settle(Awq(), small, {"quant_method": "awq", "bits": 4}, (32, 32))


def test_one_group_of_quanto_may_be_of_two_bits_or_four(weight):
    tensors = QuantoBits(num_bits=2, group_size=IN).quantize(weight[:1])
    with pytest.raises(FormatError, match="do not fit its size"):
        settle(QuantoBits(), tensors, {}, (1, IN))
    named = {"quanto_qmap": {"m": {"weights": "qint2", "activations": "none"}}}
    assert settle(QuantoBits(), tensors, named, (1, IN)).num_bits == 2


@pytest.mark.parametrize("change", ["lost", "twice", "huge"])
def test_a_double_quantized_scale_needs_its_offset(weight, change):
    tensors = Bnb4Bit(is_nested=True).quantize(weight)
    name = next(name for name in tensors if "quant_state" in name)
    text = bytes(tensors[name].tolist()).decode()
    state = json.loads(text)
    if change == "twice":
        text = text[:-1] + ', "nested_offset": 0.5}'
    else:
        state.pop("nested_offset") if change == "lost" else state.update(nested_offset=1e29)
        text = json.dumps(state)
    tensors[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    with pytest.raises(FormatError, match="quantization state"):
        settle(Bnb4Bit(), tensors, {})


def test_other_blocksizes_of_bitsandbytes_are_told_by_their_scales(weight):
    tensors = Bnb4Bit(blocksize=128).quantize(weight)
    found = settle(Bnb4Bit(), tensors, {})
    assert found.blocksize == 128
    assert torch.equal(found.dequantize(tensors), Bnb4Bit(blocksize=128, size=(OUT, IN)).dequantize(tensors))
    assert Bnb4Bit.detect("m", described("m", tensors), {}).blocks == OUT * IN // 128


def test_one_scale_a_row_contradicts_a_config_of_groups(weight):
    """Tests a config with groups and a file without them.

    Without an error, the scale of a row would apply to all of its groups.
    """
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"targets": ["Linear"], "weights": weights}},
    }
    with pytest.raises(FormatError, match="contradict"):
        settle(PackQuantized(), PackQuantized(num_bits=4).quantize(weight), config)
    with pytest.raises(FormatError, match="contradicts"):
        settle(IntQuantized(), IntQuantized(scale_shape=(OUT, 1)).quantize(weight), config)
    named = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}
    with pytest.raises(FormatError, match="contradicts"):
        settle(ModeloptInt4(), ModeloptInt4(group_size=IN).quantize(weight), named)
