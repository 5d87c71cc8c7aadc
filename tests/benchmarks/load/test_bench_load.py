"""Tests of the load benchmark, with small checkpoints and workers in this process."""

import pytest

from benchmarks.checkpoints import LAYOUTS, checkpoint_files, make_checkpoint
from benchmarks.load import bench_load as load
from benchmarks.load.load_worker import LOADERS, LoadWorker
from hfq.machine_profile.probe_models import Architecture

SMALL = Architecture(128, 2)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("models"), SMALL, "fp8")


@pytest.fixture
def small_bench(monkeypatch, in_process):
    """Runs `bench_load` for one format and a small model in this process."""

    def prepare(worker, weights, loaders):
        monkeypatch.setattr(load, "FORMATS", (weights,))
        monkeypatch.setattr(load, "LOADERS", dict.fromkeys(loaders))
        monkeypatch.setattr(load, "Worker", in_process(worker))
        monkeypatch.setattr(load, "copy_rate", lambda: 1e9)
        monkeypatch.setattr(load, "architecture_of_size", lambda nbytes: SMALL)

    return prepare


@pytest.mark.parametrize("loader", LOADERS)
def test_a_load_tells_time_and_memory(path, loader):
    worker = LoadWorker(loader, str(path), str(path))
    found = worker.load()
    assert 0 < found["load_seconds"] <= found["seconds"]
    assert {
        "rss",
        "anonymous",
        "peak_rss",
        "pss",
        "device_read",
    } <= found.keys() or "rss" not in worker.memory()


def test_hfq_holds_the_bytes_of_the_files_and_reads_little_of_them_from_disk(path):
    worker = LoadWorker("hfq", str(path), str(path))
    worker.load()
    verified = worker.verify()
    assert verified["equal"] == verified["tensors"] == len(SMALL.tensors(LAYOUTS["fp8"]))
    lazy = worker.load_on_disk()
    dense = sum(tensor.nbytes for name, tensor in SMALL.tensors(LAYOUTS["fp8"]).items() if "proj" not in name)
    headers = lazy["bound"] - dense
    assert 0 < headers < 40_000
    assert headers < lazy["read"] <= lazy["bound"]


def test_a_changed_byte_is_found(path):
    worker = LoadWorker("hfq", str(path), str(path))
    worker.load()
    model, _ = worker._loaded
    model.model.norm.weight.data[0] += 1
    verified = worker.verify()
    assert verified["equal"] == verified["tensors"] - 1


def test_the_benchmark_reports_every_loader_and_target(tmp_path, small_bench):
    small_bench(LoadWorker, "fp8", ("hfq", "safetensors"))
    said = []
    report = load.bench_load(tmp_path, 1, 1, said.append)
    loads = [record for record in report.records if record["kind"] == "load"]
    assert {(r["state"], r["loader"]) for r in loads} == {
        (s, name) for s in ("cold", "warm") for name in ("hfq", "safetensors")
    }
    nbytes = sum(file.stat().st_size for file in checkpoint_files(next(tmp_path.glob("*-128x2-fp8"))))
    assert {record["nbytes"] for record in loads} == {nbytes}
    page = report.to_markdown()
    cold = next(record for record in loads if (record["state"], record["loader"]) == ("cold", "hfq"))
    assert f"{cold['seconds']:.3f} s ({cold['seconds'] / cold['raw_seconds']:.2f}x)" in page
    exact = next(
        target for target in report.targets if target.what == "fp8: share of tensors equal by sha256"
    )
    assert (exact.value, exact.verdict) == (1, "met")
    assert str(tmp_path) not in page + report.to_json()
    assert any("two processes" in text for text in said)


def test_a_refusal_is_told_once_and_not_tried_again(tmp_path, small_bench):
    tried = []

    class Refusing(LoadWorker):
        def load(self) -> dict:
            tried.append(self._loader)
            raise ImportError("needs what is not installed\nand more")

    small_bench(Refusing, "gptq4", ("safetensors",))
    report = load.bench_load(tmp_path, 1, 3, lambda text: None)
    assert len(tried) == 2  # cold and warm of the first round
    assert "refused: ImportError: needs what is not installed" in report.to_markdown()
    assert {target.verdict for target in report.targets} == {"not measured"}
