"""Tests of DeepSpeed configs that corrupt weights or have another effect than expected."""

import json
from pathlib import Path

import pytest
import yaml

from hfq.errors import SetupError
from hfq.integrations.deepspeed.config_check import check_config

CONFIGS = Path(__file__).parents[3] / "configs"
GOOD = json.loads((CONFIGS / "deepspeed" / "inference_zero3.json").read_text())
SAVING = {"zero_stage": 3, "zero3_init_flag": True, "zero3_save_16bit_model": True}
PLUGIN = {"deepspeed_config_file": "zero3.json", "zero3_init_flag": True}


def check(folder: Path, config: dict, name: str = "accelerate.yaml") -> list[str]:
    (folder / "zero3.json").write_text(json.dumps(GOOD))
    (folder / name).write_text(yaml.safe_dump(config))  # written as JSON below
    return [error.message for error in check_config(folder / name)]


def deepspeed(folder: Path, **zero) -> list[SetupError]:
    file = folder / "c.json"
    file.write_text(json.dumps(GOOD | {"zero_optimization": GOOD["zero_optimization"] | zero}))
    return check_config(file)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*/*.[jy]*")), ids=lambda file: file.name)
def test_the_repositorys_own_configs_have_no_findings(file, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    assert check_config(file) == []


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 2}, "stage is not 3"),
        ({"zero_quantized_weights": True}, "quantizes bytes that are already quantized"),
        ({"stage3_gather_16bit_weights_on_model_save": True}, "would save quantized bytes"),
        ({"offload_param": {"device": "nvme"}}, "nvme_path is missing"),
    ],
)
def test_findings_on_deepspeed_configs(tmp_path, zero, said):
    (error,) = deepspeed(tmp_path, **zero)
    assert said in error.message
    assert error.fix


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"distributed_type": "DEEPSPEED"}, "deepspeed_config is missing"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": PLUGIN | {"zero3_init_flag": False}},
            "load the whole model",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": PLUGIN | {"zero_stage": 3}},
            "rejects keys",
        ),
        (
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": PLUGIN | {"deepspeed_config_file": "no.json"},
            },
            "does not exist",
        ),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": SAVING}, "as if they were floats"),
        ({"distributed_type": "FSDP"}, "does not shard under FSDP"),
        ({"distributed_type": False}, "NO without quotes"),
    ],
)
def test_findings_on_accelerate_configs(tmp_path, config, said):
    (found,) = check(tmp_path, config)
    assert said in found


def test_a_named_deepspeed_config_is_read(tmp_path):
    assert check(tmp_path, {"distributed_type": "DEEPSPEED", "deepspeed_config": PLUGIN}) == []
    (tmp_path / "zero3.json").write_text("{}")
    assert [error.message for error in check_config(tmp_path / "accelerate.yaml")] == [
        "The ZeRO stage is not 3, so every rank loads the whole model."
    ]


@pytest.mark.parametrize(
    ("name", "text"), [("a.json", "{"), ("a.yaml", "[1"), ("a.json", "[]"), ("a.toml", "a = 1")]
)
def test_what_is_no_config_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(SetupError):
        check_config(tmp_path / name)
    with pytest.raises(SetupError, match="cannot be read"):
        check_config(tmp_path / "nowhere.json")
