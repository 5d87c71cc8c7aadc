"""ZeRO-3 inference: the nearest home that fits every rank and node."""

from dataclasses import replace

import pytest

from hfq.errors import PlacementError
from hfq.placement.estimate.estimate import ModelSizes, Workload
from hfq.placement.estimate.hardware import Hardware, parse_size
from hfq.placement.estimate.kv_cache import Activations, KvLayer
from hfq.placement.zero.fit import fit_zero3
from hfq.placement.zero.memory import ModelStates

MIB = 1 << 20
STATES = ModelStates(quantized=(8 * MIB,) * 16, frozen=(1000,) * 4)
SIZES = ModelSizes((), (KvLayer(512, 512),) * 8, Activations(512, 2048, 8192, 8), {}, 1.0, "bfloat16", 8)
WORK = Workload(1, 128)


def fit(hardware, has_nvme=False, ranks=2):
    return fit_zero3(STATES, SIZES, hardware, WORK, ranks, has_nvme=has_nvme)


def test_shards_rest_on_devices_then_in_memory_then_on_nvme():
    roomy, tight = (
        512 * MIB,
        180 * MIB,
    )  # 128 MiB are gathered on each device, beside 64 MiB of shards where they rest there
    assert fit(Hardware((roomy,) * 2, 0)).memory.setup.offload_param == "none"
    assert fit(Hardware((tight,) * 2, 200 * MIB)).memory.setup.offload_param == "cpu"
    nvme = fit(Hardware((tight,) * 2, 60 * MIB), has_nvme=True)
    assert nvme.memory.setup.offload_param == "nvme"
    held = nvme.per_rank()
    assert held["nvme"] == 64 * MIB
    assert held["device"] <= tight
    assert held["cpu"] * 2 <= 60 * MIB


def test_ranks_without_accelerators_share_the_nodes_memory():
    found = fit(Hardware(cpu=700 * MIB))
    assert found.ranks_on_cpu
    assert found.per_rank()["device"] * 2 <= 700 * MIB
    assert found.gathered == 16 * 8 * MIB + 8000


def test_the_way_out_of_what_does_not_fit_fits():
    tight = Hardware((180 * MIB,) * 2, 10 * MIB)
    with pytest.raises(PlacementError, match="does not fit under ZeRO-3") as refused:
        fit(tight)
    assert len(refused.value.problems) == 2
    cpu = parse_size(refused.value.fix.split("--cpu ")[1].split(",")[0].split()[0], "--cpu")
    assert fit(replace(tight, cpu=cpu)).memory.setup.offload_param == "cpu"


def test_a_rank_needs_an_accelerator_of_its_own():
    with pytest.raises(PlacementError, match="A node has fewer accelerators than ranks"):
        fit(Hardware((512 * MIB,), 0))
