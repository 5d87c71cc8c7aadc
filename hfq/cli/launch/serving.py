"""`hfq serve MODEL` and `hfq chat MODEL`: the commands of transformers with hfq enabled."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from hfq.cli.launch.load_options import with_load_options
from hfq.cli.launch.run_program import (
    enabling_environment,
    exit_status,
    report_record,
    run_enabled,
    run_program,
)
from hfq.cli.model_argument import check_path
from hfq.errors import CheckpointError, SetupError
from hfq.launch_environment import say

__all__ = ["chat", "serve"]

Served = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or Hub id of the checkpoint.")]
ServeArguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS...", help="Options of transformers serve, such as --port.")
]
ChatArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS...", help="Arguments of transformers chat, such as max_new_tokens=99."),
]

_TRANSFORMERS = [sys.executable, "-m", "transformers.cli.transformers"]
_REQUIRED = ("fastapi", "openai", "pydantic", "uvicorn")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tekken.json")
"""Files that say how messages become a prompt; tekken.json is the tokenizer of mistral-common."""
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_INFORMATION = b"INFO:     "
"""Start of the lines in which uvicorn names its process, its address, and each request."""
_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0


@with_load_options
def serve(ctx: typer.Context, model: Served, arguments: ServeArguments = None, *, options: str) -> None:
    """Serves a checkpoint by an OpenAI-compatible API, with transformers serve.

    Options of hfq come before the model, and those of transformers serve after it.
    """
    _check_arguments(ctx, arguments or ())
    _check_model(model, options)
    _check_packages()
    raise typer.Exit(run_enabled([*_TRANSFORMERS, "serve", model, *(arguments or ())], options))


@with_load_options
def chat(ctx: typer.Context, model: Served, arguments: ChatArguments = None, *, options: str) -> None:
    """Chats with a checkpoint: starts transformers serve, and transformers chat for it.

    Options of hfq come before the model, and arguments of transformers chat after it.
    """
    _check_arguments(ctx, arguments or ())
    _check_model(model, options)
    _check_packages()
    _check_chat_template(model)
    with _server(model, options) as url:
        status = run_program([*_TRANSFORMERS, "chat", model, url, *(arguments or ())], _chat_environment())
    raise typer.Exit(status)


def _chat_environment() -> dict[str, str]:
    """Returns an environment in which a chat reaches the server of this machine.

    huggingface_hub 2.4 does not reach it offline, nor through a proxy.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OFFLINE}
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    return {**environment, "no_proxy": f"{direct},localhost" if direct else "localhost"}


def _check_arguments(ctx: typer.Context, arguments: Sequence[str]) -> None:
    """Raises an error for options of hfq after the model, where transformers would read them.

    Args:
        ctx: Context of the verb; its `obj` is the command line.
        arguments: The words after the model.
    """
    options: dict[str, Any] = {
        name: each for each in ctx.command.params for name in each.opts if name[:2] == "--"
    }
    moved: list[str] = []
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        typed, equals, value = word.partition("=")
        name = f"--{typed.lstrip('-').replace('_', '-')}"  # transformers chat also takes name=value
        if name not in options or not (equals or typed.startswith("--")):
            kept.append(word)
        elif equals or options[name].is_flag:
            moved.append(f"{name}{equals}{value}")
        else:
            moved += [name, next(words, "VALUE")]
    if moved:
        verb, *before = ctx.obj[: len(ctx.obj) - len(arguments)]
        raise SetupError(
            "Options of hfq come before MODEL. Nothing was started.",
            expected=f"options of transformers {verb} after MODEL",
            found=shlex.join(moved),
            fix=f"Run {shlex.join(['hfq', verb, *moved, *before, *kept])}",
        )


def _check_model(model: str, options: str) -> None:
    """Raises an error for a model that is damaged, or neither at this path nor on the Hub.

    transformers also loads models without an organization, such as gpt2; of these, the Hub is asked.
    """
    from hfq.checkpoint.index import split_gguf_path
    from hfq.integrations.hub.download import has_legacy_model

    if has_legacy_model(model):
        return
    check_path(model)
    folder, gguf_file = split_gguf_path(model)
    if os.path.lexists(folder):
        _check_files(Path(folder), gguf_file, options)


def _check_files(folder: Path, gguf_file: str | None, options: str) -> None:
    """Raises the error that the load of these files would raise in the server."""
    from hfq.checkpoint.headers_only import check_has_weights
    from hfq.checkpoint.loadable import open_loadable

    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        return
    try:
        check_has_weights(folder)
        open_loadable(folder, gguf_file=gguf_file)
    except CheckpointError:
        if gguf_file is not None or _is_for_hfq(folder, options):
            raise


