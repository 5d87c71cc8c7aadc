"""Shared code of the programs in this folder: a model on disk, and ways to delay its reads."""

import os
import sys
import threading

import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig

FOLDER, MODE, *ARGUMENTS = sys.argv[1:]
"""The program's checkpoint, its `disk_io`, and further arguments."""
FILE = f"{FOLDER}/model.safetensors"
ON_DISK = {"": "disk"}
TOKENS = torch.arange(3, 9)[None]


def load(device_map=ON_DISK, **options):
    config = HfqConfig(**{"disk_io": MODE, **options})
    return AutoModelForCausalLM.from_pretrained(
        FOLDER, quantization_config=config, dtype=torch.float32, device_map=device_map
    )


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(input_ids=tokens).logits


def streamer_of(model):
    return model.hf_quantizer.loading.offloader


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "hfq-reader"]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def is_offloaded(model):
    return all(parameter.is_meta for parameter in model.parameters())


class Hold:
    """Delays reads of units until they are released; `began` tells that one has begun."""

    def __init__(self, model):
        self.began, self.leave, source = threading.Event(), threading.Event(), streamer_of(model).source
        self.source, self.read = source, source.read
        began, leave, read = self.began, self.leave, self.read

        def held(wanted, target):
            began.set()
            leave.wait(20)
            read(wanted, target)

        source.read = held


def in_flight(model):
    """Drops the first unit and starts to read it again; the read is delayed."""
    streamer_of(model)._buffers_of(0).drop(0)
    hold = Hold(model)
    assert streamer_of(model)._buffers_of(0).start(0, [])
    assert hold.began.wait(20)
    return hold


expected = logits(load(None))
