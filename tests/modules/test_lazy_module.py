"""Modules without empty tables: the same behavior as any module of torch."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from hfq.modules.lazy_module import LazyModule


class Doubling(LazyModule):
    def forward(self, values):
        return 2 * values


def test_tables_are_made_when_they_are_used():
    module = Doubling()
    first = {"training", "_is_full_backward_hook", "_parameters", "_buffers", "_modules"}
    assert set(vars(module)) == first
    module.train().eval()
    assert list(module.parameters()) == list(module.modules())[1:] == []
    assert set(vars(module)) == first
    module.register_forward_hook(lambda *arguments: None)
    assert len(vars(module)["_forward_hooks"]) == 1


def test_every_attribute_of_a_module_of_torch_is_there():
    module, plain = Doubling(), nn.Module()
    for name, value in vars(plain).items():
        assert getattr(module, name) == value
        assert type(getattr(module, name)) is type(value)
    assert vars(module).keys() == vars(plain).keys()
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        module.other  # noqa: B018


def test_hooks_buffers_and_children_work():
    module, seen = Doubling(), []
    module.register_forward_pre_hook(lambda *arguments: seen.append("before"))
    handle = module.register_forward_hook(lambda *arguments: seen.append("after"))
    module.register_buffer("step", torch.ones(2))
    module.inner = nn.Linear(2, 2)
    assert torch.equal(module(torch.ones(1)), torch.full((1,), 2.0))
    handle.remove()
    module(torch.ones(1))
    assert seen == ["before", "after", "before"]
    assert list(module.state_dict()) == ["step", "inner.weight", "inner.bias"]
    copied = copy.deepcopy(module)
    assert list(copied.state_dict()) == list(module.state_dict())
    assert len(copied._forward_pre_hooks) == 1


def test_a_module_can_be_pickled():
    restored = pickle.loads(pickle.dumps(Doubling()))
    assert torch.equal(restored(torch.ones(1)), torch.full((1,), 2.0))


def test_one_table_is_made_for_all_threads():
    module = Doubling()
    barrier, found = threading.Barrier(8), []

    def read():
        barrier.wait()
        found.append(module._forward_hooks)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(table) for table in found}) == 1
