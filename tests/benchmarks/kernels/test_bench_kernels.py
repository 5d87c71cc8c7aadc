"""Tests of `python -m benchmarks kernels`: measured methods and ratios, without timing."""

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.command import app
from benchmarks.kernels import bench_kernels as kernels
from benchmarks.kernels import kernels_report


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(kernels, "SHAPES", {"small": (128, 256)})
    monkeypatch.setattr(kernels, "FLUSH_NBYTES", 1 << 10)


def test_every_kernel_is_measured_on_every_format_beside_the_dense_products(small, native):
    said = []
    report = kernels.bench_kernels(["small"], (1, 8), 2, [1], said.append)
    found = {(record["weights"], record["method"]) for record in report.records}
    floats = set(kernels.FORMATS) - {kernels.ROUNDED}
    assert found >= {(weights, kernel) for weights in floats for kernel in ("cpp", "torch", "reference")}
    assert {kernel for weights, kernel in found if weights == kernels.ROUNDED} == {"int8"}
    assert found >= {("bf16", kernels.DENSE), ("f32", kernels.WIDE), ("-", kernels.READ)}
    assert found >= {("f16", kernels.HALF), *((weights, kernels.OF_HALVES) for weights in kernels.HALVES)}
    assert {record["rows"] for record in report.records} == {1, 8}
    assert all(record["seconds"] > 0 for record in report.records)
    assert said == ["small, 1 threads"]
    text = report.to_markdown()
    assert "| small | fp8 128x128 | cpp |" in text
    assert text.count("not measured") >= 4  # M=128 and M=512


def test_peers_are_measured_where_they_are_installed_and_named_where_not(small):
    from benchmarks.kernels.kernel_peers import PEERS, make_peers, missing_peers

    found = make_peers(torch.randn(256, 256).to(torch.bfloat16))
    assert set(found) <= set(PEERS)
    assert all(
        nbytes > 0 and call(torch.ones(3, 256, dtype=torch.bfloat16)).shape == (3, 256)
        for nbytes, call in found.values()
    )
    missing = missing_peers(found)
    assert {tool for tool, _ in found} | set(missing) == {tool for tool, _ in PEERS}
    assert set(missing.values()) <= {"not installed", "does not run here"}


def test_the_number_of_threads_is_put_back(small):
    before = torch.get_num_threads()
    kernels.bench_kernels(["small"], (1,), 1, [before + 1], print)
    assert torch.get_num_threads() == before


def test_packed_tensors_lie_as_in_a_file():
    for weight_format in kernels.FORMATS.values():
        tensors = kernels.random_layer(weight_format, 128, 256)
        placed = kernels.as_in_a_file(tensors)
        assert all(
            torch.equal(placed[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors
        )
        assert {tensor.data_ptr() % 64 for tensor in placed.values()} == {8}


def test_random_layers_hold_finite_weights():
    for weight_format in kernels.FORMATS.values():
        tensors = kernels.random_layer(weight_format, 128, 256)
        assert torch.isfinite(weight_format.dequantize(tensors)).all()


def test_ratios_are_taken_within_a_round():
    def record(method, number, seconds, weights="w"):
        return {
            "shape": "s",
            "rows": 1,
            "method": method,
            "weights": weights,
            "round": number,
            "seconds": seconds,
        }

    times = [record(kernels.DENSE, n, s) for n, s in enumerate((2.0, 20.0, 9.0))]
    times += [record("cpp", n, s) for n, s in enumerate((1.0, 10.0, 3.0))]
    assert kernels_report._ratio(times, {"method": kernels.DENSE}, {"method": "cpp"}, "s", 1) == 2.0
    assert kernels_report._ratio(times, {"method": "absent"}, {"method": "cpp"}, "s", 1) is None


def test_layers_that_are_read_in_turn_have_the_bytes_of_the_read_they_are_compared_to(
    small, monkeypatch, native
):
    each = sum(
        tensor.nbytes for tensor in kernels.random_layer(kernels.FORMATS["gptq4 g128"], 128, 256).values()
    )
    monkeypatch.setattr(kernels, "FLUSH_NBYTES", 2 * each + 4)
    report = kernels.bench_kernels(["small"], (1, 8), 2, [1], print)
    found = [record for record in report.records if record["method"] == kernels.IN_TURN]
    assert {record["weights"] for record in found} == set(kernels.READ_IN_TURN)
    assert {record["rows"] for record in found} == {1}
    assert {record["nbytes"] for record in found if record["weights"] == "gptq4 g128"} == {3 * each}
    read = [record for record in report.records if record["method"] == kernels.SAME]
    assert len(read) == len(found)
    lines = {r["nbytes"] - f["nbytes"] for r, f in zip(read, found, strict=True)}
    assert min(lines) >= 0  # bytes between tensors
    assert max(lines) < 3 * 8 * 64
    text = report.to_markdown()
    assert "## Layer after layer, 1 thread" in text
    assert "share of the read rate, layer after layer" in text
    assert f"| {kernels.IN_TURN} |" not in text  # its milliseconds are those of many layers


def test_no_table_is_empty_where_one_row_is_not_measured(small):
    report = kernels.bench_kernels(["small"], (8,), 1, [1], print)
    assert [table.title for table in report.tables] == ["1 thread"]
    assert all(table.rows for table in report.tables)


def test_the_share_of_the_read_rate_is_taken_within_a_round_and_over_the_bytes_of_each():
    def record(method, number, nbytes, seconds, weights="w"):
        where = {"shape": "s", "rows": 1, "threads": 1, "method": method, "weights": weights}
        return where | {"round": number, "nbytes": nbytes, "seconds": seconds}

    records = [record(kernels.READ, n, 100, s, "-") for n, s in enumerate((1.0, 10.0, 2.0))]
    records += [record(kernels.IN_TURN, n, 300, s) for n, s in enumerate((4.0, 60.0, 8.0))]
    where = {"weights": "w", "method": kernels.IN_TURN, "shape": "s"}
    assert kernels_report._share_of_read(records, where) == 0.75
    records += [record(kernels.SAME, n, 300, s) for n, s in enumerate((2.0, 30.0, 4.0))]
    records += [record(kernels.SAME, n, 300, s, "others") for n, s in enumerate((1.0, 1.0, 1.0))]
    assert kernels_report._share_of_read(records, where, kernels.SAME) == 0.5
    (row,) = kernels_report._read_table(records, 1).rows
    assert (row[0], *row[-2:]) == ("s", "0.50", "0.75")


def test_layers_in_one_file_are_all_that_is_read_of_it():
    for weight_format in kernels.FORMATS.values():
        tensors = kernels.random_layer(weight_format, 96, 256)
        layers, memory = kernels.in_one_file(tensors, 3)
        assert len(layers) == 3
        for layer in layers:
            assert all(
                torch.equal(layer[name].view(torch.uint8), tensors[name].view(torch.uint8))
                for name in tensors
            )
            assert {tensor.data_ptr() % 64 for tensor in layer.values()} == {8}
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        assert min(tensor.data_ptr() for layer in layers for tensor in layer.values()) == begin
        last = max(tensor.data_ptr() + tensor.nbytes for layer in layers for tensor in layer.values())
        assert end - 64 < last <= end
        assert memory.nbytes % 8 == 0


def test_an_unknown_shape_is_refused():
    assert CliRunner().invoke(app, ["kernels", "--shape", "8B"]).exit_code == 1
