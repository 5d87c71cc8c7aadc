"""`hfq plan MODEL`: tables, JSON, files, and errors. Its bytes: tests/loading/test_dry_run.py."""

import errno
import json
import os

import pytest
import yaml
from typer.testing import CliRunner

from hfq.checkpoint import Checkpoint
from hfq.cli.main import app
from hfq.errors import PlacementError, SetupError
from hfq.placement.estimate.profile import Profile, Zero3Rates
from hfq.runtime.record_routing import Routing
from tests.support import moe_models, mtp_models, tiny_models

GPTQ = str(tiny_models.DATA / "tiny-llama-gptq")


@pytest.fixture(autouse=True)
def no_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def run(*arguments):
    return CliRunner().invoke(app, ["plan", GPTQ, *map(str, arguments)], env={"COLUMNS": "160"})


def report(*arguments) -> dict:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def test_a_table_names_homes_moves_and_what_decides():
    text = " ".join(run("--cpu", "800kB", "--max-model-len", "16", "--batch-size", "2").stdout.split())
    for said in (
        "4 layers, gptq v1 int4 g128 sym",
        "│ cpu",
        "│ disk",
        "from disk",
        "the speed of a step is unknown",
        "less than calling 4 layers, which `hfq profile-machine` measures",
        "# load.py",
        "max_memory=",
    ):
        assert said in text
    text = run("--cpu", "24GB", "--batch-size", "256").stdout  # a KV cache that takes longer than the calls
    assert "tokens/s" in text
    assert "decided by reads of the KV cache" in text


def test_one_accelerator_takes_blocks_from_the_host():
    planned = report("--gpu", "700kB", "--cpu", "10MB", "--max-model-len", "16")
    homes = planned["devices"]
    assert set(homes) == {"cuda:0", "cpu"}
    assert homes["cuda:0"]["total_nbytes"] <= 700_000
    assert homes["cuda:0"]["buffer_nbytes"] > 0
    assert planned["device_map"][""] == 0
    assert {0, "cpu"} == set(planned["device_map"].values())
    assert planned["moved"]["copied_per_step_nbytes"] > 0
    assert planned["moved"]["onloaded_per_step_nbytes"] == 0
    assert planned["prediction"]["terms"]["link"] > 0


def test_drafted_tokens_cost_fewer_bytes():
    limits = "--cpu", "800kB", "--max-model-len", "16"
    plain, (costs,) = (
        report(*limits),
        report(*limits, "--num-assistant-tokens", 3, "--acceptance-rate", 1)["speculation"],
    )
    assert plain["speculation"] == []
    assert costs["passes_per_token"] == 0.25
    assert costs["per_token_nbytes"] == pytest.approx(plain["moved"]["per_token_nbytes"] / 4, abs=1)
    listed = report(*limits, "--num-assistant-tokens", 3)["speculation"]
    assert [each["acceptance_rate"] for each in listed] == [0.5, 0.7, 0.9]
    text = " ".join(run(*limits, "--num-assistant-tokens", "3").stdout.split())
    assert "with 3 drafted tokens per pass, 90% of them accepted: 0.291 passes" in text


def test_layers_that_predict_further_tokens_are_counted(tmp_path):
    packed = str(mtp_models.write(tmp_path, "glm4_moe")[0])
    runs = [
        CliRunner().invoke(app, ["plan", packed, *more]) for more in ((), ("--num-assistant-tokens", "1"))
    ]
    assert ["use_mtp=True loads" in done.stdout for done in runs] == [False, True]
    planned = json.loads(CliRunner().invoke(app, ["plan", packed, "--json"]).stdout)
    header = Checkpoint.open(packed).tensors
    further = [info.nbytes for name, info in header.items() if name.startswith("model.layers.2.")]
    assert planned["model"]["mtp_nbytes"] == sum(further) > 0


