"""Device maps by whole dotted names: which key takes a tensor, which values are devices, and what is
refused.
"""

import re

import pytest
import torch

from hfq.errors import PlacementError
from hfq.placement.device_map import check_device, check_present, execution_device, leaf_map, resolve_devices

LAYERS = [f"model.layers.{i}" for i in range(12)]
NAMES = [
    "model.embed.weight",
    *(f"{layer}.mlp.{part}" for layer in LAYERS for part in ("qweight", "scales")),
    "lm_head.weight",
]
MODULES = [
    "",
    "model",
    "model.embed",
    "model.layers",
    *LAYERS,
    *(f"{layer}.mlp" for layer in LAYERS),
    "lm_head",
]


def devices(device_map, names=NAMES, modules=MODULES):
    return resolve_devices(device_map, names, modules)


def taken(device_map, device: str) -> list[str]:
    return [name for name, found in devices(device_map).items() if found == device]


def test_no_device_map_puts_everything_on_the_cpu():
    assert devices(None) == dict.fromkeys(NAMES, "cpu")


def test_the_empty_key_is_the_default_of_all():
    assert devices({"": "disk"}) == dict.fromkeys(NAMES, "disk")


def test_a_key_takes_whole_names_only():
    assert taken({"": "cpu", "model.layers.1": "disk"}, "disk") == [
        "model.layers.1.mlp.qweight",
        "model.layers.1.mlp.scales",
    ]


def test_a_dot_in_a_key_is_a_dot():
    names, modules = ["a.b.w", "a_b.w", "axb.w"], ["", "a", "a.b", "a_b", "axb"]
    assert devices({"": "cpu", "a.b": "disk"}, names, modules) == {
        "a.b.w": "disk",
        "a_b.w": "cpu",
        "axb.w": "cpu",
    }


def test_the_longest_key_wins_in_any_order():
    device_map = {
        "model.layers.3.mlp": "disk",
        "": "disk",
        "model.layers": "disk",
        "model.layers.3": "cpu",
        "model": "cpu",
    }
    expected = {"lm_head.weight": "disk", "model.embed.weight": "cpu"}
    expected |= {name: "disk" for name in NAMES if name.startswith("model.layers.")}
    assert devices(device_map) == expected
    assert devices(dict(reversed(device_map.items()))) == expected


def test_a_key_may_name_one_tensor():
    assert taken({"": "cpu", "model.layers.2.mlp.scales": "disk"}, "disk") == ["model.layers.2.mlp.scales"]


def test_every_tensor_keeps_its_place_in_the_order_of_names():
    assert list(devices({"": "cpu"})) == NAMES


def test_a_tensor_at_the_top_of_the_model_is_covered_by_its_name_or_the_default():
    assert devices({"scale": "disk", "a": "cpu"}, ["scale", "a.w"], ["", "a"]) == {
        "scale": "disk",
        "a.w": "cpu",
    }
    assert devices({"": "disk", "a": "cpu"}, ["scale", "a.w"], ["", "a"]) == {"scale": "disk", "a.w": "cpu"}


def test_generators_of_names_are_read_once():
    assert resolve_devices({"": "cpu"}, iter(NAMES), iter(MODULES)) == dict.fromkeys(NAMES, "cpu")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("model.layer.1", ". Did you mean 'model.layers.1"),
        ("lm_haed", ". Did you mean 'lm_head'?"),
        ("model.layers.", "Did you mean"),
        ("model.layers.12", "Did you mean"),
        ("zzz", ""),
    ],
)
def test_a_key_that_matches_nothing_is_refused_with_a_hint(key, hint):
    with pytest.raises(PlacementError, match="contains keys that match no module") as caught:
        devices({"": "cpu", key: "cpu"})
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(repr(key) + (hint if hint.startswith(";") else ""))
    assert hint in caught.value.problems[0]


def test_all_unknown_keys_are_listed():
    with pytest.raises(PlacementError) as caught:
        devices({"": "cpu", "x1": "cpu", "lm_head": "cpu", "x2": "disk"})
    assert [re.match(r"'(\w+)'", problem)[1] for problem in caught.value.problems] == ["x1", "x2"]


@pytest.mark.parametrize(
    ("device_map", "left_out"),
    [
        ({}, ("model", "lm_head")),
        ({"lm_head": "cpu"}, ("model",)),
        ({"model.layers": "cpu", "lm_head": "disk"}, ("model.embed",)),
        ({"model": "cpu"}, ("lm_head",)),
        ({"model.embed": "cpu", "lm_head": "cpu", LAYERS[0]: "disk"}, tuple(LAYERS[1:])),
    ],
)
def test_a_part_that_is_left_out_is_refused_by_its_largest_module(device_map, left_out):
    with pytest.raises(PlacementError, match="does not cover all tensors") as caught:
        devices(device_map)
    assert caught.value.problems == left_out


