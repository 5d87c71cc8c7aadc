"""Tests of `python -m benchmarks plan`: planned bytes equal measured bytes in every placement."""

import pytest

from benchmarks.plan import bench_plan as plan
from benchmarks.plan.plan_cases import PLACEMENTS, open_cases
from benchmarks.plan.plan_report import bytes_apart, plan_report
from hfq.loading.dry_run import open_model
from hfq.placement.estimate.profile import PUBLISHED
from hfq.placement.estimate.roofline import predict
from tests.support import tiny_models

CHECKPOINTS = [tiny_models.DATA / name for name in ("tiny-llama-gptq", "tiny-llama-fp8", "tiny-llama")]


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_planned_bytes_are_measured_bytes_in_every_placement(path):
    for placement, case in zip(PLACEMENTS, open_cases(path, open_model(path)), strict=True):
        assert case.placement == placement
        assert bytes_apart({"planned": case.planned, "measured": case.measured}) <= 0.02
        assert (case.planned["disk"] > 0) == (case.planned["buffer"] > 0) == (placement != "cpu")
        assert predict(case.work, PUBLISHED).step_seconds > 0


def test_every_round_predicts_with_rates_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "GENERATED", ())
    report = plan.bench_plan(tmp_path, CHECKPOINTS[:1], 5e6, 2, lambda _: None, ranks=0, quick=True)
    assert [record["placement"] for record in report.records] == [*PLACEMENTS]
    assert max(map(bytes_apart, report.records)) <= 0.02
    rounds = [each for record in report.records for each in record["rounds"]]
    assert len(rounds) == 2 * len(report.records)
    assert all(each["predicted"] > 0 and each["achieved"] > 0 for each in rounds)
    first, second = report.records[0]["rounds"]
    assert first["profile"]["products"].keys() == {"gptq 4-bit bfloat16", "head bfloat16"}
    assert first["profile"]["products"] != second["profile"]["products"]
    assert report.targets[0].verdict == "met"
    assert "| tiny-llama-gptq | half disk |" in report.to_markdown()


@pytest.mark.slow
def test_shards_under_zero3_are_those_that_were_planned(tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(plan, "GENERATED", ("fp8",))
    monkeypatch.setattr(plan, "PLACEMENTS", ())
    report = plan.bench_plan(
        tmp_path, CHECKPOINTS[:1], 5e6, 1, lambda _: None, ranks=2, quick=True
    )  # whose head is tied
    assert [record["placement"] for record in report.records] == ["ZeRO-3, 2 ranks"] * 2
    for record in report.records:
        (found,) = record["rounds"]
        assert bytes_apart(record) <= 0.02
        assert found["predicted"] > 0
        assert found["terms"]["gathering"] > 0
        assert found["profile"]["zero3"]["slowdown"] >= 1


def test_a_report_tells_what_is_apart(tmp_path):
    label = {"checkpoint": "a", "placement": "cpu", "planned": {"cpu": 100}}
    rounds = [{"predicted": 1.0, "achieved": seconds} for seconds in (9.0, 1.2, 1.0)]
    near = label | {"measured": {"cpu": 99}, "rounds": rounds}
    devices = {"planned": {"cpu": 100, "disk": 0}, "measured": {"cpu": 100, "disk": 4}}
    far = label | devices | {"placement": "half disk", "rounds": [{"predicted": 1.0, "achieved": 2.0}]}
    report = plan_report(tmp_path, {}, [near, far])
    largest, share = report.targets
    assert (largest.value, largest.verdict) == (1.0, "not met")
    assert (share.value, share.verdict) == (0.5, "not met")
    assert "| a | cpu | cpu 100 | cpu 99 | 1.00% | 1 | 0.833 | 1.20 |" in report.to_markdown()
