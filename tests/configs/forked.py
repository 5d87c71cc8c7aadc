"""Ranks that a launcher starts become forks of one process, which has imported what they need: seconds of a
processor saved for each.

`accelerate launch --config_file FILE forked.py script.py ARGUMENTS`: what the launcher starts hands its
arguments, environment, folder and output over to a fork, which runs the script with them, and ends as that
ends. A fork whose rank is ended, ends.
"""

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from tests.support.leaving import leave

ADDRESS = "HFQ_TEST_FORKS"
"""The variable that names the socket of the process that forks."""


@contextmanager
def served(environment: dict[str, str]):
    """The environment in which a launcher finds a process that forks; the process lives as long as this
    context.
    """
    name = f"hfq-forks-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        number = listener.fileno()
        command = [sys.executable, __file__, str(number)]
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, pass_fds=[number]) as server:
            try:
                yield {**environment, ADDRESS: name}
            finally:
                server.kill()


def serve(listener: socket.socket) -> None:
    """Forks for each rank that asks, until the input ends."""
    import deepspeed

    from tests.support import ranks  # noqa: F401  (imports what ranks use)

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone: nothing to compile
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        asked, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            become(asked)
            return
        asked.close()


def become(asked: socket.socket) -> None:
    """Runs the script as the rank that has asked."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, outputs, *_ = socket.recv_fds(asked, 1 << 20, 2)
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    sys.argv, variables, folder = json.loads(message)
    os.environ.clear(), os.environ.update(variables)
    os.chdir(folder)
    threading.Thread(target=lambda: asked.recv(1) or os._exit(1), daemon=True).start()
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0])["main"]()
    asked.send(b"0")
    leave()


def ask(address: str) -> int:
    """The exit code of the fork that runs this rank's script."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(f"\0{address}")
        numbers = [
            word for word in sys.argv[1:] if word.startswith("--local_rank")
        ]  # deepspeed puts it first
        script, *others = (word for word in sys.argv[1:] if word not in numbers)
        request = json.dumps([[script, *numbers, *others], dict(os.environ), os.getcwd()])
        socket.send_fds(server, [request.encode()], [1, 2])
        return 0 if server.recv(1) else 1


if __name__ == "__main__":
    if ADDRESS in os.environ:
        sys.exit(ask(os.environ[ADDRESS]))
    serve(socket.socket(fileno=int(sys.argv[1])))
