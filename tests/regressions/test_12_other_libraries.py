"""Tests of torch's own functions that change layers: each works on a quantized layer, or names it."""

import copy
import pickle

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


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("cpu_memory", ["mmap", "private"])
@pytest.mark.parametrize("path", [GPTQ, FP8], ids=lambda path: path.name)
def test_fully_shard_computes_the_same_or_names_the_layer(path, cpu_memory, mesh):
    model = load(path, cpu_memory=cpu_memory)
    expected = logits(model, TOKENS)
    is_refused = "fp8" in path.name and cpu_memory == "mmap"
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if is_refused:
        with pytest.raises(SetupError, match=r'(?s)q_proj was sharded.*fully_shard.*cpu_memory="private"'):
            logits(model, TOKENS)
    else:
        assert torch.equal(logits(model, TOKENS), expected)
