"""Tests of the settings of Python and torch during a load."""

import gc

import pytest
import torch

from hfq.integrations.transformers.interpreter import pausing_collection, without_torch_modes
from hfq.loading import model_loader, read_weights
from tests.support.models import load


def modes():
    return torch._C._len_torch_function_stack()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collection_is_as_before_after_a_pause(was_enabled):
    if not was_enabled:
        gc.disable()
    try:
        with pytest.raises(KeyError), pausing_collection():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()


def test_no_mode_is_active_within_and_all_are_after():
    with torch.device("meta"), torch.device("meta"):
        with pytest.raises(KeyError), without_torch_modes():
            assert modes() == 0
            assert torch.empty(1).device.type == "cpu"
            raise KeyError
        assert modes() == 2
        assert torch.empty(1).device.type == "meta"
    assert modes() == 0


def test_a_load_replaces_modules_and_reads_weights_without_modes_and_collection(monkeypatch):
    seen = []

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*arguments):
            seen.append((name, modes(), gc.isenabled()))
            return original(*arguments)

        monkeypatch.setattr(owner, name, watched)

    watch(model_loader, "replace_modules")
    watch(read_weights, "plan_weight_reads")
    load(device_map={"": "cpu"})
    assert seen == [("replace_modules", 0, False), ("plan_weight_reads", 0, False)]
    assert gc.isenabled()
