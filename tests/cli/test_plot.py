"""`hfq plot`: files in, files out, and errors without a traceback. What is drawn is tested in tests/plots."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hfq.cli.main import app

RUN = Path(__file__).parents[2] / "docs" / "pictures" / "run.json"


def run(*arguments):
    return CliRunner().invoke(app, ["plot", *map(str, arguments)])


def test_without_a_file_it_says_what_is_missing():
    done = run()
    assert done.exit_code == 2
    assert "FILE" in done.stderr


def test_a_file_that_holds_nothing_to_draw_is_an_error(tmp_path):
    file = tmp_path / "empty.json"
    file.write_text("[]")
    done = run(file, "--output-dir", tmp_path / "out")
    assert done.exit_code == 1
    assert "no result that hfq plot can draw" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_it_writes_pictures_and_a_page_and_says_where(tmp_path):
    pytest.importorskip("matplotlib")
    done = run(RUN, "--output-dir", tmp_path, "--html")
    assert done.exit_code == 0, done.exception
    written = ["run-placement.png", "run-timeline.png", "run.trace.json", "report.html"]
    assert done.stdout.split() == [str(tmp_path / name) for name in written]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(written)
    events = json.loads((tmp_path / "run.trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(
        json.loads(RUN.read_text())["timeline"]["spans"]
    )
    plain = run(RUN, "--output-dir", tmp_path / "plain")
    assert not (tmp_path / "plain" / "report.html").exists(), plain.stdout
    (tmp_path / "file").touch()
    assert "cannot be written" in str(run(RUN, "--output-dir", tmp_path / "file").exception)
