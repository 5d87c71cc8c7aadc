"""Tests that a report and a timeline know all accelerators: bytes held, copies, and computation."""

import gc
import itertools

import pytest
import torch

import hfq
from hfq.offload.chrome_trace import chrome_trace
from hfq.plots.documents import read_section
from tests.support import moe_models
from tests.support.accelerator_maps import LAYERS, MIXED, ORDERS
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator
TOKENS = torch.arange(8)[None]
HALVES = {"": "sim:0", LAYERS[2]: "sim:1", "model.norm": "sim:1"} | dict.fromkeys(
    [LAYERS[0], f"{LAYERS[2]}.self_attn", LAYERS[3]], "disk"
)
MAPS = {"1": {"": "sim:0"}, "2": {"": "sim:0", LAYERS[3]: "sim:1"}, **MIXED}
ROUNDING = 512
"""A device rounds each tensor up to a multiple of these bytes."""


def held(sim) -> dict[str, int]:
    gc.collect()
    torch.accelerator.synchronize()
    return {f"sim:{index}": sim.memory_allocated(index) for index in range(3)}


def device_nbytes(model) -> dict[str, int]:
    """Returns the bytes that a report says are held on each accelerator: weights, offload buffers, experts."""
    report, loading = hfq.report(model), model.hf_quantizer.loading
    found = {f"sim:{index}": 0 for index in range(3)}
    parts = [(each.device, each.nbytes) for each in report.devices]
    if report.offload is not None:
        parts += [*report.offload.buffers.items(), *loading.offloader.experts.nbytes_by_device().items()]
        assert sum(report.offload.buffers.values()) == report.offload.buffer_nbytes
    for device, nbytes in parts:
        found[device] = found.get(device, 0) + nbytes
    return {device: found[device] for device in ("sim:0", "sim:1", "sim:2")}


@pytest.mark.parametrize("placement", MAPS)
def test_the_bytes_of_each_device_are_those_held(sim, placement):
    with torch.no_grad():
        load(GPTQ, MAPS[placement])(TOKENS.to("sim:0"))  # the scratch memory of the kernels
    before = held(sim)
    model = load(GPTQ, MAPS[placement])
    found, reported = held(sim), device_nbytes(model)
    tensors = len(model.state_dict()) + 4
    for device, nbytes in reported.items():
        assert 0 <= found[device] - before[device] - nbytes <= tensors * ROUNDING
        assert (nbytes > 0) == (device in {*model.hf_quantizer.loading.executes.values()})


def test_the_bytes_of_experts_are_counted_on_their_device(sim, tmp_path):
    scheme = next(scheme for scheme in moe_models.SCHEMES if scheme.id == "mixtral w1 w2 w3, gptq")
    path = moe_models.write(scheme, moe_models.is_quantized(scheme)).save(tmp_path)
    device_map = {"": "sim:0", LAYERS[1]: "sim:1", "model.norm": "sim:1", "lm_head": "sim:1"}
    device_map |= {f"{LAYERS[0]}.mlp.experts": "disk", f"{LAYERS[1]}.mlp.experts": "cpu"}
    model = load(path, device_map, expert_cache_size=1 << 20)
    cache = model.hf_quantizer.loading.offloader.experts
    assert cache.nbytes == 0
    nbytes = cache.nbytes_by_device()
    assert 0 < nbytes["sim:0"] <= 1 << 20
    assert 0 < nbytes["sim:1"] <= 1 << 20
    before, reported = held(sim), device_nbytes(model)
    del cache, model
    without = held(sim)
    assert all(before[device] - without[device] >= reported[device] for device in nbytes)
    model = load(path, device_map, expert_cache_size=1 << 20)
    with torch.no_grad():
        model(TOKENS.to("sim:0"))
    report = hfq.report(model).offload
    assert 0 < report.expert_nbytes <= report.expert_cache_nbytes == sum(nbytes.values())


def test_a_report_names_the_buffers_of_each_device(sim):
    text = str(hfq.report(load(GPTQ, MIXED["2+cpu+disk"])))
    assert all(f"B on {device}" in text for device in ("sim:0", "sim:1", "cpu"))


@pytest.mark.parametrize("order", ORDERS)
def test_a_timeline_has_the_copies_and_the_computation_of_each_device(sim, order, tmp_path):
    with sim.streams(**ORDERS[order]), torch.no_grad():
        model = load(GPTQ, HALVES)
        with hfq.timeline(model) as timeline:
            model(TOKENS.to("sim:0"))
    loading = model.hf_quantizer.loading
    devices = {unit.name: str(unit.device) for unit in loading.offloader.units}
    assert {*devices.values()} == {"sim:0", "sim:1"}
    copies = [span for span in timeline.spans if span.track == "copy"]
    assert {(span.name, span.device) for span in copies} == {*devices.items()}
    computed = {span.name: span for span in timeline.spans if span.track in ("compute", "other")}
    assert {name: computed[name].device for name in devices} == devices
    assert computed["model.norm"].device == "sim:1"
    assert computed[LAYERS[1]].device == "sim:0"
    assert all(span.start <= span.end for span in timeline.spans)
    assert all(span.end <= computed[span.name].end for span in copies)
    layers = [computed[name] for name in (*LAYERS, "model.norm")]
    assert all(one.end <= other.end for one, other in itertools.pairwise(layers))
    events = chrome_trace(timeline.spans)["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"copy sim:0", "copy sim:1", "compute sim:0", "compute sim:1", "read", "pass", "wait"} <= tracks
    hfq.report(model, timeline=timeline).save(tmp_path / "run.json")
    assert [picture.name for picture in read_section(tmp_path / "run.json").pictures] == [
        "placement",
        "timeline",
    ]


@pytest.mark.parametrize("placement", MAPS)
def test_one_token_is_measured(sim, placement):
    report = hfq.report(load(GPTQ, MAPS[placement]), measure=True)
    assert report.speed.step_achieved_seconds > 0
    assert [span.device for span in report.timeline.spans if span.track == "pass"] == ["sim:0"]
