"""The plan sums bytes by home, and says what moves."""

import json

import pytest

from hfq.placement.budget import Unit
from hfq.placement.plan import Plan, PlanEntry

RESIDENT = PlanEntry("a.qweight", "cpu", "cpu", 1000, True)
ON_DISK = PlanEntry("b.qweight", "disk", "cpu", 20_000, True)
DENSE_ON_DISK = PlanEntry("b.norm", "disk", "cpu", 300, False)
ON_GPU = PlanEntry("c.weight", "cuda:0", "cuda:0", 4_000_000, False)
OFFLOADED = PlanEntry("d.weight", "cpu", "cuda:0", 50, False)
ALL = Plan((RESIDENT, ON_DISK, DENSE_ON_DISK, ON_GPU, OFFLOADED))


@pytest.mark.parametrize(
    ("entry", "moved"),
    [(RESIDENT, False), (ON_DISK, True), (DENSE_ON_DISK, True), (ON_GPU, False), (OFFLOADED, True)],
)
def test_an_entry_moves_if_it_rests_where_it_does_not_compute(entry, moved):
    assert entry.is_moved is moved


def test_what_rests_on_disk_moves_wherever_it_computes():
    assert PlanEntry("x", "disk", "disk", 1, True).is_moved


def test_bytes_are_summed_by_home():
    assert ALL.nbytes_by_device() == {"cpu": 1050, "disk": 20_300, "cuda:0": 4_000_000}
    assert list(ALL.nbytes_by_device()) == ["cpu", "disk", "cuda:0"]


def test_what_moves_and_what_stays_in_memory_are_summed():
    assert ALL.onloaded_nbytes() == 20_000 + 300 + 50
    assert ALL.resident_nbytes() == 1000 + 4_000_000 + 50


def test_an_empty_plan_holds_nothing():
    assert Plan(()).nbytes_by_device() == {}
    assert (Plan(()).onloaded_nbytes(), Plan(()).resident_nbytes()) == (0, 0)


def test_the_text_names_the_homes_and_what_moves():
    assert str(ALL) == "cpu 1,050 B, disk 20,300 B, cuda:0 4,000,000 B; 20,350 B onloaded per forward pass"
    assert str(Plan((RESIDENT,))) == "cpu 1,000 B; nothing is offloaded"


def test_the_dict_is_json_with_every_tensor():
    data = json.loads(json.dumps(ALL.to_dict()))
    assert data["devices"] == {"cpu": 1050, "disk": 20_300, "cuda:0": 4_000_000}
    assert data["onloaded_nbytes"] == 20_350
    assert [tensor["name"] for tensor in data["tensors"]] == [entry.name for entry in ALL.entries]
    assert data["tensors"][1] == {
        "name": "b.qweight",
        "device": "disk",
        "execution_device": "cpu",
        "nbytes": 20_000,
        "quantized": True,
    }


def test_a_plan_cannot_be_changed():
    with pytest.raises(AttributeError):
        ALL.entries = ()
    with pytest.raises(AttributeError):
        RESIDENT.device = "disk"


def test_the_offload_buffer_holds_two_units_of_each_accelerator():
    units = [Unit(f"h.{index}", 100, "block", 90) for index in range(6)]
    units += [Unit("h.0.experts", 1000, "experts"), Unit("embed", 1000, "embedding"), Unit("", 5, "fixed")]
    entries = [PlanEntry(f"h.{index}.a", "disk", "sim:0", 50, True) for index in (0, 1, 2)]
    entries += [PlanEntry(f"h.{index}.b", "cpu", "sim:0", 45, True) for index in (0, 1)]
    entries += [PlanEntry("h.4.a", "cpu", "sim:1", 20, False), PlanEntry("h.5.a", "sim:1", "sim:1", 20, True)]
    entries += [PlanEntry("h.0.experts.w", "disk", "sim:0", 9, True)]
    entries += [PlanEntry("embed.w", "cpu", "sim:2", 9, True), PlanEntry("h.3.a", "cpu", "cpu", 9, True)]
    plan = Plan(tuple(entries))
    assert plan.buffers(units) == {"sim:0": 90 + 90, "sim:1": 20}
    assert Plan(()).buffers(units) == {}
