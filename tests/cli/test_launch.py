"""`hfq launch`: real programs in processes of their own, and errors before anything starts."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from hfq.cli.launch.load_options import load_options, resolve_options
from hfq.cli.launch.run_program import enabling_environment, find_program, report_record, run_enabled
from hfq.cli.main import main
from hfq.cli.typed_options import as_typed
from hfq.errors import SetupError
from hfq.launch_environment import CONFIG, ENABLE
from tests.support import programs, tiny_models

GPTQ = str(tiny_models.DATA / "tiny-llama-gptq")
LAUNCH = [sys.executable, "-m", "hfq", "launch"]
NOTHING = "hfq: nothing was loaded with hfq: "
COUNT = """
import signal, sys, time
counted = []
signal.signal(signal.SIGINT, lambda *_: counted.append(1))
print("ready", flush=True)
until = time.time() + 60
while not counted and time.time() < until:
    time.sleep(0.05)
time.sleep(0.3)
sys.exit(40 + len(counted))
"""
LOADING = (
    "import sys\n"
    "from transformers import AutoModelForCausalLM\n"
    "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
    "print(model.hf_quantizer.quantization_config.disk_io, model.hf_quantizer.loading.plan)\n"
)


def run(*words: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*LAUNCH, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=programs.environment(**variables),
    )


def test_a_script_in_a_child_process_loads_with_the_options(tmp_path):
    """The child of the child inherits them, as the ranks of a launcher do."""
    script = tmp_path / "script.py"
    script.write_text(LOADING + "sys.exit(7)\n")
    command = f'"{sys.executable}" "{script}" "$0"; exit $?'
    done = run("--device-map", "disk", "--disk-io", "direct", "sh", "-c", command, GPTQ)
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("direct disk ")
    assert "cpu" not in done.stdout.partition(";")[0]
    lines = [line for line in done.stderr.splitlines() if line.startswith("hfq: ")]
    assert lines == [f"hfq: loaded {GPTQ}: gptq v1 int4 g128 sym; 857 kB on disk."]


def test_a_launch_inside_another_adds_its_options_and_leaves_the_lines_to_the_outer_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOADING)
    inner = (*LAUNCH, "--device-map", "disk", sys.executable, str(script), GPTQ)
    done = run("--device-map", "cpu", "--disk-io", "direct", *inner)
    assert done.stdout.startswith("direct disk "), done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("hfq: ")]
    assert lines == [f"hfq: loaded {GPTQ}: gptq v1 int4 g128 sym; 857 kB on disk."]


def test_the_outermost_launch_says_once_that_nothing_was_loaded():
    done = run(*LAUNCH, sys.executable, "-c", "raise SystemExit(7)")
    assert (done.returncode, done.stderr.count(NOTHING)) == (7, 1)


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        (["-c", "raise SystemExit(7)"], 7, " loaded no quantized checkpoint with transformers."),
        (["-m", "this"], 0, " loaded no quantized checkpoint with transformers."),
        (["-I", "-c", "pass"], 0, "python -I, -E, and -S do not."),
        (
            ["-c", "import os; os.kill(os.getpid(), 9)"],
            137,
            " loaded no quantized checkpoint with transformers.",
        ),
    ],
    ids=["status", "module", "isolated", "signal"],
)
def test_a_program_that_loads_nothing_keeps_its_exit_status(capfd, program, status, reason):
    assert run_enabled([sys.executable, *program], "") == status
    error = capfd.readouterr().err
    assert error.count(NOTHING) == 1
    assert reason in error


def test_a_program_inherits_files_and_an_ignored_signal(capfd, tmp_path):
    """A shell passes <(COMMAND) as the path of an open file. Ignored, SIGCHLD must not hide the status."""
    code = "import signal, sys; print(open(sys.argv[1]).read(), signal.getsignal(17).name); sys.exit(7)"
    (tmp_path / "file").write_text("content")
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with open(tmp_path / "file") as file:
            os.set_inheritable(file.fileno(), True)
            program = [sys.executable, "-I", "-S", "-c", code, f"/dev/fd/{file.fileno()}"]
            assert run_enabled(program, "") == 7
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert capfd.readouterr().out == "content SIG_IGN\n"


def test_a_program_of_no_python_runs(capfd):
    assert run_enabled(["echo", "printed"], "") == 0
    printed = capfd.readouterr()
    assert printed.out == "printed\n"
    assert printed.err.startswith(f"{NOTHING}echo runs no Python")


def test_a_python_without_hfq_is_named(capfd, tmp_path, monkeypatch):
    (tmp_path / "hfq.py").write_text("raise ImportError('an old version')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_enabled([sys.executable, "-c", "print('runs')"], "") == 0
    printed = capfd.readouterr()
    assert printed.out == "runs\n"
    assert printed.err.splitlines() == [
        f"hfq: {sys.executable} ran without hfq: an old version. "
        f"Fix: Make `import hfq` work there, or start {sys.executable}.",
        f"{NOTHING}no Python of {sys.executable} imported hfq.",
    ]


def test_the_sitecustomize_of_the_environment_still_runs(capfd, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("NAME = 'the other'")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(programs.ROOT)]))
    code = "import sys, sitecustomize; print(sitecustomize.NAME, 'hfq' in sys.modules)"
    assert run_enabled([sys.executable, "-c", code], "") == 0
    assert capfd.readouterr().out == "the other True\n"


def test_a_signal_to_hfq_is_handed_to_the_program():
    for number, status in ((signal.SIGINT, 41), (signal.SIGTERM, 143)):
        launched = subprocess.Popen(
            [*LAUNCH, sys.executable, "-c", COUNT],
            stdout=subprocess.PIPE,
            text=True,
            env=programs.environment(),
        )
        assert launched.stdout.readline() == "ready\n"
        launched.send_signal(number)
        assert launched.wait(60) == status
        launched.stdout.close()


@pytest.mark.parametrize(("is_closed", "expected"), [(False, 41), (True, 129)], ids=["Ctrl-C", "closed"])
def test_a_signal_of_a_terminal_reaches_the_program_once(is_closed, expected):
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, around the tests, would ignore it
        os.execve(sys.executable, [*LAUNCH, sys.executable, "-c", COUNT], programs.environment())
    shown = b""
    until = time.monotonic() + 120
    while b"ready\r\n" not in shown and time.monotonic() < until:
        shown += os.read(terminal, 1024)
    if not is_closed:
        os.write(terminal, b"\x03")
        _, status = os.waitpid(child, 0)
    os.close(terminal)
    if is_closed:
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == expected, shown


def test_a_python_file_runs_with_this_python(tmp_path):
    file = tmp_path / "train.py"
    file.touch()
    assert find_program([str(file), "--epochs", "1"]) == [sys.executable, str(file), "--epochs", "1"]


@pytest.mark.parametrize("name", ["no-such-program", "file"])
def test_a_program_that_is_not_there_is_an_error(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no program")
    with pytest.raises(SystemExit) as ended:
        main(["launch", f"./{name}"])
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"SetupError: The program ./{name} was not found. Nothing was started.\n")
    assert "Fix: Install the program, or pass its path." in error


def test_a_file_that_cannot_be_executed_is_an_error(tmp_path):
    file = tmp_path / "program"
    file.write_bytes(b"\x00\x01")
    file.chmod(0o755)
    with pytest.raises(SetupError, match="cannot be started"):
        run_enabled([str(file)], "")


def test_an_option_is_checked_before_the_program_starts(capsys, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('a line of another module')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(programs.ROOT)]))
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--disk-io", "fast", "echo", "started"])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (1, "")
    assert printed.err.startswith("SetupError: --disk-io fast is not valid.")


def test_options_without_values_need_no_check():
    assert load_options() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "dsk"}, "--device-map dsk is not a device map."),
        ({"max_memory": "cpu=8"}, "--max-memory cpu=8 has no valid size for cpu."),
        ({"quantize_weights": "{bits: 4}"}, "The options in --quantize-weights are not valid JSON."),
        ({"kernel": "fast"}, "kernel='fast' is not valid."),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(SetupError) as raised:
        resolve_options(options)
    assert raised.value.message.startswith(message)
    assert raised.value.fix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "The options in --config are not valid JSON."),
        ('["disk"]', "The options in --config are not a JSON object."),
        ('{"devcie_map": "disk"}', "The options in {file} have the unknown key 'devcie_map'. Did you mean"),
        ('{"offload_folder": 5}', "The options in {file} are not valid: offload_folder is not a path."),
    ],
)
def test_wrong_config_files_are_errors(tmp_path, text, message):
    file = tmp_path / "options.json"
    file.write_text(text)
    with pytest.raises(SetupError) as raised:
        resolve_options({"config": str(file)})
    assert raised.value.message.startswith(message.format(file=file))
    assert raised.value.fix


def test_an_error_has_a_device_map_as_it_was_typed():
    typed = ("--device-map", "disk")
    error = SetupError("no automatic map", found="device_map={'': 'disk'}", fix="none")
    assert as_typed(error, {"device_map": typed[0]}, {"device_map": typed}).found == "--device-map disk"
    assert as_typed(error, {"device_map": typed[0]}).found == "--device-map={'': 'disk'}"


def test_errors_of_a_config_file_name_its_keys(capsys, tmp_path):
    """Options of the command line have other names: `device-map` would not be a key either."""
    file = tmp_path / "options.json"
    for text, expected in (
        ('{"device-map": "disk"}', "Did you mean 'device_map'?"),
        ('["disk"]', '{"device_map": "disk"}'),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit):
            main(["launch", "--config", str(file), "echo"])
        assert expected in capsys.readouterr().err


def test_the_command_line_wins_over_the_config_file(tmp_path):
    file = tmp_path / "options.json"
    file.write_text('{"disk_io": "direct", "max_memory": {"cpu": "1GiB"}}')
    options = {"config": str(file), "disk_io": "buffered", "max_memory": "cpu=2GiB", "device_map": "auto"}
    assert json.loads(resolve_options(options)) == {
        "disk_io": "buffered",
        "max_memory": {"cpu": 2 << 30},
        "device_map": "auto",
    }
    folder = json.loads(resolve_options({"offload_folder": "layers"}))["offload_folder"]
    assert folder == os.path.abspath("layers"), "the program may change its folder"
    recipe = {"quantize_weights": '{"method": "rtn", "bits": 4}'}
    assert json.loads(resolve_options(recipe)) == {"quantize_weights": {"method": "rtn", "bits": 4}}


def test_the_environment_of_a_program_has_the_switch_the_options_and_one_folder():
    given = {"PYTHONPATH": "/folder", "HOME": "/"}
    once = enabling_environment(given, "{}", "/record")
    assert (once[ENABLE], once[CONFIG], once["HOME"]) == ("1", "{}", "/")
    assert once["PYTHONPATH"].split(os.pathsep)[1:] == ["/folder"]
    assert enabling_environment(once, "{}", "/record") == once
    assert os.pathsep not in enabling_environment({}, "", "/record")["PYTHONPATH"]


def test_one_load_is_enough_to_say_nothing_more(capsys):
    report_record("program", ["python", "loaded model"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("loads", [[], ["loaded model"]])
def test_a_python_without_hfq_is_named_next_to_one_with_hfq(capsys, loads):
    rank = "without /usr/bin/python3: no module: hfq"
    report_record("program", ["python", rank, *loads, rank])
    first, *others = capsys.readouterr().err.splitlines()
    assert first == (
        "hfq: /usr/bin/python3 ran without hfq: no module: hfq. "
        f"Fix: Make `import hfq` work there, or start {sys.executable}."
    )
    assert others == (
        [] if loads else [f"{NOTHING}program loaded no quantized checkpoint with transformers."]
    )
