"""Tests of read plans: bytes for each `cpu_memory`, limited memory, and shared memory."""

import contextlib
import functools
import json
import logging
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from hfq import CheckpointError, PlacementError
from hfq.checkpoint.filesystem import resident_fraction
from hfq.checkpoint.read_plan import BUFFER_ALIGNMENT, plan_reads
from hfq.checkpoint.writer import write_safetensors
from hfq.loading import read_weights
from hfq.modules.linear import QuantizedLinear
from tests.support import programs, tiny_models
from tests.support.models import load, logits

ROOT = Path(__file__).parents[2]
GPTQ = tiny_models.DATA / "tiny-llama-gptq"
FP8 = tiny_models.DATA / "tiny-llama-fp8"
TOKENS = torch.tensor([[1, 40, 77, 300]])
HALF = {"": "cpu", "model.layers.2": "disk", "model.layers.3": "disk"}


def loader_of(model):
    return model.hf_quantizer.loading


def how(model, quantized=True):
    """Returns {kind of read: number of modules}, without the extra reads of small tensors."""
    loading, found = loader_of(model), {}
    for read in loading.read_plan.reads:
        if (read.name in loading.quantized) is quantized and not read.buffer.startswith("checks"):
            key = read.buffer or read.how
            found[key] = found.get(key, 0) + 1
    return found


@pytest.fixture(scope="module")
def expected():
    return logits(load(), TOKENS)


