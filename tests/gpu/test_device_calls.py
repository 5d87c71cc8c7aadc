"""What CUDA does in a pass: waits, copies, launches, and the state of the driver."""

import os
import time
from pathlib import Path

import pytest
import torch

from hfq.kernels.cuda import host_memory
from hfq.kernels.cuda.libraries import capability
from hfq.kernels.layer_tensors import LayerTensors
from hfq.kernels.registry import KERNELS
from tests.support.accelerator_maps import LAYERS
from tests.support.models import GPTQ, load
from tests.support.triton_device import made, random_rows

pytestmark = pytest.mark.gpu

PROMPT = torch.arange(2, 14)[None]


def events(call) -> list[str]:
    """Returns the names of what the device did in a call."""
    call()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profiled:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def mapped(device: torch.device, place: str) -> dict:
    return {"": str(device)} | dict.fromkeys(LAYERS, place)


@pytest.mark.parametrize("name", ["w4 g32", "awq g32", "mxfp4", "nvfp4", "fp8 blocks", "nf4"])
@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_a_product_takes_at_most_three_launches(cuda, name, count):
    """Row 14, and the bound of the kernels."""
    weight_format, tensors = made(name)
    held = LayerTensors(tensors)
    rows = random_rows(count, weight_format.shape(tensors)[1], torch.bfloat16)
    launched = events(lambda: KERNELS["triton"].linear(rows, held, weight_format))
    assert 1 <= len(launched) <= 3, launched


def test_a_resident_model_decodes_without_a_wait_of_the_host(cuda):
    """Row 7."""
    model, token = load(GPTQ, {"": str(cuda)}, dtype=torch.bfloat16), torch.tensor([[5]], device=cuda)
    with torch.no_grad():
        state = model(PROMPT.to(cuda), use_cache=True).past_key_values
        model(token, past_key_values=state)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(token, past_key_values=state)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_weights_are_copied_from_pinned_memory(cuda, place):
    """Row 10."""
    model, tokens = load(GPTQ, mapped(cuda, place)), PROMPT.to(cuda)

    def forward() -> None:
        with torch.no_grad():
            model(tokens)

    forward()
    copies = [name for name in events(forward) if "HtoD" in name]
    assert copies
    assert not [name for name in copies if "Pageable" in name]


def test_weights_on_the_cpu_are_held_once_in_pinned_memory(cuda):
    """Row 5."""
    model = load(GPTQ, mapped(cuda, "cpu"))
    tensors = model.model.layers[0].mlp.down_proj.stored_tensors()
    assert all(tensor.device.type == "cpu" for tensor in tensors.values())
    with torch.no_grad():
        model(PROMPT.to(cuda))
    until = time.monotonic() + 30  # memory is pinned in the background
    while not all(tensor.is_pinned() for tensor in tensors.values()) and time.monotonic() < until:
        time.sleep(0.05)
    assert all(tensor.is_pinned() for tensor in tensors.values())


def test_a_failed_registration_leaves_no_pending_error(cuda):
    """Row 6: memory that is registered twice fails, and the next launch must not raise it."""
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    start = -(-memory.data_ptr() // 4096) * 4096
    first = host_memory.pin(start, 8192, cuda)
    second = host_memory.pin(start, 8192, cuda)
    try:
        assert first != second
        assert torch.ones(4, device=cuda).sum().item() == 4
    finally:
        host_memory.unpin(start, cuda)


def test_pinned_pages_are_not_copied_by_a_fork(cuda):
    """Row 12: the kernel marks them `dc`, do not copy."""
    model = load(GPTQ, mapped(cuda, "cpu"))
    address = next(iter(model.model.layers[0].mlp.down_proj.stored_tensors().values())).data_ptr()
    assert "dc" in flags_of(address)
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with torch.no_grad():
        assert model(PROMPT.to(cuda)).logits.isfinite().all()


def flags_of(address: int) -> list[str]:
    """Returns the flags of the mapping that holds an address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            is_inside = start <= address < end
        elif is_inside and head == "VmFlags:":
            return line.split()[1:]
    return []


def test_the_kernels_of_the_device_are_chosen(cuda):
    """Rows 8 and 9."""
    chosen = load(GPTQ, {"": str(cuda)}).model.layers[0].mlp.down_proj.accelerated.name
    assert chosen == ("triton" if capability() >= (8, 0) else "reference")
