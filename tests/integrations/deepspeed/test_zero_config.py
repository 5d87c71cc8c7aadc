"""Tests that DeepSpeed options that would change quantized bytes raise errors early."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig, PlacementError, SetupError
from hfq.integrations.deepspeed.swap_buffers import Pool, plan_pool, swap_options
from hfq.integrations.deepspeed.zero_config import read_zero_config
from hfq.loading import ranks
from hfq.placement.zero.shards import FlatParameter, ZeroPlan
from tests.support import tiny_models

pytest.importorskip("deepspeed")
from transformers.integrations import HfDeepSpeedConfig

BASE = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


def config(**sections) -> dict:
    """Returns the base config with these values in its sections."""
    changed = copy.deepcopy(BASE)
    for section, values in sections.items():
        changed.setdefault(section, {}).update(values)
    return changed


REFUSED = [
    ("zero_optimization", "stage3_use_all_reduce_for_fetch_params", True),
    ("zero_optimization", "zero_quantized_weights", True),
    ("zero_optimization", "zero_quantized_nontrainable_weights", True),
    ("zero_optimization", "stage3_gather_16bit_weights_on_model_save", True),
    ("zero_optimization", "stage3_gather_fp16_weights_on_model_save", True),
    ("zero_optimization", "zero_hpz_partition_size", 2),
    ("zero_optimization", "mics_shard_size", 2),
    ("torch_autocast", "enabled", True),
    ("tensor_parallel", "autotp_size", 2),
]


@pytest.mark.parametrize(("section", "option", "value"), REFUSED)
def test_an_option_that_changes_packed_bytes_is_refused_by_name(section, option, value):
    alive = HfDeepSpeedConfig(config(**{section: {option: value}}))
    with pytest.raises(SetupError, match=rf"{section}\.{option} .*Nothing was loaded") as caught:
        AutoModelForCausalLM.from_pretrained(
            tiny_models.DATA / "tiny-llama-gptq", quantization_config=HfqConfig(), dtype=torch.bfloat16
        )
    assert "Fix: " in str(caught.value)
    del alive


@pytest.mark.parametrize(("section", "option", "value"), REFUSED)
def test_the_same_option_switched_off_is_taken(section, option, value):
    off = False if value is True else 1
    alive = HfDeepSpeedConfig(config(**{section: {option: off}}))
    assert read_zero_config(torch.bfloat16).shard_device == "device"
    del alive


def test_a_model_in_another_dtype_than_zero_is_refused():
    alive = HfDeepSpeedConfig(config())
    with pytest.raises(SetupError, match=r"enables bf16, but the model is loaded in float16") as caught:
        read_zero_config(torch.float16)
    assert "dtype=torch.bfloat16" in caught.value.fix
    del alive


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_auto_means_the_dtype_of_the_model(dtype):
    alive = HfDeepSpeedConfig(
        config(bf16={"enabled": "auto"}, fp16={"enabled": "auto", "loss_scale": "auto"})
    )
    found = read_zero_config(dtype)
    assert found.dtype == dtype
    assert found.options["fp16"] == {"enabled": dtype == torch.float16}
    del alive


def test_the_home_of_shards_is_that_of_offload_param():
    for device, shard_device in (("none", "device"), ("cpu", "cpu"), ("nvme", "nvme")):
        alive = HfDeepSpeedConfig(
            config(zero_optimization={"offload_param": {"device": device, "nvme_path": "/tmp/x"}})
        )
        found = read_zero_config(torch.bfloat16)
        assert (found.shard_device, found.nvme_path) == (shard_device, "/tmp/x")
        del alive


def test_a_load_without_a_launcher_says_so(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    alive = HfDeepSpeedConfig(config())
    with pytest.raises(SetupError, match="the rank of this process is unknown"):
        AutoModelForCausalLM.from_pretrained(
            tiny_models.DATA / "tiny-llama-gptq", quantization_config=HfqConfig(), dtype=torch.bfloat16
        )
    del alive


def test_no_zero3_without_a_live_config():
    alive = HfDeepSpeedConfig(config())
    assert ranks.is_zero3()
    del alive
    assert not ranks.is_zero3()


def test_the_pool_holds_the_largest_shard_and_what_a_module_needs_at_once():
    parameters = tuple(
        FlatParameter(str(n), nbytes, 2, (), True)
        for n, nbytes in enumerate([64, 1 << 22, 6_000_001 * 2, 1 << 21])
    )
    plan = ZeroPlan(parameters, 0, 2, "nvme")
    assert plan_pool(plan, 2, at_once=1) == Pool(4, 3_000_001, 2)
    assert plan_pool(plan, 2, at_once=30, least_nbytes=1 << 20).count == 3  # no more than there are
    assert Pool(4, 3_000_001, 2).nbytes == 24_000_008


def test_deepspeeds_own_swapper_gets_a_pool_and_a_folder_of_its_own_for_each_load():
    sections = {
        "zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 5}}
    }
    alive = HfDeepSpeedConfig(config(**sections))
    zero = read_zero_config(torch.bfloat16)
    first, second = (
        swap_options(zero, Pool(7, 1000, 2))["zero_optimization"]["offload_param"] for _ in range(2)
    )
    assert (first["buffer_count"], first["buffer_size"]) == (7, 1000)
    assert first["nvme_path"].startswith("/nvme/hfq-")
    assert first["nvme_path"] != second["nvme_path"]
    assert zero.options["zero_optimization"]["offload_param"]["buffer_count"] == 5
    del alive


def test_swapping_without_a_folder_is_refused_and_in_place_needs_none():
    alive = HfDeepSpeedConfig(config(zero_optimization={"offload_param": {"device": "nvme"}}))
    zero = read_zero_config(torch.bfloat16)
    with pytest.raises(PlacementError, match="nvme_path is missing"):
        swap_options(zero, Pool(7, 1000, 2))
    assert swap_options(zero, None)["zero_optimization"]["offload_param"]["device"] == "nvme"
    del alive


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 100_000), ({"stage3_param_persistence_threshold": 0}, 0), ({"param_persistence_threshold": 7}, 7)],
)
def test_what_deepspeed_keeps_gathered_is_known(options, expected):
    alive = HfDeepSpeedConfig(config(zero_optimization=options))
    assert read_zero_config(torch.bfloat16).kept_numel == expected
    del alive


def test_trainers_own_threshold_is_bounded_before_it_is_filled_in():
    alive = HfDeepSpeedConfig(config(zero_optimization={"stage3_param_persistence_threshold": "auto"}))
    assert read_zero_config(torch.bfloat16).kept_numel >= 10 * 16_384  # × the hidden size
    del alive