@pytest.mark.parametrize(
    "options",
    [
        ("--acceptance-rate", "0.5"),
        ("--num-assistant-tokens", "2", "--batch-size", "2"),
        ("--num-assistant-tokens", "2", "--suggest-format", "1GB"),
        ("--num-assistant-tokens", "2", "--zero-stage", "3"),
    ],
)
def test_drafted_tokens_are_planned_for_one_sequence_on_one_device(options):
    assert isinstance(run(*options).exception, SetupError)


def test_recorded_routing_gives_the_hits_of_the_expert_cache(tmp_path):
    path = moe_models.save_wide(tmp_path / "model", num_experts=16)
    modules = [f"model.layers.{layer}.mlp.experts" for layer in range(moe_models.LAYERS)]
    experts, calls = [16] * 2, [(layer % 2, [[0, 1]]) for layer in range(40)]
    Routing(modules, experts, [9, 9], calls).save(tmp_path / "routing.json")
    limits = [str(path), "--cpu", "250kB", "--max-model-len", "16"]

    def plan(*more):
        return CliRunner().invoke(app, ["plan", *limits, *map(str, more)], env={"COLUMNS": "160"})

    even, recorded = (
        json.loads(plan(*more, "--json").stdout)["moved"]
        for more in ((), ("--routing", tmp_path / "routing.json"))
    )
    assert 0 < even["expert_hit_rate"] < 1 == recorded["expert_hit_rate"]
    assert even["routed_per_step_nbytes"] > 0 == recorded["routed_per_step_nbytes"]
    assert (even["routing"], recorded["routing"]) == ("even routing", "the routing of 20 tokens")
    assert "are cached, by even routing" in " ".join(plan().stdout.split())
    Routing(modules[:1], experts[:1], [9], calls[:1]).save(tmp_path / "other.json")
    assert "another model" in str(plan("--routing", tmp_path / "other.json").exception)
    assert isinstance(plan("--routing", tmp_path / "other.json", "--zero-stage", "3").exception, SetupError)
    catalog = plan("--routing", tmp_path / "other.json", "--catalog", "shipped")
    assert "plans without --routing" in str(catalog.exception)


def test_several_accelerators_hold_the_model_alone():
    planned = report("--gpu", "RTX-4090×2")
    assert planned["machine"]["gpu_nbytes"] == [24 * 10**9] * 2
    assert set(planned["device_map"].values()) == {0, 1}
    assert (
        sum(device["weights_nbytes"] for device in planned["devices"].values())
        == report("--cpu", "1GB")["devices"]["cpu"]["weights_nbytes"]
    )


def test_several_accelerators_offload_what_they_cannot_hold():
    planned = report("--gpu", "520kB×2", "--cpu", "2MB", "--max-model-len", 16)
    assert planned["devices"]["cpu"]["weights_nbytes"] > 0
    for device in planned["devices"].values():
        assert device["total_nbytes"] <= device["capacity_nbytes"]
    small = run("--gpu", "60kB×2", "--cpu", "2MB", "--max-model-len", 16)
    assert isinstance(small.exception, PlacementError)
    assert "--gpu" in small.exception.fix


def test_a_named_profile_predicts(tmp_path):
    from hfq.machine_profile.machine_facts import machine_facts

    facts = {"processor": machine_facts(tmp_path)["processor"]}
    rates = {"gptq 4-bit bfloat16": {1: 1e9}, "dense bfloat16": {1: 1e9}}
    profile = Profile("measured", 1e9, 2e9, 3e9, None, rates, 0.001, (0.5, 0.1), facts)
    file = tmp_path / "profile.json"
    file.write_text(profile.to_json())
    found = report("--cpu", "1GB", "--profile", file)["prediction"]
    assert found["source"] == "measured"
    assert found["terms"]["layers"] == pytest.approx(0.004)
    assert found["load_seconds"] > 0.9
    file.write_text(profile.to_json().replace(facts["processor"], "another processor"))
    refused = run("--cpu", "1GB", "--profile", file)
    assert "another machine" in str(refused.exception)


