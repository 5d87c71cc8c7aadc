"""Imports hfq when Python starts, in every process of a program that `hfq launch` runs.

Python imports the first `sitecustomize` of its path. This one is on PYTHONPATH, so it runs the next one, too.
Its syntax is that of old versions: the program may start any Python.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _enable() -> None:
    """Imports hfq, and records for `hfq launch` how that went."""
    try:
        import hfq  # noqa: F401

        line = "python"
    except Exception as error:  # another environment, without hfq or with an old Python
        line = "without {}: {}".format(sys.executable, str(error).replace("\n", " "))
    try:
        descriptor = os.open(os.environ.get("HFQ_LAUNCH_RECORD", ""), os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    os.write(descriptor, (line + "\n").encode("utf-8", "replace"))
    os.close(descriptor)


def _run_next() -> None:
    """Runs the `sitecustomize` that Python would import without this one."""
    here = os.path.dirname(os.path.realpath(__file__))
    folders = [folder for folder in sys.path if os.path.realpath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("HFQ_ENABLE", "0") not in ("", "0"):
    _enable()
_run_next()
