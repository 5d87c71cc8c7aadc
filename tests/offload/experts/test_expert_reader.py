"""Tests of the reads of experts: their number and bytes, alignment, file systems, and memory."""

import errno
import os
import random

import pytest
import torch

from hfq.checkpoint import Checkpoint, Reader, write_safetensors
from hfq.errors import CheckpointError
from hfq.formats.gptq import Gptq
from hfq.formats.unquantized import Unquantized
from hfq.kernels.registry import choose_kernel
from hfq.modules.linear import QuantizedLinear
from hfq.offload.byte_source import CHUNK_NBYTES
from hfq.offload.experts.expert_reader import gather_experts, place_nbytes
from hfq.offload.host_memory import HUGE_PAGE
from hfq.offload.offloader import Offloader, OffloadOptions
from tests.support import programs

CPU = torch.device("cpu")
PROJECTIONS = {"gate_proj": (768, 2048), "up_proj": (768, 2048), "down_proj": (2048, 768)}


def stored(tensor):
    kinds = {torch.int32: "I32", torch.float16: "F16", torch.uint8: "U8", torch.float32: "F32"}
    return kinds[tensor.dtype], tuple(tensor.shape), tensor.numpy().tobytes()


def random_bytes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(dtype).view(shape)


def build(
    folder, tensors: dict[str, torch.Tensor], make, mode: str = "direct", places: int = 2, threads: int = 8
):
    """Returns (reader, offloader, layers of each expert) of a file with tensors `<expert>.<layer>.<tensor>`."""
    write_safetensors(folder / "model.safetensors", {name: stored(each) for name, each in tensors.items()})
    checkpoint = Checkpoint.open(folder)
    reader, layers = Reader(checkpoint), {}
    for prefix in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
        infos = {
            name.removeprefix(f"{prefix}."): info
            for name, info in checkpoint.tensors.items()
            if name.startswith(f"{prefix}.")
        }
        layer = make(prefix, infos)
        layer.onload_to(CPU)
        layers.setdefault(prefix.partition(".")[0], []).append(layer)
    on_demand = [layer for own in layers.values() for layer in own]
    limit = places * place_nbytes(gather_experts(on_demand))
    options = OffloadOptions(mode, threads=threads, expert_caches={CPU: limit}, routed_experts=1)
    return reader, Offloader([], reader, "cpu", on_demand, options), list(layers.values())


def gptq(prefix: str, infos) -> QuantizedLinear:
    out_features, in_features = PROJECTIONS[prefix.rpartition(".")[2]]
    weight_format = Gptq(4, 128, True, "stored", g_idx_length=in_features)
    return QuantizedLinear(
        prefix, in_features, out_features, weight_format, infos, choose_kernel("reference")
    )


def float_layer(prefix: str, infos) -> QuantizedLinear:
    out_features, in_features = infos["weight"].shape
    return QuantizedLinear(
        prefix, in_features, out_features, Unquantized(), infos, choose_kernel("reference")
    )


