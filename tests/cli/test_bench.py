"""`hfq bench MODEL`: what it measures and predicts in each placement, as a table and as JSON, and its
errors.
"""

import contextlib
import json
import re
import subprocess
import sys
from dataclasses import replace

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from typer.testing import CliRunner

from hfq.cli.bench import bench_run
from hfq.cli.bench.bench_worker import BenchWorker
from hfq.cli.main import app, main
from hfq.errors import CheckpointError, PlacementError, SetupError
from hfq.placement.estimate.profile import PUBLISHED
from tests.support import tiny_models

GPTQ = tiny_models.DATA / "tiny-llama-gptq"
SMALL = ("-p", "8", "-n", "4", "-r", "2")


class InProcess(contextlib.nullcontext):
    """Stands in for `Worker`: the same questions, answered here."""

    def __init__(self, module, **options):
        super().__init__(self)
        self.commands = BenchWorker(**options).commands

    def ask(self, question):
        try:
            return json.loads(json.dumps(self.commands[question]()))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


@pytest.fixture
def in_process(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bench_run, "Worker", InProcess)


def run(*options):
    return CliRunner().invoke(app, ["bench", *map(str, options)])


def found(*options):
    done = run(GPTQ, *SMALL, "--json", *options)
    assert done.exit_code == 0, done.exception
    return json.loads(done.stdout)


def test_help_ends_with_an_example_and_imports_no_torch():
    code = "import sys; from hfq.cli import main\ntry: main(['bench', '--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--n-prompt" in done.stdout
    assert done.stdout.rstrip().rpartition("\n")[2].strip().startswith("hfq bench")


def test_each_number_of_threads_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = run(GPTQ, *SMALL, "-t", "1")
    assert done.exit_code == 0, done.exception
    assert done.stderr == ""
    rows = [line.split("│")[1:4] for line in done.stdout.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row[:2]] for row in rows] == [
        ["1", test] for test in ("load", "peak memory", "prefill 8", "decode 4")
    ]
    assert "GB/s" in rows[0][2]
    assert all("±" in row[2] and "tokens/s" in row[2] for row in rows[2:])
    assert "limits of standards" in done.stdout


@pytest.mark.usefixtures("in_process", "native")
def test_json_has_all_measurements():
    report = found("--device-map", "cpu", "-t", "1")
    (measured,) = report["runs"]
    assert report["model"]["formats"] == "gptq v1 int4 g128 sym"
    assert report["options"] == {
        "device_map": {"": "cpu"},
        "max_memory": None,
        "dtype": "auto",
        "n_prompt": 8,
        "n_gen": 4,
        "repetitions": 2,
        "is_compiled": False,
    }
    assert measured["threads"] == 1
    assert set(measured["devices"]) == {"cpu"}
    for name, tokens in (("prefill", 8), ("decode", 4)):
        seconds = measured[f"{name}_seconds"]
        assert len(seconds) == 2
        mean = sum(tokens / each for each in seconds) / 2
        assert measured[f"{name}_tokens_per_second"] == pytest.approx(mean)
        assert measured[f"{name}_tokens_per_second_std"] >= 0
    assert 0 < measured["host_seconds_per_layer"] < 1e-3
    assert 0 < measured["load_nbytes"] <= report["model"]["file_nbytes"]
    assert measured["load_seconds"] > 0
    predicted = measured["predicted"]
    assert predicted["peak_memory_nbytes"] > measured["devices"]["cpu"]
    assert predicted["load_seconds"] > 0
    assert predicted["decode_tokens_per_second"] is None  # Python decides, and its time is not profiled
    assert "`hfq profile-machine` measures" in predicted["source"]


@pytest.mark.usefixtures("in_process", "native")
def test_the_host_time_of_layers_is_printed():
    lines = run(GPTQ, *SMALL, "--device-map", "cpu").stdout.splitlines()
    assert any("host time per layer" in line and "µs" in line for line in lines)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_generation_with_torch_compile_is_measured():
    (measured,) = found("--device-map", "cpu", "-t", "1", "--compile")["runs"]
    assert len(measured["decode_compiled_seconds"]) == len(measured["decode_generate_seconds"]) == 2
    assert measured["compile_seconds"] > max(measured["decode_compiled_seconds"])


@pytest.mark.usefixtures("in_process")
def test_a_model_on_disk_is_not_compiled(monkeypatch):
    asked, ask = [], InProcess.ask
    monkeypatch.setattr(InProcess, "ask", lambda self, step: asked.append(step) or ask(self, step))
    done = run(GPTQ, *SMALL, "--device-map", "disk", "--compile")
    assert "needs a model whose weights stay in memory" in str(done.exception)
    assert asked == ["load"]  # no prefill, whose time would be lost


