"""Loads two checkpoints without an HfqConfig; prints a digest of the logits and the state of each.

Imports nothing of hfq.
"""

import hashlib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

DATA = Path(__file__).parents[2] / "data"

for name in ("tiny-llama", "tiny-llama-fp8"):
    model = AutoModelForCausalLM.from_pretrained(DATA / name)
    with torch.no_grad():
        logits = model(torch.arange(24)[None]).logits.float()
    state = {name: (str(value.dtype), tuple(value.shape)) for name, value in model.state_dict().items()}
    print(hashlib.sha256(logits.numpy().tobytes() + repr(sorted(state.items())).encode()).hexdigest())