@pytest.fixture(scope="module")
def misaligned(tmp_path_factory):
    """The GPTQ model with all tensors shifted by one byte in the file."""
    folder = tmp_path_factory.mktemp("misaligned") / "model"
    shutil.copytree(GPTQ, folder)
    content = (GPTQ / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length] + b" "
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length + 1) + header + content[8 + length :])
    return folder


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    """A folder that replaces the shared memory of the node."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(
        read_weights.SharedMemory, "open", functools.partial(read_weights.SharedMemory.open, folder=folder)
    )
    return folder


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="hfq")
    return caplog


def test_the_plan_holds_every_stored_tensor_once_and_is_printed(tmp_path):
    loading = loader_of(load(device_map=HALF))
    plan = loading.read_plan
    resting = [
        info.name
        for read in plan.reads
        if not read.buffer.startswith("checks")
        for info in read.infos.values()
    ]
    assert sorted(resting) == sorted(loading.checkpoint.tensors)
    text = plan.explain()
    assert all(name in text for name in loading.checkpoint.tensors)
    for words in (
        ("mapped", "aligned"),
        ("disk", "read when the module computes"),
        ("checks 0", "values are checked while loading"),
    ):
        assert any(all(word in line for word in words) for line in text.splitlines())
    assert json.loads(json.dumps(plan.to_dict()))["staging"] == plan.staging > 0


@pytest.mark.parametrize("device_map", [{"": "disk"}, HALF])
def test_of_what_rests_on_disk_only_small_tensors_are_read(device_map):
    loading = loader_of(load(FP8, device_map))
    small = sum(module.infos["weight_scale_inv"].nbytes for module in loading.quantized.values())
    assert loading.reader.counters.bytes_read == loading.read_plan.bytes_read == small
    on_disk = sum(
        info.nbytes for read in loading.read_plan.reads if read.how == "disk" for info in read.infos.values()
    )
    stored = sum(info.nbytes for info in loading.checkpoint.tensors.values())
    assert sum(source.nbytes for source in loading.read_plan.mapped) <= stored - on_disk + (64 << 10) * len(
        loading.quantized
    )
    if device_map == {"": "disk"}:
        assert loading.read_plan.mapped == []
        assert loading.reader.counters.populated == 0


@pytest.mark.parametrize("cpu_memory", ["auto", "mmap", "private", "shared"])
def test_every_backing_computes_the_same(cpu_memory, expected, shared_memory):
    model = load(cpu_memory=cpu_memory)
    assert how(model) == {
        {"auto": "mapped", "mmap": "mapped", "private": "cpu"}.get(cpu_memory, cpu_memory): 28
    }
    assert torch.equal(logits(model, TOKENS), expected)


def test_rows_of_an_arena_lie_one_after_another_at_multiples_of_256():
    model = load(cpu_memory="private")
    plan = loader_of(model).read_plan
    found = sorted(
        (module.flat_buffer.data_ptr(), module.flat_buffer.nbytes)
        for module in model.modules()
        if isinstance(module, QuantizedLinear)
    )
    first = found[0][0]
    assert all((address - first) % BUFFER_ALIGNMENT == 0 for address, _ in found)
    assert found[-1][0] + found[-1][1] - first <= plan.buffers["cpu"].nbytes
    assert plan.buffers["cpu"].kind == "private"
    assert plan.bytes_needed == sum(
        info.nbytes for module in loader_of(model).quantized.values() for info in module.infos.values()
    )
    assert (
        loader_of(model).reader.counters.bytes_read == plan.bytes_read
    )  # each module once, with its small tensors


def test_a_row_of_an_arena_is_a_storage_of_its_own():
    model = load(cpu_memory="private")
    read = model.model.layers[0].mlp.up_proj.flat_buffer
    assert read.untyped_storage().nbytes() == read.nbytes


def test_staging_is_bounded_and_used_again(expected, monkeypatch):
    limit = 20_000
    monkeypatch.setattr(read_weights, "plan_reads", functools.partial(plan_reads, staging=limit))
    model = load(device_map=HALF)
    plan = loader_of(model).read_plan
    assert len(plan.buffers) > 1
    assert plan.staging <= limit
    assert torch.equal(logits(model, TOKENS), expected)


def test_rows_of_an_accelerator_are_copied_out_of_the_staging_buffer(expected, monkeypatch):
    """`cpu:0` replaces an accelerator: hfq sees another device than `cpu`, and torch knows it."""
    monkeypatch.setattr(read_weights, "plan_reads", functools.partial(plan_reads, staging=100_000))
    model = load()
    loading = loader_of(model)
    loading.devices = dict.fromkeys(loading.devices, "cpu:0")
    before = loading.reader.counters.bytes_read
    plan, *_ = read_weights.load_quantized_weights(loading, set())
    assert plan.staging <= 100_000
    assert len(plan.buffers) >= 5
    assert all(read.buffer.startswith("cpu:0 ") for read in plan.reads if read.name in loading.quantized)
    assert loading.reader.counters.bytes_read - before == plan.bytes_read
    held = [module.flat_buffer for module in loading.quantized.values()]
    assert len({read.data_ptr() for read in held}) == 28
    assert torch.equal(logits(model, TOKENS), expected)


def test_what_is_not_aligned_is_read(misaligned, expected):
    model = load(misaligned)
    assert how(model) == {"cpu": 28}
    assert "not aligned" in loader_of(model).read_plan.explain()
    assert torch.equal(logits(model, TOKENS), expected)
    with pytest.raises(PlacementError, match="cannot be mapped from its file"):
        load(misaligned, cpu_memory="mmap")


def test_a_copy_is_shared_where_a_launcher_started_several_processes(
    misaligned, expected, monkeypatch, shared_memory
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert how(load()) == {"mapped": 28}
    first, second = load(misaligned), load(misaligned)
    assert how(first) == how(second) == {"shared": 28}
    assert len(list(shared_memory.iterdir())) == 1
    counts = [loader_of(model).reader.counters.bytes_read for model in (first, second)]
    assert counts == [loader_of(first).read_plan.bytes_read, 0]
    assert loader_of(second).read_report.shared == loader_of(second).read_plan.buffers["shared"].nbytes
    assert torch.equal(logits(second, TOKENS), expected)
    first.model.layers[0].mlp.up_proj.flat_buffer.data.zero_()
    assert torch.equal(logits(second, TOKENS), expected)
    assert not torch.equal(logits(first, TOKENS), expected)


def test_another_version_of_a_file_is_not_taken_for_it(misaligned, shared_memory, tmp_path):
    copied = shutil.copytree(misaligned, tmp_path / "copy")
    first, second = load(misaligned, cpu_memory="shared"), load(copied, cpu_memory="shared")
    assert loader_of(second).reader.counters.bytes_read == loader_of(first).reader.counters.bytes_read > 0
    assert len(list(shared_memory.iterdir())) == 2


def test_without_room_in_shared_memory_each_process_has_its_own(
    monkeypatch, misaligned, expected, shared_memory
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    shared_memory.rmdir()
    model = load(misaligned)
    assert loader_of(model).read_report.shared == 0
    assert torch.equal(logits(model, TOKENS), expected)
    with pytest.raises(
        PlacementError, match="do not fit in shared memory"
    ):  # requested with cpu_memory="shared"
        load(misaligned, cpu_memory="shared")


def test_a_network_file_system_is_read_by_many_threads(monkeypatch, expected, log):
    monkeypatch.setattr(read_weights, "is_network", lambda _: True)
    model = load()
    assert how(model) == {"cpu": 28}
    assert "network file system" in loader_of(model).read_plan.explain()
    assert "16 threads" in log.text
    assert how(load(cpu_memory="mmap")) == {"mapped": 28}
    assert torch.equal(logits(model, TOKENS), expected)


def test_one_line_says_what_was_done(log):
    load()
    (line,) = [record.getMessage() for record in log.records if record.getMessage().startswith("hfq: loaded")]
    for words in ("28 quantized modules", "bytes read", "mapped", " s at ", "GB/s", "4 threads"):
        assert words in line


@pytest.mark.parametrize("enabled", [True, False])
def test_the_bar_is_shown_as_transformers_says(enabled, capsys, monkeypatch):
    monkeypatch.setattr(read_weights, "_SMALL", 0)
    monkeypatch.setattr(transformers_logging, "_tqdm_active", enabled)
    model = load(cpu_memory="private")
    shown = capsys.readouterr().err
    assert ("hfq: reading" in shown) is enabled
    assert ("100%" in shown.partition("hfq: reading")[2]) is enabled
    assert loader_of(model).read_plan.bytes_read > 0


@pytest.fixture(autouse=True)
def shown_bars():
    """Switches transformers' progress bars on.

    The setting belongs to the process, and an earlier test may have switched it off.
    """
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    yield
    if not was_on:
        transformers_logging.disable_progress_bar()


def test_the_bar_ends_where_another_process_has_read(capsys, monkeypatch, shared_memory):
    monkeypatch.setattr(read_weights, "_SMALL", 0)
    first = load(cpu_memory="shared")
    capsys.readouterr()
    second = load(cpu_memory="shared")
    assert "100%" in capsys.readouterr().err.partition("hfq: reading")[2].partition("Loading weights")[0]
    assert loader_of(first).reader.counters.bytes_read > loader_of(second).reader.counters.bytes_read == 0


def test_a_small_read_has_no_bar(capsys):
    load(cpu_memory="private")
    assert "hfq: reading" not in capsys.readouterr().err


@pytest.fixture
def cold(tmp_path):
    """A copy of the model with no page in memory."""
    folder = shutil.copytree(FP8, tmp_path / "cold")
    with open(folder / "model.safetensors", "r+b") as stream:
        os.fsync(stream.fileno())
    return folder


@contextlib.contextmanager
def evicted(monkeypatch, folder):
    """Evicts the pages of a file from the page cache when hfq is about to read weights.

    Headers and other data are read by then.
    """
    file = str(folder / "model.safetensors")
    original = read_weights._worth_bringing_in

    def evict_first(plan, reader):
        os.posix_fadvise(reader.descriptor(file), 0, 0, os.POSIX_FADV_DONTNEED)
        if any(resident_fraction(reader.descriptor(file), source) != 0 for source in plan.mapped):
            pytest.skip("this file system does not let go of pages")
        return original(plan, reader)

    with monkeypatch.context() as patch:
        patch.setattr(read_weights, "_worth_bringing_in", evict_first)
        yield


def test_a_cold_checkpoint_that_is_mapped_is_in_memory_after_the_load(cold, monkeypatch):
    with evicted(monkeypatch, cold):
        loading = loader_of(load(cold))
    mapped = sum(source.nbytes for source in loading.read_plan.mapped)
    assert (
        loading.reader.counters.populated
        == loading.read_report.populated
        == loading.read_report.mapped
        == mapped
    )
    again = loader_of(load(cold))
    assert again.reader.counters.populated == 0


def test_nothing_is_brought_in_where_it_does_not_fit(cold, monkeypatch):
    monkeypatch.setattr(read_weights, "available_memory", lambda: 1000)
    with evicted(monkeypatch, cold):
        assert loader_of(load(cold)).reader.counters.populated == 0


@pytest.mark.parametrize("cpu_memory", ["auto", "private"])
def test_a_file_truncated_while_it_is_loaded_is_an_error(cold, monkeypatch, cpu_memory):
    original = read_weights.plan_weight_reads

    def cut(*args):
        plan = original(*args)
        os.truncate(cold / "model.safetensors", 200_000)
        return plan

    monkeypatch.setattr(read_weights, "plan_weight_reads", cut)
    with pytest.raises(CheckpointError, match="changed while the model was using it"):
        load(cold, cpu_memory=cpu_memory)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """(folder, bytes) of a model of about 100 MB, almost all of it FP8."""
    folder, sizes = (
        tmp_path_factory.mktemp("large"),
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6},
    )
    config = json.loads((FP8 / "config.json").read_text()) | sizes | {"head_dim": 256, "vocab_size": 512}
    shapes = {f"self_attn.{name}_proj": (1024, 1024) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (4096, 1024), "mlp.up_proj": (4096, 1024), "mlp.down_proj": (1024, 4096)}
    generator, stored = torch.Generator().manual_seed(0), {}
    for layer in range(6):
        for local, (out, size) in shapes.items():
            name = f"model.layers.{layer}.{local}"
            codes = torch.randint(0, 100, (out, size), dtype=torch.uint8, generator=generator)
            stored[f"{name}.weight_scale_inv"] = tiny_models.as_stored(
                torch.full((out // 128, size // 128), 0.01)
            )
            stored[f"{name}.weight"] = ("F8_E4M3", (out, size), memoryview(codes.reshape(-1).numpy()))
        for local in ("input_layernorm", "post_attention_layernorm"):
            stored[f"model.layers.{layer}.{local}.weight"] = tiny_models.as_stored(
                torch.ones(1024, dtype=torch.bfloat16)
            )
    stored["model.norm.weight"] = tiny_models.as_stored(torch.ones(1024, dtype=torch.bfloat16))
    stored["model.embed_tokens.weight"] = tiny_models.as_stored(torch.ones(512, 1024, dtype=torch.bfloat16))
    (folder / "config.json").write_text(json.dumps(config))
    return folder, write_safetensors(folder / "model.safetensors", stored, {"format": "pt"})


@contextlib.contextmanager
def loaded(folder, cpu_memory):
    variables = {"TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    with programs.start("hold_model", FP8, folder, cpu_memory, **variables) as process:
        try:
            yield process
            process.communicate("", timeout=60)
        finally:
            process.kill()


def ask(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux")
@pytest.mark.parametrize("cpu_memory", ["mmap", "shared"])
def test_two_processes_hold_one_copy_and_little_of_their_own(large, cpu_memory):
    folder, nbytes = large
    constant = 4 << 20  # the meta model, the plan, and free memory of the allocator, in each process
    with loaded(folder, cpu_memory) as first, loaded(folder, cpu_memory) as second:
        after_load = [int(process.stdout.readline()) for process in (first, second)]
        touched = [ask(process) for process in (first, second)]
        assert max(after_load + touched) <= 0.02 * nbytes + constant
        sizes = [ask(process) for process in (first, second)]
    assert 0.9 * nbytes < sum(sizes) <= 1.05 * nbytes + constant
