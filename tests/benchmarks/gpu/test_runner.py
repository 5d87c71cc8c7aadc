"""Tests of the runner of `python -m benchmarks.gpu`, with parts that measure nothing."""

import json
import os
import re
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.gpu import command
from benchmarks.gpu.report import ACCEPTED, Accepted, Document, replace_text
from benchmarks.gpu.runner import Part, run_parts
from hfq.errors import SetupError

REST = """
def tables(records): return []
def values(records, ceilings): return {"made": records[-1]["value"]} if records else {}
"""


@pytest.fixture
def part(tmp_path, monkeypatch):
    """Returns a factory of parts from the body of their `measure`."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)
    made = []

    def make(body: str, seconds: float = 120.0, **options) -> Part:
        name = f"fake_part_{len(made) + 1}"
        made.append(name)
        code = "import os, time\nfrom pathlib import Path\ndef measure(bench):\n"
        (folder / f"{name}.py").write_text(code + textwrap.indent(textwrap.dedent(body), "    ") + REST)
        monkeypatch.setitem(ACCEPTED, "made", Accepted(name, "a value", 2, at_least=True))
        return Part(len(made), name, seconds, name, **options)

    yield make
    for name in made:
        sys.modules.pop(name, None)


ONE = 'yield {"kind": "one", "value": 3}'


def run(parts, out, again=True, budget=300.0, sources="s"):
    said = []
    document = Document(out, "a device", False, sources)
    run_parts(
        parts,
        document,
        out,
        budget=budget,
        is_wanted=lambda each: again or not document.is_finished(each.name),
        say=said.append,
    )
    return json.loads((out / "gpu.json").read_text())["parts"], "\n".join(said)


def test_a_value_is_written_beside_its_acceptance_number(part, tmp_path):
    only = part(ONE)
    found, said = run([only], tmp_path)
    assert found[only.name]["records"] == [{"kind": "one", "value": 3}]
    assert found[only.name]["figures"][0]["verdict"] == "ok"
    for text in (said, (tmp_path / "gpu.md").read_text()):
        assert "| a value | 3 | >= 2 | ok |" in text


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("raise RuntimeError('CUDA error: an illegal address')", "failed", "an illegal address"),
        ("os.kill(os.getpid(), 11)", "failed", "killed by SIGSEGV"),
        ("os._exit(3)", "failed", "exit status 3"),
    ],
    ids=["raises", "is killed", "exits"],
)
def test_a_part_that_dies_costs_one_part(part, tmp_path, body, status, reason):
    first, second = part(f"{ONE}\n{body}"), part(ONE)
    found, _ = run([first, second], tmp_path)
    assert found[first.name]["status"] == status
    assert reason in found[first.name]["reason"]
    assert found[first.name]["records"] == [{"kind": "one", "value": 3}]
    assert found[second.name]["status"] == "done"


def test_a_part_is_stopped_at_its_limit_with_all_of_its_processes(part, tmp_path):
    body = """
    import subprocess
    process = subprocess.Popen(["sleep", "600"])
    yield {"kind": "one", "value": process.pid}
    time.sleep(600)
    """
    for seconds in (6.0, 30.0, 120.0):  # on a busy machine, a part may begin after its limit
        found, _ = run([slow := part(body, seconds=seconds)], tmp_path)
        entry = found[slow.name]
        assert entry["status"] == "timed out"
        assert f"limit of {seconds:g} s" in entry["reason"]
        if entry["records"]:
            break
    assert has_ended(entry["records"][0]["value"])


def has_ended(process: int) -> bool:
    """Returns True once a process has ended; it may wait for its parent to notice."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


def test_finished_parts_are_skipped_and_others_run_again(part, tmp_path):
    good, bad = part(ONE), part(f"raise ValueError(str(len(os.listdir({str(tmp_path)!r}))))")
    first, _ = run([good, bad], tmp_path)
    (tmp_path / "one more").touch()
    second, _ = run([good, bad], tmp_path, again=False)
    assert second[good.name] == first[good.name]
    assert second[bad.name]["reason"] != first[bad.name]["reason"]


def test_a_part_that_other_code_finished_runs_again_and_stays_until_then(part, tmp_path):
    first, second = parts = part(ONE), part(ONE)
    run(parts, tmp_path)
    found, _ = run([first], tmp_path, again=False, sources="t")
    assert (found[first.name]["sources"], found[second.name]["sources"]) == ("t", "s")


def test_a_part_that_does_not_fit_the_budget_is_skipped_by_name(part, tmp_path):
    long, short = part(ONE, seconds=500.0), part(ONE, seconds=120.0)
    found, said = run([long, short], tmp_path, budget=180.0)
    assert found[long.name]["status"] == "skipped"
    left = re.fullmatch(r"it takes 500 s, and (\d+) s are left", found[long.name]["reason"])
    assert 120 <= int(left[1]) <= 180
    assert found[long.name]["figures"] == []
    assert found[short.name]["status"] == "done"
    assert f"1 {long.name}: skipped" in said


def test_a_skipped_part_keeps_its_earlier_result(part, tmp_path):
    only = part(ONE)
    first, _ = run([only], tmp_path)
    second, said = run([only], tmp_path, budget=1.0)
    assert second == first
    assert "its earlier result stays" in said


def test_a_value_that_was_not_measured_has_the_reason(part, tmp_path):
    found, _ = run([only := part("raise ValueError('no such card')\nyield")], tmp_path)
    figure = found[only.name]["figures"][0]
    assert (figure["verdict"], figure["value"]) == ("not measured", None)
    assert "no such card" in figure["reason"]


def test_a_model_is_deleted_after_the_last_part_that_uses_it(part, tmp_path):
    write, look = (
        "(bench.scratch / 'm').mkdir()",
        "yield {'kind': 'one', 'value': (bench.scratch / 'm').exists()}",
    )
    parts = [part(f"{write}\n{ONE}", models=("m",)), part(look, models=("m",)), part(look)]
    found, _ = run(parts, tmp_path)
    assert [found[each.name]["records"][-1]["value"] for each in parts] == [3, True, False]


def test_results_of_another_device_are_dropped(part, tmp_path):
    run([part(ONE)], tmp_path)
    assert Document(tmp_path, "another device", False, "s").parts == {}


def test_a_dry_run_does_not_replace_measurements(part, tmp_path):
    run([part(ONE)], tmp_path)
    before = (tmp_path / "gpu.json").read_text()
    with pytest.raises(SetupError, match="does not replace measurements"):
        Document(tmp_path, "the simulated accelerator", True, "s")
    assert (tmp_path / "gpu.json").read_text() == before


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    file = tmp_path / "gpu.json"
    replace_text(file, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        replace_text(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_the_interpreter_of_triton_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="1"):
        command.main(["--out", str(tmp_path)])
    assert "TRITON_INTERPRET" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_name_of_a_part_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        command.main(["--out", str(tmp_path), "--only", "kernles"])
    assert "'kernels'" in capsys.readouterr().err


def test_every_acceptance_number_belongs_to_a_part():
    assert {accepted.part for accepted in ACCEPTED.values()} <= {part.name for part in command.PARTS}
