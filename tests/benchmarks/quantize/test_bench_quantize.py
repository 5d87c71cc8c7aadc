"""Tests of `python -m benchmarks quantize`: questions to its process, and use of the answers."""

import torch
from transformers import AutoTokenizer

from benchmarks.quantize import bench_quantize as quantize
from benchmarks.quantize.quantize_report import make_report
from benchmarks.quantize.quantize_worker import QuantizeWorker, read_tokens, write_tokens
from tests.support import tiny_models


def test_a_quantization_is_measured_beside_its_bound(tmp_path, monkeypatch, in_process):
    monkeypatch.setattr(quantize, "Worker", in_process(QuantizeWorker))
    threads = torch.get_num_threads()
    found = quantize.measure_memory(tiny_models.DATA / "tiny-llama", tmp_path, {"method": "fp8"}, threads)
    assert (found["kind"], found["method"], found["activations"]) == ("memory", "fp8", 0)
    assert found["cpu_seconds"] > 0
    assert found["peak_rss"] >= found["imports"] > 0
    assert (tmp_path / "whole-fp8" / "config.json").exists()


def test_tokens_reach_the_worker_as_they_are(tmp_path):
    tokens = torch.arange(6).view(2, 3)
    assert torch.equal(read_tokens(str(write_tokens(tokens, tmp_path / "tokens.json"))), tokens)


def test_gptqmodel_gets_a_tokenizer_where_there_is_none(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with quantize._readable(tmp_path / "model", tmp_path, "gptqmodel") as found:
        assert sorted(file.name for file in found.iterdir()) == [
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        assert len(AutoTokenizer.from_pretrained(found)) == 4
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    for path, tool in ((tmp_path / "model", "hfq"), (tiny_models.DATA / "tiny-llama", "gptqmodel")):
        with quantize._readable(path, tmp_path, tool) as found:
            assert found == path


def test_the_report_holds_medians_against_the_peer():
    measured = {"imports": 1 << 20, "block": 2 << 20, "activations": 0, "cpu_seconds": 9.0}
    records = [
        {"kind": "memory", "method": "gptq", "peak_rss": 3 << 20, "bound": 4 << 20, **measured},
        {
            "kind": "resume",
            "killed_after": 2,
            "files": 5,
            "is_identical": False,
            "peak_rss": 1,
            "imports": 1,
            "cpu_seconds": 1,
        },
        {"kind": "floats", "model": "it", "perplexity": 10.0},
    ]
    for tool, seconds, perplexity in (("hfq", 2.0, 11.0), ("gptqmodel", 4.0, 10.9)):
        records.append(
            {"kind": "time", "tool": tool, "cpu_seconds": seconds, "wall_seconds": 1.0, "peak_rss": 1 << 20}
        )
        records += [
            {
                "kind": "quality",
                "model": "it",
                "bits": 4,
                "seed": seed,
                "tool": tool,
                "perplexity": perplexity + seed,
            }
            for seed in (0, 1, -1)
        ]
    report = make_report(records, {"date": "today"})
    verdicts = {target.what: (target.value, target.verdict) for target in report.targets}
    assert verdicts["gptq: peak memory over one float32 block, activations and 400 MiB"] == (0.75, "met")
    assert verdicts["fp8: peak memory over one float32 block, activations and 400 MiB"] == (
        None,
        "not measured",
    )
    assert verdicts["killed and resumed: whether every file is identical"] == (0.0, "not met")
    assert verdicts["CPU seconds over gptqmodel's"] == (0.5, "met")
    assert verdicts["it, 4 bits: median perplexity over gptqmodel's"] == (11.0 / 10.9, "not met")
    assert "DIFFER" in report.to_markdown()
