"""Tests of `python -m benchmarks fms`, with small models and workers in this process."""

import pytest
import torch

pytest.importorskip("fms", reason="ibm-fms is not installed (pip install hfq[fms])")

from benchmarks.fms import bench_fms as fms
from benchmarks.fms.fms_worker import FmsWorker
from hfq.machine_profile.probe_models import Architecture

pytestmark = pytest.mark.peers


class InProcess:
    """Replacement of `worker_process.Worker` that answers in this process."""

    def __init__(self, module: str, **options: str) -> None:
        self._worker = FmsWorker(**options)

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        pass

    def ask(self, question: str, **arguments) -> dict:
        try:
            return self._worker.commands[question](**arguments)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}


def test_the_report_has_every_loader(tmp_path, monkeypatch):
    monkeypatch.setattr(fms, "Worker", InProcess)
    monkeypatch.setattr(fms, "PARITY", [("llama", "gptq-asym", 8), ("granite", "fp8-block", 2)])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(fms, "FORMATS", ("gptq4",))
    monkeypatch.setattr(fms, "architecture_of_size", lambda nbytes: Architecture(128, 2))
    report = fms.bench_fms(tmp_path, 1e6, 1, lambda text: None)
    parity = {row[0]: row[1:] for row in report.tables[0].rows}
    assert list(parity) == ["llama gptq-asym 8", "granite fp8-block 2", "llama dense 2"]
    assert parity["llama gptq-asym 8"][0].startswith("wrong: ")  # FMS by itself
    assert report.tables[0].header[-2:] == ("hfq.fms.load, 2 ranks", "FMS with hfq.fms.register, 2 ranks")
    assert all(float(cell) <= fms.TOLERANCE for row in parity.values() for cell in row[1:])
    assert [(target.value, target.bound, target.verdict) for target in report.targets[:4]] == 4 * [
        (3, 3, "met")
    ]
    loads = {row[1]: row[2] for row in report.tables[1].rows}
    assert list(loads) == list(fms.LOADERS)
    assert "error" not in loads["hfq.fms.load"].lower()
    assert loads["hfq.fms.load"].endswith(" s")
    assert report.to_markdown().startswith("# FMS by itself and with hfq")


def test_a_model_that_does_not_load_is_not_met():
    """A loader that fails on a model, or on one of its ranks, counts as wrong."""
    failed = {"error": "FormatError: of one rank"}
    assert fms._compared([{"logits": [1.0, 2.0]}, failed], torch.tensor([1.0, 2.0])) == failed
    assert fms._compared([{"logits": [3.0, 4.0]}, {"logits": [3.0, 5.25]}], torch.tensor([3.0, 4.0])) == {
        "relative_error": 0.25
    }
    made = {"kind": "parity", "loader": "hfq.fms.load"}
    target = fms._parity_target(
        [made | {"relative_error": 1e-7}, made | {"relative_error": float("nan")}, made | failed],
        "hfq.fms.load",
    )
    assert (target.value, target.bound, target.verdict) == (1, 3, "not met")
