"""`hfq bench`: its help is quick and without torch, its options reach the benchmark, its result is printed and written."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from benchmarks.load import bench_load as load
from hfq.cli.main import app
from hfq.tables import Chart, Report, Target

CANNED = Report("Canned", {"date": "today"}, [], [Target("a ratio", 2, 1)], [{"kind": "x"}], Chart("c", (), {}))


def test_help_imports_no_torch():
    code = (
        "import sys; from hfq.cli import main; sys.argv = ['hfq', 'bench', '--help']\ntry: main()\nexcept SystemExit: pass\n"
    )
    code += "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "load" in done.stdout
    assert "stream" in done.stdout


@pytest.mark.parametrize(
    ("options", "expected"), [((), (2.4e9, 3)), (("--size", "5e8", "--rounds", "2"), (5e8, 2)), (("--quick",), (24e6, 1))]
)
def test_options_reach_the_benchmark(tmp_path, monkeypatch, options, expected):
    seen = []
    monkeypatch.setattr(load, "bench_load", lambda *arguments: seen.append(arguments) or CANNED)
    done = CliRunner().invoke(app, ["bench", "load", "--folder", str(tmp_path), *options])
    assert done.exit_code == 0, done.output
    assert seen[0][0] == tmp_path
    assert seen[0][1:3] == expected
    assert "# Canned" in done.stdout
    assert "a ratio: 2.000 (target <= 1: not met)" in done.stderr


def test_json_is_printed_and_files_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "bench_load", lambda *arguments: CANNED)
    done = CliRunner().invoke(app, ["bench", "load", "--json", "--out", str(tmp_path / "out")])
    assert json.loads(done.stdout)["records"] == [{"kind": "x"}]
    assert json.loads((tmp_path / "out" / "load.json").read_text())["title"] == "Canned"
    assert (tmp_path / "out" / "load.md").read_text().startswith("# Canned")