@pytest.fixture(scope="module")
def experts_of_30b():
    """The tensors of three experts of Qwen3-30B-A3B, in the order in which safetensors stores them."""
    tensors = {}
    for expert in range(3):
        for name, (out_features, in_features) in PROJECTIONS.items():
            groups, prefix = in_features // 128, f"{expert}.{name}"
            tensors[f"{prefix}.qweight"] = random_bytes(torch.int32, in_features // 8, out_features)
            tensors[f"{prefix}.qzeros"] = random_bytes(torch.int32, groups, out_features // 8)
            tensors[f"{prefix}.g_idx"] = (torch.arange(in_features) // 128).int()
            tensors[f"{prefix}.scales"] = random_bytes(torch.float16, groups, out_features)
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_an_expert_is_two_requests_of_little_more_than_its_bytes(tmp_path, experts_of_30b, mode):
    reader, offloader, layers = build(tmp_path, experts_of_30b, gptq, mode)
    reader.counters.bytes_read = reader.counters.calls = 0
    for number in (0, 1, 2, 0, 2):  # 0 was driven out, 2 was not
        offloader.experts.within([layers[number]], lambda *_: None)
    missed = sum(info.nbytes for number in (0, 1, 2, 0) for info in offloader.experts.experts[number].infos)
    assert reader.counters.calls == 4 * 2
    assert missed <= offloader.source.nbytes_read <= 1.01 * missed
    assert missed <= reader.counters.bytes_read <= 1.01 * missed
    assert offloader.experts.misses == 4


def test_direct_reads_leave_the_page_cache_alone(tmp_path, experts_of_30b, monkeypatch):
    reader, offloader, layers = build(tmp_path, experts_of_30b, gptq, "direct")
    if not offloader.source.files.supports_direct(str(tmp_path / "model.safetensors")):
        pytest.skip("the file system has no direct reads")
    monkeypatch.setattr(Reader, "read_into", lambda *_: pytest.fail("a read through the page cache"))
    offloader.experts.within([layers[0], layers[1]], lambda *_: None)
    assert reader.counters.bytes_read > 0


def test_a_file_system_without_direct_reads_says_so_and_gives_the_same_bytes(
    tmp_path, experts_of_30b, monkeypatch, caplog
):
    opened = os.open

    def refuse(path, flags, *rest, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    _, offloader, layers = build(tmp_path, experts_of_30b, gptq, "direct")
    assert offloader.source.mode == "buffered"
    assert "no direct reads; reads are buffered" in caplog.text
    check(offloader, layers, experts_of_30b)


def check(offloader, layers, tensors) -> None:
    """Checks every byte of every expert, one at a time."""
    for own in layers:

        def compare(*_, own=own):
            for layer in own:
                for name, found in layer.onloaded_tensors().items():
                    expected = tensors[f"{layer.name}.{name}"]
                    assert found.dtype == expected.dtype
                    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))

        offloader.experts.within([own], compare)


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_every_byte_is_right_whatever_the_alignment_in_the_file(tmp_path, mode):
    generator, tensors = random.Random(1), {}
    for expert in range(6):
        for name in ("up_proj", "down_proj"):
            tensors[f"pad{expert}{name}.x.weight"] = random_bytes(torch.uint8, 1, generator.randint(1, 9000))
            shape = generator.randint(1, 90), generator.randint(1, 90)
            tensors[f"{expert}.{name}.weight"] = random_bytes(torch.float32, *shape)
    _, offloader, layers = build(tmp_path, tensors, float_layer, mode)
    assert any(each.layout.copies for each in offloader.experts.experts)
    for _ in range(2):
        check(offloader, layers, tensors)


def neighbors(folder, count: int, threads: int = 2, mode: str = "direct"):
    """Returns what `build` does for experts that follow each other in a file in another order."""
    generator, tensors = random.Random(2), {}
    for expert in sorted(map(str, range(count))):
        for name in ("down_proj", "up_proj"):
            shape = generator.randint(1, 90), generator.randint(1, 90)
            tensors[f"{expert}.{name}.weight"] = random_bytes(torch.float32, *shape)
    reader, offloader, layers = build(folder, tensors, float_layer, mode, count, threads)
    reader.counters.bytes_read = reader.counters.calls = 0
    order = sorted(range(count), key=lambda place: int(layers[place][0].name.partition(".")[0]))
    return reader, offloader, [layers[place] for place in order], tensors


def is_right(layers, tensors) -> bool:
    return all(
        torch.equal(found.view(torch.uint8), tensors[f"{layer.name}.{name}"].view(torch.uint8))
        for own in layers
        for layer in own
        for name, found in layer.onloaded_tensors().items()
    )


def skip_without_direct_reads(offloader, folder) -> None:
    if not offloader.source.files.supports_direct(str(folder / "model.safetensors")):
        pytest.skip("the file system has no direct reads")


@pytest.mark.parametrize("count", [4, 13, 40])
def test_neighbors_in_a_file_are_one_request_for_each_thread_and_pages_are_read_once(tmp_path, count):
    reader, offloader, layers, tensors = neighbors(tmp_path, count)
    skip_without_direct_reads(offloader, tmp_path)
    right = []
    offloader.experts.within(
        layers, lambda first, last, _: right.append(is_right(layers[first:last], tensors))
    )
    assert right
    assert all(right)
    groups = -(-count // (count // 2))
    assert reader.counters.calls == groups < count
    assert reader.counters.bytes_read <= (tmp_path / "model.safetensors").stat().st_size + groups * 4096
    offloader.experts.within(
        layers, lambda first, last, _: right.append(is_right(layers[first:last], tensors))
    )
    assert all(right)
    assert reader.counters.calls == groups


def test_what_is_missing_between_neighbors_is_not_read(tmp_path):
    reader, offloader, layers, tensors = neighbors(tmp_path, 40)
    skip_without_direct_reads(offloader, tmp_path)
    wanted = [layers[number] for number in range(40) if number != 20]
    right = []
    offloader.experts.within(
        wanted, lambda first, last, _: right.append(is_right(wanted[first:last], tensors))
    )
    assert all(right)
    missing = next(each for each in offloader.experts.experts if each.name == "20").layout.needed_nbytes
    assert reader.counters.calls == 3
    assert reader.counters.bytes_read <= (tmp_path / "model.safetensors").stat().st_size - missing + 4 * 4096


def test_no_more_experts_than_twice_the_threads_are_requests_of_their_own(tmp_path):
    reader, offloader, layers, _ = neighbors(tmp_path, 7, threads=4)
    skip_without_direct_reads(offloader, tmp_path)
    offloader.experts.within(layers, lambda *_: None)
    assert reader.counters.calls == 7


def test_requests_that_fail_together_are_read_one_by_one(tmp_path, monkeypatch):
    reader, offloader, layers, tensors = neighbors(tmp_path, 12)
    skip_without_direct_reads(offloader, tmp_path)
    read, bad = offloader.source.read, offloader.experts.experts[3]

    def fail(wanted, target):
        if wanted in [chunk for chunk, _, _ in bad.chunks]:
            raise CheckpointError("The disk fails.", fix="check the disk")
        read(wanted, target)

    monkeypatch.setattr(offloader.source, "read", fail)
    monkeypatch.setattr(offloader.source.files, "read_parts", lambda *_: False)
    with pytest.raises(CheckpointError, match=f"{bad.name}: The disk fails"):
        offloader.experts.within(layers, lambda *_: None)
    right = []
    others = [own for own in layers if own[0].name.partition(".")[0] != bad.name]
    offloader.experts.within(
        others, lambda first, last, _: right.append(is_right(others[first:last], tensors))
    )
    assert all(right)
    assert reader.counters.calls == 11


def test_a_large_expert_is_several_requests_of_at_most_a_chunk(tmp_path):
    tensors = {"0.up_proj.weight": random_bytes(torch.float32, 5, CHUNK_NBYTES // 8)}
    reader, offloader, layers = build(tmp_path, tensors, float_layer)
    reader.counters.calls = 0
    check(offloader, layers, tensors)
    assert reader.counters.calls == 3


def test_an_expert_without_bytes_is_there(tmp_path):
    tensors = {
        "0.up_proj.weight": torch.empty(0, 4),
        "1.up_proj.weight": random_bytes(torch.float32, 2, 4),
    }
    _, offloader, layers = build(tmp_path, tensors, float_layer)
    check(offloader, layers, tensors)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="counts the memory of Linux")
def test_the_process_grows_by_the_budget_and_no_more(tmp_path):
    tensors = {f"{expert}.up_proj.weight": random_bytes(torch.float32, 256, 1027) for expert in range(24)}
    build(tmp_path, tensors, float_layer)
    found = programs.run("count_expert_memory", tmp_path, 9)
    grown, budget = map(int, found.stdout.split())
    assert budget % HUGE_PAGE
    assert 0.75 * budget <= grown <= budget + (128 << 10)
