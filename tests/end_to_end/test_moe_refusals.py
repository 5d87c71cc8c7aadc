"""Tests of errors for incomplete, duplicate, or mismatched tensors of experts."""

import pytest
import torch

from hfq import FormatError
from hfq.formats.gpt_oss import GptOssMxfp4
from tests.support import moe_models
from tests.support.moe_models import EXPERTS, FP8, FP8_CONFIG, ONE, SCHEMES, Scheme, load, logits


@pytest.fixture(scope="module")
def by_expert():
    return moe_models.write(moe_models.BY_EXPERT)


def test_a_missing_expert_is_refused_by_its_name(by_expert, tmp_path):
    path = by_expert.save(tmp_path, moe_models.without(by_expert.tensors, f"{ONE}."))
    with pytest.raises(FormatError, match="Nothing was loaded") as caught:
        load(path)
    for projection in moe_models.SPLIT:
        assert f"{ONE}.{projection}: missing" in str(caught.value)


@pytest.mark.parametrize("projection", moe_models.SPLIT)
def test_an_expert_without_one_projection_is_refused_by_name(by_expert, tmp_path, projection):
    path = by_expert.save(tmp_path, moe_models.without(by_expert.tensors, f"{ONE}.{projection}."))
    with pytest.raises(FormatError, match=rf"{ONE}.{projection}: missing"):
        load(path)


def test_a_whole_layer_without_experts_is_refused(by_expert, tmp_path):
    path = by_expert.save(tmp_path, moe_models.without(by_expert.tensors, "model.layers.1.mlp.experts."))
    with pytest.raises(FormatError, match=r"model.layers.1.mlp.experts.gate_up_proj: missing"):
        load(path)


@pytest.mark.parametrize("number", [EXPERTS, 99, 10**30])
def test_an_expert_too_many_is_refused_by_its_name(by_expert, tmp_path, number):
    extra = {
        name.replace("experts.0.", f"experts.{number}."): tensor for name, tensor in by_expert.tensors.items()
    }
    path = by_expert.save(tmp_path, extra | by_expert.tensors)
    with pytest.raises(
        FormatError, match=rf"experts\.{number}\.down_proj: unexpected, .* has {EXPERTS} experts"
    ):
        load(path)


def test_an_expert_stored_under_two_names_is_refused(by_expert, tmp_path):
    twice = {
        name.replace("gate_proj", "w1"): tensor
        for name, tensor in by_expert.tensors.items()
        if name.startswith(ONE)
    }
    path = by_expert.save(tmp_path, by_expert.tensors | twice)
    with pytest.raises(FormatError, match=rf"{ONE}.*stored a second time"):
        load(path)


def test_gate_and_up_stored_both_apart_and_together_are_refused(tmp_path):
    together = moe_models.write(next(scheme for scheme in SCHEMES if "fused gate_up" in scheme.id))
    start = "model.layers.1.block_sparse_moe.experts.2"
    halves = {"gate_proj": slice(0, 96), "up_proj": slice(96, 192)}
    apart = {
        f"{start}.{projection}.{local}": together.tensors[f"{start}.gate_up_proj.{local}"][rows].clone()
        for projection, rows in halves.items()
        for local in ("weight", "weight_scale")
    }
    with pytest.raises(FormatError, match=r"experts.2.gate_proj"):
        load(together.save(tmp_path, together.tensors | apart))


def test_an_expert_stored_both_fused_and_by_itself_is_refused(tmp_path):
    written = moe_models.write(next(scheme for scheme in SCHEMES if scheme.id.startswith("qwen3 fused")))
    start = "model.layers.1.mlp.experts"
    tensors = dict(written.tensors)
    for local in ("weight", "weight_scale"):
        tensors[f"{start}.2.down_proj.{local}"] = tensors[f"{start}.down_proj.{local}"][1].clone()
    with pytest.raises(FormatError, match=rf"{start}.2.down_proj"):
        load(written.save(tmp_path, tensors))


def test_a_router_stored_under_two_names_is_refused(tmp_path):
    written = moe_models.write(Scheme("mixtral", "mixtral", FP8, FP8_CONFIG))
    router = written.tensors["model.layers.0.mlp.gate.weight"]
    with pytest.raises(FormatError, match=r"block_sparse_moe.gate.weight"):
        load(
            written.save(tmp_path, written.tensors | {"model.layers.0.block_sparse_moe.gate.weight": -router})
        )


def test_packed_experts_beside_the_fused_parameter_are_refused(by_expert, tmp_path):
    name = "model.layers.1.mlp.experts.down_proj"
    with pytest.raises(FormatError, match=rf"{name}"):
        load(by_expert.save(tmp_path, by_expert.tensors | {name: by_expert.plain[name]}))


def test_an_expert_with_a_projection_of_another_size_is_refused(by_expert, tmp_path):
    tensors = dict(by_expert.tensors)
    for name in [name for name in tensors if name.startswith(f"{ONE}.down_proj.")]:
        tensors[name] = tensors[name.replace("down_proj", "up_proj")]
    with pytest.raises(FormatError, match=rf"{ONE}.down_proj"):
        load(by_expert.save(tmp_path, tensors))


def test_a_packed_router_keeps_a_bias_of_its_own(tmp_path):
    scheme = Scheme(
        "gpt-oss", "gpt-oss", GptOssMxfp4(), {"quant_method": "mxfp4"}, {}, ("gate_up_proj_*", "down_proj_*")
    )
    written = moe_models.write(scheme, lambda name: False)
    router = "model.layers.0.mlp.router"
    packed = FP8.quantize(written.tensors[f"{router}.weight"])
    dequantized = written.tensors | {f"{router}.weight": FP8.dequantize(packed)}
    tensors = written.tensors | {f"{router}.{local}": tensor for local, tensor in packed.items()}
    expected = logits(load(written.save(tmp_path / "dense router", dequantized)))
    for number, device_map in enumerate(({"": "cpu"}, {"": "disk"})):
        assert torch.equal(logits(load(written.save(tmp_path / str(number), tensors), device_map)), expected)


@pytest.mark.parametrize("change", ["missing scales", "an expert less", "an expert more"])
def test_fused_blocks_that_do_not_fit_are_refused(tmp_path, change):
    scheme = next(scheme for scheme in SCHEMES if scheme.model == "gpt-oss")
    written = moe_models.write(scheme, lambda name: False)
    tensors, start = dict(written.tensors), "model.layers.1.mlp.experts."
    if change == "missing scales":
        del tensors[f"{start}down_proj_scales"]
    else:
        for name in [name for name in tensors if name.startswith(start)]:
            whole = tensors[name]
            tensors[name] = whole[:-1] if change == "an expert less" else torch.cat([whole, whole[:1]])
    with pytest.raises(FormatError, match=rf"(?s)Nothing was loaded.*{start}"):
        load(written.save(tmp_path, tensors))


def test_a_scale_of_one_expert_that_is_not_finite_is_refused_by_its_name(by_expert, tmp_path):
    name = f"{ONE}.up_proj.weight_scale"
    tensors = by_expert.tensors | {name: torch.full_like(by_expert.tensors[name], float("nan"))}
    with pytest.raises(FormatError, match=rf"(?s)not finite. Nothing was loaded.*{name}"):
        load(by_expert.save(tmp_path, tensors), {"": "disk"})
