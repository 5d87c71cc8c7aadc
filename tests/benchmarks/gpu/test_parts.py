"""Tests of the parts' tables and values, on measurements that are written down here."""

import importlib

import pytest

from benchmarks.gpu import offload, products, resident, suite
from benchmarks.gpu.bench import missing
from benchmarks.gpu.decoding import _covered
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.report import figures_of
from hfq.offload.spans import Span


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_that_ended_before_its_first_record_has_tables_and_no_values(part):
    module = importlib.import_module(part.module)
    assert all(table.to_markdown() for table in module.tables([]))
    assert module.values([], {}) == {}
    assert {figure.verdict for figure in figures_of(part.name, {}, "it died")} <= {"not measured"}


def test_a_dry_run_says_nothing_about_speed():
    figures = figures_of("exact", {"error": 0.5}, "", is_dry=True)
    assert figures[0].verdict == "ok"
    figures = figures_of("kernels", {"fp8": 9.0, "host": 1.0}, "", is_dry=True)
    assert {(figure.value, figure.reason) for figure in figures} == {(None, "a dry run")}


def product(name, rows, seconds, size="14336 x 4096", nbytes=30e6):
    return {
        "kind": "product",
        "format": name,
        "kernel": "k",
        "size": size,
        "rows": rows,
        "seconds": seconds,
        "nbytes": nbytes,
        "how": "graph replays",
    }


def test_products_are_compared_with_bf16_of_the_same_size_and_rows():
    records = [
        product("bf16", 1, 40e-6),
        product("bf16", 64, 50e-6),
        product("mxfp4", 1, 10e-6),
        product("awq", 1, 20e-6),
        product("fp8", 1, 25e-6),
        product("fp8", 64, 100e-6),
        product("torch int4", 64, 500e-6),
        missing("product", "out of shared memory", format="gptq4", size="14336 x 4096"),
        {
            "kind": "call",
            "format": "mxfp4",
            "rows": 1,
            "host": 12e-6,
            "launches": 2,
            "kernel": "k",
            "size": "s",
        },
        {
            "kind": "call",
            "format": "bf16",
            "rows": 1,
            "host": 90e-6,
            "launches": 9,
            "kernel": "k",
            "size": "s",
        },
    ]
    found = products.values(records, {"copy": 3e12})
    assert found == pytest.approx(
        {"four": 2, "four_rate": 0.5, "fp8": 1.6, "some": 0.5, "host": 12, "launches": 2}
    )
    page = products.tables([r for r in records if r["kind"] == "product"])[0].to_markdown()
    assert "| fp8 | k | 25.0 (1.60x) | 100.0 (0.50x) | M = 64 |" in page
    assert "not measured: out of shared memory" in page


def run(model, placement, seconds, **others):
    usual = {"pass_nbytes": 5e9, "waits": 0, "where": "", "peak": 101, "planned": 100}
    busy = {"busy": {"copy": 0.9, "compute": 0.5}, "load_seconds": 1.0, "stall_seconds": 0.0}
    return {
        "kind": "run",
        "model": model,
        "placement": placement,
        "seconds": seconds,
        **usual,
        **busy,
        **others,
    }


def test_offload_is_compared_with_the_pinned_rate_and_with_accelerate():
    theirs = {"kind": "run", "model": "accelerate", "placement": "all in cpu", "seconds": 1.2}
    runs = [
        run("8b-fp8", "all in cpu", 0.2),
        run("8b-gptq4", "all in cpu", 0.125),
        run("8b-gptq4", "on disk", 1.0, waits=2, where="mask.py:3: a wait", peak=103),
    ]
    found = offload.values([*runs, theirs], {"pinned to device": 50e9})
    assert found == pytest.approx(
        {"rate": 0.5, "busy": 0.9, "waits": 2, "accelerate": 6, "offload_peak": 1.03}
    )
    assert "part 1" in offload.values(runs, {})["rate"]
    assert "2 (mask.py:3: a wait)" in offload.tables(runs)[0].to_markdown()


def test_accelerate_that_failed_is_not_measured_with_its_reason():
    records = [
        run("8b-fp8", "all in cpu", 0.2),
        missing("run", ValueError("no room"), model="accelerate", placement="all in cpu"),
    ]
    assert offload.values(records, {})["accelerate"] == "ValueError: no room"


def test_the_slowest_warm_load_counts():
    loads = [
        {"kind": "load", "model": name, "state": state, "seconds": seconds, "nbytes": 4e9}
        for name, state, seconds in (("a", "warm", 0.1), ("b", "warm", 0.2), ("a", "cold", 9.0))
    ]
    assert resident.values(loads, {"pinned to device": 40e9}) == pytest.approx({"warm": 0.5})


def test_failed_tests_come_with_their_messages(tmp_path):
    file = tmp_path / "junit.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure message="other bits&#10;more">long</failure></testcase>'
        '<testcase classname="a" name="broken"><error message="no fixture"/></testcase>'
        '<testcase classname="a" name="left out"><skipped message="no card"/></testcase>'
        "</testsuite></testsuites>"
    )
    results = suite.read_results(file)
    outcomes = [(each["name"], each["outcome"], each["message"]) for each in results]
    assert outcomes == [
        ("a::good", "passed", ""),
        ("a::bad", "failed", "other bits"),
        ("a::broken", "failed", "no fixture"),
        ("a::left out", "skipped", "no card"),
    ]
    end = {"kind": "end", "status": 1, "reason": "", "last": "2 failed", "tests": 4}
    assert suite.values([end, *results], {}) == {"failed": 2}


def test_spans_that_overlap_are_counted_once():
    spans = [Span("copy", "u", start, end, 0, "") for start, end in ((0, 3), (2, 4), (6, 9), (-5, 1))]
    assert _covered(iter(spans), 1, 8) == 5
