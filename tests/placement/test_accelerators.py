"""Tests of the accelerators of this machine, on a machine without one; see tests/accelerator for others."""

import types

import pytest
import torch

from hfq.errors import PlacementError
from hfq.placement import accelerators
from hfq.placement.accelerators import (
    accelerator_kind,
    check_room,
    describe_accelerator,
    free_nbytes,
    list_accelerators,
)


@pytest.fixture
def machine(monkeypatch):
    """machine(kind, count, memory, allocated, reserved): mocks what torch finds."""

    def make(kind, count=0, memory=None, allocated=0, reserved=0):
        def memory_info(device):
            if memory is None:
                raise RuntimeError("Allocator for this device is not a DeviceAllocator.")
            return memory

        for name, value in {
            "current_accelerator": lambda: kind and torch.device(kind),
            "device_count": lambda: count,
            "get_memory_info": memory_info,
            "memory_allocated": lambda device: allocated,
            "memory_reserved": lambda device: reserved,
        }.items():
            monkeypatch.setattr(torch.accelerator, name, value)

    return make


@pytest.mark.parametrize(
    ("kind", "count", "devices"),
    [
        (None, 0, []),
        ("cuda", 0, []),  # built for CUDA, on a machine without it
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("xpu", 1, ["xpu:0"]),
        ("mps", 1, ["mps"]),
    ],
)
def test_accelerators_are_listed_as_devices_of_a_map(machine, kind, count, devices):
    machine(kind, count)
    assert list_accelerators() == devices
    assert accelerator_kind() == (kind if count else None)


def test_free_bytes_include_what_the_allocator_keeps(machine):
    machine("cuda", 1, (100, 1000), allocated=30, reserved=70)
    assert free_nbytes("cuda:0") == 140
    machine("mps", 1)
    assert free_nbytes("mps") is None


def test_an_error_of_the_device_is_not_taken_for_a_missing_function(machine, monkeypatch):
    def fail(device):
        raise torch.AcceleratorError("ECC error")

    machine("cuda", 1, (1, 1))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", fail)
    with pytest.raises(torch.AcceleratorError):
        free_nbytes("cuda:0")


def test_an_accelerator_is_described_by_name_and_bytes(machine, monkeypatch):
    machine("xpu", 1, (3 * 10**9, 4 * 10**9))
    facts = types.SimpleNamespace(name="Some GPU", total_memory=5 * 10**9)
    module = types.SimpleNamespace(get_device_properties=lambda index: facts)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert str(describe_accelerator("xpu:0")) == "xpu:0: Some GPU, 5.0 GB, 3.0 GB free"
    machine("mps", 1)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: types.SimpleNamespace())
    assert str(describe_accelerator("mps")) == "mps: mps"


def test_every_device_that_is_too_small_is_named_with_its_bytes(monkeypatch):
    free = {"xpu:0": 100, "xpu:1": 99, "xpu:2": None}
    monkeypatch.setattr(accelerators, "free_nbytes", free.__getitem__)
    check_room({"xpu:0": 60, "xpu:2": 1 << 60, "cpu": 1 << 60, "disk": 1 << 60}, {"xpu:0": 40})
    with pytest.raises(PlacementError, match="more on an accelerator than it has free") as caught:
        check_room({"xpu:0": 61, "xpu:1": 100}, {"xpu:0": 40})
    assert caught.value.expected == (
        "xpu:0: 61 B of weights and 40 B of offload buffer; xpu:1: 100 B of weights and 0 B of offload buffer"
    )
    assert caught.value.found == "xpu:0: 100 B free; xpu:1: 99 B free"
