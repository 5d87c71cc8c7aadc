"""The read plan as pure data: nothing missing, nothing twice, aligned, few requests, printable."""

import json

import pytest

from hfq.checkpoint.read_plan import BUFFER_ALIGNMENT, ModuleRead, ReadBuffer, coalesce, plan_reads
from hfq.tensor_spec import ByteRange, TensorInfo

MIB = 1 << 20


def info(name, offset, nbytes, file="a"):
    return TensorInfo(name, "U8", (nbytes,), ByteRange(file, offset, nbytes))


def read(name, *infos, how="read", buffer="cpu", home="cpu"):
    return ModuleRead(name, home, how, "for a test", {tensor.name: tensor for tensor in infos}, buffer)


def private(name="cpu", **options):
    return ReadBuffer(name, 0, "private", **options)


def spans(plan, buffer):
    """(offset in the arena, bytes) of every target."""
    return [
        target for request in plan.requests[buffer] for target in request.targets if target[0] is not None
    ]


@pytest.fixture
def mixed():
    """Rows of two files in file order and out of it, some mapped, some on disk, with gaps, empty and odd
    sizes.
    """
    return plan_reads(
        [
            read("late", info("w", 9 * MIB, 1001, "b"), info("s", 10 * MIB, 7, "b")),
            read("first", info("w", 100, 40 * MIB), info("s", 100 + 40 * MIB, 3), info("e", 0, 0)),
            read("near", info("w", 200 + 40 * MIB, 500)),
            read("map", info("w", 50 * MIB, 77), how="mapped"),
            read("away", info("w", 60 * MIB, 77), how="disk", home="disk"),
            read("away", info("s", 61 * MIB, 5), buffer="checks", home="disk"),
        ],
        [ReadBuffer("checks", 0, "staging", gap=0), private()],
    )


def test_what_is_needed_is_read_once_and_nothing_overlaps(mixed):
    needed = 1001 + 7 + 40 * MIB + 3 + 500 + 5
    assert mixed.bytes_needed == needed
    assert sum(nbytes for buffer in mixed.buffers for _, nbytes in spans(mixed, buffer)) == needed
    assert mixed.bytes_read == needed + (200 - 103)  # the one gap that is small
    for name, buffer in mixed.buffers.items():
        end = 0
        for offset, nbytes in sorted(spans(mixed, name)):
            assert offset >= end
            end = offset + nbytes
        assert end <= buffer.nbytes


def test_every_tensor_has_its_place(mixed):
    """Each request, byte for byte, as the tensors say it."""
    for name in mixed.buffers:
        wanted = {}
        for found in mixed.reads_into(name):
            for local, tensor in found.infos.items():
                start = found.offset + found.layout[0][local].offset
                wanted |= {
                    (tensor.range.file, tensor.range.offset + i): start + i
                    for i in {0, tensor.nbytes - 1}
                    if tensor.nbytes
                }
        placed = {}
        for request in mixed.requests[name]:
            at = request.source.offset
            for offset, nbytes in request.targets:
                for (file, byte), target in wanted.items():
                    if offset is not None and file == request.source.file and at <= byte < at + nbytes:
                        placed[file, byte] = offset + byte - at
                        assert placed[file, byte] == target
                at += nbytes
            assert at == request.source.offset + request.source.nbytes
        assert placed == wanted


def test_every_row_starts_at_a_multiple_of_256_in_the_order_of_the_files(mixed):
    reads = mixed.reads_into("cpu")
    assert [found.name for found in reads] == ["first", "near", "late"]
    assert all(found.offset % BUFFER_ALIGNMENT == 0 for found in reads)
    assert mixed.buffers["cpu"].nbytes % BUFFER_ALIGNMENT == 0
    assert reads[1].offset == 40 * MIB + BUFFER_ALIGNMENT


def test_requests_are_few_and_never_larger_than_16_mib(mixed):
    sources = [request.source for request in mixed.requests["cpu"]]
    assert [(s.file, s.nbytes) for s in sources] == [
        ("a", 16 * MIB),
        ("a", 16 * MIB),
        ("a", 8 * MIB + 600),
        ("b", 1001),
        ("b", 7),
    ]
    assert sources == sorted(sources, key=lambda source: (source.file, source.offset))


