"""The catalog: the shipped examples, ranking, and files that are refused."""

import pytest
import yaml

from hfq.errors import SetupError
from hfq.placement.budget import Unit
from hfq.placement.estimate.catalog import SHIPPED, rank_machines, read_catalog
from hfq.placement.estimate.estimate import ModelSizes, Workload
from hfq.placement.estimate.kv_cache import Activations, KvLayer

GB = 10**9
SIZES = ModelSizes(
    tuple(Unit(f"layers.{i}", GB, "block") for i in range(60)),
    (KvLayer(1024, 1024),) * 60,
    Activations(8192, 28672, 32000, 60),
    {"gptq 4-bit bfloat16": (110 * GB, 60 * GB)},
    1.0,
    "bfloat16",
    60,
)
MACHINE = {
    "name": "m",
    "gpus": ["G"],
    "cpu": "64GB",
    "memory_rate": "50GB",
    "link_rate": "30GB",
    "disk_rate": "5GB",
    "cost": 1,
    "source": "example",
}
STORED = {
    "date": "2026-01-01",
    "gpus": {"G": {"memory": "80GB", "memory_rate": "2TB"}},
    "machines": [MACHINE],
}


def write(tmp_path, **changes):
    file = tmp_path / "catalog.yaml"
    file.write_text(yaml.safe_dump(STORED | changes))
    return file


def test_the_shipped_catalog_is_dated_and_marked_as_examples():
    catalog = read_catalog(SHIPPED)
    assert catalog.date
    assert catalog.gpus["RTX-4090"] == 24 * GB
    assert catalog.memory_rate("rtx-4090×2") == 1008 * GB
    assert catalog.memory_rate("24GiB×2") is None
    assert {machine.note for machine in catalog.machines} == {"example"}
    assert len({machine.name for machine in catalog.machines}) == len(catalog.machines) >= 5


def test_machines_are_ranked_by_what_tokens_cost(tmp_path):
    dear, small = MACHINE | {"name": "dear", "cost": 3}, MACHINE | {"name": "small", "gpus": [], "cpu": "1GB"}
    ranked = rank_machines(
        read_catalog(write(tmp_path, machines=[dear, small, MACHINE])), SIZES, Workload(1, 1024)
    )
    assert [entry["name"] for entry in ranked] == ["m", "dear", "small"]
    assert ranked[1]["cost_of_a_million_tokens"] == pytest.approx(3 * ranked[0]["cost_of_a_million_tokens"])
    assert ranked[0]["tokens_per_second"] == pytest.approx(1 / ((60 * GB + 1024 * 60 * 2048 * 2) / 2e12))
    assert "refused" in ranked[2]


@pytest.mark.parametrize("field", [*MACHINE])
def test_a_machine_without_a_field_is_refused(tmp_path, field):
    with pytest.raises(SetupError, match="cannot be used") as refused:
        read_catalog(
            write(tmp_path, machines=[{key: value for key, value in MACHINE.items() if key != field}])
        )
    assert field in refused.value.found


@pytest.mark.parametrize(
    "changes",
    [
        {"machines": [MACHINE | {"cost": 0}]},
        {"machines": [MACHINE | {"cost": "cheap"}]},
        {"machines": [MACHINE | {"disk_rate": -1}]},
        {"machines": ["m"]},
        {"gpus": {"G": {"memory": "80GB"}}},
    ],
)
def test_values_that_make_no_sense_are_refused(tmp_path, changes):
    with pytest.raises(SetupError, match="cannot be used"):
        read_catalog(write(tmp_path, **changes))


@pytest.mark.parametrize("text", ["[1, 2", "- 1", "", "just text"])
def test_what_is_no_catalog_is_refused(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(SetupError, match="cannot be used"):
        read_catalog(tmp_path / "c.yaml")
    with pytest.raises(SetupError, match="cannot be read"):
        read_catalog(tmp_path / "nowhere.yaml")
