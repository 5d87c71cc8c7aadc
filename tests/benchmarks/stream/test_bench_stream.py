"""Tests of the stream benchmark: a round's measurements, and the report of invented records."""

import pytest

from benchmarks.checkpoints import make_checkpoint
from benchmarks.stream import bench_stream as stream
from benchmarks.stream.stream_report import stream_report
from hfq.machine_profile.probe_models import Architecture

SMALL = Architecture(128, 1)


class Answering:
    """Worker that answers every question, except for one contender."""

    asked: list = []

    def __init__(self, mover, path, stand_in=True, on_disk=True) -> None:
        self._mover, self._place = mover, "disk" if on_disk else "memory"
        self.commands = {name: getattr(self, name) for name in ("load", "passes", "micro_batches", "decode")}

    def load(self) -> dict:
        self.asked.append((self._mover, self._place))
        if self._mover == "accelerate":
            raise ImportError("needs what is not installed")
        return {}

    def passes(self, count: int, compute: float) -> dict:
        return {
            "steps": count,
            "seconds": 1.0 if self._mover == "hfq" else 3.0,
            "expected": 400,
            "moved": 200,
        }

    def micro_batches(self, count: int, compute: float, repeats: int) -> dict:
        return {
            "steps": repeats,
            "seconds": 1.0 if self._mover == "hfq" else float(count),
            "expected": 100,
            "moved": 100,
        }

    def decode(self, tokens: int) -> dict:
        return {"tokens": [1, 2], "seconds": 0.5}


@pytest.fixture
def report(tmp_path, monkeypatch, in_process):
    monkeypatch.setattr(stream, "FORMATS", ("fp8",))
    monkeypatch.setattr(stream, "Worker", in_process(Answering))
    monkeypatch.setattr(stream, "measure_limit", lambda path: 1000.0)
    monkeypatch.setattr(stream, "copy_rate", lambda: 1e9)
    monkeypatch.setattr(stream, "architecture_of_size", lambda nbytes: SMALL)
    monkeypatch.setattr(Answering, "asked", [])
    return stream.bench_stream(tmp_path, 1, 3, lambda text: None)


def test_every_mover_is_measured_in_every_round_in_another_order(report):
    orders = [
        [r["mover"] for r in report.records if r["kind"] == "idle" and r["round"] == number]
        for number in range(3)
    ]
    assert orders[0][0] == "hfq"
    assert orders[1][0] == "hfq, buffered"
    assert set(orders[1]) == {"hfq", "hfq, buffered", "accelerate's hooks"}


def test_what_refuses_is_not_tried_again(report):
    tries = [place for mover, place in Answering.asked if mover == "accelerate"]
    assert sorted(tries) == ["disk", "disk", "memory"]
    assert "refused: ImportError: needs what is not installed" in report.to_markdown()


def test_ratios_follow_from_the_records(report):
    found = {target.what: target for target in report.targets}
    assert found["fp8: share of the disk's limit, no compute"].value == pytest.approx(0.2)
    assert found["fp8: times as fast as accelerate's hooks, no compute"].value == pytest.approx(3)
    assert found["fp8: layer-major over accelerate's hooks, 8 micro-batches"].verdict == "met"
    assert found["fp8: decoding gives the tokens of all in memory"].value == 1
    assert found["bf16: share of the disk's limit, no compute"].verdict == "not measured"


def test_other_tokens_are_seen(tmp_path):
    label = {"kind": "decode", "weights": "fp8", "mover": "hfq", "seconds": 1.0, "round": 0}
    records = [label | {"on_disk": False, "tokens": [1, 2]}, label | {"on_disk": True, "tokens": [1, 3]}]
    report = stream_report(tmp_path, {}, records)
    target = next(target for target in report.targets if target.what.startswith("fp8: decoding"))
    assert (target.value, target.verdict) == (0, "not met")
    assert "| fp8 | hfq | disk | 1.000 s | NO |" in report.to_markdown()


def test_efficiency_is_the_longer_of_reading_and_computing_over_the_time(tmp_path):
    record = {
        "kind": "busy",
        "weights": "fp8",
        "mover": "hfq",
        "round": 0,
        "limit": 100.0,
        "layers": 2,
        "nbytes": 100,
    }
    record |= {"steps": 4, "seconds": 8.0, "expected": 400, "moved": 400}

    def efficiency(alone: float) -> float:
        report = stream_report(tmp_path, {}, [record | {"alone": alone}])
        return next(
            target.value for target in report.targets if target.what == "fp8: max(io, compute) over time"
        )

    assert efficiency(0.0) == pytest.approx(0.5)  # 4 s of reading
    assert efficiency(1.5) == pytest.approx(0.75)  # 4 passes of 1.5 s


def test_what_had_all_been_read_before_gives_no_rate(tmp_path):
    record = {
        "kind": "idle",
        "weights": "fp8",
        "round": 0,
        "limit": 100.0,
        "layers": 2,
        "nbytes": 100,
        "compute": 0.0,
    }
    record |= {"steps": 1, "seconds": 1.0, "expected": 100, "moved": 0}
    report = stream_report(
        tmp_path, {}, [record | {"mover": mover} for mover in ("hfq", "accelerate's hooks")]
    )
    target = next(t for t in report.targets if t.what.startswith("fp8: times as fast as accelerate's hooks"))
    assert target.verdict == "not measured"
    assert report.to_markdown()


def test_the_limit_is_a_rate(tmp_path):
    assert stream.measure_limit(make_checkpoint(tmp_path, SMALL, "fp8")) > 0
