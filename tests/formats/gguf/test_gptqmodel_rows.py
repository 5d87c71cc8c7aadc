"""Rows of ggml's blocks in safetensors: the type that the config names, padded rows, and wrong configs."""

import pytest
import torch

from hfq import FormatError
from hfq.formats import detect_formats
from hfq.formats.codecs.ggml.blocks import decode_into
from hfq.formats.gguf.gptqmodel_rows import GptqmodelGguf
from tests.support import tiny_models
from tests.support.checkpoint_files import refused
from tests.support.gguf_files import random_blocks

GGUF = {"quant_method": "gguf"}


def detect(config, *shape, dtype=torch.uint8):
    tensors = tiny_models.described("m", {"qweight": torch.zeros(*shape, dtype=dtype)})
    return detect_formats({"m": tensors}, GGUF | config)["m"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"bits": 4, "format": "q_k_m"}, "Q4_K"),
        ({"bits": 4, "format": "q_0", "checkpoint_format": "q_0"}, "Q4_0"),
        ({"bits": 8, "checkpoint_format": "q_0"}, "Q8_0"),
        ({"bits": 1, "format": "q_0_g128"}, "Q1_0"),
        ({"bits": "q5_k_s", "format": "gguf"}, "Q5_K"),
        ({"bits": 4, "format": "q_0", "dynamic": {"+:m": {"bits": 6, "format": "q_k"}}}, "Q6_K"),
    ],
)
def test_the_config_names_the_type(config, expected):
    assert detect(config, 4, 18) == GptqmodelGguf(expected)


@pytest.mark.parametrize(
    "config",
    [{}, {"bits": 4}, {"bits": 3, "format": "q_k"}, {"bits": [4], "format": "q_0"}, {"bits": 4, "format": 4}],
    ids=str,
)
def test_a_config_without_a_known_type_is_refused(config):
    with refused("names no type of ggml for m", "m.qweight", "Q4_K", "bits=", kind=FormatError):
        detect(config, 4, 18)


def test_words_of_gptq_are_not_read_as_blocks():
    found = detect({"bits": 4, "format": "q_0"}, 4, 18, dtype=torch.int32).sized(32, 4)
    assert found.tensor_specs(32, 4)[0].dtypes == ("U8",)


@pytest.mark.parametrize("name", ["Q1_0", "Q2_0", "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_padding_of_a_row_is_no_weight(name):
    kind = GptqmodelGguf(name).type
    raw = torch.from_numpy(random_blocks(name, 12)).view(4, -1)
    values = torch.empty(4, 3 * kind.size)
    decode_into(values, raw, name, kind.nbytes)
    for columns in (3 * kind.size, 3 * kind.size - 10):
        found = GptqmodelGguf(name).sized(columns, 4)
        assert found.tensor_specs(columns, 4)[0].shape == raw.shape
        assert found.shape({"qweight": raw}) == (4, columns)
        assert torch.equal(found.dequantize({"qweight": raw}), values[:, :columns])


def test_a_row_of_another_type_has_another_length():
    assert GptqmodelGguf("Q4_0").tensor_specs(320, 4)[0].shape == (4, 180)
    assert GptqmodelGguf("Q4_K").tensor_specs(320, 4)[0].shape == (4, 288)


def test_types_with_two_levels_of_scales_are_not_written():
    with refused("does not quantize to GGUF", kind=FormatError):
        GptqmodelGguf("Q4_K").quantize(torch.zeros(4, 256))
