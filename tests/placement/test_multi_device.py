"""Several accelerators: contiguous parts, none over its limit."""

import pytest

from hfq.errors import PlacementError
from hfq.placement.budget import Unit
from hfq.placement.multi_device import assign_units

UNITS = [
    Unit("embed", 30, "embedding"),
    *(Unit(f"layers.{i}", 20, "block") for i in range(6)),
    Unit("head", 30, "other"),
]


def test_parts_are_contiguous_and_even_with_their_cache():
    spread = assign_units(UNITS, {"cuda:0": 200, "cuda:1": 200}, kv=60, activations=10)
    assert list(spread.devices.values()) == ["cuda:0"] * 4 + ["cuda:1"] * 4
    assert spread.stored_nbytes == {"cuda:0": 90, "cuda:1": 90}
    assert spread.kv == {"cuda:0": 30, "cuda:1": 30}


def test_a_small_accelerator_gets_less():
    spread = assign_units(UNITS, {"cuda:0": 60, "cuda:1": 400}, kv=0, activations=5)
    assert spread.stored_nbytes["cuda:0"] <= 55
    assert sum(spread.stored_nbytes.values()) == 180


def test_what_does_not_fit_together_says_how_much_would():
    with pytest.raises(PlacementError) as refused:
        assign_units(UNITS, {"cuda:0": 60, "cuda:1": 60}, kv=60, activations=10)
    assert "240" in refused.value.expected
