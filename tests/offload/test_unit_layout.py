"""Tests of the layout of a unit's tensors, by hand and for random files."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfq.offload.unit_layout import PAGE, Run, lay_out, lay_out_on_device, layout_nbytes
from hfq.tensor_spec import DTYPE_BITS, ByteRange, TensorInfo

FILE = "a.safetensors"
NOISE = random.Random(0).randbytes(500_000)


def tensor(name: str, offset: int, nbytes: int, dtype: str = "U8", file: str = FILE) -> TensorInfo:
    return TensorInfo(name, dtype, (nbytes * 8 // DTYPE_BITS[dtype],), ByteRange(file, offset, nbytes))


def filled(layout, files) -> bytearray:
    """A region after its chunks were read and its copies were made, as the streamer does it."""
    region = bytearray(layout.nbytes)
    for run in layout.runs:
        for wanted, offset in run.chunks(3 * PAGE):
            assert wanted.offset % PAGE == offset % PAGE == 0
            region[offset : offset + wanted.nbytes] = files[wanted.file][
                wanted.offset : wanted.offset + wanted.nbytes
            ]
    for source, target, nbytes in layout.copies:
        region[target : target + nbytes] = region[source : source + nbytes]
    return region


def test_neighbours_are_one_run_that_starts_on_the_page_of_the_first():
    layout = lay_out([tensor("b", 5100, 400), tensor("a", 5000, 100)])
    assert layout.runs == (Run(ByteRange(FILE, 5000, 500), 0),)
    assert {info.name: place for info, place in layout.places.items()} == {"a": 904, "b": 1004}
    assert (layout.runs[0].lead, layout.runs[0].nbytes) == (904, 4096)
    assert (layout.nbytes, layout.needed_nbytes, layout.copies) == (4096, 500, ())


@pytest.mark.parametrize(("gap", "runs"), [(100, 1), (101, 2)])
def test_a_gap_is_read_along_where_it_is_small_enough(gap, runs):
    layout = lay_out([tensor("a", 0, 8), tensor("b", 8 + gap, 8)], gap_nbytes=100)
    assert len(layout.runs) == runs
    assert layout.needed_nbytes == (16 + gap if runs == 1 else 16)
    assert layout.nbytes == runs * PAGE


def test_runs_lie_one_after_another_in_whole_pages():
    layout = lay_out(
        [tensor("a", 4000, 200), tensor("b", 1 << 20, 4097), tensor("c", 10, 10, file="b.safetensors")]
    )
    assert [(run.source.file, run.offset, run.nbytes) for run in layout.runs] == [
        (FILE, 0, 8192),
        (FILE, 8192, 8192),
        ("b.safetensors", 16384, 4096),
    ]
    assert {info.name: place for info, place in layout.places.items()} == {"a": 4000, "b": 8192, "c": 16394}


def test_a_misaligned_tensor_is_copied_behind_the_runs_and_an_aligned_one_is_not():
    layout = lay_out(
        [
            tensor("a", 100, 8, "F32"),
            tensor("b", 109, 12, "F32"),
            tensor("c", 121, 7),
            tensor("d", 129, 2, "F16"),
        ]
    )
    assert layout.copies == ((109, 4096, 12), (129, 4160, 2))
    assert {info.name: place for info, place in layout.places.items()} == {
        "a": 100,
        "b": 4096,
        "c": 121,
        "d": 4160,
    }
    assert layout.nbytes == 8192


def test_a_tensor_given_twice_and_one_within_another_are_read_once():
    whole, part = tensor("experts", 64, 400), tensor("experts.1", 164, 100)
    layout = lay_out([whole, part, whole])
    assert layout.runs == (Run(ByteRange(FILE, 64, 400), 0),)
    assert dict(layout.places) == {whole: 64, part: 164}


def test_an_empty_tensor_needs_no_read():
    empty = TensorInfo("empty", "F32", (0, 4), ByteRange(FILE, 77, 0))
    layout = lay_out([empty])
    assert (layout.runs, dict(layout.places), layout.nbytes) == ((), {empty: 0}, 0)
    assert lay_out([]).nbytes == 0


def test_chunks_cover_a_run_from_its_first_page_to_its_last_byte():
    run = Run(ByteRange(FILE, 5000, 20000), 8192)
    assert list(run.chunks(8192)) == [
        (ByteRange(FILE, 4096, 8192), 8192),
        (ByteRange(FILE, 12288, 8192), 16384),
        (ByteRange(FILE, 20480, 4520), 24576),
    ]


@st.composite
def units(draw):
    """(files, tensors): tensors of odd sizes and gaps in up to three files of other bytes each."""
    files, infos = {}, []
    for number in range(draw(st.integers(1, 3))):
        end = draw(st.integers(0, 9000))
        for index in range(draw(st.integers(1, 5))):
            dtype = draw(st.sampled_from(["U8", "BF16", "F32", "I64"]))
            nbytes = draw(st.integers(0, 2000)) * DTYPE_BITS[dtype] // 8
            offset = end + draw(st.sampled_from([0, 1, 3, 8, 5000, 70000]))
            infos.append(tensor(f"{number}.{index}", offset, nbytes, dtype, f"{number}"))
            end = offset + nbytes
        files[str(number)] = NOISE[number:]
    return files, draw(st.permutations(infos))


@settings(max_examples=50)
@given(units(), st.sampled_from([0, 100, 64 << 10]))
def test_every_place_holds_the_bytes_of_its_tensor_aligned_to_its_element(unit, gap):
    files, infos = unit
    layout = lay_out(infos, gap)
    region = filled(layout, files)
    for info in infos:
        start, place = info.range.offset, layout.places[info]
        assert region[place : place + info.nbytes] == files[info.range.file][start : start + info.nbytes]
        assert place % (DTYPE_BITS[info.dtype] // 8) == 0
    assert layout.nbytes % PAGE == 0
    assert all(run.offset % PAGE == 0 for run in layout.runs)
    ends = [0, *(run.offset + run.nbytes for run in layout.runs)]
    assert [run.offset for run in layout.runs] == ends[:-1]
    assert ends[-1] <= layout.nbytes


@settings(max_examples=50)
@given(units())
def test_the_bytes_of_a_layout_are_known_without_it(unit):
    _, infos = unit
    assert layout_nbytes(infos, is_on_host=True) == lay_out(infos).nbytes
    assert layout_nbytes(infos, is_on_host=False) == lay_out_on_device(infos).nbytes
