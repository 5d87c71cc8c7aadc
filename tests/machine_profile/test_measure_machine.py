"""Tests of `hfq profile-machine --quick`: a profile with every rate, which `hfq plan` reads."""

import resource

import pytest
from typer.testing import CliRunner

from hfq.cli.main import app
from hfq.errors import SetupError
from hfq.machine_profile.measure_machine import disk_file, measure_machine
from hfq.placement.estimate.profile import read_profile
from tests.support import tiny_models

GPTQ = str(tiny_models.DATA / "tiny-llama-gptq")


def test_a_profile_is_measured_written_and_used(tmp_path):
    file = tmp_path / "profile.json"
    done = CliRunner().invoke(
        app,
        ["profile-machine", GPTQ, "--quick", "--folder", str(tmp_path / "disk"), "--output-file", str(file)],
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert "GB/s" in done.output
    profile = read_profile(file)
    assert profile.is_measured
    assert min(profile.disk, profile.page_cache, profile.memory) > 0
    assert {
        "dense float32",
        "dense bfloat16",
        "gptq 4-bit bfloat16",
        "fp8 8-bit float32",
        "awq 4-bit bfloat16",
    } <= set(profile.products)
    assert (
        min(profile.layer_seconds, profile.step_seconds, profile.block_seconds, *profile.calls.values()) >= 0
    )
    for beside in (profile.beside_disk, profile.beside_cached):
        assert 0 < beside.computing <= 1
        assert 0 < beside.reading <= 1
    assert profile.zero3 is None
    assert list((tmp_path / "disk").iterdir()) == []
    planned = CliRunner().invoke(app, ["plan", GPTQ, "--cpu", "1GB", "--profile", str(file)])
    assert "rates: measured" in planned.output


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="disk cannot be measured"):
        measure_machine(tmp_path / "file" / "below", lambda _: None, quick=True)


def test_a_full_disk_is_refused_and_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(SetupError, match="found: File too large"), disk_file(tmp_path, 1 << 20):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_an_output_file_that_cannot_be_written_is_found_before_the_measurement(tmp_path):
    done = CliRunner().invoke(app, ["profile-machine", "--quick", "--output-file", str(tmp_path)])
    assert "found: Is a directory" in str(done.exception)
    assert done.stderr == ""  # no measurement was announced
