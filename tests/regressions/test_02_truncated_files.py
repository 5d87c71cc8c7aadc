"""Tests that a mapped file which changes after the load is an error and never a signal."""

import copy
import os
import shutil
from pathlib import Path

import pytest
import torch

from hfq.errors import CheckpointError
from tests.support.models import GPTQ, load, logits

TOKENS = torch.arange(8)[None]
HALF = {"": "cpu", "model.layers.0": "disk"}


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(GPTQ, tmp_path / "model"))


def truncate(folder):
    os.truncate(folder / "model.safetensors", 4096)


def is_mapped(folder):
    return str(folder / "model.safetensors") in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize("device_map", [None, HALF], ids=["memory", "half"])
def test_a_truncated_file_of_a_mapped_model_is_an_error(folder, device_map):
    model = load(folder, device_map)
    logits(model, TOKENS)
    # a file of the same size first: without the check, it fails here, and the truncated one ends the process
    for change in (lambda folder: os.utime(folder / "model.safetensors"), truncate):
        change(folder)
        with pytest.raises(CheckpointError, match="changed while the model was using it"):
            logits(model, TOKENS)


@pytest.mark.parametrize("cpu_memory", ["private", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_its_own_memory_needs_no_file(folder, cpu_memory, dtype):
    model = load(folder, cpu_memory=cpu_memory, dtype=dtype)
    expected = logits(model, TOKENS)
    assert not is_mapped(folder)
    truncate(folder)
    assert torch.equal(logits(model, TOKENS), expected)


def test_a_copy_of_a_mapped_model_needs_no_file(folder):
    model = load(folder)
    copied, expected = copy.deepcopy(model), logits(model, TOKENS)
    truncate(folder)
    assert torch.equal(logits(copied, TOKENS), expected)


def test_the_check_is_one_fstat_of_each_file(folder, monkeypatch):
    model, calls, fstat = load(folder), [], os.fstat
    monkeypatch.setattr(os, "fstat", lambda descriptor: calls.append(descriptor) or fstat(descriptor))
    logits(model, TOKENS)
    assert len(calls) == 1