@pytest.mark.usefixtures("in_process")
def test_weights_stay_on_disk_where_they_are_placed_there():
    on_disk = found("--device-map", "disk")["runs"][0]
    in_memory = found("--device-map", "cpu")["runs"][0]
    assert set(on_disk["devices"]) == {"disk"}
    assert on_disk["load_nbytes"] == 0
    assert in_memory["load_nbytes"] == in_memory["devices"]["cpu"]
    assert on_disk["predicted"]["decode_dominant_term"] == "reads from disk"
    assert on_disk["predicted"]["peak_memory_nbytes"] < in_memory["predicted"]["peak_memory_nbytes"]


@pytest.mark.usefixtures("in_process")
def test_max_memory_moves_layers_to_the_disk():
    devices = found("--max-memory", "cpu=700kB")["runs"][0]["devices"]
    assert set(devices) == {"cpu", "disk"}
    assert devices["cpu"] <= 700_000


@pytest.mark.usefixtures("in_process")
def test_prompt_and_generation_may_be_left_out():
    done = run(GPTQ, "-p", 0, "-n", 0, "--json")
    (measured,) = json.loads(done.stdout)["runs"]
    assert not [key for key in measured if key.startswith(("prefill", "decode"))]
    assert {"load_seconds", "peak_memory_nbytes"} <= set(measured)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("profiled", "is_shown"), [("1", True), ("7", False)])
def test_rates_are_predicted_for_the_threads_of_the_profile_alone(tmp_path, profiled, is_shown):
    products = {"gptq 4-bit bfloat16": {1: 1e9}, "dense bfloat16": {1: 1e9}}
    profile = replace(PUBLISHED, source="measured", machine={"threads": profiled}, products=products)
    (tmp_path / "cache" / "hfq").mkdir(parents=True)
    (tmp_path / "cache" / "hfq" / "profile.json").write_text(profile.to_json())
    done = run(GPTQ, *SMALL, "-t", "1")
    predicted = [
        line.split("│")[4].strip() for line in done.stdout.splitlines() if "tokens/s" in line and "±" in line
    ]
    assert len(predicted) == 2
    assert all(("tokens/s" in cell) == is_shown for cell in predicted)
    assert ("predicted for 7 threads alone" in " ".join(done.stdout.split())) != is_shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--threads", "0"), "--threads 0 is not valid"),
        (("--threads", "1,two"), "--threads 1,two is not valid"),
        (("--max-memory", "8GiB"), "--max-memory 8GiB is not valid"),
        (("--max-memory", "cpu=much"), "no valid size for cpu"),
        (("--max-memory", "cpu=8GiB", "--device-map", "disk"), "limits nothing with --device-map disk"),
        (("--dtype", "bfloat"), "Did you mean 'bfloat16'"),
        (("--device-map", "dsk"), "'disk'"),
    ],
)
def test_a_bad_option_is_an_error_with_a_fix(capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        main(["bench", str(GPTQ), *options])
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert message in told.err
    assert "\nFix: " in told.err
    assert told.out == ""


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path):
    assert isinstance(run(tmp_path).exception, CheckpointError)


@pytest.mark.usefixtures("in_process")
def test_an_error_of_the_load_comes_with_all_that_it_said():
    done = run(GPTQ, *SMALL, "--max-memory", "cpu=1kB")
    assert isinstance(done.exception, PlacementError)
    assert re.search(r"Pass --max-memory cpu=[0-9]+B, or --max-memory cpu=[0-9]+B,", done.exception.fix)
    assert done.exception.expected is not None


@pytest.mark.usefixtures("in_process")
def test_a_failure_of_the_model_is_an_error(monkeypatch):
    monkeypatch.setattr(BenchWorker, "_random_tokens", lambda self, count: 1 / 0)
    done = run(GPTQ, *SMALL)
    assert isinstance(done.exception, SetupError)
    assert "ZeroDivisionError" in str(done.exception)


@pytest.mark.usefixtures("in_process")
def test_a_model_of_the_hub_is_downloaded_without_code(monkeypatch):
    asked = []

    def download(repo, revision, allow_patterns, ignore_patterns):
        asked.append((repo, revision))
        assert "*.safetensors" in allow_patterns
        assert "*.py" not in allow_patterns
        return str(GPTQ)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert run("some/model", "--revision", "v1", *SMALL).exit_code == 0
    assert asked == [("some/model", "v1")]


def test_a_model_that_the_hub_has_not_is_an_error(monkeypatch):
    def download(*_, **__):
        raise RepositoryNotFoundError("no such repository", response=None)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert isinstance(run("some/model").exception, CheckpointError)
