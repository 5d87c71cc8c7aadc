"""Tests of automatic device maps with max_memory: memory limits and unchanged results."""

import dataclasses
import functools
import json
import logging
import re

import pytest
import torch

from hfq import HfqConfig, PlacementError
from hfq.checkpoint import Reader
from hfq.formats.fp8 import Fp8
from hfq.integrations.transformers.quantizer import HfqQuantizer
from hfq.loading import automatic_map
from hfq.loading.context import within_load
from tests.support import models, moe_models, tiny_models
from tests.support.models import logits

PATHS = {name: tiny_models.DATA / f"tiny-llama-{name}" for name in ("gptq", "fp8")}
TOKENS = torch.arange(3, 12)[None]
load = functools.partial(models.load, device_map="auto")


@pytest.fixture(scope="module", params=PATHS)
def path(request):
    return PATHS[request.param]


@pytest.fixture(scope="module")
def resident(path):
    return load(path)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return tiny_models.write_model(
        tmp_path_factory.mktemp("untied"), tiny_models.model_tensors(Fp8()), {"quant_method": "fbgemm_fp8"}
    )


@pytest.fixture(scope="module")
def whole(untied):
    return load(untied)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return moe_models.save_wide(tmp_path_factory.mktemp("moe"), num_experts=16)


@pytest.fixture(scope="module")
def whole_moe(moe):
    return load(moe)


def units_of(model, **changes):
    loading = model.hf_quantizer.loading
    return automatic_map.gather_units(model, dataclasses.replace(loading.match, **changes), loading._dtypes)


def total(model) -> int:
    return sum(unit.nbytes for unit in units_of(model))


def planned(model, limits, cache=0):
    """Returns the (device map, budget) of a load of this model."""
    loading = model.hf_quantizer.loading
    return automatic_map.plan_map(model, loading.match, loading._dtypes, limits, cache)


def test_everything_is_resident_where_nothing_is_asked(resident):
    loading = resident.hf_quantizer.loading
    assert resident.hfq_device_map == {"": "cpu"}
    assert (loading.budget.buffers, loading.budget.onloaded_nbytes) == ({}, 0)
    assert loading.offloader is None
    buffers = sum(buffer.nbytes for buffer in resident.buffers())
    rounding = sum(16 * len(module.infos) for module in loading.quantized.values())
    assert 0 <= loading.budget.stored_nbytes["cpu"] - buffers - loading.plan.resident_nbytes() <= rounding


@pytest.mark.parametrize(("share", "device_map"), [(0.999, "balanced"), (0.55, "sequential")])
def test_what_rests_and_the_ring_stay_within_the_limit(path, resident, share, device_map):
    limit = int(total(resident) * share) // 1000 * 1000
    model = load(path, device_map=device_map, max_memory={"cpu": f"{limit // 1000}KB"})
    loading = model.hf_quantizer.loading
    ring = loading.offloader.buffer_nbytes
    assert loading.plan.resident_nbytes() + ring <= limit
    assert 0 <= ring - loading.budget.buffers["cpu"] <= loading.budget.read_ahead_nbytes()
    assert loading.plan.onloaded_nbytes() > 0
    assert next(iter(model.hfq_device_map.values())) == "cpu"
    assert torch.equal(logits(model, TOKENS), logits(resident, TOKENS))


