"""Tests of the spans of a recording, and that nothing is recorded outside of it."""

import itertools

import pytest
import torch

from hfq.checkpoint import Checkpoint, Reader
from hfq.errors import SetupError
from hfq.offload.byte_source import Source
from hfq.offload.offload_buffers import AcceleratorBuffers
from hfq.offload.offloader import OffloadOptions
from hfq.offload.reader_threads import Pool
from hfq.offload.recorder import Recorder, recording
from hfq.offload.unit_layout import lay_out_on_device
from tests.offload.conftest import SIZE
from tests.support.fake_copy_stream import FakeLane

DEVICE = torch.device("meta")
OPTIONS = OffloadOptions("buffered", threads=2, read_ahead_nbytes=0)


@pytest.fixture
def stack(build):
    stack = build(layers=4, options=OPTIONS)
    with torch.no_grad():
        stack.model(torch.ones(2, SIZE))
    stack.quiet()
    return stack


def test_every_read_wait_and_block_of_a_pass_is_recorded(stack):
    activations = torch.ones(2, SIZE)
    with torch.no_grad():
        expected = stack.model(activations)
        stack.quiet()
        before = stack.offloader.source.nbytes_read
        with recording(stack.offloader) as recorder:
            found = stack.model(activations)
            stack.quiet()
        read = stack.offloader.source.nbytes_read - before
    assert torch.equal(found, expected)
    spans = recorder.spans()
    assert [span.name for span in spans if span.track == "compute"] == ["0", "1", "2", "3"]
    assert [span.name for span in spans if span.track == "wait"] == ["0", "1", "2", "3"]
    assert sum(span.nbytes for span in spans if span.track == "read") == read > 0
    assert all(span.start <= span.end for span in spans)
    ends = {(span.track, span.name): span.end for span in spans}
    starts = {(span.track, span.name): span.start for span in spans}
    assert all(ends["wait", name] <= starts["compute", name] for name in "0123")
    assert all(ends["compute", name] <= starts["wait", str(int(name) + 1)] for name in "012")


def test_outside_of_a_recording_nobody_notes_anything(stack, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("noted")

    with recording(stack.offloader):
        pass
    for name in ("note", "note_read", "note_computed", "copying", "computing", "stamp"):
        monkeypatch.setattr(Recorder, name, refuse)
    with torch.no_grad():
        stack.model(torch.ones(2, SIZE))
    stack.quiet()
    assert stack.offloader.recorder is stack.buffers.recorder is stack.offloader.source.on_read is None


def test_a_recording_ends_with_the_error_that_ends_it(stack):
    with pytest.raises(RuntimeError), recording(stack.offloader):
        raise RuntimeError
    assert stack.offloader.recorder is None


def test_a_second_recording_is_refused(stack):
    with (
        recording(stack.offloader),
        pytest.raises(SetupError, match="already active"),
        recording(stack.offloader),
    ):
        pass
    assert stack.offloader.recorder is None


def test_copies_to_an_accelerator_have_the_times_of_its_own_stream(folder):
    checkpoint, track, pool = Checkpoint.open(folder), FakeLane(), Pool(2)
    infos = [
        [info for name, info in checkpoint.tensors.items() if name.startswith(f"{unit}.")]
        for unit in range(3)
    ]
    buffers = AcceleratorBuffers(
        [lay_out_on_device(each) for each in infos],
        range(3),
        Source(Reader(checkpoint), "buffered", 0),
        pool,
        track,
    )
    recorder = buffers.recorder = Recorder(DEVICE, ["0", "1", "2"], clocks={DEVICE: buffers.clock()})
    try:
        for unit in range(3):
            assert buffers.start(unit, [])
            buffers.take(unit)
            stamp = recorder.stamp()
            track.compute(buffers.buffer, lambda: None)
            recorder.note_computed("compute", str(unit), stamp)
            buffers.give_back(unit)
        spans = recorder.spans()
    finally:
        track.close()
        pool.close()
    copies = [span for span in spans if span.track == "copy"]
    assert {span.name for span in copies} == {"0", "1", "2"}
    assert all(
        before.end <= after.start for before, after in itertools.pairwise(copies)
    )  # one after the other
    for unit in range(3):
        sizes = [span.nbytes for span in copies if span.name == str(unit)]
        assert sum(sizes) >= buffers.layouts[unit].needed_nbytes
        computed = next(span for span in spans if span.track == "compute" and span.name == str(unit))
        assert max(span.end for span in copies if span.name == str(unit)) <= computed.end


def test_reads_of_routed_experts_have_their_names(build_experts):
    experts = build_experts(places=4)
    with recording(experts.offloader) as recorder:
        experts.use(1, 3)
        experts.use(3, 1)
    spans = [span for span in recorder.spans() if span.track == "read"]
    assert sorted(span.name for span in spans) == ["1", "3"]
    sizes = {each.name: each.layout.runs[0] for each in experts.cache.experts}
    assert all(span.nbytes == sizes[span.name].lead + sizes[span.name].source.nbytes for span in spans)
