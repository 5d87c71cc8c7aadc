"""The ladder of formats: bytes by each format's own tensors, and the best that fits."""

import pytest

from hfq.errors import PlacementError
from hfq.placement.estimate.best_format import LADDER, Shapes, choose_format
from hfq.placement.estimate.estimate import ModelSizes, Workload
from hfq.placement.estimate.kv_cache import Activations, KvLayer

SIZES = ModelSizes((), (KvLayer(128, 128),), Activations(256, 512, 1000, 1), {}, 1.0, "bfloat16", 1)
SHAPES = Shapes([(256, 256)] * 4, 1000, 4.5)
WORK = Workload(1, 1)
WEIGHTS = 4 * 256 * 256


def choose(budget):
    return choose_format(SHAPES, SIZES, WORK, budget)


def test_rungs_take_what_their_tensors_take():
    rungs = {rung["name"]: rung["weights_nbytes"] - 1000 for rung in choose(1 << 30)["rungs"]}
    assert rungs["bf16"] == WEIGHTS * 2
    assert rungs["fp8, a scale for each 128×128"] == WEIGHTS + 4 * 2 * 2 * 2  # bfloat16 scales
    scales, zeros = 4 * 2 * 256 * 2, 4 * 2 * 256 // 2
    assert rungs["gptq int4 g128"] == WEIGHTS // 2 + scales + zeros
    assert list(rungs) == list(LADDER)
    assert list(rungs.values()) == sorted(rungs.values(), reverse=True)


def test_the_best_that_fits_is_chosen_and_more_budget_never_chooses_worse():
    rungs = choose(1 << 30)["rungs"]
    for rung in rungs:
        assert choose(rung["total_nbytes"])["best"] == rung["name"]
        if rung is not rungs[-1]:
            assert choose(rung["total_nbytes"] - 1)["best"] != rung["name"]
    with pytest.raises(PlacementError) as refused:
        choose(rungs[-1]["total_nbytes"] - 1)
    assert str(rungs[-1]["total_nbytes"]) in refused.value.fix


def test_layers_that_groups_do_not_divide_stay_as_they_are():
    odd = choose_format(Shapes([(256, 100)], 0, 16), SIZES, WORK, 1 << 30)
    assert {rung["weights_nbytes"] for rung in odd["rungs"]} == {256 * 100 * 2}
