"""Prints a digest of the logits of each checkpoint that it reads a path of.

hfq is imported only if the argument says so.
"""

import hashlib
import sys

import torch

if "hfq" in sys.argv[1]:
    import hfq  # noqa: F401
from transformers import AutoModelForCausalLM

for path in map(str.strip, sys.stdin):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, device_map="cpu")
    assert not [m for m in model.modules() if type(m).__module__.startswith("hfq")]
    with torch.no_grad():
        logits = model(torch.arange(1, 25)[None]).logits
    print("digest", hashlib.sha256(logits.numpy().tobytes()).hexdigest(), flush=True)
