"""Tests that the order of Python's hashes does not change where a model is placed.

accelerate takes its main device from a set of devices.
"""

import json

import pytest
from typer.testing import CliRunner

from hfq.cli.main import app
from hfq.placement.device_map import covering_device
from tests.support import programs
from tests.support.accelerator_maps import LAYERS
from tests.support.models import GPTQ

pytestmark = pytest.mark.accelerator
FIRST, SECOND = "sim:0", "sim:1"
MAPS = {
    "default and layers": {
        "": SECOND,
        LAYERS[0]: FIRST,
        LAYERS[1]: "disk",
        LAYERS[2]: "cpu",
        LAYERS[3]: FIRST,
    },
    "parent and layers": {"model": SECOND, "lm_head": 0, LAYERS[0]: 0, LAYERS[1]: "cpu", LAYERS[2]: "disk"},
    "offloaded default": {"": "cpu", "model.layers": "disk", LAYERS[1]: FIRST, LAYERS[3]: 1, "lm_head": 1},
    "nested parents": {
        "": "disk",
        "model": "cpu",
        "model.layers": 0,
        LAYERS[3]: 1,
        f"{LAYERS[2]}.mlp": "cpu",
    },
}
STORED = {
    "default and layers": [FIRST, "disk", "cpu", FIRST],
    "parent and layers": [FIRST, "cpu", "disk", SECOND],
    "offloaded default": ["disk", FIRST, "disk", SECOND],
    "nested parents": [FIRST, FIRST, "cpu", SECOND],
}
COMPUTED = {
    "default and layers": [FIRST, FIRST, FIRST, FIRST],
    "parent and layers": [FIRST, FIRST, FIRST, SECOND],
    "offloaded default": [FIRST, FIRST, FIRST, SECOND],
    "nested parents": [FIRST, FIRST, FIRST, SECOND],
}


def planned_map() -> dict:
    """Returns the map that `hfq plan` prints for two accelerators that hold the model together."""
    sizes = ["--gpu", "900KB×2", "--cpu", "1MB", "--batch-size", "1", "--max-model-len", "1"]
    done = CliRunner().invoke(app, ["plan", str(GPTQ), "--dtype", "float32", "--json", *sizes])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)["device_map"]


@pytest.mark.parametrize("seed", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_each_layer_is_where_the_map_says_and_logits_are_equal(seed):
    planned = planned_map()
    assert "" in planned
    assert set(planned.values()) == {0, 1}
    text = json.dumps(MAPS | {"of hfq plan": planned})
    done = programs.run("place_over_accelerators", text=text, PYTHONHASHSEED=seed)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["of hfq plan"]["is_equal"]
    names = [covering_device(layer, planned) for layer in LAYERS]
    assert found["of hfq plan"]["stored"] == [
        f"sim:{name}" if isinstance(name, int) else name for name in names
    ]
    for name in MAPS:
        expected = {"stored": STORED[name], "computed": COMPUTED[name], "is_equal": True}
        assert found[name] == expected, name