@pytest.mark.parametrize(
    ("distance", "gap", "count"), [(0, 0, 1), (1, 0, 2), (65536, 65536, 1), (65537, 65536, 2)]
)
def test_neighbours_become_one_request_up_to_the_gap(distance, gap, count):
    reads = [read("x", info("w", 0, 10)), read("y", info("w", 10 + distance, 10))]
    plan = plan_reads(reads, [private(gap=gap)])
    assert len(plan.requests["cpu"]) == count
    assert plan.bytes_read == 20 + (distance if count == 1 else 0)


def test_many_small_neighbours_are_no_more_targets_than_one_call_takes():
    plan = plan_reads([read(f"{i:04}", info("w", 3 * i, 3)) for i in range(2000)], [private()])
    assert [len(request.targets) for request in plan.requests["cpu"]] == [512, 512, 512, 464]
    assert plan.bytes_read == 6000


def test_ranges_that_overlap_are_read_by_themselves():
    plan = plan_reads([read("x", info("w", 0, 100)), read("y", info("w", 50, 100))], [private()])
    assert [request.source.nbytes for request in plan.requests["cpu"]] == [100, 100]


def test_staging_is_cut_into_batches_that_fit_and_a_larger_row_is_one_by_itself():
    sizes = [300, 400, 300, 5000, 256, 256]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    reads = [
        read(str(i), info("w", start, size), buffer="cuda:0", home="cuda:0")
        for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    plan = plan_reads(reads, [ReadBuffer("cuda:0", 0, "staging")], staging=1024)
    assert [[found.name for found in plan.reads_into(name)] for name in plan.buffers] == [
        ["0", "1"],
        ["2"],
        ["3"],
        ["4", "5"],
    ]
    assert list(plan.buffers) == [f"cuda:0 {i}" for i in range(4)]
    assert plan.staging == 5120
    assert all(plan.reads_into(name)[0].offset == 0 for name in plan.buffers)


def test_modules_of_one_layout_adjoin_in_a_batch_of_staging_memory():
    sizes = [300, 100, 300, 100, 300]
    reads = [read(str(i), info("w", sum(sizes[:i]), size), buffer="checks") for i, size in enumerate(sizes)]
    plan = plan_reads(reads, [ReadBuffer("checks", 0, "staging", gap=0)])
    placed = plan.reads_into("checks 0")
    assert [(found.name, found.offset) for found in placed] == [
        ("0", 0),
        ("2", 512),
        ("4", 1024),
        ("1", 1536),
        ("3", 1792),
    ]
    assert plan.buffers["checks 0"].nbytes == 2048
    assert len({id(found.layout) for found in placed}) == 2
    assert len(plan.requests["checks 0"]) == 1
    assert sorted(spans(plan, "checks 0")) == [(0, 300), (512, 300), (1024, 300), (1536, 100), (1792, 100)]


def test_a_plan_that_reads_nothing_has_no_arena():
    plan = plan_reads(
        [read("map", info("w", 8, 8), how="mapped")], [private(), ReadBuffer("checks", 0, "staging")]
    )
    assert (plan.buffers, plan.requests, plan.bytes_read, plan.bytes_needed, plan.staging) == (
        {},
        {},
        0,
        0,
        0,
    )
    assert plan.mapped == [ByteRange("a", 8, 8)]


def test_the_bytes_of_each_file_are_known(mixed):
    assert mixed.bytes_by_file == {"a": 40 * MIB + 3 + 97 + 500 + 5, "b": 1008}


def test_the_plan_is_printed_and_is_json(mixed):
    text = mixed.explain()
    lines = text.splitlines()
    assert (
        lines[0] == "41,944,556 bytes needed, 41,944,653 read in 6 requests; 77 mapped; staging at most 256"
    )
    assert "near.w a 41,943,240 + 500 cpu cpu + 41,943,296 for a test" in [
        " ".join(line.split()) for line in lines
    ]
    assert any(line.startswith("map.w ") and " mapped " in line for line in lines)
    again = json.loads(json.dumps(mixed.to_dict()))
    assert again["bytes_read"] == mixed.bytes_read
    assert {tensor["how"] for tensor in again["tensors"]} == {"read", "mapped", "disk"}
    assert len(again["tensors"]) == 9


def test_ranges_are_joined():
    ranges = [
        ByteRange("b", 0, 5),
        ByteRange("a", 10, 10),
        ByteRange("a", 0, 4),
        ByteRange("a", 12, 2),
        ByteRange("a", 25, 0),
    ]
    assert coalesce(ranges, 0) == [ByteRange("a", 0, 4), ByteRange("a", 10, 10), ByteRange("b", 0, 5)]
    assert coalesce(ranges, 6) == [ByteRange("a", 0, 25), ByteRange("b", 0, 5)]
