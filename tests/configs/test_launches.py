"""Every DeepSpeed config under the real launchers, 2 CPU ranks: equal logits, equal losses, and the bytes
that were planned.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hfq.placement.zero.memory import ModelStates, ZeroSetup, estimate_zero
from tests.configs import forked
from tests.support import compiled_io
from tests.support.zero_launch import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
JSONS = sorted((ROOT / "configs" / "deepspeed").glob("*.json"))
BIN = Path(sys.executable).parent
YAMLS = sorted(path.stem for path in (ROOT / "configs" / "accelerate").glob("*zero3*.yaml"))
PLAIN = "zero3_cpu"
"""The accelerate config whose ranks import everything themselves; those of the others are forks."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


def variables() -> dict[str, str]:
    paths = os.pathsep.join(map(str, (ROOT, HERE)))
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
    }


def documented(start: str, option: str, *script: object) -> list:
    """The README's command that starts so, for this script and its arguments, on a port of its own."""
    text = (ROOT / "configs" / "deepspeed" / "README.md").read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    before, after = line.partition(" #")[0].split("script.py")
    return [*before.split(), option, free_port(), *script, *after.split()]


def launch(command: list, folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.fixture(scope="module")
def forks():
    """The environment of launches whose ranks are forks of one process."""
    with forked.served(variables()) as environment:
        yield environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where configs are launched: it looks like the repository."""
    folder = tmp_path_factory.mktemp("launch")
    shutil.copytree(ROOT / "configs", folder / "configs")
    return folder


@pytest.fixture(scope="module")
def runs(folder) -> dict:
    """What each config did: {its name: [of rank 0, of rank 1]}; one launch."""
    configs = [
        path.relative_to(ROOT) for path in JSONS if compiled_io.is_built() or not path.stem.endswith("nvme")
    ]
    if compiled_io.is_built():
        config = json.loads((folder / "configs/deepspeed/zero3_nvme.json").read_text())
        config["zero_optimization"]["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": ".nvme",
            "buffer_count": 4,
        }
        (folder / "zero3_optimizer_nvme.json").write_text(json.dumps(config))
        configs.append(Path("zero3_optimizer_nvme.json"))
    others = [path for path in configs if path.name != "inference_zero3.json"]
    start = (
        "deepspeed --num_gpus 2 script.py --deepspeed --deepspeed_config "
        "configs/deepspeed/inference_zero3.json"
    )
    launch(
        documented(start, "--master_port", HERE / "run_deepspeed.py", folder, *others), folder, variables()
    )
    found = {
        path.stem: [json.loads((folder / f"{path.stem}-{rank}.json").read_text()) for rank in (0, 1)]
        for path in configs
    }
    states = folder / ".nvme" / "zero_stage_3" / "optimizer" / "rank0"
    found["states on nvme"] = (
        sum(file.stat().st_size for file in states.rglob("*.swp")) if compiled_io.is_built() else 0
    )
    return found


def of_each(runs: dict) -> dict:
    return {name: ranks for name, ranks in runs.items() if name != "states on nvme"}


def test_logits_and_losses_are_those_of_every_other_config(runs):
    ranks = [found for both in of_each(runs).values() for found in both]
    assert len({logits for found in ranks for logits in found["logits"]}) == 1
    trained = {tuple(found["losses"]) for found in ranks if found["losses"]}
    assert len(trained) == 1
    first, second = trained.pop()
    assert second < first - 0.5  # measured: 8.34, 7.00


def test_each_rank_holds_what_was_planned(runs):
    for name, ranks in of_each(runs).items():
        trains, home = (
            not name.startswith("inference"),
            "nvme" if "nvme" in name else "cpu" if "cpu" in name else "none",
        )
        optimizer_home = "nvme" if "optimizer" in name else "cpu" if trains and home != "none" else "none"
        for held in (found["held"] for found in ranks):
            frozen = tuple(numel for numel, is_trained in held["sizes"] if not is_trained)
            trained = tuple(numel for numel, is_trained in held["sizes"] if is_trained)
            offloads = {"offload_param": home, "offload_optimizer": optimizer_home}
            setup = ZeroSetup(3, 2, optimizer="adam" if trains else "none", **offloads)
            parts = estimate_zero(ModelStates(frozen=frozen, trained=trained), setup).parts
            weights: dict[str, int] = {"nvme": 0, "memory": 0}
            for part in ("frozen weights", "trained weights"):
                for where, nbytes in parts.get(part, {}).items():
                    weights["nvme" if where == "nvme" else "memory"] += nbytes
            assert {"nvme": 0, **held["weights"]} == weights, name
            states = held["masters"] + held["moments"]
            assert states == sum(
                n for where, n in parts.get("optimizer states", {}).items() if where != "nvme"
            ), name
            assert bool(trained) is trains


def test_optimizer_states_rest_on_nvme_as_planned(runs):
    if "zero3_optimizer_nvme" not in runs:
        pytest.skip(compiled_io.REASON)
    trained = tuple(
        numel for numel, is_trained in runs["zero3_optimizer_nvme"][0]["held"]["sizes"] if is_trained
    )
    planned = estimate_zero(ModelStates(trained=trained), ZeroSetup(3, 2, offload_optimizer="nvme"))
    assert planned.parts["optimizer states"] == {"nvme": runs["states on nvme"]}


def test_nvme_configs_put_large_shards_on_nvme(runs):
    if not compiled_io.is_built():
        pytest.skip(compiled_io.REASON)
    for name in ("zero3_nvme", "inference_zero3_nvme"):
        assert (
            runs[name][0]["held"]["weights"]["nvme"] == 2 * 4096 * 512
        )  # half of the embedding and of the head, in bf16


@pytest.mark.parametrize("name", YAMLS)
def test_accelerate_launches_what_its_config_names(name, runs, folder, forks):
    if name.endswith("nvme") and not compiled_io.is_built():
        pytest.skip(compiled_io.REASON)
    script = [HERE / "run_accelerate.py", folder / f"accelerate-{name}"]
    if name == PLAIN:
        launch(documented("accelerate launch", "--main_process_port", *script), folder, variables())
    else:
        command = [
            "accelerate",
            "launch",
            "--config_file",
            f"configs/accelerate/{name}.yaml",
            "--main_process_port",
            free_port(),
        ]
        launch([*command, HERE / "forked.py", *script], folder, forks)
    for rank in (0, 1):
        found = json.loads((folder / f"accelerate-{name}-{rank}.json").read_text())
        assert (found["is_zero3"], found["world"]) == (True, 2)
        assert found["logits"] == runs["zero3"][0]["logits"][0]
        assert found["losses"] == runs[name][0]["losses"]
        assert found["sharded"] == sum(numel // 2 for numel, _ in runs["zero3"][0]["held"]["sizes"])


def test_deepspeed_launches_a_script_of_trainer(folder, forks):
    start = "deepspeed --num_gpus 2 script.py --deepspeed configs/deepspeed/zero3_cpu.json --bf16"
    command = documented(start, "--master_port", HERE / "forked.py", ROOT / "examples" / "finetune_lora.py")
    options = (
        "--use_cpu --do_train --max_steps 1 --per_device_train_batch_size 1 --save_strategy no "
        "--report_to none"
    )
    launch([*command, *options.split(), "--output_dir", folder / "trained"], folder, forks)
    assert (folder / "trained" / "adapter_model.safetensors").is_file()


def test_accelerate_launches_hfq_with_the_config_of_a_device_map():
    config = ["--config_file", "configs/accelerate/device_map.yaml", "--module"]
    launch(
        ["accelerate", "launch", *config, "hfq", "inspect", "tests/data/tiny-llama-gptq"], ROOT, variables()
    )
