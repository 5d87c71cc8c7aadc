"""`hfq bench fms` with workers in this process and one small model: complete, and consistent in itself."""

import pytest

pytest.importorskip("fms", reason="ibm-fms is not installed (pip install hfq[fms])")

from hfq.benchmarks import fms
from hfq.benchmarks.fms_worker import FmsWorker
from hfq.benchmarks.models import Architecture

pytestmark = pytest.mark.peers


class InProcess:
    """Stands in for `process.Worker`: the same questions, answered here."""

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
    monkeypatch.setattr(fms, "FORMATS", ("gptq4",))
    monkeypatch.setattr(fms.Architecture, "of_size", lambda nbytes: Architecture(128, 2))
    report = fms.bench_fms(tmp_path, 1e6, 1, lambda text: None)
    parity = {row[0]: row[1:] for row in report.tables[0].rows}
    assert list(parity) == ["llama gptq-asym 8", "granite fp8-block 2", "llama dense 2"]
    assert parity["llama gptq-asym 8"][0].startswith("wrong: ")  # FMS by itself
    assert all(float(cell) <= fms.TOLERANCE for row in parity.values() for cell in row[1:])
    assert [target.verdict for target in report.targets[:2]] == ["met", "met"]
    loads = {row[1]: row[2] for row in report.tables[1].rows}
    assert list(loads) == list(fms.LOADERS)
    assert "error" not in loads["hfq.fms.load"].lower()
    assert loads["hfq.fms.load"].endswith(" s")
    assert report.to_markdown().startswith("# FMS by itself and with hfq")
