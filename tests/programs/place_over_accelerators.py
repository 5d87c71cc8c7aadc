"""Prints where each decoder layer is stored and computes under each map of its input, and if logits are equal.

The input is a JSON object of device maps. The process starts the simulated accelerator itself.
"""

import json
import sys

import torch

from tests.support import simulated_accelerator
from tests.support.models import GPTQ, load, logits

simulated_accelerator.start(count=2)
tokens = torch.arange(8)[None].to("sim:0")


def describe(device_map: dict, expected: torch.Tensor) -> dict:
    """Returns stored and execution device of each layer, and True if the logits are the expected ones."""
    model, computed = load(GPTQ, device_map), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *given: computed.append(str(given[2].device)))
    found = logits(model, tokens).cpu()
    devices = model.hf_quantizer.loading.devices
    stored = [devices[f"model.layers.{index}.mlp.up_proj"] for index in range(4)]
    for device, layer in zip(stored, model.model.layers, strict=True):
        held = {str(each.device) for each in layer.mlp.up_proj.parameters()}
        assert held == {device} or device in ("cpu", "disk"), (held, device)
    return {
        "stored": stored,
        "computed": computed,
        "is_equal": torch.equal(found, expected),
    }


one = logits(load(GPTQ, {"": "sim:0"}), tokens).cpu()
print(json.dumps({name: describe(each, one) for name, each in json.load(sys.stdin).items()}))
