"""Tests of transformers' KV caches: logits are bit-identical in every placement."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, cache_utils

from hfq import HfqConfig
from hfq.loading.kv_layers import kv_layers
from hfq.placement.estimate.kv_cache import kv_nbytes
from tests.support import tiny_models

PLACEMENTS = {
    "memory": None,
    "half on disk": {"": "cpu", "model.layers.2": "disk", "model.layers.3": "disk"},
    "disk": {"": "disk"},
}
PROMPT, NEW = [[5, 9, 31, 7, 12, 40, 3, 8], [8, 3, 40, 12, 7, 31, 9, 5]], 6
CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "fp8": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    "quanto": {
        "cache_implementation": "quantized",
        "cache_config": {"backend": "quanto", "nbits": 4, "q_group_size": 32},
    },
    "hqq": {
        "cache_implementation": "quantized",
        "cache_config": {"backend": "hqq", "nbits": 4, "q_group_size": 32, "axis_key": 1},
    },
    "offloaded": {"cache_implementation": "offloaded"},
}
HAS_FP8 = hasattr(cache_utils, "Fp8QuantizedLayer")  # some supported versions lack it
NEEDS = {"quanto": "optimum.quanto", "hqq": "hqq"}


@pytest.fixture(scope="module")
def models():
    def load(device_map):
        return AutoModelForCausalLM.from_pretrained(
            tiny_models.DATA / "tiny-llama-gptq",
            quantization_config=HfqConfig(kernel="reference"),
            device_map=device_map,
            dtype=torch.bfloat16,
        )

    return {name: load(device_map) for name, device_map in PLACEMENTS.items()}


def generate(model, cache: str):
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    found = model.generate(torch.tensor(PROMPT), **options, **CACHES[cache])
    return torch.cat(found.logits), found.past_key_values


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_gives_the_same_logits_wherever_the_weights_rest(models, cache):
    if cache == "offloaded" and not torch.cuda.is_available():
        pytest.skip("transformers' offloaded cache needs an accelerator's stream")
    if cache == "fp8" and not HAS_FP8:
        pytest.skip("this transformers has no FP8 cache")
    package = NEEDS.get(cache)
    if package is not None and importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    if package is not None:
        pytest.importorskip(package)
    resident, _ = generate(models["memory"], cache)
    for placement in PLACEMENTS:
        logits, _ = generate(models[placement], cache)
        assert torch.equal(logits, resident), placement


@pytest.mark.skipif(not HAS_FP8, reason="this transformers has no FP8 cache")
def test_a_quantized_cache_takes_the_bytes_that_are_planned(models):
    layers, _ = kv_layers(models["disk"])
    tokens = len(PROMPT[0]) + NEW - 1  # the last generated token is not an input
    _, dynamic = generate(models["disk"], "dynamic")
    _, fp8 = generate(models["disk"], "fp8")
    held = [(layer._quantized_keys, layer._quantized_values) for layer in fp8.layers]
    real = sum(tensor.nbytes for pair in held for quantized in pair for tensor in quantized)
    assert real == kv_nbytes(layers, 2, tokens, "bfloat16", "fp8")
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in dynamic.layers) == kv_nbytes(
        layers, 2, tokens, "bfloat16"
    )
