"""The path to an accelerator, on a made-up one: right bytes, and no memory used before the other side is done
with it.
"""

import random
import threading
import time

import pytest
import torch

from hfq.checkpoint import Checkpoint, Reader, write_safetensors
from hfq.errors import CheckpointError
from hfq.modules.flat_buffer import FlatBuffer
from hfq.offload import offload_buffers as buffers_module
from hfq.offload.byte_source import Source
from hfq.offload.offload_buffers import AcceleratorBuffers
from hfq.offload.offloader import Offloader, OffloadOptions
from hfq.offload.pinned_weights import PinnedWeights
from hfq.offload.reader_threads import Pool
from hfq.offload.unit_layout import lay_out_on_device
from tests.support.fake_copy_stream import FakeLane

BLOCKS, SIZE = 5, 64


@pytest.fixture
def track():
    track = FakeLane()
    yield track
    track.close()


@pytest.fixture
def device(tmp_path, track, monkeypatch):
    """device(resident=()) → (regions over five blocks of several chunks and odd offsets, the blocks' tensors,
    their bytes).
    """
    monkeypatch.setattr(buffers_module, "CHUNK_NBYTES", 8192)
    noise = random.Random(0).randbytes(40_000)
    tensors = {}
    for unit in range(BLOCKS):
        sizes = {"odd": ("U8", 1001 + unit), "wide": ("F32", 12_000 + 4000 * unit), "codes": ("U8", 5000)}
        for name, (dtype, nbytes) in sizes.items():
            tensors[f"{unit}.{name}"] = (
                dtype,
                (nbytes // (4 if dtype == "F32" else 1),),
                noise[unit : unit + nbytes],
            )
    write_safetensors(tmp_path / "model.safetensors", tensors)
    checkpoint = Checkpoint.open(tmp_path)
    units = [
        [info for name, info in checkpoint.tensors.items() if name.startswith(f"{unit}.")]
        for unit in range(BLOCKS)
    ]
    pool = Pool(2)

    def make(resident=()):
        source = Source(Reader(checkpoint), "buffered", 0)
        pinned = pin(source.reader, [info for unit in resident for info in units[unit]])
        read = source.read

        def noted(wanted, target):
            memory = torch.frombuffer(target, dtype=torch.uint8, count=wanted.nbytes)
            track.note("read begun", memory)
            target[: wanted.nbytes] = b"\xff" * wanted.nbytes
            read(wanted, target)
            track.note("read done", memory)

        monkeypatch.setattr(source, "read", noted)
        return (
            AcceleratorBuffers(
                [lay_out_on_device(infos, pinned.in_order(infos)) for infos in units],
                range(len(units)),
                source,
                pool,
                track,
                pinned,
            ),
            units,
            tensors,
        )

    yield make
    pool.close()


def pin(reader, infos) -> PinnedWeights:
    """Returns these tensors in memory that counts as pinned."""
    read = FlatBuffer.read(reader, {info.name: info for info in infos})
    pinned = PinnedWeights(read.buffer)
    for info in infos:
        pinned.add(info, read.segments[info.name].offset)
    return pinned


def use(buffers, track, infos, tensors, unit: int, wrong: list, buffer_overflows: bool = False) -> None:
    """Takes a block and gives the device a check of its bytes to compute."""
    region = buffers.check_out(unit) if buffer_overflows else buffers.take(unit)

    def check() -> None:
        for info in infos[unit]:
            place = buffers.layouts[unit].places[info]
            if region[place : place + info.nbytes].numpy().tobytes() != tensors[info.name][2]:
                wrong.append(info.name)

    track.compute(region, check)


def test_the_layouts_have_copies_and_several_chunks(device):
    buffers, _, _ = device()
    assert all(len(layout.copies) > 1 for layout in buffers.layouts)
    assert all(place % 256 == 0 for layout in buffers.layouts for place in layout.places.values())
    assert all(len(list(run.chunks(8192))) > 1 for layout in buffers.layouts for run in layout.runs)


@pytest.mark.parametrize("resident", [(), (1,), (0, 3), range(BLOCKS)])
def test_every_pass_computes_from_the_right_bytes_and_nothing_is_used_too_early(device, track, resident):
    buffers, infos, tensors = device(resident)
    wrong: list[str] = []
    for step in range(4 * BLOCKS):
        unit, following = step % BLOCKS, (step + 1) % BLOCKS
        assert buffers.start(unit, [])
        assert buffers.start(following, [unit])
        use(buffers, track, infos, tensors, unit, wrong)
        buffers.give_back(unit)
    track.close()
    assert wrong == []
    assert sum(what == "compute done" for what, *_ in track.log) == 4 * BLOCKS
    assert track.violations() == []


@pytest.mark.parametrize("seed", range(3))
def test_any_order_with_dropped_and_separate_blocks_is_right(device, track, seed):
    buffers, infos, tensors = device((2,))
    dice, wrong = random.Random(seed), []
    for _ in range(25):
        unit, ahead = dice.randrange(BLOCKS), dice.sample(range(BLOCKS), 2)
        assert buffers.start(unit, [])
        without_room = [other for other in ahead if not buffers.start(other, [unit])]
        use(buffers, track, infos, tensors, unit, wrong)
        for other in (unit, *without_room):
            if dice.random() < 0.3:
                use(buffers, track, infos, tensors, other, wrong, buffer_overflows=True)
        buffers.give_back(unit)
        if dice.random() < 0.2:
            buffers.drop(ahead[1])
    track.close()
    assert wrong == []
    assert track.violations() == []


def test_units_in_pinned_memory_are_not_read(device, track):
    buffers, infos, tensors = device(range(BLOCKS))
    wrong: list[str] = []
    for unit in 2 * [*range(BLOCKS)]:
        buffers.start(unit, [])
        use(buffers, track, infos, tensors, unit, wrong)
        buffers.give_back(unit)
    track.close()
    assert wrong == []
    assert buffers.source.nbytes_read == 0
    assert buffers.nbytes == buffers.buffer.numel()


def test_a_read_that_fails_is_raised_where_the_block_is_taken_and_tried_again(device, track, monkeypatch):
    buffers, infos, tensors = device()
    read, wrong = buffers.source.read, []

    def fail(wanted, target):
        raise CheckpointError("The disk fails.", fix="check the disk")

    with monkeypatch.context() as patch:
        patch.setattr(buffers.source, "read", fail)
        assert buffers.start(0, [])
        with pytest.raises(CheckpointError, match="The disk fails"):
            buffers.take(0)
        assert buffers.start(1, [])
        while not buffers.ticket_of(1).is_done:
            time.sleep(0.001)
    assert buffers.source.read == read
    for unit in (0, 1):
        assert buffers.start(unit, [])
        use(buffers, track, infos, tensors, unit, wrong)
        buffers.give_back(unit)
    track.close()
    assert wrong == []
    assert track.violations() == []


def random_tensor(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_a_stack_on_the_made_up_device_is_bit_equal(build, monkeypatch, mode):
    track = FakeLane(is_host_the_device=True)
    monkeypatch.setattr(
        Offloader,
        "_make_buffers",
        lambda self, device: AcceleratorBuffers(
            self.layouts, range(len(self.layouts)), self.source, self.pool, track, self._pinned
        ),
    )
    monkeypatch.setattr(Offloader, "_lay_out", lambda self, unit: lay_out_on_device(unit.infos))
    stack, expected = build(options=OffloadOptions(mode)), build(offload=False).model(random_tensor(3, SIZE))
    for passes in range(1, 6):
        assert torch.equal(stack.model(random_tensor(3, SIZE)), expected)
        sizes = stack.read_nbytes()
        assert stack.quiet() == passes * sum(sizes) + sum(sizes[:2])
    assert stack.offloader.prefetch_order.prefetch_misses == 0
    stack.model.order = (3, 1, 1, 0)
    for _ in range(3):
        stack.model(random_tensor(3, SIZE))
    stack.offloader.close()
    track.close()
    assert track.violations() == []


def test_a_lane_that_forgets_to_wait_is_noticed(device, track, monkeypatch):
    """The checks above can fail: without the wait for the computation, regions are overwritten while it
    runs.
    """
    buffers, infos, tensors = device(range(BLOCKS))
    monkeypatch.setattr(track, "copy_after", lambda mark: None)
    leave = threading.Event()
    track.hold_computation(leave)
    for step in range(BLOCKS):
        buffers.start(step, [])
        use(buffers, track, infos, tensors, step, [])
        buffers.give_back(step)
    track.finish(track.mark())
    leave.set()
    track.close()
    assert "overwritten while it computes" in track.violations()
