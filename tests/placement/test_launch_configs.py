"""Tests that a plan implies the values of the repository's own configs."""

import json
from pathlib import Path

import pytest
import yaml

from hfq.placement.launch_configs import accelerate_yaml, deepspeed_config, loading_code

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(("offload", "name"), [("none", ""), ("cpu", "_cpu"), ("nvme", "_nvme")])
def test_deepspeed_configs_are_those_of_the_repository(offload, name):
    assert deepspeed_config(offload) == json.loads(
        (CONFIGS / "deepspeed" / f"inference_zero3{name}.json").read_text()
    )


def test_dtype_batch_and_folder_are_the_plans():
    config = deepspeed_config("nvme", "/scratch", "float32", 4)
    assert config["zero_optimization"]["offload_param"]["nvme_path"] == "/scratch"
    assert (config["train_micro_batch_size_per_gpu"], "bf16" in config) == (4, False)
    assert deepspeed_config(dtype="float16")["fp16"] == {"enabled": True}


def test_accelerate_configs_say_what_those_of_the_repository_say():
    stored = yaml.safe_load((CONFIGS / "accelerate" / "inference_zero3_cpu.yaml").read_text())
    made = yaml.safe_load(accelerate_yaml(2, "configs/deepspeed/inference_zero3_cpu.json"))
    assert made == stored | {"use_cpu": False}
    single = yaml.safe_load(accelerate_yaml(1, on_cpu=True))
    assert single == yaml.safe_load((CONFIGS / "accelerate" / "device_map.yaml").read_text()) | {
        "use_cpu": True
    }


def test_the_call_is_python_and_names_the_limits():
    code = loading_code("a/\"b'", "bfloat16", {"cuda:0": 7, "cpu": 8, "disk": 9}, "int4")
    compile(code, "load.py", "exec")
    assert 'max_memory={0: 7, "cpu": 8}' in code
    assert '"nbits": 4' in code
    assert "device_map" not in loading_code("a", "bfloat16", None)
    assert 'HfqConfig(quantize_output_head="fp8")' in loading_code(
        "a", "bfloat16", None, quantize_output_head="fp8"
    )
