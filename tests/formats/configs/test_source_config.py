"""Tests of the files that a quantization config is read from, and of their precedence."""

import json
import struct

import pytest

from hfq.checkpoint import Checkpoint, write_safetensors
from hfq.errors import CheckpointError, FormatError
from hfq.formats.configs.source_config import source_config

GPTQ = {"bits": 4, "group_size": 128, "desc_act": False}
MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
OWN = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture
def source(tmp_path):
    """source({file: content}) → the config found in a checkpoint with these JSON files."""

    def source(files):
        write_safetensors(tmp_path / "model.safetensors", {"w": ("F32", (), struct.pack("<f", 1.0))})
        for name, content in files.items():
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return source_config(Checkpoint.open(tmp_path))

    return source


def test_config_json_holds_it(source):
    assert source({"config.json": {"model_type": "llama", "quantization_config": OWN}}) == OWN


def test_the_config_of_a_part_of_the_model_may_hold_it(source):
    config = {
        "model_type": "llava",
        "vision_config": {"hidden_size": 8},
        "text_config": {"quantization_config": OWN},
    }
    assert source({"config.json": config}) == OWN


def test_the_outer_config_wins_over_that_of_a_part(source):
    config = {"text_config": {"quantization_config": GPTQ}, "quantization_config": OWN}
    assert source({"config.json": config}) == OWN


def test_config_json_wins_over_the_side_files(source):
    files = {"quantize_config.json": GPTQ, "hf_quant_config.json": MODELOPT}
    assert source({"config.json": {"quantization_config": OWN}, **files}) == OWN


def test_the_side_file_of_autogptq_is_gptq_unless_it_says_otherwise(source):
    assert source({"config.json": {}, "quantize_config.json": GPTQ}) == {"quant_method": "gptq", **GPTQ}
    assert source({"quantize_config.json": GPTQ | {"quant_method": "awq"}})["quant_method"] == "awq"


def test_the_side_file_of_modelopt_is_unwrapped(source):
    found = source({"config.json": {}, "hf_quant_config.json": MODELOPT})
    assert found == {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}


def test_the_side_file_of_autogptq_wins_over_that_of_modelopt(source):
    assert source({"quantize_config.json": GPTQ, "hf_quant_config.json": MODELOPT})["quant_method"] == "gptq"


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config.json": {"model_type": "llama"}},
        {"config.json": {"quantization_config": None}},
        {"hf_quant_config.json": {"producer": {}}},
        {"hf_quant_config.json": {"quantization": "FP8"}},
    ],
)
def test_nothing_is_found_where_nothing_is_said(source, files):
    assert source(files) is None


@pytest.mark.parametrize("config", ["fp8", ["fp8"], 8, False])
def test_a_config_that_is_no_object_is_refused_by_name(source, config):
    with pytest.raises(FormatError, match="quantization_config is not an object") as caught:
        source({"config.json": {"quantization_config": config}})
    assert caught.value.found == repr(config)


@pytest.mark.parametrize("name", ["quantize_config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_damaged_side_file_is_named(source, name, text):
    with pytest.raises(CheckpointError, match=name):
        source({"config.json": {}, name: text})


def test_what_is_returned_is_a_copy(source, tmp_path):
    source({"config.json": {"quantization_config": OWN}})
    checkpoint = Checkpoint.open(tmp_path)
    source_config(checkpoint)["bits"] = 3
    assert checkpoint.config["quantization_config"] == OWN
