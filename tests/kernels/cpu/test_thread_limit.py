"""Tests of the warning about more threads than a cgroup allows processors."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfq
from hfq.kernels.cpu import thread_limit
from tests.support import tiny_models

WARNING = (
    "hfq: 64 threads compute on a quota of 1.5 CPUs, which a control group sets. "
    "Fix: OMP_NUM_THREADS=2, or torch.set_num_threads(2)."
)


@pytest.fixture
def machine(monkeypatch):
    """machine(threads, quota) → torch has these threads, and a cgroup this quota."""
    thread_limit._warn.cache_clear()

    def make(threads, quota):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(thread_limit, "cpu_quota", lambda: quota)

    yield make
    thread_limit._warn.cache_clear()


def load():
    return AutoModelForCausalLM.from_pretrained(
        tiny_models.DATA / "tiny-llama-gptq", quantization_config=hfq.HfqConfig(kernel="reference")
    )


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == thread_limit.__name__]


def test_loads_warn_once_of_more_threads_than_the_quota(machine, caplog):
    machine(64, 1.5)
    load()
    load()
    assert messages(caplog) == [WARNING]


@pytest.mark.parametrize(("threads", "quota"), [(64, None), (2, 1.5), (2, 2), (1, 0.5)])
def test_threads_that_fit_are_not_named(threads, quota, machine, caplog):
    machine(threads, quota)
    assert thread_limit.threads_above_quota() is None
    load()
    assert messages(caplog) == []
