"""Reading and computing overlap: proved by gates that only open when the other side is under way, and never
by a clock.
"""

import threading

import pytest
import torch

SIZE, LAYERS, PASSES = 64, 4, 3
TIMEOUT = 20


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


class Gates:
    """Counts the reads of each block that have begun and the forwards that are under way, and lets threads
    wait for a count.
    """

    def __init__(self, stack) -> None:
        self.began, self.entered, self.is_open = [0] * LAYERS, [0] * LAYERS, False
        self._changed = threading.Condition()
        self._offsets = {}
        for index, layout in enumerate(stack.offloader.layouts):
            for run in layout.runs:
                self._offsets[run.source.offset // 4096] = index
        self._read = stack.offloader.source.read

    def block_of(self, wanted) -> int:
        return self._offsets[wanted.offset // 4096]

    def note(self, counts: list[int], index: int) -> None:
        with self._changed:
            counts[index] += 1
            self._changed.notify_all()

    def wait(self, counts: list[int], index: int, least: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: counts[index] >= least or self.is_open, TIMEOUT):
                raise TimeoutError(f"{counts[index]} of {least} for block {index}: nothing overlaps")

    def open(self) -> None:
        """Holds nobody up any more: what is read ahead at the end of a test waits for a pass that never
        comes.
        """
        with self._changed:
            self.is_open = True
            self._changed.notify_all()

    def read(self, wanted, target) -> None:
        self.note(self.began, self.block_of(wanted))
        self._read(wanted, target)


@pytest.fixture
def gated(build, monkeypatch):
    """(stack, gates): computing block i waits until the read of the block that follows has begun, over the
    wrap, too.
    """
    stack = build(layers=LAYERS)
    gates = Gates(stack)
    monkeypatch.setattr(stack.offloader.source, "read", gates.read)

    def probe_of(index: int):
        def probe(layer):
            gates.note(gates.entered, index)
            following = (index + 1) % LAYERS
            gates.wait(gates.began, following, gates.entered[index] + (following == 0))

        return probe

    for index, layer in enumerate(stack.model):
        layer.probe = probe_of(index)
    yield stack, gates
    gates.open()
    stack.offloader.close()


def test_the_next_block_is_being_read_while_one_computes_also_over_the_wrap(gated, build):
    stack, gates = gated
    activations, resident = random(3, SIZE), build(offload=False)
    expected = resident.model(activations)
    for _ in range(PASSES):
        assert torch.equal(stack.model(activations), expected)
    assert gates.entered == [PASSES] * LAYERS
    stack.quiet()
    assert gates.began == [PASSES + 1, PASSES + 1, PASSES, PASSES]  # of the next pass two blocks are there


def test_reads_and_computation_wait_for_each_other_and_neither_starves(gated, build, monkeypatch):
    stack, gates = gated

    def read(wanted, target):
        index = gates.block_of(wanted)
        gates.note(gates.began, index)
        if index == 0 and gates.began[0] > 1:
            gates.wait(gates.entered, LAYERS - 1, gates.began[0] - 1)
        elif index > 0:
            gates.wait(gates.entered, index - 1, gates.began[index])
        gates._read(wanted, target)

    monkeypatch.setattr(stack.offloader.source, "read", read)
    activations = random(3, SIZE)
    expected = build(offload=False).model(activations)
    for _ in range(PASSES):
        assert torch.equal(stack.model(activations), expected)


def test_blocks_that_are_called_without_the_model_are_read_ahead_as_well(gated):
    stack, gates = gated
    activations = random(3, SIZE)
    for _ in range(2):
        for layer in stack.model:
            layer(activations)
    assert gates.entered == [2] * LAYERS
    assert stack.offloader.prefetch_order.prefetch_misses == 0
