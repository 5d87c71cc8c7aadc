"""Tests of ZeRO-3 on two and three ranks with further formats and shard devices.

All format variants are covered. One test shows how DeepSpeed alone changes the words of a quantized layer.
"""

import json

import pytest

from tests.contract.cases import CASES, REPRESENTATIVES
from tests.support import compiled_io
from tests.support.zero_launch import BIN, check_exact, launch, once
from tests.support.zero_models import FORMATS, write_dialect, write_format

pytestmark = pytest.mark.slow

DEVICES = {
    "none": ("none", {}),
    "cpu": ("cpu", {}),
    "in place": ("nvme", {}),
    "swap": ("nvme", {"nvme_source": "swap_files"}),
}
FAST = {
    ("gptq4", "none"),
    ("gptq4", "in place"),
    ("fp8-block", "cpu"),
    ("fp8-tensor-0-dim", "in place"),
    ("int8", "cpu"),
}
"""Cases that test_zero3.py covers."""


def need(shard_device: str) -> None:
    if shard_device == "swap" and not compiled_io.is_built():
        pytest.skip(compiled_io.REASON)


ONE = [("gptq4", shard_device) for shard_device in DEVICES]
TWO = [
    (name, shard_device) for name in FORMATS for shard_device in DEVICES if (name, shard_device) not in FAST
]
TARGET_FORMATS = [case for case in CASES if case.id in REPRESENTATIVES]
"""One case per format, because the partition of a flat buffer depends only on its bytes."""
THREE = [(name, shard_device) for name in FORMATS for shard_device in DEVICES]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return {name: write_format(folder / name, name) for name in FORMATS}


@pytest.fixture(scope="module")
def run(tmp_path_factory, sources):
    """Returns a function from the number of ranks to the results of each rank."""
    done = {}

    def results(ranks: int) -> list[dict]:
        if ranks not in done:
            pairs = {1: ONE, 2: TWO, 3: THREE}[ranks]
            cases = [
                {
                    "id": f"{name} {shard_device}",
                    "checkpoint": sources[name],
                    "shard_device": DEVICES[shard_device][0],
                    "options": DEVICES[shard_device][1],
                }
                for name, shard_device in pairs
                if shard_device != "swap" or compiled_io.is_built()
            ]
            if ranks == 2:
                folder = tmp_path_factory.mktemp("formats")
                paths = {case.id: write_dialect(folder / case.id, case) for case in TARGET_FORMATS}
                cases += [
                    {"id": name, "checkpoint": path, "shard_device": "cpu", "generates": False}
                    for name, path in paths.items()
                ]
            if ranks == 2 and compiled_io.is_built():
                cases.append(
                    {"id": "stock", "checkpoint": sources["gptq4"], "shard_device": "nvme", "stock": True}
                )
            done[ranks] = once(
                tmp_path_factory,
                f"zero3-{ranks}",
                lambda: launch(tmp_path_factory.mktemp("run"), cases, ranks),
            )
        return done[ranks]

    return results


@pytest.mark.parametrize(("name", "shard_device"), TWO)
def test_two_ranks_are_exact_and_each_reads_and_holds_its_part(name, shard_device, run):
    need(shard_device)
    for results in run(2):
        found = results[f"{name} {shard_device}"]
        check_exact(found, ranks=2, is_read=shard_device != "in place")
        assert (found["written"] > 0) == (shard_device == "swap")


@pytest.mark.parametrize(("name", "shard_device"), ONE)
def test_one_rank_holds_whole_rows(name, shard_device, run):
    need(shard_device)
    check_exact(run(1)[0][f"{name} {shard_device}"], ranks=1, is_read=shard_device != "in place")


@pytest.mark.parametrize(("name", "shard_device"), THREE)
def test_three_ranks_are_exact_with_padded_shards(name, shard_device, run):
    need(shard_device)
    for results in run(3):
        found = results[f"{name} {shard_device}"]
        check_exact(found, ranks=3, is_read=shard_device != "in place")
        assert (found["written"] > 0) == (shard_device == "swap")


@pytest.mark.parametrize("case", [case.id for case in TARGET_FORMATS])
def test_every_format_is_sharded_by_bytes(case, run):
    for results in run(2):
        # With one-bit codes, the small tensors are as large as the codes, and they are read twice.
        check_exact(results[case], ranks=2, is_read=case != "hqq-1bit")


def test_stock_nvme_offload_still_casts_the_values_of_packed_words(run):
    """hfq views flat buffers in ZeRO's dtype because of this bug.

    If this test fails, DeepSpeed is fixed. Then review `ShardMaker._is_swapped` in make_parameters.py.
    """
    need("swap")
    for results in run(2):
        assert results["stock"]["words_destroyed"] > 0.9
        assert results["stock"]["dtype"] == "torch.bfloat16"


def test_accelerate_launch_with_its_own_config_file(tmp_path, sources):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": {"device": "nvme"}}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    (tmp_path / "zero3.json").write_text(json.dumps(config))
    (tmp_path / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\nuse_cpu: true\n"
        f"deepspeed_config:\n  deepspeed_config_file: {tmp_path / 'zero3.json'}\n  zero3_init_flag: true\n"
    )
    command = [
        str(BIN / "accelerate"),
        "launch",
        "--config_file",
        str(tmp_path / "accelerate.yaml"),
        "--main_process_port",
    ]
    case = {
        "id": "accelerate",
        "checkpoint": sources["fp8-block"],
        "shard_device": "none",
        "accelerates": True,
    }
    for results in launch(tmp_path / "run", [case], ranks=2, command=command):
        check_exact(results["accelerate"], ranks=2, is_read=False)
        assert results["accelerate"]["swapped_in"] > 0
