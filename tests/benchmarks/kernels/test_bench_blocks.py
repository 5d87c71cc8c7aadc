"""Tests of the benchmark of GGUF's blocks, without ggml."""

import pytest
import torch

from benchmarks.kernels import bench_blocks
from benchmarks.kernels.bench_blocks import GGML, SHORT, WIDE, measure_type, report
from hfq.checkpoint.gguf.block_types import block_type
from tests.support.gguf_files import random_blocks

SHAPE = 24, 512


def blocks_of(dense, name):
    """Returns random blocks in place of quantized ones."""
    kind = block_type(name)
    raw = random_blocks(name, dense.numel() // kind.size, scale=0.01)
    return torch.from_numpy(raw).view(dense.shape[0], -1)


@pytest.fixture(autouse=True)
def replaced(monkeypatch):
    monkeypatch.setattr(bench_blocks, "quantized_rows", blocks_of)
    monkeypatch.setattr(bench_blocks, "GgmlLinear", lambda dense, name, repack: lambda x: x @ dense.t())
    monkeypatch.setattr(bench_blocks, "compiled_for", lambda: "AVX2")
    monkeypatch.setattr(bench_blocks, "FLUSH_NBYTES", 1 << 10)


def test_each_method_is_measured_in_each_round(native):
    records = measure_type("Q4_K", SHAPE, [1, 17], 2)
    found = {(r["method"], r["rows"], r["round"]) for r in records if r["seconds"] >= 0}
    assert found == {(m, rows, n) for m in (GGML, WIDE, SHORT) for rows in (1, 17) for n in (0, 1)}


def test_the_report_has_ratios_within_rounds():
    seconds = {GGML: (2.0, 9.0, 4.0), WIDE: (1.0, 3.0, 4.0), SHORT: (4.0, 3.0, 2.0)}
    records = [
        {"threads": 1, "blocks": "Q4_K", "rows": 1, "method": method, "round": number, "seconds": each}
        for method, values in seconds.items()
        for number, each in enumerate(values)
    ]
    made = report(records, 3, SHAPE)
    assert [target.value for target in made.targets] == [2.0]
    assert [row[2] for row in made.tables[0].rows] == [
        "4000.00 ms, 1.00x",
        "3000.00 ms, 2.00x",
        "3000.00 ms, 2.00x",
    ]
