"""Tests of the placement map: one unit per layer, and merged rows in the table."""

import pytest

from hfq.placement.plan import ModuleDevice
from hfq.plots.placement_map import device_colour, gather_units, placement_picture
from tests.plots.conftest import MODULES


def test_modules_of_a_layer_are_one_part():
    units = gather_units(ModuleDevice(**module) for module in MODULES)
    assert [unit.short for unit in units] == ["embed_tokens", "layers.0", "layers.1", "layers.2", "lm_head"]
    assert units[1].by_device == {"cpu": (4000, 2000)}
    assert units[2].modules == 2
    assert sum(unit.nbytes for unit in units) == sum(module["nbytes"] for module in MODULES)


@pytest.mark.parametrize(
    ("module", "unit"),
    [
        ("transformer.h.3.attn.c_attn", "transformer.h.3"),
        ("model.layers.5.mlp.experts.7.up", "model.layers.5"),
        ("", ""),
        ("a.b", "a.b"),
    ],
)
def test_the_first_number_ends_the_name_of_a_part(module, unit):
    assert gather_units([ModuleDevice(module, "cpu", "cpu", 1, 0)])[0].name == unit


def test_a_layer_in_two_homes_has_a_row_for_each():
    modules = [ModuleDevice("h.0.a", "cpu", "cuda:0", 5, 5), ModuleDevice("h.0.b", "cuda:0", "cuda:0", 7, 0)]
    rows = placement_picture(modules).table.rows
    assert rows == [("h.0", "cpu, runs on cuda:0", "5", "0", "5"), ("h.0", "cuda:0", "0", "7", "7")]


def test_alike_neighbours_stand_in_one_row():
    rows = placement_picture([ModuleDevice(**module) for module in MODULES]).table.rows
    assert [row[0] for row in rows] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1 to model.layers.2 (2)",
        "lm_head",
    ]
    assert rows[2][1:] == ("disk, runs on cpu", "4,000", "2,000", "12,000")


def test_homes_have_colours_of_their_own():
    devices = ("cpu", "disk", "nvme", "cuda:0", "cuda:1", "cuda:2")
    assert len({device_colour(device) for device in devices}) == len(devices)
