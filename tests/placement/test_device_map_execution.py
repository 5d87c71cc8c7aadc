"""The map of devices that compute, read by transformers' own matching, gives every tensor the device that hfq
gave it.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.accelerate import expand_device_map, get_device

from hfq.placement.device_map import execution_device, execution_map, resolve_devices

DEVICES = ["cpu", "disk", "xpu:0", "xpu:1"]
SEGMENTS = ["model", "m", "layers", "l", "0", "1", "10", "11", "100"]
LAYERS = [f"model.layers.{i}.w" for i in range(12)]


def ancestors(name: str) -> list[str]:
    """The name, what it is part of, and at last the model itself."""
    found = [name]
    while name:
        name = name.rpartition(".")[0]
        found.append(name)
    return found


@st.composite
def placements(draw):
    """(device_map, names of tensors, names of modules) where each tensor has a home."""
    modules = st.lists(st.sampled_from(SEGMENTS), max_size=4)
    name = st.tuples(modules, st.sampled_from(["w", "b", "weight"])).map(
        lambda parts: ".".join([*parts[0], parts[1]])
    )
    names = draw(st.lists(name, min_size=1, max_size=10, unique=True))
    parts = sorted({part for name in names for part in ancestors(name)})
    keys = draw(st.lists(st.sampled_from(parts), unique=True, max_size=6))
    for name in names:
        if not set(ancestors(name)) & set(keys):
            keys.append(draw(st.sampled_from(ancestors(name))))
    return {key: draw(st.sampled_from(DEVICES)) for key in keys}, names, parts


def executed(device_map, names, modules):
    """(what hfq means, what transformers reads)."""
    devices = resolve_devices(device_map, names, modules)
    main = execution_device(devices.values())
    meant = {name: main if device in ("cpu", "disk") else device for name, device in devices.items()}
    computing = execution_map(device_map, devices, main)
    assert {name: get_device(computing, name) for name in names} == expand_device_map(computing, names)
    return meant, expand_device_map(computing, names)


@settings(max_examples=100, deadline=None)
@given(placements())
def test_transformers_reads_every_device_as_hfq_means_it(placement):
    meant, read = executed(*placement)
    assert read == meant


def test_transformers_alone_would_misplace_what_shares_a_prefix():
    names = LAYERS
    device_map = {"": "xpu:0", "model.layers.1": "xpu:1"}
    assert expand_device_map(device_map, names)["model.layers.10.w"] == "xpu:1"
    meant, read = executed(device_map, names, ["", *(n[:-2] for n in names)])
    assert read == meant
    assert [name for name in names if read[name] == "xpu:1"] == ["model.layers.1.w"]


def test_a_module_that_transformers_would_misplace_gains_one_key_of_its_own():
    device_map = {"": "xpu:0", "layers.1": "xpu:1"}
    devices = resolve_devices(
        device_map, ["layers.1.a", "layers.10.a", "layers.10.b"], ["", "layers", "layers.1", "layers.10"]
    )
    assert execution_map(device_map, devices, "xpu:0") == device_map | {"layers.10": "xpu:0"}


@pytest.mark.parametrize("other", ["h_1", "hx1"])
def test_a_dot_that_matches_another_letter_is_corrected_where_the_devices_differ(other):
    meant, read = executed({"": "xpu:0", "h.1": "xpu:1"}, ["h.1.w", f"{other}.w"], ["", "h", "h.1", other])
    assert read == meant


@pytest.mark.parametrize("other", ["h_1", "hx1"])
def test_a_dot_that_matches_another_letter_is_no_error_where_the_devices_agree(other):
    meant, read = executed({"": "cpu", "h.1": "disk"}, ["h.1.w", f"{other}.w"], ["", "h", "h.1", other])
    assert read == meant


def test_what_rests_on_cpu_or_disk_computes_on_the_main_device():
    devices = resolve_devices(
        {"a": "cpu", "b": "disk", "c": "xpu:1"}, ["a.w", "b.w", "c.w"], ["", "a", "b", "c"]
    )
    assert execution_map({"a": "cpu", "b": "disk", "c": "xpu:1"}, devices, "xpu:1") == {
        "a": "xpu:1",
        "b": "xpu:1",
        "c": "xpu:1",
    }
    assert execution_map({"": "disk"}, {"a.w": "disk"}, "cpu") == {"": "cpu"}


def test_a_map_that_transformers_reads_rightly_gains_no_key():
    device_map = {"": "xpu:0", "a.1": "xpu:1", "b": "xpu:0"}
    names = ["a.1.w", "a.2.w", "b.w", "w"]
    devices = resolve_devices(device_map, names, ["", "a", "a.1", "a.2", "b"])
    assert execution_map(device_map, devices, "xpu:0") == device_map


def test_the_map_of_the_user_is_left_as_it_was():
    device_map = {"": "disk", "model.layers.1": "xpu:0"}
    devices = resolve_devices(device_map, LAYERS, ["", *(name[:-2] for name in LAYERS)])
    execution_map(device_map, devices, "xpu:0")
    assert device_map == {"": "disk", "model.layers.1": "xpu:0"}
