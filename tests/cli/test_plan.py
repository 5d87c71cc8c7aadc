"""`hfq plan --zero-stage`: its tables, its JSON, and its errors."""

import json

import pytest
from typer.testing import CliRunner

from hfq.cli.main import app
from tests.contract.cases import CASES
from tests.support import tiny_models

GPTQ = str(tiny_models.DATA / "tiny-llama-gptq")
DENSE = str(tiny_models.DATA / "tiny-llama")


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "120"})


def report(*arguments) -> dict:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_papers_example_as_a_table_and_as_json():
    arguments = ("--parameters", "7.5e9", "--zero-stage", "2", "--num-processes", "64", "--num-machines", "8")
    text = run(*arguments).stdout
    for size in ("120 GB", "31.4 GB", "16.6 GB", "1.88 GB", "133 GB", "2 ←"):
        assert size in text
    stages = report(*arguments)["stages"]
    assert [round(stage["per_rank"]["device"] / 1e9, 1) for stage in stages] == [120.0, 31.4, 16.6, 1.9]


def test_a_packed_checkpoint_is_counted_in_its_packed_bytes():
    inspected = json.loads(CliRunner().invoke(app, ["inspect", GPTQ, "--json"]).stdout)
    planned = report(GPTQ, "--zero-stage", "3", "--num-processes", "2", "--offload-param-device", "cpu")
    assert planned["model"]["quantized_modules"] == len(inspected["modules"]) == 28
    assert planned["model"]["quantized_nbytes"] >= inspected["quantized_nbytes"]  # segments start on 16 bytes
    stages = planned["stages"]
    assert stages[2]["parts_per_rank"]["quantized weights"] == {
        "device": planned["model"]["quantized_nbytes"]
    }
    assert stages[3]["parts_per_rank"]["quantized weights"] == {
        "cpu": planned["model"]["quantized_nbytes"] // 2
    }  # 16 divides by 4
    assert planned["setup"]["optimizer"] == "none"
    assert "28 quantized modules" in run(GPTQ, "--zero-stage", "3", "--optimizer", "none").stdout


def test_adapters_are_what_is_trained():
    planned = report(
        GPTQ, "--zero-stage", "3", "--num-processes", "3", "--lora-rank", "8", "--lora-target", "q_proj"
    )
    assert planned["model"]["trained_parameters"] == 4 * 8 * (128 + 128)
    assert planned["setup"]["optimizer"] == "adam"
    other = report(GPTQ, "--zero-stage", "3", "--trainable", "8192", "--optimizer", "sgd")
    assert other["stages"][3]["parts_per_rank"]["optimizer states"] == {"device": 8192 * 4}


def test_an_unquantized_checkpoint_is_trained_whole_where_an_optimizer_is_named():
    assert report(DENSE, "--zero-stage", "1")["model"]["trained_parameters"] == 0
    trained = report(DENSE, "--zero-stage", "1", "--optimizer", "adam")["model"]
    assert trained["frozen_parameters"] == 0
    assert trained["trained_parameters"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--zero-stage 3"),
        (["--zero-stage", "3"], "one of the two"),
        ([GPTQ, "--parameters", "1e9", "--zero-stage", "3"], "one of the two"),
        (["--parameters", "-1", "--zero-stage", "3"], "7.5e9"),
        (["--parameters", "nan", "--zero-stage", "3"], "7.5e9"),
        (["--parameters", "1e9", "--zero-stage", "3", "--lora-rank", "8"], "--trainable"),
        ([GPTQ, "--zero-stage", "3", "--optimizer", "adam"], "--lora-rank 16"),
        ([GPTQ, "--zero-stage", "3", "--optimizer", "none", "--lora-rank", "8"], "Pass an optimizer"),
        ([GPTQ, "--zero-stage", "3", "--num-processes", "0"], "--num-processes 8"),
        (
            [GPTQ, "--zero-stage", "3", "--num-processes", "7", "--num-machines", "2"],
            "a multiple of --num-machines",
        ),
        ([GPTQ, "--zero-stage", "2", "--offload-param-device", "cpu"], "stage 3"),
        ([GPTQ, "--zero-stage", "3", "--lora-target", "q_proj"], "--lora-rank"),
    ],
)
def test_what_cannot_be_planned_is_an_error_with_a_way_out(arguments, said):
    done = run(*arguments)
    assert done.exit_code == 1
    assert said in done.exception.fix


def test_a_dialect_whose_headers_tell_no_sizes_asks_for_the_number(tmp_path):
    case = next(case for case in CASES if case.id == "bitsandbytes-nf4")
    folder = tiny_models.write_model(tmp_path / "m", tiny_models.model_tensors(case.format), case.config)
    assert report(folder, "--zero-stage", "3", "--optimizer", "none")["model"]["quantized_modules"] == 14
    done = run(folder, "--zero-stage", "3", "--lora-rank", "8")
    assert "--trainable" in done.exception.fix
