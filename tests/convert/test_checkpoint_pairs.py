"""Tests of conversions between every pair of formats.

Logits stay bit-identical, other tools find the tensors that they expect, and the way back works.
"""

import json

import pytest
import torch

from hfq.checkpoint import Checkpoint
from hfq.convert import convert_checkpoint
from hfq.formats import detect_formats, tensors_by_module
from hfq.formats.configs.source_config import detection_hints
from tests.contract.cases import CASES
from tests.support import models, tiny_models

ROWS = {case.id: case for case in CASES}
TOKENS = torch.arange(1, 25)[None]
PAIRS = {
    "gptq-v1-w4-sym": ("gptq_v2", "pack-quantized"),
    "gptq-v1-w4-asym": ("gptq_v2", "pack-quantized"),
    "gptq-v2-w4-asym": ("pack-quantized",),
    "gptq-v1-w3-sym": ("gptq_v2", "pack-quantized"),
    "gptq-v1-w2-sym": ("pack-quantized",),
    "gptq-v1-w8-channel": ("gptq_v2", "pack-quantized"),
    "gptq-autogptq-w4": ("gptq_v2",),
    "gptq-planar-w3": ("gptq_v2", "pack-quantized"),
    "gptq-planar-w5": ("pack-quantized",),
    "pack-quantized-w4": ("gptq", "gptq_v2"),
    "pack-quantized-w4-asym": ("gptq_v2",),
    "pack-quantized-w3-channel": ("gptq",),
    "pack-quantized-w8": ("gptq",),
    "pack-quantized-g-idx": ("gptq_v2",),
    "pack-quantized-w3-words": ("gptq",),
    "fp8-block": ("float-quantized",),
    "fp8-block-ragged": ("float-quantized",),
    "fp8-block-ue8m0": ("float-quantized",),
    "fp8-autofp8-static": ("float-quantized", "fp8"),
    "fp8-modelopt-tensor": ("float-quantized",),
}
TENSORS = {
    "gptq": {"qweight", "qzeros", "scales", "g_idx"},
    "gptq_v2": {"qweight", "qzeros", "scales", "g_idx"},
    "pack-quantized": {"weight_packed", "weight_scale", "weight_shape"},
    "float-quantized": {"weight", "weight_scale"},
    "fp8": {"weight", "weight_scale_inv"},
}


def write(folder, case):
    tensors = tiny_models.model_tensors(case.format)
    if case.id.startswith("pack-quantized"):  # llmcompressor stores such scales, and GPTQ can hold them
        tensors = {name: t.bfloat16() if name.endswith(".weight_scale") else t for name, t in tensors.items()}
    return tiny_models.write_model(folder, tensors, case.config)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    made = {}

    def sources(name):
        if name not in made:
            path = write(tmp_path_factory.mktemp("source") / name, ROWS[name])
            made[name] = path, logits(path)
        return made[name]

    return sources


def logits(path, device_map=None):
    return models.logits(models.load(path, device_map, kernel="reference"), TOKENS)


def formats_of(path):
    checkpoint = Checkpoint.open(path)
    modules = tensors_by_module(checkpoint.tensors)
    return modules, detect_formats(
        modules, detection_hints(checkpoint, checkpoint.config["quantization_config"])
    )


@pytest.mark.parametrize(("name", "to"), [(name, to) for name, targets in PAIRS.items() for to in targets])
def test_the_logits_are_the_same_bit_for_bit(sources, tmp_path, name, to):
    path, expected = sources(name)
    written = []
    report = convert_checkpoint(Checkpoint.open(path), tmp_path / "to", to, written.append)
    assert torch.equal(logits(tmp_path / "to"), expected)
    assert report.layers == 14
    assert report.nbytes == sum(file.stat().st_size for file in (tmp_path / "to").iterdir())
    modules, found = formats_of(tmp_path / "to")
    assert sum(written) == sum(info.nbytes for infos in modules.values() for info in infos.values())
    assert len(found) == 14
    for module in found:
        others = {"weight_zero_point", "activation_scale", "input_scale"}
        assert TENSORS[to] == modules[module].keys() - others
    for name, digest in tiny_models.digests(path).items():
        if "_proj" not in name:
            assert tiny_models.digests(tmp_path / "to")[name] == digest


WAYS = [
    ("gptq-v1-w4-sym", ("gptq_v2", "gptq")),
    ("gptq-v1-w4-sym", ("pack-quantized", "gptq")),
    ("gptq-v1-w3-sym", ("pack-quantized", "gptq_v2", "gptq")),
    ("gptq-v2-w4-asym", ("pack-quantized", "gptq_v2")),
    ("pack-quantized-w4-asym", ("gptq_v2", "pack-quantized")),
    ("fp8-block", ("float-quantized", "fp8")),
    ("fp8-autofp8-static", ("fp8", "float-quantized", "fp8")),
]


