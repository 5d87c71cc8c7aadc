"""Tests that a placement that cannot work is refused before the load, with devices, bytes, and a fix."""

import ast
import gc
import re

import pytest
import torch

from hfq.errors import HfqError, PlacementError
from hfq.loading import model_loader
from tests.support.accelerator_maps import LAYERS, MIXED
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator


@pytest.fixture
def capacity(sim):
    """capacity(device, nbytes): leaves so many bytes of a device free until the test ends."""
    gc.collect()

    def leave(device: int, nbytes: int) -> None:
        sim.set_capacity(device, sim.memory_allocated(device) + nbytes)

    yield leave
    for device in range(3):
        sim.set_capacity(device, 1 << 30)


@pytest.fixture(autouse=True)
def nothing_stays(sim):
    """No test leaves bytes on a device."""
    gc.collect()
    before = [sim.memory_allocated(device) for device in range(3)]
    yield
    gc.collect()
    assert [sim.memory_allocated(device) for device in range(3)] == before


def refused(device_map, **options) -> HfqError:
    """Returns the error of a load that must fail before weights are read."""
    with pytest.MonkeyPatch.context() as patch:
        reads = []
        patch.setattr(model_loader, "load_quantized_weights", lambda *_: reads.append("weights"))
        with pytest.raises(HfqError) as caught:
            load(GPTQ, device_map, **options)
    assert not reads
    assert "Nothing was loaded" in caught.value.message
    return caught.value


def devices_of(error: HfqError) -> list[str]:
    """Returns the devices that the fix of an error names."""
    return re.findall(r'"([a-z]+(?::\d+)?)"', error.fix)


@pytest.mark.parametrize("value", ["sim:7", 7, "cuda:0", "xpu:0", torch.device("xpu", 1)])
@pytest.mark.parametrize("is_dict", [True, False], ids=["map", "device"])
def test_an_accelerator_that_is_not_there_is_named_with_those_that_are(sim, value, is_dict):
    error = refused({"": value, "lm_head": "cpu"} if is_dict else value)
    assert isinstance(error, PlacementError)
    assert str(value) in error.found
    assert re.search(r"sim:0 \([\d,]+ B free\), sim:1 \([\d,]+ B free\)", error.expected)
    assert devices_of(error) == ["cpu", "disk", "sim:0", "sim:1", "sim:2"]
    for device in devices_of(error):
        load(GPTQ, {"": device})


@pytest.mark.parametrize("other", ["cuda:1", "xpu:0", torch.device("xpu", 0)])
@pytest.mark.parametrize("own", ["sim:0", 0])
def test_a_map_of_two_kinds_is_refused(sim, own, other):
    error = refused({"": own, LAYERS[1]: other, LAYERS[2]: "cpu", LAYERS[3]: "disk"})
    assert "several kinds" in error.message
    assert "sim:0 (" in error.expected
    assert all(str(device) in error.found for device in (own, other))
    assert "sim:1" in devices_of(error)


@pytest.mark.parametrize("limits", [{0: 1000, 1: 1000}, {0: 600_000, 1: 100_000, "cpu": 1000, "disk": 0}])
def test_more_bytes_than_all_devices_are_refused_with_limits_that_hold_them(sim, limits):
    error = refused("auto", max_memory=limits)
    assert re.search(r"at least [\d,]+ B on (sim:\d|disk|cpu)", error.expected)
    assert error.found.endswith(" B")
    fixes = [ast.literal_eval(text) for text in re.findall(r"max_memory=(\{.*?\})", error.fix)]
    assert fixes
    for fix in fixes:
        load(GPTQ, "auto", max_memory=fix)


def test_weights_that_a_device_has_no_room_for_are_refused(sim, capacity):
    capacity(0, 500_000)
    error = refused({"": "sim:0", LAYERS[3]: "sim:1"})
    assert re.fullmatch(r"sim:0: [\d,]+ B of weights and 0 B of offload buffer", error.expected)
    assert error.found == "sim:0: 500,000 B free"
    assert 'device_map="auto"' in error.fix
    load(GPTQ, "auto")


@pytest.mark.parametrize("name", MIXED)
def test_a_capacity_for_the_weights_but_not_the_buffer_is_refused(sim, capacity, name):
    held = load(GPTQ, MIXED[name]).hf_quantizer.loading.plan.nbytes_by_device()
    gc.collect()
    device = max(device for device in held if device.startswith("sim"))
    capacity(int(device[-1]), held[device] + 8000)
    error = refused(MIXED[name])
    weights, buffer = re.fullmatch(
        rf"{device}: ([\d,]+) B of weights and ([\d,]+) B of .*", error.expected
    ).groups()
    assert weights == f"{held[device]:,}"
    assert int(buffer.replace(",", "")) > 100_000
    assert error.found == f"{device}: {held[device] + 8000:,} B free"
    load(GPTQ, "auto")


def test_automatic_limits_leave_room_for_the_buffer(sim, capacity):
    for device in range(3):
        capacity(device, 400_000)
    error = refused("auto")
    assert re.search(r"at least [\d,]+ B on sim:0 .*offload buffer", error.expected)
    assert "too little free memory" in error.message
    assert error.found.startswith("360,000 B")
    assert "max_memory" not in str(error)
    load(GPTQ, "cpu")
    capacity(0, 700_000)
    load(GPTQ, "auto")


def test_limits_above_the_free_bytes_are_named_with_them(sim, capacity):
    capacity(0, 700_000)
    error = refused("auto", max_memory={0: "100GB"})
    assert "max_memory places more" in error.message
    assert error.found == "sim:0: 700,000 B free"
    assert "device_map" not in error.fix
    limits = ast.literal_eval(re.search(r"max_memory=(\{.*?\})", error.fix)[1])
    assert limits == {0: 700_000}
    load(GPTQ, "auto", max_memory=limits)


def test_limits_of_devices_that_are_there_warn_of_none(sim, caplog):
    load(GPTQ, "auto", max_memory={0: 700_000, 1: 700_000})
    assert not [record for record in caplog.records if "not available" in record.getMessage()]


def test_a_divided_layer_is_refused_with_the_keys_to_remove(sim):
    error = refused({"": "sim:0", LAYERS[1]: "sim:1", f"{LAYERS[1]}.mlp": "sim:0"})
    assert f'remove the longer keys, which begin with "{LAYERS[1]}."' in error.fix


@pytest.mark.parametrize("key", [3, 7, -1])
def test_a_limit_of_a_device_that_is_not_there_is_refused(sim, key):
    error = refused("auto", max_memory={0: "1GB", key: "1GB"})
    assert f"max_memory[{key}]" in error.message
    assert "sim:2 (" in error.expected
    assert error.fix == 'Use "cpu" or "disk" or 0 or 1 or 2.'


@pytest.mark.parametrize("limit", ["lots", "", "-1GB", None, float("nan"), True])
def test_a_limit_that_is_no_size_is_refused(sim, limit):
    error = refused("auto", max_memory={0: limit})
    assert "max_memory[0] is not a size" in error.message
    assert error.found == repr(limit)
    load(GPTQ, "auto", max_memory={0: 1_400_000})
