"""`hfq demo`: what an interruption leaves."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import tiny_models


@pytest.mark.slow
def test_an_interruption_prints_one_line_and_ends_every_process():
    command = [sys.executable, "-m", "hfq", "demo", "--folder", str(tiny_models.DATA)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **streams, start_new_session=True) as process:
        assert process.stdout.readline()  # the first checkpoint was inspected
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "Interrupted. Run the same command again.\n")
    until = time.monotonic() + 10
    while _lives(process.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _lives(process.pid)


def _lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
