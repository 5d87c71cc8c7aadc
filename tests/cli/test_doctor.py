"""`hfq doctor`: what it finds here, configs it refuses, leftovers it removes."""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hfq.checkpoint import cleanup as leftovers
from hfq.cli.doctor.command import TESTED
from hfq.cli.main import app
from hfq.kernels.cpp import library
from tests.support import tiny_models

ROOT = Path(__file__).parents[2]
GPTQ = tiny_models.DATA / "tiny-llama-gptq"


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Nothing outside of the test's folder is looked at or removed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    find = leftovers.find_leftovers
    monkeypatch.setattr(leftovers.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(leftovers, "find_leftovers", lambda folders: find(folders, tmp_path / "shm", 0.0))


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def findings(*arguments, exit_code=0) -> list[dict]:
    done = run(*arguments, "--json")
    assert done.exit_code == exit_code, (done.output, done.exception)
    return json.loads(done.stdout)["findings"]


def texts(found: list[dict], section: str) -> str:
    return "\n".join(finding["text"] for finding in found if finding["section"] == section)


def test_versions_are_those_of_the_constraints():
    def pinned(file: str) -> dict[str, str]:
        return dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE))

    oldest, newest = pinned("constraints-oldest.txt"), pinned("constraints.txt")
    assert {name: (oldest.get(name, newest[name]), newest[name]) for name in TESTED} == TESTED


def test_it_tells_what_is_here_and_names_nobody(tmp_path):
    found = findings(GPTQ)
    assert {
        "environment",
        "versions",
        "devices",
        "kernels",
        "DeepSpeed operators",
        "disk",
        "checkpoint",
        "leftovers",
    } == {finding["section"] for finding in found}
    assert (
        "28 × gptq v1 int4 g128 sym by torch (cpp: HFQ_DISABLE_CPP=1; reference: not used: torch is preferred)"
        in texts(found, "checkpoint")
    )
    assert "cpp does not run: HFQ_DISABLE_CPP=1" in texts(found, "kernels")
    assert "HFQ_DISABLE_CPP=1" in texts(found, "environment")
    assert "page cache" in texts(found, "disk")
    block = run(GPTQ).stdout
    assert block.startswith("```\n")
    assert str(tmp_path) not in block
    assert str(Path.home()) not in block


def test_threads_above_the_quota_of_a_control_group_are_a_warning(monkeypatch):
    monkeypatch.setattr("hfq.kernels.cpu.thread_limit.cpu_quota", lambda: 0.5)
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    told = [finding for finding in findings() if "quota" in finding["text"]]
    assert [(finding["status"], finding["fix"]) for finding in told] == [
        ("warning", "export OMP_NUM_THREADS=1")
    ]


def test_what_is_missing_for_a_kernel_is_told_of_that_kernel(monkeypatch, tmp_path):
    """A compiler that is not there stops nothing but the kernel that it would compile."""
    monkeypatch.setenv("HFQ_DISABLE_CPP", "0")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with library.use("auto"):
        found = texts(findings(), "kernels")
    assert "cpp does not run: CXX='no-such-compiler' names a compiler that is not there" in found
    assert found.count("no-such-compiler") == 1


@pytest.fixture
def without_compiler(monkeypatch, tmp_path):
    """No compiler on the path, and no package ziglang."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with library.use("auto"):
        yield


def test_without_a_compiler_the_extra_that_brings_one_is_the_fix(without_compiler, monkeypatch):
    monkeypatch.setenv("HFQ_DISABLE_CPP", "0")
    told = [finding for finding in findings() if finding["text"].startswith("cpp does not run")]
    assert [(finding["status"], finding["fix"]) for finding in told] == [
        ("warning", "pip install 'hfq[compiler]'")
    ]
    assert "there is no C++ compiler" in told[0]["text"]
    assert "fix: pip install 'hfq[compiler]'" in run().stdout


def test_a_compiler_is_not_asked_for_where_compiled_kernels_are_switched_off(without_compiler):
    told = [finding for finding in findings() if finding["text"].startswith("cpp does not run")]
    assert [(finding["status"], finding["fix"]) for finding in told] == [("note", "")]


def test_a_damaged_checkpoint_is_an_error_with_its_fix(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    errors = [finding for finding in findings(tmp_path, exit_code=1) if finding["status"] == "error"]
    assert len(errors) == 1
    assert errors[0]["section"] == "checkpoint"
    assert errors[0]["fix"]


def test_configs_are_checked_and_all_their_faults_told(tmp_path):
    good = [
        ROOT / "configs" / "deepspeed" / "zero3.json",
        ROOT / "configs" / "accelerate" / "inference_zero3_nvme.yaml",
    ]
    bad = tmp_path / "bad.json"
    zero = {"stage": 2, "zero_quantized_weights": True, "zero_hpz_partition_size": 4}
    bad.write_text(
        json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}, "fp16": {"enabled": True}})
    )
    found = findings(*(f"--config={file}" for file in [*good, bad]), exit_code=1)
    told = [finding for finding in found if finding["section"] == "configs"]
    assert [finding["status"] for finding in told] == ["ok", "ok", "error", "error", "error", "error"]
    assert {finding["text"].partition(":")[0] for finding in told[2:]} == {"bad.json"}
    assert "fix: Set it to false" in run("--config", bad).stdout


def test_leftovers_are_told_and_removed(tmp_path):
    left = tmp_path / ".model.safetensors.abcd1234.tmp"
    left.write_bytes(b"1234")
    assert ".model.safetensors.abcd1234.tmp, 4 bytes, of a save" in texts(
        findings(tmp_path, exit_code=1), "leftovers"
    )
    assert left.exists()
    assert "removed .model.safetensors.abcd1234.tmp" in texts(
        findings(tmp_path, "--clean", exit_code=1), "leftovers"
    )
    assert not left.exists()
