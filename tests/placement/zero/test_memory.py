"""ZeRO's memory: the paper's figures, and the rule by which packed rows are sharded."""

import json

import pytest

from hfq.errors import PlacementError
from hfq.placement.zero.memory import ModelStates, ZeroSetup, estimate_zero, shard_numel

PAPER = ModelStates(trained=(7_500_000_000,))
MIB = 1 << 20


def device_bytes(states, stage, ranks, **options):
    return estimate_zero(states, ZeroSetup(stage, ranks, **options)).per_rank()["device"]


def test_the_papers_example_of_7_5_billion_parameters_on_64_devices():
    gigabytes = [round(device_bytes(PAPER, stage, 64) / 1e9, 1) for stage in (0, 1, 2, 3)]
    assert gigabytes == [120.0, 31.4, 16.6, 1.9]


def test_three_devices_follow_the_formula():
    assert [device_bytes(PAPER, stage, 3) / 1e9 for stage in (1, 2, 3)] == [60.0, 50.0, 40.0]


def test_figures_that_were_printed_for_three_devices_are_those_of_no_number_of_devices():
    """An erratum: 54.8, 47.9 and 41 GB."""
    for ranks in range(1, 200):
        found = [device_bytes(PAPER, stage, ranks) / 1e9 for stage in (1, 2, 3)]
        assert found != pytest.approx([54.8, 47.9, 41], rel=0.05)


@pytest.mark.parametrize(
    ("billions", "printed", "exact", "inference"),
    [(11, 176, 176, 22), (66, 1056, 1056, 132), (176, 2800, 2816, 352)],
)
def test_figures_that_were_printed_for_inference_are_those_of_training_with_adam(
    billions, printed, exact, inference
):
    """An erratum: T5-11B, OPT-66B and BLOOM; in 16 bits inference takes an eighth."""
    trained, frozen = (ModelStates(**{role: (billions * 10**9,)}) for role in ("trained", "frozen"))
    assert device_bytes(trained, 0, 1) == exact * 10**9
    assert device_bytes(frozen, 0, 1, optimizer="none") == inference * 10**9
    assert printed == pytest.approx(exact, rel=0.01)


def test_one_rank_holds_everything_in_every_stage():
    assert {device_bytes(PAPER, stage, 1) for stage in (0, 1, 2, 3)} == {120_000_000_000}


@pytest.mark.parametrize(
    ("nbytes", "ranks", "elements"), [(16, 2, 4), (16, 3, 3), (48, 5, 5), (16, 64, 1), (0, 2, 0)]
)
def test_a_row_is_padded_to_a_multiple_of_ranks_times_the_dtypes_size(nbytes, ranks, elements):
    assert shard_numel(nbytes, ranks) == elements
    assert elements * 2 * ranks - nbytes in range(ranks * 2)


def test_frozen_weights_have_no_gradients_and_no_states_and_are_sharded_in_stage_3_alone():
    states = ModelStates(quantized=(16, 48), frozen=(7,))
    assert [device_bytes(states, stage, 3, optimizer="none") for stage in (0, 1, 2)] == [16 + 48 + 14] * 3
    assert device_bytes(states, 3, 3, optimizer="none") == 2 * (3 + 8 + 3)  # each row by itself
    assert set(estimate_zero(states, ZeroSetup(3, 3, optimizer="none")).parts) == {
        "quantized weights",
        "frozen weights",
    }


def test_offloaded_parts_rest_where_they_were_sent():
    states = ModelStates(quantized=(8 * MIB, 16), trained=(4 * MIB,))  # the trained shard has 4 MiB, too
    cpu = estimate_zero(states, ZeroSetup(3, 2, 1, offload_param="cpu", offload_optimizer="cpu"))
    assert cpu.per_rank() == {"device": 0, "cpu": 4 * MIB + 8 + 2 * MIB * (2 + 2 + 12), "nvme": 0}
    assert cpu.per_node() == cpu.per_rank()
    both = estimate_zero(
        states, ZeroSetup(3, 2, offload_param="nvme", offload_optimizer="nvme", buffer_count=3)
    )
    assert both.parts["quantized weights"] == {
        "nvme": 4 * MIB,
        "cpu": 8,
    }  # below 1 MiB DeepSpeed leaves a shard in memory
    assert both.parts["optimizer states"] == {"nvme": 2 * MIB * 12}
    assert both.parts["gradients"] == {"cpu": 2 * MIB * 2}
    assert both.parts["swap buffers"] == {"cpu": 2 * 4 * MIB}  # there are two shards
    assert both.per_node()["nvme"] == 2 * both.per_rank()["nvme"]
    assert both.largest_row_nbytes == 8 * MIB


def test_small_states_stay_in_memory_where_nvme_is_asked_for():
    states = ModelStates(frozen=(16,), trained=(8,))
    found = estimate_zero(states, ZeroSetup(3, 2, offload_param="nvme", offload_optimizer="nvme"))
    assert found.per_rank() == {"device": 0, "cpu": 16 + 4 * 16, "nvme": 0}


def test_stage_1_keeps_gradients_whole_where_they_are():
    found = estimate_zero(ModelStates(trained=(1000,)), ZeroSetup(1, 4, offload_optimizer="cpu"))
    assert found.per_rank() == {"device": 4000, "cpu": 250 * 12, "nvme": 0}


def test_a_sum_is_no_tensor_to_gather_or_to_size_buffers_by():
    states = ModelStates(frozen=(7_500_000_000,), is_sum=True)
    found = estimate_zero(states, ZeroSetup(3, 2, optimizer="none", offload_param="nvme"))
    assert found.largest_row_nbytes == 0
    assert found.parts["swap buffers"] == {"cpu": 1_000_000_000}


def test_it_is_json_ready():
    report = estimate_zero(PAPER, ZeroSetup(3, 64)).to_dict()
    assert json.loads(json.dumps(report)) == report
    assert (
        sum(sum(devices.values()) for devices in report["parts_per_rank"].values())
        == report["per_rank"]["device"]
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stage": 4}, "0, 1, 2, or 3"),
        ({"stage": 3, "ranks": 0}, "at least 1"),
        ({"stage": 3, "ranks": 2, "ranks_per_node": 3}, "1 to 2"),
        ({"stage": 3, "optimizer": "adm"}, "Did you mean 'adam'"),
        ({"stage": 3, "offload_param": "disk"}, "none, cpu, or nvme"),
        ({"stage": 2, "offload_param": "cpu"}, "stage 3"),
        ({"stage": 0, "offload_optimizer": "cpu"}, "stage 1"),
    ],
)
def test_what_zero_does_not_have_is_refused(options, said):
    with pytest.raises(PlacementError, match=said):
        ZeroSetup(**options)


def test_training_without_an_optimizer_is_refused():
    with pytest.raises(PlacementError, match="Pass an optimizer"):
        estimate_zero(PAPER, ZeroSetup(3, optimizer="none"))
