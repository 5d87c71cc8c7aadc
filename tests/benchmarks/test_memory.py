"""Tests of the memory benchmark, with small checkpoints and workers in this process."""

import pytest

from benchmarks import memory
from benchmarks.checkpoints import make_checkpoint
from hfq.machine_profile.probe_models import Architecture

SIZES = [Architecture(128, layers) for layers in (1, 2, 3, 4)]


@pytest.mark.parametrize("setup", memory.SETUPS)
def test_a_worker_measures_its_peak(setup, tmp_path):
    path = str(make_checkpoint(tmp_path, SIZES[1], "fp8"))
    assert memory.MemoryWorker(path, path, setup).load_and_run()["peak_nbytes"] >= 0


def test_the_report_has_a_line_of_every_setup(monkeypatch, in_process, tmp_path):
    sizes = iter(SIZES)
    monkeypatch.setattr(memory, "Worker", in_process(memory.MemoryWorker))
    monkeypatch.setattr(memory, "architecture_of_size", lambda nbytes: next(sizes))
    said = []
    report = memory.bench_memory(tmp_path, 1e6, 1, said.append)
    assert len(said) == len(report.records) == 4 * len(memory.SETUPS)
    assert set(report.chart.series) == set(memory.SETUPS)
    assert all(len(points) == 4 for points in report.chart.series.values())
    assert [len(table.rows) for table in report.tables] == [4]
    assert all(target.value is not None for target in report.targets)