def test_zero3_prints_configs_that_their_readers_take(tmp_path):
    planned = report(
        "--zero-stage",
        "3",
        "--num-processes",
        2,
        "--gpu",
        "1GB×2",
        "--cpu",
        "1GB",
        "--output-dir",
        tmp_path / "out",
    )
    assert planned["zero3"]["offload_param"] == "none"
    config = json.loads((tmp_path / "out" / "deepspeed.json").read_text())
    assert config["zero_optimization"]["stage"] == 3
    assert yaml.safe_load((tmp_path / "out" / "accelerate.yaml").read_text())["num_processes"] == 2
    tight = report(
        "--zero-stage",
        "3",
        "--num-processes",
        2,
        "--gpu",
        "13MB×2",
        "--cpu",
        "1GB",
        "--nvme-path",
        "/scratch",
    )
    assert tight["zero3"]["offload_param"] == "cpu"
    assert "ZeRO-3, 2 ranks" in run("--zero-stage", "3", "--num-processes", 2, "--cpu", "1GB").stdout


def test_zero3_predicts_where_as_many_ranks_were_measured_here(tmp_path):
    from hfq.machine_profile.machine_facts import machine_facts

    here = ("--zero-stage", "3", "--num-processes", 2, "--cpu", "1GB")
    assert "hfq profile-machine --num-processes 2" in report(*here)["prediction"]["not_predicted"]
    facts = {"processor": machine_facts(tmp_path)["processor"]}
    rates = {"gptq 4-bit bfloat16": {1: 1e9}, "dense bfloat16": {1: 1e9}}
    measured = Zero3Rates(2, "cpu", gathering=1e8, slowdown=2.0, layer_seconds=0.01, step_seconds=0.1)
    file = tmp_path / "profile.json"
    file.write_text(
        Profile("measured", 1e9, 2e9, 3e9, None, rates, 0.001, (0.5, 0.1), facts, zero3=measured).to_json()
    )
    found = report(*here, "--profile", file)
    assert found["prediction"]["terms"]["layers"] == pytest.approx(0.14)
    gathered = found["zero3"]["gathered_per_forward_nbytes"]
    assert found["prediction"]["terms"]["gathering"] == pytest.approx(gathered / 1e8)
    for other, said in (
        (("--num-processes", 3), "3 with 3 on each node"),
        (("--gpu", "1GB×2"), "measured ranks on cpu"),
    ):
        assert said in report(*here, "--profile", file, *other)["prediction"]["not_predicted"]
    assert "no time is predicted: gathers were not measured" in " ".join(run(*here).stdout.split())


def test_the_catalog_and_the_ladder():
    ranked = report("--catalog", "shipped", "--batch-size", 256)["catalog"]
    costs = [entry["cost_of_a_million_tokens"] for entry in ranked]
    assert costs == sorted(costs)
    assert "workstation with an RTX 4090" in run("--catalog", "shipped").stdout
    assert all("no speed" in entry["refused"] for entry in report("--catalog", "shipped")["catalog"])
    ladder = report("--suggest-format", "1GB")["ladder"]
    assert ladder["best"] == "bf16"
    assert "4.16 bits" in ladder["note"] or "bits per weight" in ladder["note"]
    assert "best that fits" in run("--suggest-format", "1GB").stdout