def test_too_little_is_refused_before_anything_is_read_and_the_error_names_what_works(
    path, resident, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(Reader, "read_into", lambda *_: pytest.fail("a weight was read"))
        with pytest.raises(PlacementError, match="max_memory is too small") as error:
            load(path, max_memory={"cpu": 1000})
    least, most = (json.loads(way) for way in re.findall(r"max_memory=(\{[^}]*\})", error.value.fix))
    assert torch.equal(logits(load(path, max_memory=least), TOKENS), logits(resident, TOKENS))
    assert least["cpu"] < most["cpu"] == total(resident)
    assert planned(resident, most)[0] == {"": "cpu"}
    with pytest.raises(PlacementError, match="max_memory is too small"):
        planned(resident, {"cpu": least["cpu"] - 1})


def test_a_disk_that_may_hold_nothing_is_obeyed(resident):
    limit = total(resident)
    assert planned(resident, {"cpu": limit, "disk": 0})[0] == {"": "cpu"}
    with pytest.raises(
        PlacementError, match=rf'on disk(?s:.)*Pass max_memory=\{{"cpu": {limit}, "disk": 0\}}'
    ):
        planned(resident, {"cpu": limit - 1, "disk": 0})


def test_the_numbers_are_logged(resident, caplog):
    with caplog.at_level(logging.INFO, "hfq"):
        _, budget = planned(resident, {"cpu": total(resident) - 1})
    assert [record.getMessage() for record in caplog.records] == [f"hfq: placed by max_memory: {budget}"]


def test_tied_weights_are_one_unit_that_is_read_whole(resident):
    units = {unit.name: unit for unit in units_of(resident)}
    assert list(units)[1:] == [
        *(f"model.layers.{layer}" for layer in range(4)),
        "model.norm",
        "model.embed_tokens",
    ]
    assert units["model.embed_tokens"].kind == "other"
    assert units["model.embed_tokens"].nbytes == resident.lm_head.weight.nbytes


def test_a_tied_head_is_shown_where_its_table_is(resident):
    with pytest.raises(PlacementError) as error:
        planned(resident, {"cpu": 1000})
    least = json.loads(re.search(r"\{[^}]*\}", error.value.fix).group())
    device_map, _ = planned(resident, least)
    assert device_map["lm_head"] == device_map["model.embed_tokens"] == "disk"


def test_an_untied_embedding_leaves_first(untied, whole):
    assert [unit.kind for unit in units_of(whole)] == [
        "fixed",
        "embedding",
        "block",
        "block",
        "other",
        "other",
    ]
    model = load(untied, max_memory={"cpu": total(whole) - 1})
    assert model.hfq_device_map == {"": "cpu", "model.embed_tokens": "disk"}
    assert model.hf_quantizer.loading.budget.buffers == {}
    assert torch.equal(logits(model, TOKENS), logits(whole, TOKENS))


def test_what_cannot_be_offloaded_is_fixed(whole):
    norm, blocks = "model.layers.1.input_layernorm.weight", {}
    for merged in ({}, {norm: ["a", "b"]}):
        units = {unit.name: unit for unit in units_of(whole, merged=merged)}
        blocks[len(merged)] = units["model.layers.1"].nbytes
    assert units[norm].kind == "fixed"
    assert units[norm].nbytes == blocks[0] - blocks[1] == 4 * 128


def test_a_head_that_is_not_stored_stays_where_it_computes(whole):
    unquantized = {
        name: info
        for name, info in whole.hf_quantizer.loading.match.unquantized.items()
        if name != "lm_head.weight"
    }
    assert {unit.name: unit.kind for unit in units_of(whole, unquantized=unquantized)}[
        "lm_head.weight"
    ] == "fixed"


def test_experts_leave_before_blocks(moe, whole_moe):
    units = {unit.name: unit for unit in units_of(whole_moe)}
    experts = [f"model.layers.{layer}.mlp.experts" for layer in range(moe_models.LAYERS)]
    assert [unit.name for unit in units.values() if unit.kind == "experts"] == experts
    cache = 2 * max(unit.routed_nbytes for unit in units.values())
    least = cache + sum(unit.nbytes for unit in units.values() if unit.kind not in ("experts", "embedding"))
    model = load(moe, max_memory={"cpu": least}, expert_cache_size=0)
    assert model.hfq_device_map == {"": "cpu", **dict.fromkeys(["model.embed_tokens", *experts], "disk")}
    assert torch.equal(logits(model, moe_models.IDS), logits(whole_moe, moe_models.IDS))
    budget = model.hf_quantizer.loading.budget
    assert (budget.buffers, budget.on_demand_nbytes) == ({}, sum(units[name].nbytes for name in experts))


@pytest.mark.parametrize("size", [0, 57_000, "200KB", None])
def test_the_cache_of_experts_counts(moe, whole_moe, size):
    units = units_of(whole_moe)
    model = load(moe, max_memory={"cpu": total(whole_moe) - 1000}, expert_cache_size=size)
    budget, offloader = model.hf_quantizer.loading.budget, model.hf_quantizer.loading.offloader
    least = 2 * max(unit.routed_nbytes for unit in units)
    experts = {unit.name: unit.nbytes for unit in units if unit.kind == "experts"}
    assert budget.expert_caches == {
        "cpu": {0: least, 57_000: least, "200KB": 200_000, None: sum(experts.values()) - 1000}[size]
    }
    assert offloader.experts.budget <= budget.expert_caches["cpu"]
    assert budget.headroom()["cpu"] >= 0
    staying = [name for name in experts if budget.devices[name] == "cpu"]
    assert len(staying) == (1 if size in (0, 57_000) else 0)  # by default the cache takes their memory
    assert torch.equal(logits(model, moe_models.IDS), logits(whole_moe, moe_models.IDS))


def test_a_part_may_stay_while_what_is_around_it_leaves(whole, monkeypatch):
    devices = {"": "cpu", "model.layers.1": "disk", "model.layers.1.mlp": "cpu", "model.norm": "cpu"}
    budget = dataclasses.replace(whole.hf_quantizer.loading.budget, devices=devices)
    monkeypatch.setattr(automatic_map, "plan_devices", lambda *_: budget)
    assert planned(whole, {"cpu": 1})[0] == {"": "cpu", "model.layers.1": "disk", "model.layers.1.mlp": "cpu"}


def test_one_accelerator_computes_and_the_cpu_holds_the_rest(whole, monkeypatch):
    monkeypatch.setattr(
        automatic_map, "check_device", lambda key: f"xpu:{key}" if isinstance(key, int) else key
    )
    embedding = next(unit.nbytes for unit in units_of(whole) if unit.kind == "embedding")
    device_map, budget = planned(whole, {0: total(whole) - embedding, 1: 0, "cpu": embedding})
    assert device_map == {"": 0, "model.embed_tokens": "cpu"}
    assert budget.headroom() == {"xpu:0": 0, "cpu": 0}


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({"cpu": 5}, ["cpu"]),
        ({"disk": 5}, ["cpu"]),
        ({0: 0, "cpu": 5}, ["cpu"]),
        ({0: 5, "cpu": 5}, [0]),
        ({"mps": 5}, ["mps"]),
        ({0: 0, 1: 5}, [1]),
        ({0: 5, 1: 5, "cpu": 5}, [0, 1]),
    ],
)
def test_which_devices_compute(limits, found):
    assert automatic_map.computing_devices(limits) == found
    with within_load(max_memory=limits):
        assert set(HfqQuantizer(HfqConfig()).adjust_max_memory(limits)) == {found[0]}
