"""Loads and runs two models on both sides of a fork."""

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import hfq

DATA = Path(__file__).parents[2] / "data"
DEVICES = {"": "cpu", "model.layers.2": "disk"}

child = os.fork()
finite = []
for name in ("tiny-llama-gptq", "tiny-llama-fp8"):
    model = AutoModelForCausalLM.from_pretrained(
        DATA / name, quantization_config=hfq.HfqConfig(), device_map=DEVICES
    )
    with torch.no_grad():
        finite.append(bool(torch.isfinite(model(torch.arange(9)[None]).logits).all()))
if child == 0:
    os._exit(0 if all(finite) else 1)
assert all(finite)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
