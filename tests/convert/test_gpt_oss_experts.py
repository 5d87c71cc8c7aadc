"""Experts of gpt-oss: gate and up channels in turn in its checkpoints, and separate in GGUF files."""

import pytest
import torch

from hfq import FormatError
from hfq.checkpoint import Checkpoint
from tests.convert.test_gguf_file import convert, logits, stored
from tests.support import tiny_models
from tests.support.checkpoint_files import refused
from tests.support.gguf_models import make_model, write_model
from tests.support.reshard_files import assert_nothing_left


def types(name):
    """Returns the types of the published files: MXFP4 for experts, and floats."""
    return "MXFP4" if "_exps" in name else "BF16"


@pytest.fixture
def source(tmp_path):
    return write_model(tmp_path / "source", "gpt-oss", make_model("gpt-oss"), types)


def test_a_file_becomes_the_layout_of_gpt_oss_and_back(tmp_path, source):
    report = convert(source, tmp_path / "fused", "mxfp4")
    assert report.layers == 2 * 4 * 3
    assert torch.equal(logits(tmp_path / "fused"), logits(source))
    experts = "model.layers.0.mlp.experts"
    tensors = tiny_models.stored_tensors(tmp_path / "fused")
    assert {name: tensor.shape for name, tensor in tensors.items() if name.startswith(experts)} == {
        f"{experts}.gate_up_proj_blocks": (4, 192, 2, 16),
        f"{experts}.gate_up_proj_scales": (4, 192, 2),
        f"{experts}.gate_up_proj_bias": (4, 192),
        f"{experts}.down_proj_blocks": (4, 64, 3, 16),
        f"{experts}.down_proj_scales": (4, 64, 3),
        f"{experts}.down_proj_bias": (4, 64),
    }
    assert Checkpoint.open(tmp_path / "fused").config["quantization_config"]["quant_method"] == "mxfp4"
    convert(tmp_path / "fused", tmp_path / "back", "gguf", source)
    assert torch.equal(logits(tmp_path / "back"), logits(source))
    assert stored(tmp_path / "back") == stored(source)


def test_the_tensors_are_those_that_plain_transformers_reads(tmp_path, source):
    """The reader of upstream is no code of hfq, so gate and up cannot be confused twice."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    convert(source, tmp_path / "fused", "mxfp4")
    tensors = tiny_models.stored_tensors(tmp_path / "fused")
    model = make_model("gpt-oss")
    experts = "model.layers.1.mlp.experts"
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = (tensors[f"{experts}.{name}_{local}"] for local in ("blocks", "scales"))
        found = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        expected = model.get_parameter(f"{experts}.{name}")
        assert found.shape == expected.shape
        assert (found - expected).norm() < 0.2 * expected.norm()


def test_a_quantized_layer_that_is_no_expert_is_refused(tmp_path):
    source = write_model(tmp_path / "source", "gpt-oss", make_model("gpt-oss"), ("MXFP4",))
    with refused("gpt-oss quantizes nothing else", "Convert to mxfp4-pack-quantized", kind=FormatError):
        convert(source, tmp_path / "to", "mxfp4")
    assert_nothing_left(tmp_path)


def test_experts_of_another_model_are_refused(tmp_path):
    source = write_model(tmp_path / "source", "qwen3moe", make_model("qwen3moe"), types)
    with refused("model_type gpt_oss", "found: qwen3_moe", kind=FormatError):
        convert(source, tmp_path / "to", "mxfp4")
