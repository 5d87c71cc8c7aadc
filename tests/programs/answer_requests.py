"""A worker that adds, fails and dies on request, and prints what is no answer."""

import json
import os
import sys

from hfq.machine_profile.worker_process import memory, serve


def add(first, second):
    print("this is no answer")
    os.system("echo nor is this")
    return {"sum": first + second, "options": json.loads(sys.argv[1])}


def fail():
    try:
        raise KeyError("the cause")
    except KeyError as error:
        raise ValueError("first line\nsecond line") from error


def die():
    print("the reason", file=sys.stderr)
    os._exit(3)


serve({"add": add, "fail": fail, "die": die, "memory": memory})
