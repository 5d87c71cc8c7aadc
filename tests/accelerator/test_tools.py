"""Tests that the verbs of hfq find accelerators of any kind, with their bytes."""

import json

import pytest
import torch
from typer.testing import CliRunner

from hfq.cli.bench.bench_table import print_table
from hfq.cli.bench.bench_worker import BenchWorker
from hfq.cli.main import app
from hfq.evaluation.placed_models import as_device_map
from hfq.machine_profile.measure_machine import measure_machine
from hfq.placement.accelerators import describe_accelerator, free_nbytes, list_accelerators
from tests.support.accelerator_maps import MIXED
from tests.support.models import GPTQ
from tests.support.programs import ROOT

pytestmark = pytest.mark.accelerator
DEVICES = ["sim:0", "sim:1", "sim:2"]
SIZES = {"sim:0": 1_000_000_000, "sim:1": 700_000_000, "sim:2": 800_000_000}


@pytest.fixture(autouse=True)
def sizes(sim):
    """Three devices of different sizes."""
    for index, nbytes in enumerate(SIZES.values()):
        sim.set_capacity(index, nbytes)
    yield
    for index in range(3):
        sim.set_capacity(index, 1 << 30)


@pytest.fixture
def in_new_processes(tmp_path, monkeypatch):
    """Starts the simulated accelerator in every Python process that a test starts."""
    code = "from tests.support import simulated_accelerator as it\nit.start(3)\n"
    (tmp_path / "sitecustomize.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")


def invoke(*arguments: object) -> str:
    """Returns the standard output of a verb."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_accelerators_have_names_and_bytes(sim):
    assert list_accelerators() == DEVICES
    found = describe_accelerator("sim:1")
    assert (found.model, found.total_nbytes) == ("simulated accelerator 1", SIZES["sim:1"])
    before = free_nbytes("sim:1")
    held = torch.empty(1 << 20, device="sim:1")
    assert before - free_nbytes("sim:1") == held.nbytes
    assert found.free_nbytes == before


def test_doctor_shows_every_accelerator_and_what_multiplies_there():
    found = json.loads(invoke("doctor", "--json"))["findings"]
    texts = [finding["text"] for finding in found if finding["section"] == "devices"]
    for device, nbytes in SIZES.items():
        model = f"{device}: simulated accelerator {device[-1]}, {nbytes / 1e9:.1f} GB, "
        assert any(text.startswith(model) and text.endswith("GB free") for text in texts)
    assert "sim: hfq has no kernel for it; the reference kernel multiplies" in texts
    assert not any("compute capability" in text for text in texts)


def test_plan_without_sizes_plans_for_the_accelerators_of_this_machine():
    report = json.loads(invoke("plan", GPTQ, "--json"))
    assert report["machine"]["gpu_nbytes"] == [*SIZES.values()]
    assert {name: report["devices"][name]["capacity_nbytes"] for name in DEVICES} == SIZES
    text = invoke("plan", GPTQ)
    assert all(device in text for device in DEVICES)
    assert "cuda" not in text


def test_plan_of_one_accelerator_names_its_kind(sim, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    report = json.loads(invoke("plan", GPTQ, "--json"))
    assert report["machine"]["gpu_nbytes"] == [SIZES["sim:0"]]
    assert report["devices"]["sim:0"]["capacity_nbytes"] == SIZES["sim:0"]
    assert {module["device"] for module in report["modules"]} == {"sim:0"}


def test_the_machine_profile_measures_accelerators(tmp_path):
    profile = measure_machine(tmp_path, lambda _: None, quick=True)
    for device, nbytes in SIZES.items():
        text = f"{device}: simulated accelerator {device[-1]}, {nbytes:,} B"
        assert text in profile.machine["accelerators"]
    assert profile.device_memory > 0
    assert profile.host_to_device > 0


def test_a_bench_worker_reports_the_peak_of_each_accelerator(sim):
    worker = BenchWorker(str(GPTQ), MIXED["2+cpu+disk"], None, "float32", None, 4, 2).commands
    loaded = worker["load"]()
    assert loaded["execution_device"] == "sim:0"
    assert {"sim:0", "sim:1", "cpu", "disk"} == set(loaded["devices"])
    for step in ("warm_up", "prefill", "decode"):
        worker[step]()
    peaks = worker["memory"]()["peak_device_memory_nbytes"]
    for device in ("sim:0", "sim:1"):
        assert peaks[device] >= loaded["devices"][device]


def test_bench_reports_memory_of_accelerators_and_host_time_per_layer(in_new_processes, capsys):
    limits = "sim:0=700KB,sim:1=700KB,2=700KB,cpu=1MB"
    found = json.loads(invoke("bench", GPTQ, "--max-memory", limits, "-p", 4, "-n", 2, "-r", 1, "--json"))
    run = found["runs"][0]
    assert set(run["devices"]) == {"sim:0", "sim:1", "sim:2"}
    for device, nbytes in run["devices"].items():
        assert run["peak_device_memory_nbytes"][device] >= nbytes
    assert run["host_seconds_per_layer"] > 0
    print_table(found)
    assert f"{run['host_seconds_per_layer'] * 1e6:.3g} µs" in capsys.readouterr().out


@pytest.mark.parametrize("placement", ["sim", "sim:1", "balanced_low_0"])
def test_verbs_accept_devices_of_this_machine(placement):
    assert as_device_map(placement) in (placement, {"": placement})
