"""Tests of fused tensors of quantized experts, which are split by headers alone."""

import pytest
import torch

from hfq import FormatError
from hfq.checkpoint import Checkpoint, Reader, write_safetensors
from hfq.formats import detect_formats, tensors_by_module
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.formats.fp8 import Fp8
from hfq.formats.gpt_oss import GptOssMxfp4
from hfq.formats.layouts.fused_experts import split_experts
from hfq.modules.flat_buffer import read_tensor
from tests.support.tiny_models import described

LAYER = "model.layers.3.mlp"


def infos(tensors: dict[str, torch.Tensor]):
    return {info.name: info for info in described(LAYER, tensors).values()}


def any_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def gpt_oss(experts: int = 3) -> dict[str, torch.Tensor]:
    tensors = {}
    for projection, size in (("gate_up_proj", (8, 64)), ("down_proj", (64, 32))):
        tensors[f"experts.{projection}_blocks"] = any_bytes(experts, size[0], size[1] // 32, 16)
        tensors[f"experts.{projection}_scales"] = any_bytes(experts, size[0], size[1] // 32)
        tensors[f"experts.{projection}_bias"] = torch.randn(experts, size[0]).bfloat16()
    return tensors


def fp8(stem: str, experts: int = 3) -> dict[str, torch.Tensor]:
    return {
        f"{stem}.weight": any_bytes(experts, 8, 16).view(torch.float8_e4m3fn),
        f"{stem}.weight_scale": torch.rand(experts, 8, 1),
    }


def modelopt(experts: int = 3) -> dict[str, torch.Tensor]:
    return {
        "experts.down_proj": any_bytes(experts, 32, 16),
        "experts.down_proj_weight_scale": any_bytes(experts, 4, 16).view(torch.float8_e4m3fn),
        "experts.down_proj_weight_scale_2": torch.tensor(0.25),
        "experts.down_proj_input_scale": torch.rand(experts),
        "experts.down_proj_bias": torch.randn(experts, 16).bfloat16(),
    }


@pytest.fixture
def written(tmp_path):
    def written(tensors):
        """Returns (headers as stored, reader) of a file with these tensors of the layer."""
        stored = {
            f"{LAYER}.{name}": (
                safetensors_dtype(t.dtype),
                tuple(t.shape),
                t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
            for name, t in tensors.items()
        }
        write_safetensors(tmp_path / "model.safetensors", stored)
        checkpoint = Checkpoint.open(tmp_path)
        return checkpoint.tensors, Reader(checkpoint)

    return written


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    )


def test_each_expert_of_gpt_oss_is_a_slice_of_the_file(written):
    tensors = gpt_oss()
    stored, reader = written(tensors)
    split = split_experts(stored)
    assert len(split) == 3 * len(tensors)
    for name, whole in tensors.items():
        projection, _, local = name.removeprefix("experts.").rpartition("_")
        for expert in range(3):
            info = split[f"{LAYER}.experts.{expert}.{projection}.{local}"]
            assert info.part_of == f"{LAYER}.{name}"
            assert same(read_tensor(reader, info), whole[expert].contiguous())


@pytest.mark.parametrize(
    ("stem", "module"),
    [
        ("experts.gate_up_proj", "experts.{}.gate_up_proj"),
        ("experts.down_proj", "experts.{}.down_proj"),
        ("block.input_linear", "block.experts.{}.gate_up_proj"),
        ("block.output_linear", "block.experts.{}.down_proj"),
    ],
)
def test_each_expert_of_a_fused_weight_is_a_slice_of_the_file(written, stem, module):
    tensors = fp8(stem)
    stored, reader = written(tensors)
    modules = tensors_by_module(stored)
    assert set(modules) == {f"{LAYER}.{module.format(expert)}" for expert in range(3)}
    for expert in range(3):
        found = modules[f"{LAYER}.{module.format(expert)}"]
        assert same(read_tensor(reader, found["weight"]), tensors[f"{stem}.weight"][expert])
        assert same(read_tensor(reader, found["weight_scale"]), tensors[f"{stem}.weight_scale"][expert])


def test_each_expert_of_modelopt_is_a_slice_of_the_file_and_has_the_numbers_of_all(written):
    tensors = modelopt()
    stored, reader = written(tensors)
    split = split_experts(stored)
    assert len(split) == 3 * len(tensors)
    for name, whole in tensors.items():
        local = name.removeprefix("experts.down_proj").removeprefix("_") or "transposed"
        for expert in range(3):
            info = split[f"{LAYER}.experts.{expert}.down_proj.{local}"]
            assert info.part_of == f"{LAYER}.{name}"
            assert same(read_tensor(reader, info), whole[expert].contiguous() if whole.dim() else whole)


def test_the_slices_are_detected_as_layers_of_their_own():
    modules = tensors_by_module(infos(gpt_oss() | fp8("block.input_linear")))
    found = detect_formats(modules, {})
    assert {type(found[f"{LAYER}.experts.{expert}.down_proj"]) for expert in range(3)} == {GptOssMxfp4}
    assert {type(found[f"{LAYER}.block.experts.{expert}.gate_up_proj"]) for expert in range(3)} == {Fp8}


def test_experts_at_the_root_of_a_file_have_no_dot_before_them():
    split = split_experts(
        {info.name: info for info in described("experts", {"down_proj.weight": any_bytes(2, 8, 16)}).values()}
    )
    assert set(split) == {"experts.0.down_proj.weight", "experts.1.down_proj.weight"}


DENSE = {
    "experts.gate_up_proj": torch.zeros(2, 8, 16),
    "experts.gate_up_proj.weight": torch.zeros(2, 8, 16).bfloat16(),
    "block.input_linear.weight": torch.zeros(2, 8, 16),
    "experts.0.gate_proj.weight": any_bytes(8, 16),
    "self_attn.q_proj.weight": any_bytes(2, 8, 16),
    "gate_up_proj_bias": torch.zeros(2, 8),
    "experts.down_proj_scales": any_bytes(2, 8, 1),
    "experts.down_proj.weight_scale": torch.zeros(2, 8, 1),
    "experts.down_proj": any_bytes(2, 8, 16),
    "experts.down_proj_weight_scale": torch.tensor(1.0),
}


@pytest.mark.parametrize("name", DENSE)
def test_what_is_no_fused_tensor_of_packed_experts_stays_as_it_is(name):
    stored = infos({name: DENSE[name]})
    assert split_experts(stored) == stored


@pytest.mark.parametrize("experts", [0, 4097])
def test_a_number_of_experts_that_no_model_has_is_not_split(experts):
    stored = infos({"experts.down_proj.weight": torch.empty(experts, 2, 2, dtype=torch.uint8)})
    assert split_experts(stored) == stored


def test_tensors_that_disagree_on_the_number_of_experts_are_not_split_together():
    stored = infos(fp8("experts.down_proj") | {"experts.down_proj.weight_scale": torch.rand(2, 8, 1)})
    split = split_experts(stored)
    assert f"{LAYER}.experts.down_proj.weight_scale" in split
    assert f"{LAYER}.experts.2.down_proj.weight" in split
    assert f"{LAYER}.experts.0.down_proj.weight_scale" not in split


@pytest.mark.parametrize("local", ["weight_scale", "bias"])
def test_a_tensor_of_modelopt_for_another_number_of_experts_is_not_split(local):
    name = f"experts.down_proj_{local}"
    stored = infos(modelopt() | {name: modelopt(experts=2)[name]})
    split = split_experts(stored)
    assert split[f"{LAYER}.{name}"] == stored[f"{LAYER}.{name}"]
    assert f"{LAYER}.experts.2.down_proj.transposed" in split


def test_an_expert_that_is_stored_fused_and_by_itself_is_refused():
    fused = fp8("experts.down_proj")
    alone = {"experts.1.down_proj.weight": any_bytes(8, 16).view(torch.float8_e4m3fn)}
    for tensors in (fused | alone, alone | fused):
        with pytest.raises(
            FormatError, match=r"(?s)stores an expert twice. Nothing was loaded.*experts.1.down_proj.weight"
        ):
            split_experts(infos(tensors))
