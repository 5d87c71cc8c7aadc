"""Tests of `python -m benchmarks`: fast help, options, and printed and written reports."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from benchmarks.command import BENCHMARKS, app, main
from benchmarks.load import bench_load
from hfq.plots.charts import Chart
from hfq.tables import Report, Target

CANNED = Report(
    "Canned", {"date": "today"}, [], [Target("a ratio", 2, 1)], [{"kind": "x"}], Chart("c", (), {})
)


def test_help_names_every_benchmark_and_imports_no_torch():
    code = "import sys; from benchmarks.command import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(f"{name}:" in done.stdout for name in BENCHMARKS)


@pytest.mark.parametrize(
    ("options", "expected"),
    [((), (2.4e9, 3)), (("--size", "5e8", "--rounds", "2"), (5e8, 2)), (("--quick",), (24e6, 1))],
)
def test_options_reach_the_benchmark(tmp_path, monkeypatch, options, expected):
    seen = []
    monkeypatch.setattr(bench_load, "bench_load", lambda *arguments: seen.append(arguments) or CANNED)
    done = CliRunner().invoke(app, ["load", "--folder", str(tmp_path), *options])
    assert done.exit_code == 0, done.output
    assert seen[0][0] == tmp_path
    assert seen[0][1:3] == expected
    assert "# Canned" in done.stdout
    assert "a ratio: 2.000 (target <= 1: not met)" in done.stderr


def test_json_is_printed_and_files_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_load, "bench_load", lambda *arguments: CANNED)
    done = CliRunner().invoke(app, ["load", "--json", "--out", str(tmp_path / "out")])
    assert json.loads(done.stdout)["records"] == [{"kind": "x"}]
    assert json.loads((tmp_path / "out" / "load.json").read_text())["title"] == "Canned"
    assert (tmp_path / "out" / "load.md").read_text().startswith("# Canned")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["laod"], "'load'"),
        (["load", "--ranks", "2"], "load does not accept --ranks"),
        (["kernels", "--shape", "MoE exprt"], "'MoE expert'"),
        (["quantize", "--threads", "1", "--threads", "2"], "one number of threads"),
    ],
)
def test_a_wrong_name_or_option_is_an_error(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 1
    assert message in capsys.readouterr().err
