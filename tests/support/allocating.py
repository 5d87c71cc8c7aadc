"""A module for `hfq.cli.demo.limited_process`: it takes memory and says so."""

import time


def measure(nbytes, seconds):
    """Takes memory for some seconds, and returns its size; raises an error for none."""
    if nbytes == 0:
        raise ValueError("nothing to take")
    taken = bytearray(b"x") * nbytes
    time.sleep(seconds)
    return {"taken": len(taken)}
