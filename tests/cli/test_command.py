"""The `hfq` command: quick help without torch, inspection in text and JSON, errors without a traceback."""

import json
import os
import resource
import subprocess
import sys

import pytest

from hfq.cli import main
from tests.support import programs, tiny_models

HFQ = [sys.executable, "-m", "hfq"]
GPTQ = str(tiny_models.DATA / "tiny-llama-gptq")


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*HFQ, *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture
def printed(monkeypatch, capsys):
    """printed(*arguments) → what the command prints, in this process: a new one imports torch and
    transformers again.
    """

    def printed(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["hfq", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    return printed


def test_help_of_every_verb_imports_no_torch():
    done = programs.run("help_of_every_verb", timeout=60)
    assert done.returncode == 0, done.stderr
    assert {"inspect", "demo", "plan", "doctor", "env", "profile-machine", "bench"} <= set(
        done.stdout.splitlines()[-1].split()
    )


@pytest.mark.parametrize("verb", [[], ["plan"]], ids=["none", "the one with most options"])
def test_help_answers_at_once(verb):
    times = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(*verb, "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert (
        min(times) < 0.5
    )  # the promise itself, in seconds of CPU; the best of four, as a busy machine slows these, too


def test_inspect_tells_dialect_bits_bytes_and_alignment(printed):
    report = json.loads(run("inspect", GPTQ, "--json").stdout)
    assert report["formats"] == {"gptq v1 int4 g128 sym": 28}
    assert report["quantized_nbytes"] + report["unquantized_nbytes"] + 8 < report["nbytes"]
    assert 4 < report["bits_per_quantized_weight"] < 4.5
    assert (
        sum(report["nbytes_by_layer"].values()) == report["quantized_nbytes"] + report["unquantized_nbytes"]
    )
    assert set(report["nbytes_by_layer"]) == {"layer 0", "layer 1", "layer 2", "layer 3", "outside layers"}
    assert sum(report["alignment"].values()) == report["tensors"]
    assert len(report["modules"]) == 28
    text = printed("inspect", GPTQ)
    assert "gptq v1 int4 g128 sym" in text


def test_inspect_tells_which_kernel_multiplies_and_why_no_other(printed):
    report = json.loads(printed("inspect", GPTQ, "--kernels", "--json"))
    reasons = {"cpp": "HFQ_DISABLE_CPP=1", "torch": None, "reference": "not used: torch is preferred"}
    assert all(module["kernels"] == reasons for module in report["modules"])
    assert (
        f"{len(report['modules'])} by torch (cpp: HFQ_DISABLE_CPP=1; reference: not used: torch is preferred)"
        in " ".join(printed("inspect", GPTQ, "--kernels").split())
    )


def test_inspect_of_an_unquantized_checkpoint_says_so(printed):
    report = json.loads(printed("inspect", str(tiny_models.DATA / "tiny-llama"), "--json"))
    assert report["formats"] == {}
    assert any("not quantized" in note for note in report["odd"])


def test_a_wrong_path_is_an_error_without_a_traceback(tmp_path):
    done = run("inspect", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert "CheckpointError: There is no checkpoint at this path." in done.stderr
    assert "Fix:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("verb", [("inspect", GPTQ, "--json"), ("formats",), ("plan", GPTQ, "--cpu", "1GiB")])
def test_a_full_disk_under_the_output_is_an_error_without_a_traceback(verb):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hfq", *verb], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-4:] == [
        "SetupError: The output could not be written.",
        "  expected: free space where the output goes",
        "  found: No space left on device",
        "Fix: Free space, or redirect the output to another disk.",
    ]
    assert "Traceback" not in done.stderr


def test_too_little_memory_for_the_libraries_is_an_error_without_a_traceback():
    done = programs.run("run_within_memory", 300 << 20, "plan", GPTQ, "--cpu", "1GiB")
    assert done.returncode == 1
    assert "SetupError: A limit of this machine or process was reached." in done.stderr
    assert "Fix: Free memory" in done.stderr
    assert "Traceback" not in done.stderr
