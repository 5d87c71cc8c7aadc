"""Tests of the bytes that passes read, also in orders that were not predicted."""

import ctypes
import gc
import mmap
import sys
import weakref

import pytest
import torch

from hfq.offload.lockstep import run_in_lockstep
from hfq.offload.offloader import OffloadOptions

SIZE = 64
MODES = ["direct", "buffered"]


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layers", [3, 4, 6])
def test_every_pass_reads_each_block_once(build, layers, mode):
    stack = build(layers=layers, options=OffloadOptions(mode, read_ahead_nbytes=0))
    sizes, activations = stack.read_nbytes(), random(3, SIZE)
    assert stack.quiet() == 0
    for passes in range(1, 6):
        stack.model(activations)
        ahead = sizes[0] + sizes[1]  # of the next pass
        assert stack.quiet() == passes * sum(sizes) + ahead
    assert stack.offloader.passes == 5
    assert (stack.offloader.prefetch_order.prefetch_misses, stack.offloader.buffer_overflows) == (0, 0)
    assert stack.offloader.pass_nbytes == sum(stack.nbytes)


def resident_pages(tensor: torch.Tensor) -> int:
    """Returns the number of pages of a tensor that have memory."""
    found = (ctypes.c_ubyte * -(-tensor.numel() // mmap.PAGESIZE))()
    address, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
    assert ctypes.CDLL(None).mincore(address, size, found) == 0
    return sum(page & 1 for page in found)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("mode", MODES)
def test_buffers_take_memory_only_when_units_are_read(build, mode):
    stack = build(layers=3, options=OffloadOptions(mode))
    assert resident_pages(stack.buffers.buffer) == 0
    stack.model(random(3, SIZE))
    assert resident_pages(stack.buffers.buffer) > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layers", [1, 2])
def test_what_fits_into_the_ring_is_read_once_only(build, layers, mode):
    stack, activations = build(layers=layers, options=OffloadOptions(mode)), random(3, SIZE)
    for _ in range(4):
        stack.model(activations)
    assert stack.quiet() == sum(stack.read_nbytes())


@pytest.mark.parametrize("mode", MODES)
def test_small_blocks_are_read_further_ahead_and_no_more_often(build, mode):
    stack, resident, activations = (
        build(layers=8, options=OffloadOptions(mode)),
        build(offload=False, layers=8),
        random(3, SIZE),
    )
    sizes, started = stack.read_nbytes(), []

    def probe(layer):
        started.append(
            [index for index in range(8) if stack.offloader._buffers_of(index).ticket_of(index) is not None]
        )

    stack.model[0].probe = probe
    for passes in range(1, 5):
        assert torch.equal(stack.model(activations), resident.model(activations))
        assert sum(sizes) < stack.quiet() <= passes * sum(sizes) + sum(sizes) // 2 + max(sizes)
    assert all(
        {0, 1, 2} <= set(indices) for indices in started
    )  # two blocks fit beside the one that computes
    buffers = stack.buffers
    assert buffers.nbytes <= sum(layout.nbytes for layout in buffers.layouts) // 2


def test_both_modes_give_the_same_bytes(build):
    activations = random(3, SIZE)
    expected = build(offload=False).model(activations)
    for mode in (*MODES, "auto"):
        stack = build(options=OffloadOptions(mode, threads=1))
        assert torch.equal(stack.model(activations), expected)
        assert torch.equal(stack.model(activations), expected)


@pytest.mark.parametrize("count", [2, 5])
def test_jobs_in_lockstep_read_what_one_pass_reads(build, count):
    stack, resident = build(), build(offload=False)
    batches = [random(2 + index, SIZE, seed=index) for index in range(count)]
    sizes = stack.read_nbytes()
    for passes in range(1, 4):
        found = run_in_lockstep(
            stack.offloader, [lambda batch=batch: stack.model(batch) for batch in batches]
        )
        assert all(torch.equal(one, resident.model(batch)) for one, batch in zip(found, batches, strict=True))
        assert stack.quiet() == passes * sum(sizes) + sizes[0] + sizes[1]
    assert (stack.offloader.prefetch_order.prefetch_misses, stack.offloader.buffer_overflows) == (0, 0)


ORDERS = {
    "skipped": (0, 1, 3, 4, 5),
    "reversed": (5, 4, 3, 2, 1, 0),
    "one twice": (0, 1, 1, 2, 3, 4, 5),
    "one far apart": (0, 3, 1, 4, 2, 5, 0),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_changed_order_is_right_at_once_and_learned_after_one_pass(build, name):
    stack, resident, activations = build(layers=6), build(offload=False, layers=6), random(3, SIZE)
    learned = 0
    for passes in range(4):
        stack.model.order = resident.model.order = None if passes < 2 else ORDERS[name]
        assert torch.equal(stack.model(activations), resident.model(activations))
        counted = stack.offloader.prefetch_order.prefetch_misses
        assert (counted > 0) == (passes >= 2)
        assert passes < 3 or counted == learned
        learned = counted
    before = stack.quiet()
    for _ in range(3):
        assert torch.equal(stack.model(activations), resident.model(activations))
    assert stack.offloader.prefetch_order.prefetch_misses == learned
    most = sum(stack.read_nbytes()[index] for index in ORDERS[name])
    assert stack.quiet() - before <= 3 * most


def test_an_order_that_changes_with_every_pass_stays_right(build):
    stack, resident, activations = build(layers=6), build(offload=False, layers=6), random(3, SIZE)
    generator = torch.Generator().manual_seed(2)
    for _ in range(30):
        order = torch.randint(6, (8,), generator=generator).tolist()
        stack.model.order = resident.model.order = order
        assert torch.equal(stack.model(activations), resident.model(activations))
    assert stack.offloader.prefetch_order.unit_forwards == 240


def nest(stack, outer: int, inner: int) -> None:
    """Lets one block call another in the middle of its forward, and use what that gives."""
    layer, other = stack.model[outer], stack.model[inner]
    layer.inner = torch.zeros(1)

    def probe(_):
        layer.inner = other(random(2, SIZE, seed=7))

    layer.probe = probe
    layer.result = lambda layer, outputs: outputs + torch.tanh(layer.inner).mean()


@pytest.mark.parametrize(("outer", "inner"), [(0, 1), (1, 3), (3, 0), (2, 1)])
def test_a_block_within_another_is_read_beside_it(build, outer, inner):
    stack, resident, activations = build(), build(offload=False), random(3, SIZE)
    for both in (stack, resident):
        nest(both, outer, inner)
    for _ in range(3):
        assert torch.equal(stack.model(activations), resident.model(activations))
        assert stack.is_offloaded()
    found = run_in_lockstep(
        stack.offloader, [lambda seed=seed: stack.model(random(3, SIZE, seed=seed)) for seed in range(3)]
    )
    assert all(torch.equal(one, resident.model(random(3, SIZE, seed=seed))) for seed, one in enumerate(found))
    assert stack.is_offloaded()


def test_memory_beside_the_ring_is_let_go_when_its_block_is_over(build, monkeypatch):
    stack, activations, made = build(), random(3, SIZE), []
    first, seen, buffers = stack.model[0], [], stack.buffers
    check_out = buffers.check_out

    def noted(unit: int) -> torch.Tensor:
        region = check_out(unit)
        made.append(weakref.ref(region.untyped_storage()))
        return region

    def probe(layer):
        seen.append(layer)
        if len(seen) % 2:
            layer(activations)

    monkeypatch.setattr(buffers, "check_out", noted)
    first.probe = probe
    for _ in range(3):
        stack.model(activations)
    gc.collect()
    assert len(made) == 3
    assert not any(storage() for storage in made)


def test_a_block_that_calls_itself_and_a_chain_of_blocks_within_blocks(build):
    stack, resident, activations = build(), build(offload=False), random(3, SIZE)
    for both in (stack, resident):
        nest(both, 0, 1)
        nest(both, 1, 2)
        nest(both, 2, 3)
        first = both.model[3]
        nest(both, 3, 3)
        deeper, seen = first.probe, []

        def probe(layer, deeper=deeper, seen=seen):
            seen.append(layer)
            if len(seen) % 2:
                deeper(layer)

        first.probe = probe
    for _ in range(3):
        assert torch.equal(stack.model(activations), resident.model(activations))
    assert stack.offloader.buffer_overflows > 0
    assert stack.is_offloaded()
