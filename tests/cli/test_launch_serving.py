"""`hfq serve` and `hfq chat`, with a program in place of transformers; the real one: tests/clients."""

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import typer

from hfq.checkpoint.headers_only import MARKER
from hfq.cli.launch import load_options, serving
from hfq.cli.main import main
from hfq.errors import CheckpointError
from hfq.integrations.hub import download
from tests.support import model_copies, tiny_models

PROGRAM = """
import contextlib, http.client, http.server, json, os, sys, urllib.request

verb, model, *rest = sys.argv[1:]
if verb == "chat":
    print(json.dumps([model, *rest]))
    for _ in range(2):
        urllib.request.urlopen(rest[0])
    if "stop" in rest:
        with contextlib.suppress(OSError, http.client.HTTPException):
            urllib.request.urlopen(f"{rest[0]}/stop")
    sys.exit(5)
print("loading", model, os.environ["HFQ_ENABLE"], flush=True)
if model == "damaged":
    sys.exit(3)

class Healthy(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        print("a request", flush=True)

    def do_GET(self):
        if self.path == "/stop":
            print("out of memory", flush=True)
            os._exit(9)
        self.send_response(200)
        self.end_headers()

if "--port" in rest:
    http.server.HTTPServer(("localhost", int(rest[1])), Healthy).serve_forever()
"""


@pytest.fixture(autouse=True)
def transformers(monkeypatch, tmp_path):
    """A program in place of transformers."""
    file = tmp_path / "transformers_cli.py"
    file.write_text(PROGRAM)
    monkeypatch.setattr(serving, "_TRANSFORMERS", [sys.executable, str(file)])
    monkeypatch.setattr(serving, "_REQUIRED", ("json",))
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "damaged"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_chat_starts_a_server_and_ends_it(capfd):
    assert run("chat", "folder", "max_new_tokens=9", "--user", "me") == 5
    printed = capfd.readouterr()
    assert printed.out.startswith('["folder", "http://localhost:')
    assert printed.out.endswith('", "max_new_tokens=9", "--user", "me"]\n')
    assert "loading folder 1\n" in printed.err
    assert printed.err.count("a request") <= 1  # the first; lines about those of the chat would mix with it