def test_an_offloaded_kv_cache_is_counted_and_written_as_code():
    done = run("--cpu", "1GB", "--kv-cache-device", "disk", "--kv-cache-dtype", "int8", "--json")
    report = json.loads(done.stdout)
    assert report["devices"]["disk"]["kv_cache_nbytes"] == report["context"]["sequence_nbytes"] > 0
    assert report["prediction"]["terms"]["kv_reads"] > 0
    assert 'OffloadedCache(model, "kv_cache", kv_cache_dtype="int8")' in report["files"]["load.py"]
    assert "of KV cache" in run("--cpu", "1GB").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cpu", "1kB"], "planned and fits"),
        (["--gpu", "RTX-409", "--cpu", "1GB"], "--gpu 24GiB"),
        (["--cpu", "many"], "--cpu 24GiB"),
        (["--cpu", "-5"], "--cpu 24GiB"),
        (["--cpu", "1GB", "--batch-size", "0"], "--batch-size 1"),
        (["--cpu", "1GB", "--max-model-len", "-1"], "--max-model-len 1"),
        (["--cpu", "1GB", "--kv-cache-dtype", "fp9"], "--kv-cache-dtype"),
        (["--cpu", "1GB", "--kv-cache-device", "cpu"], "--kv-cache-device disk"),
        (["--gpu", "1GB", "--kv-cache-device", "dsik"], "--kv-cache-device disk"),
        (["--gpu", "1GB×2", "--kv-cache-device", "disk"], "Omit --kv-cache-device"),
        (["--cpu", "1GB", "--kv-cache-device", "disk", "--kv-cache-dtype", "int4"], "--kv-cache-dtype"),
        (["--zero-stage", "3", "--kv-cache-device", "disk"], "Omit --zero-stage"),
        (["--cpu", "1GB", "--zero-stage", "4"], "--zero-stage 3"),
        (["--cpu", "1GB", "--dtype", "bf16"], "--dtype"),
        (["--cpu", "1GB", "--num-processes", "2"], "--zero-stage 3"),
        (["--cpu", "1GB", "--lora-rank", "8"], "--zero-stage 3"),
        (["--cpu", "1GB", "--zero-stage", "2"], "--zero-stage 3"),
        (["--cpu", "1GB", "--zero-stage", "3", "--catalog", "shipped"], "Omit --zero-stage"),
        (["--cpu", "64"], "--cpu 64GiB"),
        (["--cpu", "1GB", "--catalog", "nowhere.yaml"], "--catalog shipped"),
        (["--cpu", "1GB", "--suggest-format", "1kB"], "--suggest-format"),
        (
            ["--zero-stage", "3", "--num-processes", "2", "--gpu", "1GB", "--cpu", "1GB"],
            "--gpu 1000000000B×2",
        ),
        (["--zero-stage", "3", "--num-processes", "2", "--cpu", "1kB"], "--cpu"),
        (["--cpu", "1GB", "--profile", "nowhere.json"], "hfq profile-machine"),
    ],
)
def test_what_cannot_be_planned_is_an_error_with_a_way_out(arguments, said):
    done = run(*arguments)
    assert done.exit_code == 1
    assert said in done.exception.fix


def test_a_rounded_head_is_counted_and_said():
    plain, rounded = report("--cpu", "100MB"), report("--cpu", "100MB", "--quantize-output-head", "fp8")
    text = " ".join(run("--cpu", "100MB", "--quantize-output-head", "int8").stdout.split())
    assert "note: lm_head is rounded to int-quantized int8 channel" in text
    assert "results are not those of the checkpoint" in text
    weights = [
        sum(device["weights_nbytes"] for device in each["devices"].values()) for each in (plain, rounded)
    ]
    assert weights[1] - weights[0] == 1536 * (128 + 2)  # the embedding that it was tied to stays
    assert 'HfqConfig(quantize_output_head="fp8")' in rounded["files"]["load.py"]
    for others in (["--zero-stage", "3"], ["--suggest-format", "1GB"]):
        assert "--quantize-output-head" in str(run("--quantize-output-head", "fp8", *others).exception)


def test_a_full_disk_leaves_the_files_of_an_earlier_plan(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "load.py").write_text("old")
    monkeypatch.setattr(os, "replace", fail)
    done = run("--cpu", "1GB", "--output-dir", tmp_path)
    assert isinstance(done.exception, SetupError)
    assert "found: No space left on device" in str(done.exception)
    assert os.listdir(tmp_path) == ["load.py"]
    assert (tmp_path / "load.py").read_text() == "old"
