"""Every config is read by the library that it is for, says what its name says, and has nothing that would
harm packed bytes.
"""

import importlib.util
import json
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from tests.support import programs

ROOT = Path(__file__).parents[2]
JSONS = sorted((ROOT / "configs" / "deepspeed").glob("*.json"))
YAMLS = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
NAMES = {f"{use}zero3{home}" for use in ("", "inference_") for home in ("", "_cpu", "_nvme")}


@pytest.fixture(scope="module")
def parsed() -> dict:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    done = programs.run("parse_deepspeed_configs", *JSONS, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_there_is_one_of_each():
    assert {path.stem for path in JSONS} == NAMES
    assert {path.stem for path in YAMLS} == NAMES | {"device_map"}


def test_deepspeed_reads_each_as_its_name_says(parsed):
    assert set(parsed) == NAMES
    for name, config in parsed.items():
        home = name.partition("zero3")[2].removeprefix("_") or "none"
        assert config["unknown"] == [], name
        assert (config["is_zero3"], config["bf16"]) == (True, True)
        assert config["param"] == home
        is_offloaded = home != "none" and not name.startswith("inference")
        assert config["optimizer"] == ("cpu" if is_offloaded else "none")
        assert config["is_offload"] is (home != "none")
        assert config["reuse"] == 0
        assert config["aio"] == (
            32 if home == "nvme" else 8
        )  # 8 is DeepSpeed's default: aio was found where it stands


def test_none_has_an_option_that_changes_packed_bytes(parsed):
    assert {name: config["harmful"] for name, config in parsed.items()} == dict.fromkeys(parsed, [False] * 4)


def test_inference_configs_leave_nothing_to_be_filled():
    for path in JSONS:
        assert ('"auto"' in path.read_text()) is (not path.stem.startswith("inference"))


def test_the_readme_explains_every_key_and_file():
    text = (ROOT / "configs" / "deepspeed" / "README.md").read_text(encoding="utf-8")
    for path in JSONS:
        assert f"`{path.name}`" in text
        config = json.loads(path.read_text())
        keys = {*config.pop("zero_optimization"), *config} - {
            "stage",
            "offload_param",
        }  # the files' table says these
        assert [key for key in sorted(keys) if f"`{key}" not in text] == []


def test_zero3_md_has_the_commands_of_the_readme():
    def commands(page: Path) -> list[str]:
        lines = page.read_text(encoding="utf-8").splitlines()
        return [
            line.partition(" #")[0].rstrip()
            for line in lines
            if line.startswith(("accelerate launch", "deepspeed "))
        ]

    assert len(found := commands(ROOT / "configs" / "deepspeed" / "README.md")) == 3
    assert commands(ROOT / "docs" / "how_to" / "use_zero3.md") == found


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_accelerate_reads_each(path):
    config = load_config_from_file(str(path))
    assert path.read_text(encoding="utf-8").count("#") >= 5
    if path.stem == "device_map":
        assert (config.distributed_type, config.num_processes, config.deepspeed_config) == (
            DistributedType.NO,
            1,
            {},
        )
        return
    assert config.distributed_type == DistributedType.DEEPSPEED
    stored = f"configs/deepspeed/{path.stem}.json"
    assert config.deepspeed_config == {"deepspeed_config_file": stored, "zero3_init_flag": True}
    assert (ROOT / stored).is_file()
