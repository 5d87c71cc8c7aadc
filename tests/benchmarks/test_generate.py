"""Tests of `python -m benchmarks generate`: measurements per model, without timing."""

import pytest

from benchmarks import generate
from benchmarks.checkpoints import FORMATS


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "PROMPT", 4)
        patch.setattr(generate, "TOKENS", 2)
        patch.setattr(generate, "READ_NBYTES", 1 << 16)
        said: list[str] = []
        made = generate.bench_generate(tmp_path_factory.mktemp("bench"), 5e6, 2, [1], said.append)
    assert [line for line in said if "loading" in line] == [f"{weights}: loading" for weights in FORMATS]
    return made


def test_every_format_reads_a_prompt_and_writes_tokens_in_every_round(report):
    found = [(record["weights"], record["round"], record["step"]) for record in report.records]
    for weights in FORMATS:
        for number in range(2):
            assert found.count((weights, number, "prefill")) == 1
            assert found.count((weights, number, "decode")) == 2
            assert found.count((weights, number, "layers")) == generate.TIMED_TOKENS
    assert found.count(("-", 1, "read")) == generate.TIMED_TOKENS
    assert all(record["seconds"] > 0 for record in report.records)


def test_the_report_holds_packed_models_against_the_stock_one(report):
    text = report.to_markdown()
    assert "| bf16 |" in text
    assert ", 1.00x" in text
    assert {target.what.partition(",")[0] for target in report.targets} == set(FORMATS) - {"bf16"}
    assert all(target.value is not None for target in report.targets)


def test_ratios_are_taken_within_a_round():
    records = [
        {"weights": weights, "round": number, "threads": 1, "step": "decode", "tokens": 1, "seconds": seconds}
        for weights, times in (("bf16", (2.0, 20.0, 9.0)), ("fp8", (1.0, 10.0, 3.0)))
        for number, seconds in enumerate(times)
    ]
    assert generate._over_plain(records, "fp8", "decode", 1) == 2.0
    assert generate._over_plain(records, "gptq4", "decode", 1) is None


def test_layers_are_the_packed_bytes_without_the_head(report):
    sizes = {record["weights"]: record["nbytes"] for record in report.records if record["step"] == "layers"}
    assert sizes["bf16"] > 1.9 * sizes["fp8"]
    assert sizes["fp8"] > 1.8 * sizes["gptq4"]


def test_shares_are_taken_within_a_round():
    records = [
        {"weights": weights, "round": number, "threads": 1, "step": step, "nbytes": 8, "seconds": seconds}
        for weights, step, times in (("-", "read", (1.0, 4.0, 1.0)), ("fp8", "layers", (2.0, 5.0, 4.0)))
        for number, seconds in enumerate(times)
    ]
    assert generate._share_of_read(records, "fp8", 1) == 0.5
    assert generate._share_of_read(records, "gptq4", 1) is None
