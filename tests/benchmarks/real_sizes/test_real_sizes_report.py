"""Tests of the targets of `python -m benchmarks real_sizes`, and of pages of several runs."""

import pytest

from benchmarks.real_sizes.cases import CASES, find_rows
from benchmarks.real_sizes.merge import merge
from benchmarks.real_sizes.real_sizes_report import real_sizes_report

RESIDENT, ON_DISK = "Llama-3-8B, resident", "Llama-3-8B on disk, 4 GB"


def record(case, contender, seconds, **more):
    return {
        "case": case,
        "contender": contender,
        "round": 0,
        "load_seconds": 2.0,
        "anonymous": 1e9,
        "decode_seconds": seconds,
        "decode_cpu_seconds": 2 * seconds,
        "decode_device_read": 4e9,
        **more,
    }


RECORDS = [
    record(RESIDENT, "hfq, GPTQ", 0.2, predicted_seconds=0.25, prefill_512=20.0),
    record(RESIDENT, "llama.cpp, mapped", 0.1, prefill_512=25.0),
    record(ON_DISK, "hfq, GPTQ", 2.0, predicted_seconds=1.0, decode_needed=3.9e9, raw_rate=2e9),
    record(ON_DISK, "hfq, the same GGUF", 4.0, predicted_seconds=4.0, decode_needed=3.2e9, raw_rate=2e9),
    record(ON_DISK, "accelerate, bfloat16", 8.0, about="8 of 32 layers"),
    record(ON_DISK, "llama.cpp, read-ahead 128 KiB", 8.0),
]


def test_targets_are_ratios_of_the_better_row():
    report = real_sizes_report({}, RECORDS)
    assert {target.what: target.value for target in report.targets} == pytest.approx(
        {
            f"{RESIDENT}: decoding against llama.cpp": 0.5,
            f"{RESIDENT}: prompt of 512 tokens against llama.cpp": 0.8,
            f"{RESIDENT}: predicted tokens/s, off by this share of the measured": 0.2,
            f"{ON_DISK}: decoding against llama.cpp": 4.0,
            f"{ON_DISK}: CPU time of a token against the resident model's": 10.0,
            f"{ON_DISK}: bytes read per token against those missed": 4 / 3.9,
            f"{ON_DISK}: decoding against one raw O_DIRECT pass": 1.95 / 2,
            f"{ON_DISK}: predicted tokens/s, off by this share of the measured": 1.0,
        }
    )
    rows = [row for row in report.tables[0].rows if row[0] == ON_DISK]
    assert rows[2][1] == "accelerate, bfloat16 (8 of 32 layers)"
    assert [row[-1] for row in rows] == ["4.00", "2.00", "-", "1.00"]  # fewer layers are no comparison
    assert report.tables[0].rows[2][7:13] == ["1.00/s", "-", "4.00 s", "4.000 GB", "-", "1.95 s"]


def test_other_formats_have_a_table_of_their_own_and_no_targets():
    case = "Llama-3-8B with 8 of 32 layers, resident"
    records = [record(case, "hfq, NF4", 0.5), record(case, "transformers, bfloat16", 0.25)]
    report = real_sizes_report({}, [*RECORDS, *records])
    assert [table.title for table in report.tables] == ["Speed", "Other formats", "What others publish"]
    assert [row[:2] + row[6:7] for row in report.tables[1].rows] == [
        [case, "hfq, NF4", "2.00/s"],
        [case, "transformers, bfloat16", "4.00/s"],
    ]
    assert len(report.targets) == len(real_sizes_report({}, RECORDS).targets)
    assert len(real_sizes_report({}, RECORDS).tables) == 2


def test_a_page_of_several_runs_has_the_latest_records_of_each_row(tmp_path):
    real_sizes_report({"date": "earlier"}, RECORDS).write(tmp_path, "first")
    later = [record(ON_DISK, "hfq, GPTQ", 1.0, predicted_seconds=1.0)]
    real_sizes_report({"date": "later"}, later).write(tmp_path, "second")
    report = merge([tmp_path / "first.json", tmp_path / "second.json"])
    assert report.facts == {"date": "later"}
    assert len(report.records) == len(RECORDS)
    assert report.records[2] == later[0]


def test_skewed_rows_have_a_prediction_from_recorded_routing_and_a_target_for_it():
    case, predicted = "Qwen3-30B-A3B in 8 GB, skewed", {"predicted_seconds": 2.0}
    records = [record(case, "hfq, GPTQ", 1.0, predicted_recorded_seconds=0.8, **predicted)]
    report = real_sizes_report({}, records)
    assert report.tables[0].rows[0][7:9] == ["0.50/s", "1.25/s"]
    assert [round(target.value, 3) for target in report.targets[-2:]] == [0.5, 0.25]
    earlier = real_sizes_report({}, [record(case, "hfq, GPTQ", 1.0, **predicted)])
    assert earlier.tables[0].rows[0][8] == "-"
    assert earlier.targets[-1].value is None


def test_rows_are_found_by_parts_of_their_names():
    assert list(find_rows()) == list(CASES)
    case, contenders = find_rows(None, ["on disk, 4 GB: acc"]).popitem()
    assert (case.name, [each.name for each in contenders]) == (ON_DISK, ["accelerate, bfloat16"])
    assert {case.shape for case in find_rows(["llama-2-13b"])} == {"llama-2-13b"}
    assert [case.name for case in find_rows(None, ["4 GB, skewed"])] == ["Qwen3-30B-A3B in 4 GB, skewed"]


@pytest.mark.parametrize("value", [None, 1.0])
def test_a_row_without_a_prediction_has_no_share(value):
    more = {} if value is None else {"predicted_seconds": value}
    found = real_sizes_report({}, [record(RESIDENT, "hfq, GPTQ", 1.0, **more)]).targets[-1]
    assert (found.value, found.verdict) == ((None, "not measured") if value is None else (0.0, "met"))
