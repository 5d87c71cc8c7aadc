"""Tests of the benchmark of large models, with few layers and workers in this process."""

import json
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from benchmarks.load import bench_large as bench
from benchmarks.load.large_models import LARGE_MODELS, make_large
from benchmarks.load.large_worker import LargeWorker
from hfq.checkpoint import Checkpoint
from tests.support.large_models import narrow


@pytest.fixture
def tiny(monkeypatch):
    """Makes the large models small."""

    monkeypatch.setattr(bench, "make_large", lambda folder, name, layers=4: make_large(folder, name, layers))
    for name in LARGE_MODELS:
        monkeypatch.setitem(LARGE_MODELS, name, narrow(name, 8))


def test_the_files_have_the_tensors_of_the_published_models():
    counts = {}
    for name, model in LARGE_MODELS.items():
        tensors = list(model.tensors(model.config(None)))
        counts[name] = len(tensors), sum(tensor.nbytes for _, tensor in tensors)
    assert counts["qwen3-30b-gptq4"][0] == 74_739
    assert round(counts["qwen3-30b-gptq4"][1] / 1e9, 2) == 16.92
    assert counts["deepseek-v3-fp8"][0] == 90_427
    assert 0.67e12 < counts["deepseek-v3-fp8"][1] < 0.68e12


def test_a_checkpoint_is_sparse_valid_and_made_once(tmp_path):
    path = make_large(tmp_path, "qwen3-30b-gptq4", 1)
    files = sorted(path.glob("*.safetensors"))
    stats = [file.stat() for file in files]
    assert sum(stat.st_blocks * 512 for stat in stats) < sum(stat.st_size for stat in stats) / 10
    checkpoint = Checkpoint.open(path)
    assert checkpoint.tensors["model.layers.0.mlp.experts.127.up_proj.scales"].shape == (16, 768)
    assert AutoConfig.from_pretrained(path).num_hidden_layers == 1
    assert make_large(tmp_path, "qwen3-30b-gptq4", 1) == path
    assert [file.stat().st_mtime_ns for file in files] == [stat.st_mtime_ns for stat in stats]


def test_the_report_has_every_case_and_target(tmp_path, tiny, monkeypatch, in_process):
    monkeypatch.setattr(bench, "Worker", in_process(LargeWorker))
    said = []
    report = bench.bench_large(tmp_path, 1, said.append)
    page = report.to_markdown()
    assert [target.verdict for target in report.targets].count("not measured") == 0, report.records
    assert "| qwen3-30b-gptq4 | load, cpu | 112 | 471 |" in page
    assert "deepseek-v3-fp8: plan" in said
    assert str(tmp_path) not in page + report.to_json()


def test_a_failed_load_is_in_the_records(tmp_path, monkeypatch):
    worker = SimpleNamespace(__enter__=lambda: None, ask=lambda question: {"error": "MemoryError: no memory"})
    monkeypatch.setattr(bench, "make_large", lambda *arguments: tmp_path)
    monkeypatch.setattr(bench, "Worker", lambda *arguments, **options: _Context(worker))
    report = bench.bench_large(tmp_path, 1, lambda text: None)
    assert {record["error"] for record in json.loads(report.to_json())["records"]} == {
        "MemoryError: no memory"
    }
    assert {target.verdict for target in report.targets} == {"not measured"}


class _Context:
    def __init__(self, worker):
        self._worker = worker

    def __enter__(self):
        return self._worker

    def __exit__(self, *exception):
        pass