def _is_for_hfq(folder: Path, options: str) -> bool:
    """Returns False for a float model, which plain transformers loads.

    It also reads files that hfq does not, such as pickles.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    from hfq.checkpoint.declared_config import declared_config
    from hfq.checkpoint.index import read_json

    file = folder / "config.json"
    config = read_json(file) if file.exists() else {}
    quantizes = json.loads(options or "{}").get("quantize_weights") is not None
    return not config or declared_config(config) is not None or quantizes


def _check_packages() -> None:
    missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(
            "transformers cannot serve models without further packages. Nothing was started.",
            expected=", ".join(_REQUIRED),
            found=f"{', '.join(missing)} not installed",
            fix="Run pip install 'hfq[serve]'.",
        )


def _check_chat_template(model: str) -> None:
    """Raises an error for a tokenizer without a chat template, which the server would need."""
    from hfq.checkpoint.index import JSON_LIMIT
    from hfq.checkpoint.small_file import read_small_file
    from hfq.integrations.hub.download import small_file

    try:
        file = small_file(model, "tokenizer_config.json")
        if file is None:  # a GGUF file may hold a template, and transformers names a missing tokenizer
            return
        config = json.loads(read_small_file(file, JSON_LIMIT))
        if not isinstance(config, dict) or config.get("chat_template"):
            return
        has_template = any(small_file(model, name) for name in _TEMPLATES)
    except (CheckpointError, OSError, ValueError, RecursionError):  # transformers explains it
        return
    if not has_template:
        raise SetupError(
            f"The tokenizer of {model} has no chat template. Nothing was started.",
            file=file,
            expected="chat_template in tokenizer_config.json, or chat_template.jinja",
            found="neither",
            fix="Add the chat_template.jinja of the model, or complete texts with hfq serve and "
            "/v1/completions.",
        )


@contextlib.contextmanager
def _server(model: str, options: str) -> Iterator[str]:
    """A context manager that serves the model on a free port, and yields the address.

    It has a session of its own, so that Ctrl-C of the terminal interrupts only the chat.
    """
    import socket

    with (
        socket.socket() as kept,  # so no other program gets the port while the model is loaded
        tempfile.NamedTemporaryFile("r", prefix="hfq-chat-") as record,
        tempfile.TemporaryFile("w+b") as said,
    ):
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does, which may listen
        kept.bind(("localhost", 0))
        port = kept.getsockname()[1]
        command = [*_TRANSFORMERS, "serve", model, "--port", str(port)]
        environment = enabling_environment(os.environ, options, record.name)
        before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        server = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shown = _wait_until_ready(server, port, said)
            report_record("transformers serve", record.read().splitlines())
            yield f"http://localhost:{port}"
            if server.poll() is not None:
                _show(said, shown)
                say(f"the server ended during the chat, with status {exit_status(server.returncode)}.")
        finally:
            server.terminate()
            try:
                server.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            for number, handler in before.items():
                signal.signal(number, handler)


def _leave(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def _wait_until_ready(server: subprocess.Popen, port: int, said: IO[bytes]) -> int:
    """Waits for a server to answer, and shows on standard error what it prints until then.

    Returns:
        The number of bytes shown.

    Raises:
        typer.Exit: The server has ended, with its exit status.
    """
    shown = 0
    while True:
        has_ended, is_ready = server.poll() is not None, _answers(port)
        shown = _show(said, shown)
        if has_ended:
            raise typer.Exit(exit_status(server.returncode) or 1)
        if is_ready:
            return shown
        time.sleep(_POLL_SECONDS)


def _show(said: IO[bytes], shown: int) -> int:
    """Shows further lines of a file on standard error, without those of uvicorn.

    Progress bars are shown before their line ends.

    Returns:
        The number of bytes read.
    """
    text = os.pread(said.fileno(), 1 << 20, shown)
    last = text[text.rfind(b"\n") + 1 :]
    if last and _INFORMATION.startswith(last[: len(_INFORMATION)]):
        text = text[: -len(last)]
    lines = (line for line in text.splitlines(keepends=True) if not line.startswith(_INFORMATION))
    sys.stderr.write(b"".join(lines).decode("utf-8", "replace"))
    sys.stderr.flush()
    return shown + len(text)


def _answers(port: int) -> bool:
    import http.client

    connection = http.client.HTTPConnection("localhost", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
