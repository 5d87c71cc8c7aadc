"""Starts ranks as forks of one process with all imports.

Reads a JSON line for each run, [ranks, port, script, arguments, file for the output], and answers with the
exit codes of the ranks. A rank has the environment of `deepspeed`: the variables of torch.distributed, and
its number as the first argument.
"""

import gc
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import accelerate  # noqa: F401
import deepspeed  # noqa: F401
import peft  # noqa: F401
import transformers.integrations.deepspeed
import transformers.trainer  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.mixtral import modeling_mixtral  # noqa: F401

import hfq.integrations.deepspeed.private_api  # noqa: F401
from tests.support.leaving import leave

TIMEOUT = 600
"""Seconds until running ranks are killed."""


def become(rank: int, ranks: int, port: str, script: str, arguments: list[str], printed: str) -> None:
    """Runs the script as this rank."""
    descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1), os.dup2(descriptor, 2)
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_SIZE": ranks,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    sys.argv = [script, f"--local_rank={rank}", *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    leave()


def finish(children: list[int]) -> list[int]:
    """Returns the exit code of each rank; the first failure, or the timeout, ends all."""
    codes: dict[int, int] = {}
    deadline, is_ended = time.monotonic() + TIMEOUT, False
    while len(codes) < len(children):
        for child in set(children) - codes.keys():
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = os.waitstatus_to_exitcode(status)
        if not is_ended and (any(codes.values()) or time.monotonic() > deadline):
            is_ended = True
            for child in set(children) - codes.keys():
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[child] for child in children]


def main() -> None:
    gc.collect()
    gc.freeze()
    while line := sys.stdin.readline():
        ranks, *run = json.loads(line)
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                become(rank, ranks, *run)
                return
            children.append(child)
        print(json.dumps(finish(children)), flush=True)


if __name__ == "__main__":
    main()
