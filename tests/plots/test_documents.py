"""Tests of files for `hfq plot`: kinds detected by fields, and errors that name the field."""

import json
import sys
from pathlib import Path

import pytest

from hfq.errors import SetupError
from hfq.plots import fields
from hfq.plots.documents import read_section, write_report

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kind", "pictures", "tables"),
    [
        ("run", ["placement", "timeline"], ["Devices", "Offloading so far", "Speed"]),
        ("plan", ["devices", "placement"], ["Predicted speed"]),
        ("bench", ["chart"], ["Time"]),
        ("eval", ["chart"], []),
        ("zero3", ["zero3"], []),
        ("catalog", ["catalog"], []),
        ("ladder", ["ladder"], []),
    ],
)
def test_every_kind_is_known_by_its_fields(kind, pictures, tables, write, result):
    section = read_section(write(kind, result(kind)))
    assert [picture.name for picture in section.pictures] == pictures
    assert [table.title for table in section.tables] == tables
    assert f"({kind}.json)" in section.title
    assert all(picture.alt and picture.table is not None for picture in section.pictures)
    assert (section.trace is not None) == (kind == "run")


@pytest.mark.parametrize("name", ["benchmarks/load.json", "benchmarks/stream.json", "pictures/run.json"])
def test_what_the_documentation_shows_can_be_drawn(name):
    section = read_section(ROOT / "docs" / name)
    assert section.pictures
    if name.startswith("benchmarks"):
        page = (ROOT / "docs" / name).with_suffix(".md").read_text(encoding="utf-8")
        assert all(table.to_markdown() in page for table in section.tables)


def test_a_model_that_streams_nothing_and_recorded_nothing(write, result):
    found = result("run") | {"offload": None, "speed": None, "timeline": None}
    section = read_section(write("run", found))
    assert [picture.name for picture in section.pictures] == ["placement"]
    assert "measure=True" in section.facts["timeline"]
    assert section.trace is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "no result that hfq plot can draw"),
        ("null", "no result that hfq plot can draw"),
        ("3", "no result that hfq plot can draw"),
        ("{}", "no result that hfq plot can draw"),
        ('{"kind": "another"}', "no result that hfq plot can draw"),
        ('{"model": {}, "setup": {}, "stages": []}', "no result that hfq plot can draw"),
    ],
)
def test_what_is_no_result_is_refused(text, said, write):
    with pytest.raises(SetupError, match=said) as refused:
        read_section(write("other", text))
    assert refused.value.file.name == "other.json"
    assert "Fix:" in str(refused.value)


def test_files_that_cannot_be_read_are_refused(tmp_path, write, monkeypatch):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for file, said in (
        (tmp_path / "none.json", "cannot be read"),
        (tmp_path, "cannot be read"),
        (tmp_path / "bytes.json", "not JSON"),
    ):
        with pytest.raises(SetupError, match=said):
            read_section(file)
    monkeypatch.setattr(fields, "_MOST_NBYTES", 10)
    with pytest.raises(SetupError, match="more than the limit"):
        read_section(write("large", {"a": "0123456789"}))


@pytest.mark.parametrize(
    ("kind", "path", "value", "place"),
    [
        ("run", ("model",), None, "Field model is not valid"),
        ("run", ("model", "path"), 3, "model.path"),
        ("run", ("modules",), [], "modules"),
        ("run", ("modules", 1, "nbytes"), -1, r"modules\[1\].nbytes"),
        ("run", ("modules", 1, "nbytes"), True, r"modules\[1\].nbytes"),
        ("run", ("modules", 1, "quantized_nbytes"), 4000, r"modules\[1\].quantized_nbytes"),
        ("run", ("modules", 2), "text", r"modules\[2\]"),
        ("run", ("timeline", "spans", 0, "track"), "walk", r"timeline.spans\[0\].track"),
        ("run", ("timeline", "spans", 3, "end"), float("nan"), r"timeline.spans\[3\].end"),
        ("run", ("timeline", "spans", 3, "end"), -5, r"timeline.spans\[3\].end"),
        ("run", ("offload", "mode"), None, "offload.mode"),
        ("plan", ("devices", "cpu", "weights_nbytes"), "much", "devices.cpu.weights_nbytes"),
        ("plan", ("modules",), None, "modules"),
        ("plan", ("prediction", "load_seconds"), 10**400, "prediction.load_seconds"),
        ("plan", ("prediction", "helps"), [["x"]], "prediction.helps"),
        ("bench", ("tables",), None, "the whole file"),
        ("bench", ("facts",), {"date": 3}, "facts.date"),
        ("bench", ("tables", 0, "rows", 0), ["one"], r"tables\[0\].rows"),
        ("bench", ("chart", "kind"), "Pie", "chart.kind"),
        ("bench", ("chart", "scale"), "cubic", "chart.scale"),
        ("bench", ("chart", "series", "a"), [1.0], "chart.series.a"),
        ("bench", ("chart", "series"), {}, "chart.series"),
        ("bench", ("targets", 0, "bound"), "1", r"targets\[0\].bound"),
        ("eval", ("chart", "points"), [], "chart.points"),
        ("eval", ("chart", "points", 0), ["a", 1.0], "chart.points"),
        ("zero3", ("zero3", "parts_per_rank"), [], "zero3.parts_per_rank"),
        ("catalog", ("catalog",), [{"name": "b", "cost": 2.0, "refused": "no"}], "catalog"),
        ("ladder", ("ladder", "rungs"), [], "ladder.rungs"),
    ],
)
def test_a_field_that_is_not_what_it_should_be_is_named(kind, path, value, place, write, result):
    spoiled = result(kind)
    at = spoiled
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(SetupError, match=place):
        read_section(write(kind, json.dumps(spoiled)))


def test_nothing_is_written_where_one_file_is_wrong(write, result, tmp_path):
    with pytest.raises(SetupError):
        write_report([write("run", result("run")), write("bad", "[]")], tmp_path / "out", as_page=True)
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_the_extra_is_named(write, result, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SetupError, match=r"hfq\[plots\]"):
        write_report([write("run", result("run"))], tmp_path / "out", as_page=False)
    assert not (tmp_path / "out").exists()
