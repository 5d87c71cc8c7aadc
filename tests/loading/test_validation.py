"""Tests of the memory of the host that a load needs, where control groups leave less than the machine has."""

import os
import shutil

import pytest
import torch
from accelerate.utils import get_max_memory

from hfq.errors import PlacementError
from hfq.loading import automatic_map, read_weights, validation
from hfq.loading.validation import check_host_memory
from hfq.offload.experts import expert_cache
from tests.support import moe_models, tiny_models
from tests.support.models import load


@pytest.fixture
def leave(monkeypatch):
    """Makes loads find this many bytes of available memory; None for an unknown number."""

    def leave(nbytes):
        for module in (automatic_map, read_weights, validation):
            monkeypatch.setattr(module, "available_memory", lambda: nbytes)

    return leave


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    scheme = moe_models.BY_EXPERT
    return moe_models.write(scheme, moe_models.is_quantized(scheme)).save(tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize(("nbytes", "mapped"), [(0, 0), (0, 100), (60, 40), (100, 0)])
def test_what_fits_says_nothing(leave, caplog, nbytes, mapped):
    for available in (100, None):
        leave(available)
        check_host_memory("it", nbytes, mapped, "Do it.")
    assert caplog.text == ""


def test_mapped_weights_that_do_not_fit_are_a_line(leave, caplog):
    leave(1000)
    check_host_memory("it", 400, 601, "Do it.")
    check_host_memory("it", 0, 1001, "Do it.")
    assert "601 B of mapped weights and 400 B for it exceed the 1,000 B" in caplog.text
    assert "1,001 B of mapped weights exceed the 1,000 B" in caplog.text
    assert caplog.text.count("read weights from disk again and again. Do it.") == 2


def test_memory_that_the_system_cannot_take_back_is_an_error(leave):
    leave(1000)
    with pytest.raises(PlacementError, match="enough memory for it") as refused:
        check_host_memory("it", 1001, 0, "Do it.")
    assert (refused.value.expected, refused.value.fix) == ("1,001 free bytes", "Do it.")
    assert "1,000 bytes" in refused.value.found


def test_a_load_that_copies_more_than_there_is_raises_and_its_fix_works(leave, monkeypatch):
    path = tiny_models.DATA / "tiny-llama-gptq"
    copied = load(path, {"": "cpu"}, cpu_memory="private").hf_quantizer.loading.read_plan.buffers
    leave(sum(buffer.nbytes for buffer in copied.values()) - 1)
    with pytest.raises(PlacementError, match="enough memory for the copied weights") as refused:
        load(path, {"": "cpu"}, cpu_memory="private")
    assert 'Pass device_map="auto"' in refused.value.fix
    monkeypatch.setattr(automatic_map, "available_memory", lambda: 600_000)  # its offload buffer is large
    model = load(path, "auto", cpu_memory="private", dtype=torch.bfloat16)
    assert "disk" in model.hfq_device_map.values()


def test_a_load_that_maps_more_than_there_is_says_so(leave, caplog, tmp_path):
    folder = shutil.copytree(tiny_models.DATA / "tiny-llama-gptq", tmp_path / "cold")
    descriptor = os.open(folder / "model.safetensors", os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    leave(1000)
    load(folder, {"": "cpu"})
    assert "of mapped weights exceed the 1,000 B" in caplog.text


EXPERTS_ON_DISK = {
    "": "cpu",
    "model.layers.0.mlp.experts": "disk",
    "model.layers.1.mlp.experts": "disk",
}


def cache_of(model):
    """Returns the bytes of a model's expert cache."""
    return model.hf_quantizer.loading.offloader.experts.budget


def test_an_expert_cache_that_exceeds_the_memory_raises(leave, moe, caplog):
    nbytes = cache_of(load(moe, EXPERTS_ON_DISK, expert_cache_size="150KB"))
    smaller = cache_of(load(moe, EXPERTS_ON_DISK, expert_cache_size="120KB"))
    assert smaller < nbytes <= 150_000
    assert caplog.text == ""
    leave(nbytes - 1)
    with pytest.raises(PlacementError, match="enough memory for the expert cache") as refused:
        load(moe, EXPERTS_ON_DISK, expert_cache_size="150KB")
    assert refused.value.expected == f"{nbytes:,} free bytes"
    assert "expert_cache_size" in refused.value.fix
    load(moe, EXPERTS_ON_DISK, expert_cache_size="120KB")
    assert f"{smaller:,} B for the expert cache exceed the {nbytes - 1:,} B" in caplog.text


@pytest.mark.parametrize("size", [0, 1, "40KB", None])
def test_the_least_expert_cache_that_exceeds_the_memory_raises(leave, moe, monkeypatch, size):
    monkeypatch.setattr(expert_cache, "available_memory", lambda: 1000)  # the default is a share of it
    least = cache_of(load(moe, EXPERTS_ON_DISK, expert_cache_size=size))
    leave(least)
    load(moe, EXPERTS_ON_DISK, expert_cache_size=size)
    leave(least - 1)
    with pytest.raises(PlacementError, match="enough memory for the expert cache") as refused:
        load(moe, EXPERTS_ON_DISK, expert_cache_size=size)
    assert refused.value.expected == f"{least:,} free bytes"
    assert refused.value.fix.startswith("Free memory, or raise the limit of the control group.")


def test_automatic_limits_are_those_of_the_control_group(leave):
    leave(12_345)
    assert automatic_map.automatic_limits(None)["cpu"] == 12_345
    assert automatic_map.automatic_limits({"cpu": 99_999}) == {"cpu": 99_999}
    leave(None)
    assert automatic_map.automatic_limits(None)["cpu"] == pytest.approx(get_max_memory()["cpu"], rel=0.2)
