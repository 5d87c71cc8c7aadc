"""Tests of `python -m benchmarks quality`: measurements, orderings, and the committed page."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from benchmarks.command import app
from benchmarks.quality import bench_quality as quality
from benchmarks.quality import published
from benchmarks.quality.corpus import PARTS, Corpus, part_of, publish, read_topics
from benchmarks.quality.differences import differences
from benchmarks.quality.measure import Subject, largest_activation
from benchmarks.quality.methods import (
    INT8,
    NUMBER_FORMATS,
    WEIGHTS_ALONE,
    measure_int8,
    measure_rounded,
    measure_rtn,
)
from benchmarks.quality.orderings import orderings, quick_orderings
from benchmarks.quality.outliers import NONE
from benchmarks.quality.quality_tables import chart, find, tables
from benchmarks.quality.training import Training, orthogonalized, train
from hfq import CheckpointError, HfqError
from hfq.plots.charts import Chart
from hfq.tables import Report, Target

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks" / "quality.json"
RECORDS = json.loads(PAGE.read_text(encoding="utf-8"))["records"]
TOKENS = torch.randint(0, 300, (1024,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Training("opt", hidden=64, layers=1, vocabulary=300).config()
    ).eval()
    return Subject.of("OPT", model, NONE, TOKENS, TOKENS.view(-1, 256), windows=2)


def test_rounding_is_measured_against_the_floats_which_come_back(subject):
    before = {name: linear.weight for name, linear in subject.linears.items()}
    subject.round("nothing", 32, lambda weight: weight.clone())
    subject.round("everything", 0, torch.zeros_like)
    nothing, everything = subject.records[-2:]
    assert (nothing["ratio"], nothing["kl"], nothing["top1"]) == (1, 0, 1)
    assert everything["kl"] > 0
    assert len(before) == 6
    assert all(linear.weight is before[name] for name, linear in subject.linears.items())


def test_every_rounding_and_every_product_of_the_tables_runs(subject):
    measure_rtn(subject, (4, 2))
    measure_rounded(subject, WEIGHTS_ALONE | NUMBER_FORMATS)
    threshold = 0.5 * largest_activation(subject)
    measure_int8(subject, threshold)
    found = {record["method"]: record for record in subject.records}
    assert {"RTN", *WEIGHTS_ALONE, *NUMBER_FORMATS, *INT8} <= set(found)
    assert all(torch.isfinite(torch.tensor(record["kl"])) for record in found.values())
    assert found["W8sym-A16"]["kl"] < found["W4sym-A16"]["kl"]
    assert 0 < found["absmax LLM.int8()"]["outlier_share"] < 1
    assert found["int8 absmax"]["outlier_share"] == 0
    assert not any("forward" in vars(linear) for linear in subject.linears.values())
    columns = {row[0] for table in tables(subject.records) for row in table.rows}
    assert {"RTN, 2 bits", *INT8, *NUMBER_FORMATS} <= columns


def test_the_committed_page_is_what_its_records_say():
    text = PAGE.with_suffix(".md").read_text(encoding="utf-8")
    for table in (differences(RECORDS), *tables(RECORDS)):
        assert table.to_markdown() in text
    for target in orderings(RECORDS):
        assert target.verdict == "met", str(target)
        assert f"| {target.what} | {target.value:.3f} |" in text


@pytest.mark.parametrize(
    "kept", [RECORDS[:1], [r for r in RECORDS if r["method"] != "GPTQ"]], ids=["floats", "no GPTQ"]
)
def test_an_ordering_that_was_not_measured_does_not_hold(kept):
    assert any(target.verdict == "not measured" for target in orderings(kept))


def test_a_method_that_became_worse_is_named():
    records = [dict(record) for record in RECORDS]
    find(records, ("OPT", "+60"), "GPTQ", 3)["ratio"] = 5.0
    report = Report("Q", {}, [], orderings(records), records, chart(records))
    with pytest.raises(
        HfqError, match=r"(?s)published order.*OPT with outliers \+60: perplexity of GPTQ 3: 5.000"
    ):
        quality.check_orderings(report)


def test_the_command_fails_after_its_page_is_shown(tmp_path, monkeypatch):
    seen = []
    canned = Report("Canned", {}, [], [Target("a ratio", 2, 1)], [], Chart("c", (), {}))
    monkeypatch.setattr(quality, "bench_quality", lambda *arguments: seen.append(arguments) or canned)
    done = CliRunner().invoke(app, ["quality", "--quick", "--folder", str(tmp_path)])
    assert isinstance(done.exception, HfqError)
    assert seen[0][:2] == (tmp_path, True)
    assert "# Canned" in done.stdout


def test_published_tables_have_the_rows_that_are_measured_and_their_order():
    assert [name for name in published.LLM_INT8.rows if name != "fp32"] == list(INT8)
    assert [name for name in published.WEIGHTS_ALONE.rows if name != "W16-A16"] == list(WEIGHTS_ALONE)[:4]
    for table in (published.GPTQ_OPT, published.GPTQ_BLOOM, published.GPTQ_LLAMA):
        full, rounded, solved, rounded_3, solved_3 = (
            table.rows[name] for name in ("full 16", "RTN 4", "GPTQ 4", "RTN 3", "GPTQ 3")
        )
        for pair in (
            (full, solved),
            (solved, rounded),
            (rounded, rounded_3),
            (solved_3, rounded_3),
            (solved, solved_3),
        ):
            assert all(better < worse for better, worse in zip(*pair, strict=True))
    assert all(
        len(row) == len(table.models)
        for table in vars(published).values()
        if hasattr(table, "rows")
        for row in table.rows.values()
    )


def test_the_text_is_divided_by_its_own_bytes():
    counts = [sum(part_of(text) == part for text in read_topics()) for part in PARTS]
    assert counts[2] > 8 * max(counts[:2])
    assert min(counts) > 0


def test_what_is_kept_between_runs_is_whole_or_not_there(tmp_path):
    def fail(folder):
        (folder / "half").touch()
        raise OSError("full")

    with pytest.raises(OSError):
        publish(tmp_path / "made", fail)
    assert list(tmp_path.iterdir()) == []
    publish(tmp_path / "made", lambda folder: (folder / "whole").touch())
    publish(tmp_path / "made", lambda folder: (folder / "again").touch())  # another process was first
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["whole"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_text_that_was_damaged_since_is_named(tmp_path):
    Corpus.make(tmp_path, 300, is_small=True)
    (file,) = tmp_path.rglob("tokens.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="Delete this folder"):
        Corpus.make(tmp_path, 300, is_small=True)


@pytest.mark.parametrize("shape", [(2, 16, 64), (1, 64, 16)])
def test_updates_are_orthogonalized(shape):
    found = orthogonalized(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(found)
    assert found.shape == shape
    assert 0.5 < values.min() <= values.max() < 1.3


def test_training_lowers_the_loss_and_is_the_same_twice():
    training, said = Training("llama", hidden=64, layers=1, vocabulary=300, steps=21, batch=1), []
    first, second = (train(training, TOKENS, said.append).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    losses = [float(line.rpartition(" ")[2]) for line in said]
    assert len(losses) == 4
    assert losses[1] < losses[0] - 0.1


@pytest.mark.slow  # trains a model of 0.9 million parameters
def test_the_small_tables_have_the_published_orderings(tmp_path):
    pytest.importorskip("optimum.gptq")
    report = quality.bench_quality(tmp_path, True, print)
    quality.check_orderings(report)
    assert len(report.targets) == len(quick_orderings(report.records)) >= 11
    assert "| RTN, 3 bits |" in report.to_markdown()
    assert sum("training.json" in file.name for file in tmp_path.rglob("*")) == 1
