"""Tests of pinned host memory: pieces, release, and the one copy of weights on the CPU."""

import gc
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfq
from hfq.kernels.cuda import host_memory
from hfq.offload import pinned_memory as pinned_memory_module
from hfq.offload.pinned_memory import pinned_memory
from tests.support.accelerator_maps import LAYERS
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator

DEVICE = "sim:0"
MAP = {"": "sim:0", **dict.fromkeys(LAYERS, "cpu")}


@pytest.fixture(params=["in place", "born pinned"])
def way(request, monkeypatch):
    """Pins memory that exists, as CUDA does, or allocates pinned memory."""
    if request.param == "born pinned":
        monkeypatch.setattr(host_memory, "can_pin", lambda device: False)
    return request.param


def copy(sim, memory) -> dict:
    """Returns the counts of one copy of memory to the device."""
    sim.take_counts()
    target = torch.empty(memory.numel(), dtype=torch.uint8, device=DEVICE)
    target.copy_(memory, non_blocking=True)
    assert torch.equal(target.cpu(), memory)
    return sim.take_counts()


def test_memory_is_pinned_from_a_page_on_and_freed_with_its_last_view(sim, way):
    memory = pinned_memory(10_000, [torch.device(DEVICE)])
    assert memory.data_ptr() % 4096 == 0
    assert not memory.any()
    memory.random_()
    view = memory[100:]
    assert copy(sim, view)["pinned bytes"] == 9_900
    del memory
    gc.collect()
    assert copy(sim, view)["pinned bytes"] == 9_900


def test_memory_is_released_after_its_copies(sim, way):
    with sim.streams(default="lazy", others="lazy"):
        for _ in range(10):
            memory = pinned_memory(1 << 20, [torch.device(DEVICE)]).fill_(7)
            target = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
            target.copy_(memory, non_blocking=True)
            del memory  # its pages are unmapped, or used again by the next pass
            pinned_memory(1 << 20, [torch.device(DEVICE)]).fill_(8)
            assert bool((target.cpu() == 7).all())


def test_pieces_are_pinned_one_by_one_until_the_memory_is_released(sim, monkeypatch):
    monkeypatch.setattr(pinned_memory_module, "PIECE_NBYTES", 1 << 20)
    pinned, unpinned, made, has_begun = [], [], [], threading.Event()
    pin, unpin, make = host_memory.pin, host_memory.unpin, pinned_memory_module._Pieces
    monkeypatch.setattr(pinned_memory_module, "_Pieces", lambda *given: made.append(make(*given)) or made[0])

    def noted(address, nbytes, device):
        pinned.append(nbytes)
        if len(pinned) == 2:
            has_begun.set()
            until = time.monotonic() + 20
            while not made[0]._is_released and time.monotonic() < until:
                time.sleep(0.001)
        return pin(address, nbytes, device)

    monkeypatch.setattr(host_memory, "pin", noted)
    monkeypatch.setattr(
        host_memory, "unpin", lambda address, device: (unpinned.append(address), unpin(address, device))
    )
    memory = pinned_memory((4 << 20) + 5, [torch.device(DEVICE)], is_in_background=True)
    assert has_begun.wait(20)
    del memory
    gc.collect()
    assert pinned == [1 << 20] * 2
    assert len(unpinned) == 2


def test_memory_that_was_released_before_it_was_pinned_is_left_alone(sim):
    """Its addresses may belong to other memory, which the child of a fork needs."""
    memory = np.zeros(1 << 20, dtype=np.uint8)
    first = -memory.ctypes.data % 4096
    pieces = pinned_memory_module._Pieces(memory.ctypes.data + first, 1 << 19, (torch.device(DEVICE),))
    pieces.release()
    pieces.pin()
    child = os.fork()
    if not child:
        os._exit(int(memory.any()))  # a signal ends a child that does not have the memory
    assert os.waitpid(child, 0)[1] == 0


def test_a_failed_pin_is_logged_and_the_model_is_right(sim, monkeypatch, caplog):
    expected = logits(load(GPTQ, {"": "sim:0"}))
    monkeypatch.setattr(type(sim.cudart()), "cudaHostRegister", lambda *_: 2)
    model = load(GPTQ, MAP)
    assert torch.equal(logits(model), expected)
    assert "could not be pinned" in caplog.text


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(8)[None].to("sim:0")).logits.cpu()


def test_all_weights_on_the_cpu_are_views_of_pinned_memory(sim, way):
    model = load(GPTQ, MAP)
    loading = model.hf_quantizer.loading
    modules = [module for name, module in loading.quantized.items() if name.startswith("model.layers.")]
    assert len(modules) == 28
    for module in modules:
        for info in module.infos.values():
            assert info in loading.pinned
    assert not any(read.how == "mapped" for read in loading.read_plan.reads if read.name)
    sim.take_counts()
    expected = logits(model)
    counts = sim.take_counts()
    assert counts["pageable bytes"] <= 64  # the token ids
    assert counts["pinned bytes"] > 0
    assert torch.equal(expected, logits(load(GPTQ, {"": "sim:0"})))


SCRIPT = """
import json, statistics, sys, time
import torch
from tests.support import simulated_accelerator
simulated_accelerator.start(count=1)
from tests.support.models import load

path, layers = sys.argv[1], int(sys.argv[2])
device_map = {"": "sim:0"} | {f"model.layers.{index}": "cpu" for index in range(layers)}
model = load(path, device_map, cpu_memory=sys.argv[3])
with torch.no_grad():
    model(torch.arange(8)[None].to("sim:0"))
loading = model.hf_quantizer.loading
planned = loading.plan.nbytes_by_device()["cpu"]
sys.stdout.write(json.dumps({"planned": planned, "address": loading.pinned._memory.data_ptr()}) + "\\n")
sys.stdout.flush()
sys.stdin.readline()

def measure():
    loading.pinned._memory[::4096].sum()  # maps pages that the kernel took from this process to merge them
    found, is_held = 0, False
    for line in open("/proc/self/smaps"):
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, last = (int(word, 16) for word in words[0].split("-"))
            address = loading.pinned._memory.data_ptr()
            is_held = first <= address < last or line.rstrip().endswith(".safetensors")
        elif is_held and words[0] == "Pss:":
            found += int(words[1]) << 10
    time.sleep(0.1)
    return found

found = statistics.median(measure() for _ in range(5))  # the kernel may move a page meanwhile
sys.stdout.write(f"{found}\\n")
sys.stdout.flush()
sys.stdin.readline()
"""


@pytest.mark.parametrize(("count", "memory"), [(1, "auto"), (2, "shared")])
def test_weights_on_the_cpu_are_held_once_per_node(tmp_path, count, memory):
    """Pss counts a page that processes share in parts, which add up to one."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=4, vocab_size=128
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "floats")
    hfq.quantize(tmp_path / "floats", hfq.Recipe("fp8"), tmp_path / "fp8")
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "fp8"), "6", memory]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(arguments, env=os.environ, **pipes) for _ in range(count)]
    try:
        planned = {json.loads(child.stdout.readline())["planned"] for child in children}
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        held = sum(int(child.stdout.readline()) for child in children)
    finally:
        for child in children:
            child.communicate("\n", timeout=60)
    (nbytes,) = planned
    assert nbytes > 10 << 20
    assert nbytes * 0.95 <= held <= nbytes * 1.05
