"""Loads a model and holds it; prints bytes of memory after the load, when touched, and shared."""

import gc
import re
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig

small, large, cpu_memory = sys.argv[1:]


def load(path):
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=HfqConfig(cpu_memory=cpu_memory), dtype=torch.bfloat16
    )


def anonymous():
    gc.collect()
    return int(re.search(r"RssAnon:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024


def proportional():
    nbytes, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line[0].isupper():
            counts = "/hfq-" in line or large in line
        elif counts and line.startswith("Pss:"):
            nbytes += int(line.split()[1]) * 1024
    return nbytes


load(small)
before = anonymous()
model = load(large)
print(anonymous() - before, flush=True)
sys.stdin.readline()
assert all(int(p.data.reshape(-1).view(torch.uint8)[::512].sum()) >= 0 for p in model.parameters())
print(anonymous() - before, flush=True)
sys.stdin.readline()
print(proportional(), flush=True)
sys.stdin.read()
