"""Tests of ModelOpt's experts of gpt-oss and Llama 4 against loops over their codes.

They also test unsupported formats of ModelOpt.
"""

import numpy as np
import pytest
import torch

from hfq import FormatError
from hfq.formats import detect_formats, tensors_by_module
from hfq.formats.layouts.fp4 import E2M1
from hfq.formats.modelopt.experts import ModeloptExpert
from tests.support.tiny_models import described

IN, OUT = 48, 6
CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def random_fp8() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "transposed": (torch.randn(IN, OUT, generator=generator) * 50).to(torch.float8_e4m3fn),
        "weight_scale": torch.tensor(0.0123),
        "input_scale": torch.tensor(0.5),
        "bias": torch.randn(OUT, generator=generator).bfloat16(),
    }


def random_nvfp4() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "transposed": torch.randint(0, 256, (IN // 2, OUT), dtype=torch.uint8, generator=generator),
        "weight_scale": (torch.rand(IN // 16, OUT, generator=generator) * 400).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.0017),
        "input_scale": torch.tensor(0.5),
        "bias": torch.randn(OUT, generator=generator).bfloat16(),
    }


def nvfp4_by_hand(tensors) -> torch.Tensor:
    """Computes weights of NVFP4: row i holds channels 2i (low nibble) and 2i + 1."""
    codes, scale = tensors["transposed"].tolist(), tensors["weight_scale"].float().numpy()
    weight = np.empty((OUT, IN), dtype=np.float32)
    for n in range(OUT):
        for k in range(IN):
            byte = codes[k // 2][n]
            step = scale[k // 16, n] * np.float32(tensors["weight_scale_2"])
            weight[n, k] = np.float32(E2M1[byte >> 4 if k % 2 else byte & 15]) * step
    return torch.from_numpy(weight)


def fp8_by_hand(tensors) -> torch.Tensor:
    codes, scale = tensors["transposed"].float().numpy(), tensors["weight_scale"].numpy()
    return torch.tensor([[codes[k, n] * scale for k in range(IN)] for n in range(OUT)])


def detect(tensors, config=CONFIG):
    return ModeloptExpert.detect("m", described("m", tensors), config)


@pytest.mark.parametrize(
    ("tensors", "by_hand"), [(random_fp8(), fp8_by_hand), (random_nvfp4(), nvfp4_by_hand)]
)
def test_the_weight_is_that_of_the_loops(tensors, by_hand):
    found, expected = detect(tensors).resolve("m", tensors), by_hand(tensors)
    specs = {spec.name: spec for spec in found.tensor_specs(IN, OUT)}
    assert {name: specs[name].shape for name in tensors} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert found.shape(tensors) == (OUT, IN)
    assert torch.equal(found.dequantize(tensors), expected)
    for start in range(OUT):
        panel = torch.full((OUT - start, IN), float("nan"))
        found.dequantize_into(panel, tensors, start)
        assert torch.equal(panel, expected[start:])


def test_the_activations_scale_of_fp8_is_the_checkpoints_own():
    assert detect(random_fp8()).activation_scheme.scale_name == "input_scale"


@pytest.mark.parametrize(
    ("codes", "scale"),
    [
        (torch.zeros(IN, OUT).to(torch.float8_e4m3fn), torch.zeros(IN, 1, dtype=torch.uint8)),  # MXFP8
        (torch.zeros(IN, OUT // 2, dtype=torch.uint8), torch.zeros(IN, 1, dtype=torch.uint8)),  # MXFP4
        (
            torch.zeros(IN, 32, dtype=torch.uint8),
            torch.zeros(IN, 2).to(torch.float8_e4m3fn),
        ),  # W4A8_NVFP4_FP8
        (torch.zeros(IN, OUT).to(torch.float8_e4m3fn), torch.zeros(OUT)),
        (torch.zeros(IN, OUT).to(torch.float8_e4m3fn), torch.zeros(1)),
    ],
)
def test_scales_of_another_dialect_are_refused(codes, scale):
    with pytest.raises(
        FormatError, match=r"(?s)not those of ModelOpt's FP8 or NVFP4. Nothing was loaded.*m.weight_scale"
    ):
        detect({"transposed": codes, "weight_scale": scale})


@pytest.mark.parametrize(
    "config", [{}, {"quant_method": "fp8"}, {"quant_method": "compressed-tensors"}], ids=str
)
def test_the_layout_is_read_of_no_other_tool(config):
    assert detect(random_nvfp4(), config) is None


def test_each_expert_is_detected_behind_the_fused_tensors():
    experts = [random_nvfp4() for _ in range(3)]
    names = {
        "transposed": "m.down_proj",
        **{local: f"m.down_proj_{local}" for local in experts[0] if local != "transposed"},
    }
    stacked = {
        names[local]: torch.stack([each[local] for each in experts]) if tensor.dim() else tensor
        for local, tensor in experts[0].items()
    }
    infos = described("layer", stacked)
    modules = tensors_by_module({info.name: info for info in infos.values()})
    found = detect_formats(modules, CONFIG)
    assert sorted(found) == [f"layer.m.{expert}.down_proj" for expert in range(3)]
    for module, weight_format in found.items():
        assert weight_format.describe() == "nvfp4 g16 transposed"
        assert modules[module].keys() == experts[0].keys()
        assert modules[module]["weight_scale_2"].range == infos["m.down_proj_weight_scale_2"].range