@pytest.mark.parametrize(
    ("name", "targets"), WAYS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_the_way_back_leads_to_the_same_bytes(sources, tmp_path, name, targets):
    path, _ = sources(name)
    steps = [path]
    for number, to in enumerate(targets):
        steps.append(tmp_path / str(number))
        convert_checkpoint(Checkpoint.open(steps[-2]), steps[-1], to)
    expected, found = tiny_models.digests(path), tiny_models.digests(steps[-1])
    if name == "fp8-autofp8-static":  # its tensors had other names at first
        expected = tiny_models.digests(steps[1])
    if name == "pack-quantized-w4-asym":  # GPTQ stores its scales in F16
        expected = {key: value for key, value in expected.items() if not key.endswith("weight_scale")}
        found = {key: value for key, value in found.items() if not key.endswith("weight_scale")}
    assert found == expected


def test_from_disk_it_is_the_same_too(sources, tmp_path):
    path, expected = sources("gptq-v1-w4-asym")
    convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "pack-quantized")
    assert torch.equal(logits(tmp_path / "to", {"": "disk"}), expected)


def quantization(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


def test_what_config_json_says_of_gptq(sources, tmp_path):
    convert_checkpoint(Checkpoint.open(sources("pack-quantized-g-idx")[0]), tmp_path / "to", "gptq_v2")
    config = quantization(tmp_path / "to")
    assert config["meta"]["quantizer"][0].startswith("hfq:")
    expected = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "sym": False,
        "desc_act": False,
        "checkpoint_format": "gptq_v2",
        "format": "gptq_v2",
        "lm_head": False,
        "pack_dtype": "int32",
        "meta": config["meta"],
    }
    sizes = {each["group_size"] for each in config["dynamic"].values()}
    assert sizes == {128}  # down_proj has the same number of groups and twice the channels
    assert {**config, "dynamic": None} == {**expected, "dynamic": None}
    assert json.loads((tmp_path / "to" / "quantize_config.json").read_text()) == config


def test_what_config_json_says_of_pack_quantized(sources, tmp_path):
    convert_checkpoint(Checkpoint.open(sources("gptq-v2-w4-asym")[0]), tmp_path / "to", "pack-quantized")
    config = quantization(tmp_path / "to")
    assert config["quant_method"] == "compressed-tensors"
    assert config["quantization_status"] == "compressed"
    assert config["ignore"] == ["lm_head", "model.embed_tokens"]
    assert config["config_groups"] == {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "symmetric": False,
                "dynamic": False,
                "group_size": 32,
                "block_structure": None,
                "actorder": None,
            },
        }
    }


def test_activations_are_asked_for_as_they_were(sources, tmp_path):
    convert_checkpoint(Checkpoint.open(sources("fp8-block")[0]), tmp_path / "block", "float-quantized")
    (group,) = quantization(tmp_path / "block")["config_groups"].values()
    asked = group["input_activations"]
    assert (asked["strategy"], asked["group_size"], asked["dynamic"], asked["type"]) == (
        "group",
        128,
        True,
        "float",
    )
    assert group["weights"]["block_structure"] == [128, 128]
    convert_checkpoint(Checkpoint.open(sources("fp8-autofp8-static")[0]), tmp_path / "static", "fp8")
    config = quantization(tmp_path / "static")
    assert (config["activation_scheme"], config["weight_block_size"]) == ("static", None)
    schemes = [
        {found.activation_scheme for found in formats_of(tmp_path / name)[1].values()}
        for name in ("block", "static")
    ]
    assert [(scheme.strategy, scheme.group_size, scheme.scale_name) for (scheme,) in schemes] == [
        ("group", 128, None),
        ("tensor", None, "activation_scale"),
    ]


def test_gptqs_own_config_is_kept_but_for_its_label(sources, tmp_path):
    path, _ = sources("gptq-v1-w4-asym")
    convert_checkpoint(Checkpoint.open(path), tmp_path / "to", "gptq_v2")
    assert quantization(tmp_path / "to") == {
        **quantization(path),
        "checkpoint_format": "gptq_v2",
        "format": "gptq_v2",
    }


SHARED = {
    "gptqmodel-gptq-w4g32-asym-v1": ("gptq_v2", "pack-quantized"),
    "gptqmodel-gptq-w4g64-descact": ("gptq_v2",),
    "gptqmodel-gptq-dynamic-lmhead": ("pack-quantized",),
    "gptqmodel-gptq-mixtral-w4g128": ("pack-quantized",),
    "ar-autoround-w4g128": ("gptq",),
    "ct-w4a16-pack": ("gptq", "gptq_v2"),
    "hf-fp8-block128": ("float-quantized",),
    "hf-fp8-mixtral": ("float-quantized",),
    "ct-fp8-static-tensor": ("fp8",),
}


@pytest.mark.skipif(not tiny_models.SHARED.is_dir(), reason="no ../shared/checkpoints beside the repository")
@pytest.mark.parametrize(("name", "to"), [(name, to) for name, targets in SHARED.items() for to in targets])
def test_other_tools_checkpoints_keep_their_logits(tmp_path, name, to):
    path = tiny_models.SHARED / name
    convert_checkpoint(Checkpoint.open(path), tmp_path / "to", to)
    assert torch.equal(logits(tmp_path / "to"), logits(path))
