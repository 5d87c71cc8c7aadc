"""Tests that every wait of the copy path is needed: without it, some order of streams gives wrong results."""

import functools

import pytest
import torch

from hfq.checkpoint.read_plan import plan_reads
from hfq.loading import read_weights
from hfq.offload.copy_stream import AcceleratorCopyStream
from hfq.offload.upload import Upload
from tests.support import moe_models
from tests.support.accelerator_maps import LAYERS
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator

TOKENS = torch.arange(2, 14)[None]
CPU = {"": "sim:0", **dict.fromkeys(LAYERS, "cpu")}
DISK = {"": "sim:0", **dict.fromkeys(LAYERS, "disk")}
LATE_COPIES, LATE_COMPUTATION = {"others": "lazy"}, {"default": "lazy"}
LEFT_OUT = {
    "computation after copies": (AcceleratorCopyStream, "compute_after", CPU, LATE_COPIES),
    "copies after computation": (AcceleratorCopyStream, "copy_after", CPU, LATE_COMPUTATION),
    "reads after copies from staging memory": (AcceleratorCopyStream, "finish", DISK, LATE_COPIES),
    "copies of an expert after computation with another one in its place": (
        AcceleratorCopyStream,
        "copy_after",
        "experts",
        LATE_COMPUTATION,
    ),
    "reads after copies of a batch of the load": (Upload, "_wait", {"": "sim:0"}, LATE_COPIES),
}


@pytest.fixture(scope="module")
def experts(sim, tmp_path_factory):
    """A mixture of experts, and its map with experts on the CPU."""
    scheme = next(scheme for scheme in moe_models.SCHEMES if scheme.id == "mixtral w1 w2 w3, gptq")
    path = moe_models.write(scheme, moe_models.is_quantized(scheme)).save(tmp_path_factory.mktemp("moe"))
    names = [name for name, _ in load(path, {"": "sim:0"}).named_modules() if name.endswith("experts")]
    return path, {"": "sim:0", **dict.fromkeys(names, "cpu")}


def passes(sim, path, device_map, delays) -> list[torch.Tensor]:
    """Returns the logits of three forward passes of a new model."""
    with sim.streams(**delays), torch.no_grad():
        model = load(path, device_map, expert_cache_size=0)
        return [model(TOKENS.to("sim:0")).logits.cpu() for _ in range(3)]


@pytest.mark.parametrize("wait", LEFT_OUT)
def test_a_wait_that_is_left_out_is_noticed(sim, monkeypatch, experts, wait):
    owner, name, device_map, delays = LEFT_OUT[wait]
    path, device_map = experts if device_map == "experts" else (GPTQ, device_map)
    monkeypatch.setattr(read_weights, "plan_reads", functools.partial(plan_reads, staging=100_000))
    (expected, *_) = passes(sim, path, {"": "sim:0"}, {})
    assert all(torch.equal(found, expected) for found in passes(sim, path, device_map, delays))
    monkeypatch.setattr(owner, name, lambda *_: None)
    try:
        found = passes(sim, path, device_map, delays)
    except RuntimeError as error:
        failure = str(error)
    else:
        failure = ""
        assert not all(torch.equal(each, expected) for each in found)
    finally:
        sim.fail()  # ends the errors of this test
    assert not failure or "was used that is not allocated" in failure


@pytest.mark.parametrize("delays", [LATE_COPIES, LATE_COMPUTATION, {"default": "lazy", "others": "lazy"}])
def test_a_unit_may_overwrite_a_part_of_another_one_in_staging_memory(sim, delays):
    """The head is larger than a layer, so the units in staging memory overlap partly."""
    (expected, *_) = passes(sim, GPTQ, {"": "sim:0"}, {})
    for found in passes(sim, GPTQ, {"": "disk", "model.norm": "sim:0"}, delays):
        assert torch.equal(found, expected)