@pytest.mark.parametrize("value", ["cpu", torch.device("cpu")])
def test_the_cpu_has_one_name(value):
    assert check_device(value) == "cpu"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("xpu:1", "xpu:1"),
        (torch.device("xpu", 2), "xpu:2"),
        ("xpu", "xpu:0"),
        ("mps", "mps"),
        ("disk", "disk"),
    ],
)
def test_other_devices_are_named_with_their_number(value, text):
    assert check_device(value) == text


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("dsik", "Did you mean 'disk'?"),
        ("cdua", "Did you mean 'cuda'?"),
        ("cuda:x", "Did you mean 'cuda'?"),
        ("meta", ""),
        (torch.device("meta"), ""),
        (None, ""),
        (True, ""),
        (1.5, ""),
        ("", ""),
        (["cpu"], ""),
    ],
)
def test_a_value_that_is_no_device_is_refused_with_a_hint(value, hint):
    with pytest.raises(PlacementError, match=r"device_map\['lm_head'\] is not a device") as caught:
        check_device(value, "lm_head")
    assert hint in caught.value.message
    assert caught.value.found == repr(value)


def simulate(monkeypatch, kind, count):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(("kind", "index"), [("cuda", 0), ("cuda", 7), ("xpu", 1), (None, 0)])
def test_an_accelerator_that_this_machine_does_not_have_is_refused(monkeypatch, kind, index):
    simulate(monkeypatch, kind, index)
    for value in (f"{kind or 'cuda'}:{index}", torch.device(kind or "cuda", index), index):
        with pytest.raises(PlacementError, match="an accelerator that this machine does not have") as caught:
            check_device(value)
        assert caught.value.expected.startswith("cpu, disk")


@pytest.mark.parametrize("device_map", [{"": "xpu:0", "lm_head": "cuda:1"}, {"": 0, "lm_head": "mps"}])
def test_accelerators_of_two_kinds_are_refused(device_map):
    with pytest.raises(PlacementError, match="accelerators of several kinds") as caught:
        devices({"model": "cpu", **device_map})
    assert all(str(value) in caught.value.found for value in device_map.values())


@pytest.mark.parametrize("kind", ["xpu", "cuda"])
def test_a_bare_number_is_one_of_the_accelerator_that_torch_finds(monkeypatch, kind):
    simulate(monkeypatch, kind, 4)
    assert check_device(3) == f"{kind}:3"


@pytest.mark.parametrize("value", [-1, 10**30])
def test_a_number_that_no_device_can_have_is_refused(value):
    with pytest.raises(PlacementError, match="is not a device"):
        check_device(value)


@pytest.mark.parametrize(("accelerator", "fits"), [("xpu", True), ("cuda", False), (None, False)])
def test_homes_on_an_accelerator_that_torch_does_not_find_are_refused(monkeypatch, accelerator, fits):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: accelerator and torch.device(accelerator)
    )
    check_present(["cpu", "disk", "cpu"])
    if fits:
        check_present(["cpu", "xpu:0", "xpu:1"])
        return
    with pytest.raises(PlacementError, match="an accelerator that this machine does not have") as caught:
        check_present(["cpu", "xpu:0", "xpu:1"])
    assert caught.value.found == "'xpu:0'"


def test_a_gpu_that_this_machine_has_is_named_with_its_number(monkeypatch):
    simulate(monkeypatch, "cuda", 2)
    assert [check_device(value) for value in ("cuda", "cuda:0", "cuda:1", torch.device("cuda"))] == [
        "cuda:0",
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]


def test_each_unit_has_a_key_of_its_own_in_the_map_for_accelerate():
    executes = {"model.layers.0.w": "sim:0", "model.layers.1.w": "sim:0", "lm_head.w": "sim:1"}
    modules = ["", "model", "model.layers", "model.layers.0", "model.layers.1", "model.rotary", "lm_head"]
    units = ["model.layers.0", "model.layers.1", "lm_head"]
    assert leaf_map(executes, {"": "sim:1"}, "sim:0", modules, units) == {
        "model.layers.0": 0,
        "model.layers.1": 0,
        "model.rotary": 1,
        "lm_head": 1,
    }


@pytest.mark.parametrize(
    ("resting", "device"),
    [
        ([], "cpu"),
        (["cpu", "disk"], "cpu"),
        (["disk"], "cpu"),
        (["cpu", "xpu:1", "xpu:0"], "xpu:1"),
        (["disk", "mps"], "mps"),
    ],
)
def test_offloaded_modules_compute_on_the_first_accelerator(resting, device):
    assert execution_device(resting) == device
