"""Tests of torch's own functions that change layers: each works on a quantized layer, or names it."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune, spectral_norm, weight_norm

from hfq.errors import SetupError
from tests.support import tiny_models
from tests.support.models import GPTQ, load, logits

FP8 = tiny_models.DATA / "tiny-llama-fp8"
TOKENS = torch.arange(8)[None]
CHANGES = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "a parameter": lambda layer: setattr(layer, "extra", torch.nn.Parameter(torch.ones(3))),
}


@pytest.mark.parametrize(
    ("path", "change"), [*((GPTQ, change) for change in CHANGES), (FP8, "weight_norm"), (FP8, "pruning")]
)
@pytest.mark.parametrize("device_map", [None, {"": "disk"}])
def test_a_change_of_a_quantized_weight_names_the_layer(device_map, path, change):
    model = load(path, device_map)
    expected = logits(model, TOKENS)
    with pytest.raises(SetupError, match=r"(?s)0\.self_attn\.q_proj is quantized.*model\.dequantize\(\)"):
        CHANGES[change](model.model.layers[0].self_attn.q_proj)
    assert torch.equal(logits(model, TOKENS), expected)


def test_a_layer_can_still_be_copied_and_pickled():
    layer = load(kernel="reference").model.layers[0].self_attn.q_proj
    x = torch.ones(1, 128)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
        with pytest.raises(SetupError, match="q_proj is quantized"):
            weight_norm(other)


CASES = [(path.name, cpu_memory) for path in (GPTQ, FP8) for cpu_memory in ("mmap", "private")]


def shard(name: str, cpu_memory: str, mesh: object) -> str:
    """Shards a model; returns "equal" or "unequal" logits, or the error."""
    model = load(tiny_models.DATA / name, cpu_memory=cpu_memory)
    expected = logits(model, TOKENS)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        return "equal" if torch.equal(logits(model, TOKENS), expected) else "unequal"
    except SetupError as error:
        return str(error)


@pytest.fixture(scope="module")
def sharded():
    """Results of a process of its own: DTensor's caches keep the group, and a later fork would crash."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(zip(CASES, json.loads(run.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cpu_memory"), CASES)
def test_fully_shard_computes_the_same_or_names_the_layer(sharded, name, cpu_memory):
    found = sharded[name, cpu_memory]
    if "fp8" in name and cpu_memory == "mmap":
        assert re.search(r'(?s)q_proj was sharded.*fully_shard.*cpu_memory="private"', found)
    else:
        assert found == "equal"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        print(json.dumps([shard(*case, mesh) for case in CASES]))
        torch.distributed.destroy_process_group()