def test_a_chat_reaches_its_server_past_a_proxy(capfd, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://localhost:9")
    monkeypatch.setenv("NO_PROXY", "elsewhere")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("chat", "folder") == 5
    assert serving._chat_environment()["no_proxy"] == "elsewhere,localhost"
    assert "HF_HUB_OFFLINE" not in serving._chat_environment()


def test_the_fix_for_options_after_the_model_keeps_all_others(capfd, monkeypatch):
    monkeypatch.setattr(load_options, "_resolved_elsewhere", lambda given: "{}")
    late = ("--max-memory=cpu=8GiB", "--quantize-activations", "--host", "a b", "--kernel")
    assert run("serve", "--disk-io", "direct", "folder", *late) == 1
    error = capfd.readouterr().err
    assert "found: --max-memory=cpu=8GiB --quantize-activations --kernel VALUE\n" in error
    assert error.endswith(
        "Fix: Run hfq serve --max-memory=cpu=8GiB --quantize-activations --kernel VALUE --disk-io direct "
        "folder --host 'a b'\n"
    )


@pytest.mark.parametrize("late", ["--max_memory=cpu=8GiB", "max_memory=cpu=8GiB", "--max-memory=cpu=8GiB"])
def test_options_with_underscores_after_the_model_are_options_of_hfq(capfd, late):
    assert run("chat", "folder", late, "max_new_tokens=9") == 1
    assert capfd.readouterr().err.endswith(
        "Fix: Run hfq chat --max-memory=cpu=8GiB folder max_new_tokens=9\n"
    )


def test_lines_of_uvicorn_are_left_out_and_errors_are_not(capfd, tmp_path):
    lines = b"Loading: 10%\rLoading: 99%\nINFO:     Started\nERROR:    [Errno 98] in use\nhfq: loaded\n"
    (tmp_path / "said").write_bytes(lines)
    with open(tmp_path / "said", "r+b") as said:
        shown = serving._show(said, 0)
        assert shown == len(lines)
        for part, is_shown in (
            (b"INFO", False),
            (b":     127.0.0.1", False),
            (b" 200\n", True),
            (b"Load", True),
        ):
            said.seek(0, 2)
            said.write(part)
            said.flush()
            shown = serving._show(said, shown)
            assert (shown == said.tell()) is is_shown
    error = capfd.readouterr().err
    assert error == "Loading: 10%\rLoading: 99%\nERROR:    [Errno 98] in use\nhfq: loaded\nLoad"


def test_a_server_that_ends_during_the_chat_is_reported(capfd):
    assert run("chat", "folder", "stop") == 5
    error = capfd.readouterr().err
    assert error.endswith("out of memory\nhfq: the server ended during the chat, with status 9.\n")


def test_chat_ends_with_the_server(capfd):
    assert run("chat", "damaged") == 3
    assert "loading damaged 1\n" in capfd.readouterr().err


@pytest.mark.parametrize("model", ["own/tiny@v1", "own/tiny/q4.gguf"])
def test_serve_leaves_models_on_the_hub_to_transformers(capfd, model):
    assert run("serve", model) == 0
    assert capfd.readouterr().out == f"loading {model} 1\n"


def test_serve_passes_options_on(capfd):
    assert run("serve", "folder", "--host", "0.0.0.0") == 0
    printed = capfd.readouterr()
    assert printed.out == "loading folder 1\n"
    assert "hfq: nothing was loaded with hfq: " in printed.err


@pytest.mark.parametrize("verb", ["chat", "serve"])
def test_missing_packages_are_an_error(capsys, monkeypatch, verb):
    monkeypatch.setattr(serving, "_REQUIRED", ("json", "no_such_package"))
    assert run(verb, "folder") == 1
    error = capsys.readouterr().err
    assert "found: no_such_package not installed" in error
    assert "Fix: Run pip install 'hfq[serve]'." in error


@pytest.fixture
def model(tmp_path):
    """A checkpoint whose tokenizer has no chat template."""
    return shutil.copytree(tiny_models.DATA / "tiny-llama-gptq", tmp_path / "model")


def test_chat_without_a_chat_template_is_an_error_before_anything_starts(capfd, model):
    assert run("chat", str(model)) == 1
    error = capfd.readouterr().err
    assert f"The tokenizer of {model} has no chat template. Nothing was started." in error
    assert f"file: {model / 'tokenizer_config.json'}" in error
    assert "Fix: Add the chat_template.jinja of the model, or complete texts with hfq serve" in error
    assert "loading" not in error
    assert run("serve", str(model)) == 0  # it also completes texts


def cut_a_shard(folder, shards):
    with open(shards[-1], "r+b") as file:
        file.truncate(shards[-1].stat().st_size - 8)


def remove_a_shard(folder, shards):
    shards[-1].unlink()


def flip_a_header(folder, shards):
    content = bytearray(shards[-1].read_bytes())
    content[20] ^= 0x80
    shards[-1].write_bytes(content)


def remove_an_index_entry(folder, shards):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"]["model.norm.weight"]
    file.write_text(json.dumps(index))


def remove_the_metadata(folder, shards):
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": json.loads(file.read_text())["weight_map"]}))


def mark_as_headers_only(folder, shards):
    (folder / MARKER).touch()


DAMAGE = {
    cut_a_shard: "it is truncated by 8 bytes",
    remove_a_shard: "is missing",
    flip_a_header: "its header is not valid JSON",
    remove_an_index_entry: "model.norm.weight: the index says nothing",
    remove_the_metadata: "has no metadata",
    mark_as_headers_only: "headers without weights",
}
"""{damage: text of its error}."""


@pytest.mark.parametrize("verb", ["chat", "serve"])
@pytest.mark.parametrize(("damage", "message"), DAMAGE.items())
def test_a_damaged_checkpoint_is_an_error_before_anything_starts(capfd, tmp_path, damage, message, verb):
    folder = model_copies.copy_model("gptq", tmp_path)
    damage(folder, model_copies.shard_model(folder))
    assert run(verb, str(folder)) == 1
    error = capfd.readouterr().err
    assert error.startswith("CheckpointError: ")
    assert message in error
    assert "\nFix: " in error
    assert "loading" not in error


def test_a_gguf_file_that_is_no_gguf_file_is_an_error_before_anything_starts(capfd, tmp_path):
    (tmp_path / "folder" / "q4.gguf").write_bytes(b"nope" * 8)
    assert run("serve", "folder/q4.gguf") == 1
    printed = capfd.readouterr()
    assert printed.err.startswith("CheckpointError: ")
    assert printed.out == ""


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_config.json"])
def test_folders_that_plain_transformers_reads_are_left_to_it(capfd, tmp_path, name):
    (tmp_path / "folder" / name).write_bytes(b"{}")
    if name == "adapter_config.json":
        (tmp_path / "folder" / "config.json").unlink()
    assert run("serve", "folder") == 0
    assert capfd.readouterr().out == "loading folder 1\n"


def test_a_float_model_that_hfq_would_quantize_is_checked(capfd, monkeypatch):
    monkeypatch.setattr(load_options, "_resolved_elsewhere", json.dumps)
    assert run("serve", "--quantize-weights", "fp8", "folder") == 1
    assert "The folder holds no checkpoint." in capfd.readouterr().err


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_a_chat_template_is_found_where_transformers_reads_it(model, name):
    file = model / name
    template = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**template, "chat_template": "{{ messages }}"}))
    assert run("chat", str(model)) == 5


def test_a_hub_that_cannot_be_asked_leaves_the_error_to_the_server(model, monkeypatch):
    def small_file(_, name):
        if name == "tokenizer_config.json":
            return model / name
        raise CheckpointError("hfq cannot fetch the model from the Hub.", fix="Try again.")

    monkeypatch.setattr(download, "small_file", small_file)
    assert run("chat", "organization/model") == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server(number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, serving._server("folder", "") as url:
        signal.raise_signal(number)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) == before
    with pytest.raises(ConnectionError):
        http.client.HTTPConnection("localhost", int(url.rpartition(":")[2])).connect()


def test_no_other_program_gets_the_port_before_the_server_listens(monkeypatch):
    class Popen(subprocess.Popen):
        def __init__(self, command, **options):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("localhost", int(command[-1])))
            super().__init__(command, **options)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with serving._server("folder", "") as url:
        http.client.HTTPConnection("localhost", int(url.rpartition(":")[2])).connect()


def test_a_server_that_ends_without_an_error_is_a_failure(tmp_path):
    (tmp_path / "transformers_cli.py").write_text("")
    with pytest.raises(typer.Exit) as ended, serving._server("folder", ""):
        pass
    assert ended.value.exit_code == 1
