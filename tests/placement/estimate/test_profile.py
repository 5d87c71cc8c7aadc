"""Profiles: written and read back, interpolated, refused."""

import json

import pytest

from hfq.errors import SetupError
from hfq.placement.estimate.pipeline import SideBySide
from hfq.placement.estimate.profile import PUBLISHED, Profile, Zero3Rates, profile_path, read_profile

MEASURED = Profile(
    "measured",
    2e9,
    8e9,
    20e9,
    None,
    {"dense float32": {1: 4e9, 5: 2e9}},
    1e-3,
    (0.5, 0.01),
    {"processor": "P"},
    calls={"dense float32": 1e-5},
    step_seconds=2e-3,
    block_seconds=1e-3,
    beside_disk=SideBySide(0.7, 0.9),
    zero3=Zero3Rates(2, "cpu", 1e9, 1.5, 2e-3, 3e-3),
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return profile_path()


def test_without_a_calibration_the_limits_of_standards_are_told(cache):
    assert read_profile() is PUBLISHED
    assert not PUBLISHED.is_measured
    assert 31.4e9 < PUBLISHED.host_to_device < 31.6e9
    assert 7.8e9 < PUBLISHED.disk < 7.9e9


def test_a_profile_is_read_back_as_it_was_written(cache):
    cache.parent.mkdir()
    cache.write_text(MEASURED.to_json())
    assert read_profile() == MEASURED
    assert read_profile(machine={"processor": "P"}) == MEASURED


def test_products_are_interpolated_in_seconds():
    assert MEASURED.product_rate("dense float32", 1) == 4e9
    assert MEASURED.product_rate("dense float32", 3) == pytest.approx(1 / ((1 / 4e9 + 1 / 2e9) / 2))
    assert MEASURED.product_rate("dense float32", 9) == pytest.approx(
        1 / (2 / 2e9 - 1 / 4e9)
    )  # beyond the last: in a line
    assert MEASURED.product_rate("gptq 4-bit float32", 1) is None


def test_a_profile_of_another_machine_is_refused(cache):
    cache.parent.mkdir()
    cache.write_text(MEASURED.to_json())
    with pytest.raises(SetupError, match="another machine") as refused:
        read_profile(machine={"processor": "Q"})
    assert "hfq profile-machine" in refused.value.fix


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"disk": 0},
        {"memory": "fast"},
        {"products": {"dense": {"1": -1}}},
        {"load_seconds": 1},
        {"unknown": 1},
        {"beside_disk": {"computing": 1.5, "reading": 1}},
        {"beside_cached": {"computing": 0, "reading": 1}},
        {"zero3": {"ranks": 2}},
        {"calls": {"dense float32": -1}},
        {"block_seconds": "long"},
        {
            "zero3": {
                "ranks": 2,
                "device": "cpu",
                "gathering": 0,
                "slowdown": 1,
                "layer_seconds": 0,
                "step_seconds": 0,
            }
        },
    ],
)
def test_a_damaged_profile_is_refused(tmp_path, change):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(json.loads(MEASURED.to_json()) | change))
    with pytest.raises(SetupError, match="cannot be used"):
        read_profile(file)


def test_a_profile_that_is_named_must_be_there(tmp_path):
    with pytest.raises(SetupError, match="cannot be used"):
        read_profile(tmp_path / "nowhere.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(SetupError, match="cannot be used"):
        read_profile(tmp_path / "list.json")
